package feed

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// TestFeed_SlowDisk_LosesNothing: the members of etcd sync their writes. The disk of one, which is
// the leader or a follower, takes 200 ms, and 2 s in the long form, for a sync. Then it does not
// complete a sync of its write-ahead log, and the member is killed in that sync. Each write is in
// the next consistent reads. A server on the other members answers them while the sync of a
// follower is pending. No watch ends or loses an event, and no acknowledged write is lost.
func TestFeed_SlowDisk_LosesNothing(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, 2*testTimeout)
	e := harness.New(t)
	s := newMembersOf(t, ctx, e, etcdcluster.StartSynced(t, e, 3))
	acknowledged := 0
	name := func() string { return fmt.Sprintf("kept-%03d", acknowledged) }
	put := func() {
		began := time.Now()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
			defer cancel()
			_, err := s.client.Txn(ctx).Then(maps.put(name(), ""), secrets.put(name(), "")).Commit()
			return err == nil, err
		}))
		wrote := time.Now()
		s.requireFresh(t, ctx, name())
		acknowledged++
		t.Logf("a write took %v, a list and a GET after it %v", wrote.Sub(began).Round(time.Millisecond), time.Since(wrote).Round(time.Millisecond))
	}
	for _, delay := range harness.Pick([]time.Duration{200 * time.Millisecond}, []time.Duration{200 * time.Millisecond, 2 * time.Second}) {
		for _, leads := range []bool{false, true} {
			leader, err := s.Leader(ctx)
			harness.Check(t, err)
			i := slices.Index(s.Members, leader)
			if !leads {
				i = (i + 1) % len(s.Members)
			}
			slow := s.Members[i]
			t.Logf("slow by %v, the leader: %v", delay, leads)
			harness.Check(t, slow.SlowSyncs(delay))
			for range 5 {
				put()
			}
			const endless = time.Hour
			s.links[i].Refuse(!leads)
			harness.Check(t, slow.SlowSyncs(endless))
			put()
			harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
				return slow.Syncing(endless), errors.New("the slow member does not sync its log")
			}))
			put()
			slow.Kill()
			if !slow.Syncing(endless) {
				t.Error("the member was not killed in a sync")
			}
			put()
			harness.Check(t, slow.SlowSyncs(0))
			slow.Start()
			s.links[i].Refuse(false)
		}
	}
	s.requireHistory(t, ctx)
	list := harness.AwaitList(t, ctx, s.api, maps.path)
	if want := acknowledged + 2; len(list.Items) != want { // one, and the fence
		t.Errorf("%d objects, want %d", len(list.Items), want)
	}
}

// requireFresh requires that a consistent list and a GET show the newest objects, which have one
// name. It repeats a read that is refused.
func (s *members) requireFresh(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	if list := harness.AwaitList(t, ctx, s.api, maps.path); !slices.Contains(list.Names(), name) {
		t.Fatalf("%s was acknowledged, and a list of revision %s does not have it", name, list.Metadata.ResourceVersion)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := s.api.Do(ctx, http.MethodGet, secrets.path+"/"+name, "", nil)
		if err != nil {
			return false, err
		}
		if r.Code == http.StatusNotFound {
			t.Fatalf("%s was acknowledged, and a GET does not find it", name)
		}
		return r.Code == http.StatusOK, r.Err()
	}))
}
