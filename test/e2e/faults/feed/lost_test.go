package feed

import (
	"context"
	"fmt"
	"net/http"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
	"github.com/stratakube/strata/test/harness/faulty"
)

// single is a server on an etcd of one member, behind a link.
type single struct {
	env    *harness.Env
	etcd   *etcdcluster.Member
	link   *faulty.Link
	server *harness.Server
	api    *harness.API
	client *clientv3.Client // bypasses the link
}

// TestFeed_OnlyMemberFails_EventsAreCompleteOr410 lets etcd fail in several ways, one after the
// other, under one server.
func TestFeed_OnlyMemberFails_EventsAreCompleteOr410(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 2*testTimeout)
	e := harness.New(t)
	s := &single{env: e, etcd: etcdcluster.Start(t, e, 1).Members[0]}
	s.link = faulty.NewLink(t, e, s.etcd.URL)
	s.server = e.APIServer(through(s.etcd.Etcd, s.link.URL), noServiceAccounts)
	s.api, s.client = s.server.API(), s.etcd.Client()
	harness.Check(t, harness.Define(ctx, thingsGroup, "things", "Thing", nil, s.api))
	for _, fault := range []struct {
		name string
		run  func(t *testing.T, ctx context.Context)
	}{
		{"connection lost", s.connectionLost},
		{"compacted while cut off", s.compactedWhileCutOff},
		{"restored in place", s.restoredInPlace},
		{"restored as another cluster", s.restoredElsewhere},
	} {
		if !t.Run(fault.name, func(t *testing.T) { fault.run(t, ctx) }) {
			return
		}
	}
}

// connectionLost breaks the connections of the server to etcd, and stops, kills and starts etcd,
// under writes. No watch ends, and each delivers every event once.
func (s *single) connectionLost(t *testing.T, ctx context.Context) {
	kinds := []kind{maps, secrets, leases, things}
	var first []clientv3.Op
	for _, k := range kinds {
		first = append(first, k.put("first", ""))
	}
	start := commit(t, ctx, s.client, first...)
	recordings, ofOne := map[*recording]kind{}, map[*recording]kind{}
	for _, k := range kinds {
		ofOne[record(t, ctx, s.api, k.path, "labelSelector=value%3D1", start)] = k
		for _, query := range []string{"", "allowWatchBookmarks=true&labelSelector=value"} {
			recordings[record(t, ctx, s.api, k.path, query, start)] = k
		}
	}
	reconnects, relists := metric(t, ctx, s.api, "reconnects_total"), metric(t, ctx, s.api, "relists_total")

	for _, fault := range []struct {
		name     string
		fail     func()
		stopping bool // etcd accepts no writes meanwhile
	}{
		{"connections are reset", s.link.Reset, false},
		{"connections are reset five times", func() {
			for range 5 {
				s.link.Reset()
				time.Sleep(30 * time.Millisecond) // some connections are restored, others not
			}
		}, false},
		{"connections are refused for a while", func() {
			s.link.Refuse(true)
			time.Sleep(500 * time.Millisecond)
			s.link.Refuse(false)
		}, false},
		{"etcd is stopped and started", func() { s.etcd.Stop(); s.etcd.Start() }, true},
		{"etcd is killed and started", func() { s.etcd.Kill(); s.etcd.Start() }, true},
	} {
		background, stop := context.WithCancel(ctx)
		var group sync.WaitGroup
		group.Go(func() {
			for n := 0; background.Err() == nil; n++ {
				var ops []clientv3.Op
				for i, k := range kinds {
					if name := fmt.Sprintf("written-%d", n%7); (n+i)%4 == 3 {
						ops = append(ops, clientv3.OpDelete(k.prefix+name))
					} else {
						ops = append(ops, k.put(name, fmt.Sprint(n%3)))
					}
				}
				// Not canceled when there are enough writes: a canceled one might still be applied.
				if _, err := s.client.Txn(ctx).Then(ops...).Commit(); err != nil && !fault.stopping {
					t.Errorf("%s: %v", fault.name, err)
					return
				}
			}
		})
		fault.fail()
		stop()
		group.Wait()
		var fence []clientv3.Op
		for _, k := range kinds {
			fence = append(fence, k.put("fence", fault.name), k.put("fence-of-one", "1"))
		}
		at := commit(t, ctx, s.client, fence...)
		for r, k := range recordings {
			r.requireEvents(t, ctx, history(t, ctx, s.client, k.prefix, start, at))
		}
		for r, k := range ofOne {
			r.requireEvents(t, ctx, historyOf(t, ctx, s.client, k.prefix, start, at, labelled("1")))
		}
		for _, k := range kinds {
			list := harness.AwaitList(t, ctx, s.api, k.path)
			if harness.Revision(t, list.Metadata.ResourceVersion) < at {
				t.Errorf("%s: a list of the latest state is of %s, want %d or later", fault.name, list.Metadata.ResourceVersion, at)
			}
		}
		if t.Failed() {
			t.Fatal("after: ", fault.name)
		}
	}
	if after := metric(t, ctx, s.api, "reconnects_total"); after <= reconnects {
		t.Errorf("strata_mirror_reconnects_total is %d, and was %d before", after, reconnects)
	}
	if after := metric(t, ctx, s.api, "relists_total"); after != relists {
		t.Errorf("strata_mirror_relists_total is %d, and was %d before", after, relists)
	}
}

// compactedWhileCutOff cuts the server off until etcd has compacted revisions that the server has
// not received. Watches below the new floor end with 410. A watch that began above the floor, at a
// revision that another server may have sent, continues.
func (s *single) compactedWhileCutOff(t *testing.T, ctx context.Context) {
	for round := range 2 {
		started := commit(t, ctx, s.client, maps.put("one", "first"), secrets.put("one", "first"))
		harness.Check(t, awaitPublished(ctx, s.api, started))
		below := []*recording{
			record(t, ctx, s.api, maps.path, "", started),
			record(t, ctx, s.api, maps.path, "fieldSelector=metadata.name%3Done", started),
			record(t, ctx, s.api, secrets.path, "allowWatchBookmarks=true", started),
		}
		floorBefore := metric(t, ctx, s.api, "history_floor_revision")

		s.link.Refuse(true)
		put := func(n int) (last int64) {
			for i := range n {
				last = commit(t, ctx, s.client, maps.put("one", fmt.Sprint(i%3)), secrets.put("one", fmt.Sprint(i%3)))
			}
			return last
		}
		missed := put(50)
		compacted := put(50)
		compact(t, ctx, s.client, compacted)
		bookmark := put(10)
		goesOn := map[*recording]kind{
			record(t, ctx, s.api, maps.path, "", bookmark): maps,
			// at the floor, not below it
			record(t, ctx, s.api, maps.path, "allowWatchBookmarks=true", compacted):   maps,
			record(t, ctx, s.api, secrets.path, "allowWatchBookmarks=true", bookmark): secrets,
			record(t, ctx, s.api, secrets.path, "labelSelector=value", bookmark):      secrets,
		}
		ofOne := record(t, ctx, s.api, maps.path, "labelSelector=value%3D1", bookmark)
		put(10)
		s.link.Refuse(false)
		put(10)

		for _, r := range below {
			r.requireExpired(t, ctx)
		}
		last := put(2) // the last one enters the watch of one value
		for r, k := range goesOn {
			r.requireEvents(t, ctx, history(t, ctx, s.client, k.prefix, r.after, last))
		}
		ofOne.requireEvents(t, ctx, historyOf(t, ctx, s.client, maps.prefix, ofOne.after, last, labelled("1")))
		// Watches at revisions that etcd still has continue; compacted revisions get 410.
		r := record(t, ctx, s.api, maps.path, "", compacted)
		r.requireEvents(t, ctx, history(t, ctx, s.client, maps.prefix, compacted, last))
		record(t, ctx, s.api, maps.path, "", missed).requireExpired(t, ctx)
		for at, code := range map[int64]int{missed: http.StatusGone, compacted: http.StatusOK, bookmark: http.StatusOK} {
			got, _, err := retried(ctx, func() (*harness.Response, error) { return listAt(ctx, s.api, maps.path, at) })
			if err != nil || got.Code != code {
				t.Errorf("round %d: list at %d, compacted at %d: %+v, %v, want %d", round, at, compacted, got, err, code)
			}
		}
		if floor := metric(t, ctx, s.api, "history_floor_revision"); floor <= floorBefore || floor > compacted {
			t.Errorf("round %d: strata_mirror_history_floor_revision is %d, and was %d before; compacted at %d", round, floor, floorBefore, compacted)
		}
		if t.Failed() {
			t.FailNow()
		}
	}
}

// awaitPublished returns when the server has reached a revision.
func awaitPublished(ctx context.Context, api *harness.API, revision int64) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		v, err := api.Metric(ctx, "strata_mirror_revision{")
		return err == nil && int64(v) >= revision, err
	})
}

// compact compacts etcd as API servers do: it writes the revision to a key that all of them watch.
func compact(t *testing.T, ctx context.Context, client *clientv3.Client, at int64) {
	t.Helper()
	_, err := client.Put(ctx, "compact_rev_key", fmt.Sprint(at))
	harness.Check(t, err)
	_, err = client.Compact(ctx, at, clientv3.WithCompactPhysical())
	harness.Check(t, err)
}
