package compaction

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestCompaction_ByOtherServer_IsFollowed by a server that compacts nothing, within a second of the key's write, and by the one that compacts:
// below the revision the answer is 410, at the revision it is 200, and watches lose no events.
func TestCompaction_ByOtherServer_IsFollowed(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	compacting := env.APIServer(etcd, every(4*time.Second)).API()
	following := env.APIServer(etcd, every(0)).API()

	first := create(t, ctx, compacting, "map-0")
	for i := 1; i < 6; i++ {
		create(t, ctx, compacting, fmt.Sprint("map-", i))
	}
	announced := announcements(t, ctx, client)
	soonest := testTimeout // on a busy machine a round may take any time; a server that only polls needs seconds in each
	for round, name := range []string{"new-0", "new-1", "new-2"} {
		page, err := following.List(ctx, maps, "limit=2")
		harness.Check(t, err)
		last := create(t, ctx, compacting, name)
		a := next(t, ctx, announced, last)
		awaitGone(t, ctx, following, a.rev-1)
		late := time.Since(a.at)
		soonest = min(soonest, late)
		t.Logf("round %d: %d is refused %s after its compaction was announced", round, a.rev-1, late)
		awaitGone(t, ctx, compacting, a.rev-1)
		for who, api := range map[string]*harness.API{"compacts": compacting, "follows": following} {
			r := listAt(t, ctx, api, a.rev)
			list, err := r.List()
			if err != nil || list.Metadata.ResourceVersion != fmt.Sprint(a.rev) {
				t.Errorf("round %d: the server that %s, at the compacted revision %d: %v", round, who, a.rev, err)
			}
			if !gone(listAt(t, ctx, api, first)) {
				t.Errorf("round %d: the server that %s still lists at %d", round, who, first)
			}
		}
		requireCompacted(t, ctx, client, a.rev)
		want := []string{"map-2", "map-3", "map-4", "map-5"}
		for i := range round + 1 {
			want = append(want, fmt.Sprint("new-", i))
		}
		requireInconsistentContinue(t, ctx, following, page.Metadata.Continue, want)
		requireInconsistentContinue(t, ctx, compacting, page.Metadata.Continue, want)
	}
	if soonest > time.Second {
		t.Errorf("the server that only follows refuses a compacted revision after %s at the soonest", soonest)
	}

	// KEP-4988: compaction does not shorten the history of watches.
	for who, api := range map[string]*harness.API{"compacts": compacting, "follows": following} {
		w, refused, err := api.Watch(ctx, maps, fmt.Sprintf("resourceVersion=%d", first))
		harness.Check(t, err)
		if refused != nil {
			t.Fatalf("the server that %s: a watch from %d: %v", who, first, refused.Err())
		}
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" || e.Object.Metadata.Name != "map-1" {
			t.Errorf("the server that %s: a watch from %d begins with %s %s %v", who, first, e.Type, e.Object.Metadata.Name, e.Status.Message)
		}
		w.Close()
	}
}

// TestCompaction_TwoServers_AnnounceRisingRevisions with different intervals. Each revision is announced once, the revisions rise, and both servers agree
// with etcd.
func TestCompaction_TwoServers_AnnounceRisingRevisions(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	servers := []*harness.API{env.APIServer(etcd, every(time.Second)).API(), env.APIServer(etcd, every(1500*time.Millisecond)).API()}
	last := int64(0)
	for i := range 6 {
		rev := create(t, ctx, servers[i%2], fmt.Sprint("map-", i))
		for last <= rev {
			a := next(t, ctx, announced, 0)
			if a.rev <= last {
				t.Errorf("%d is announced after %d", a.rev, last)
			}
			last = a.rev
		}
		for _, api := range servers {
			awaitGone(t, ctx, api, rev)
		}
		requireCompacted(t, ctx, client, rev)
	}
}

// TestCompactRevKey_AboveEtcdRevision_IsIgnored by a server that does not compact, not even once etcd has reached that revision.
func TestCompactRevKey_AboveEtcdRevision_IsIgnored(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	api := env.APIServer(etcd, every(0)).API()
	first := create(t, ctx, api, "first")
	rev := create(t, ctx, api, "second")
	_, err := client.Put(ctx, key, fmt.Sprint(rev+50))
	harness.Check(t, err)
	for i := range 100 {
		create(t, ctx, api, fmt.Sprint("map-", i))
	}
	if r := listAt(t, ctx, api, first); r.Code != http.StatusOK {
		t.Errorf("a list at %d, which is not compacted: %v", first, r.Err())
	}
	_, err = client.Put(ctx, key, fmt.Sprint(rev))
	harness.Check(t, err)
	_, err = client.Compact(ctx, rev)
	harness.Check(t, err)
	awaitGone(t, ctx, api, first)
	for _, at := range []int64{rev, rev + 10, rev + 49} {
		if r := listAt(t, ctx, api, at); r.Code != http.StatusOK {
			t.Errorf("a list at %d, which etcd has: %v", at, r.Err())
		}
	}
}

// TestCompaction_Unannounced_IsDetectedByPoll: by hand, or by etcd itself. A server's next poll, every 10 s, detects it.
func TestCompaction_Unannounced_IsDetectedByPoll(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	api := env.APIServer(etcd, every(0)).API()
	first := create(t, ctx, api, "first")
	rev := create(t, ctx, api, "second")
	create(t, ctx, api, "third")
	_, err := client.Compact(ctx, rev)
	harness.Check(t, err)
	compacted := time.Now()
	awaitGone(t, ctx, api, first)
	t.Logf("detected after %s", time.Since(compacted))
	if r := listAt(t, ctx, api, rev); r.Code != http.StatusOK {
		t.Errorf("the compacted revision itself: %v", r.Err())
	}
}

// TestCompaction_IntervalChanged_AppliesAfterRestart between starts of a server, to no compaction and back.
func TestCompaction_IntervalChanged_AppliesAfterRestart(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	s := env.APIServer(etcd, every(time.Second))
	rev := create(t, ctx, s.API(), "first")
	next(t, ctx, announced, rev)

	harness.Check(t, s.Stop())
	s.Restart(every(3 * time.Second))
	began := time.Now() // the first of the two compactions starts later, and the second is announced after it is done
	rev = create(t, ctx, s.API(), "second")
	next(t, ctx, announced, rev)
	rev = create(t, ctx, s.API(), "third")
	b := next(t, ctx, announced, rev)
	if between := b.at.Sub(began); between < 2900*time.Millisecond {
		t.Errorf("two compactions within %s, want 3 s between them at least", between)
	}
	requireCompacted(t, ctx, client, b.rev)
	awaitGone(t, ctx, s.API(), b.rev-1)

	harness.Check(t, s.Stop())
	s.Restart(every(0))
	old := create(t, ctx, s.API(), "fourth")
	written := keyVersion(t, ctx, client)
	// It follows the compactions of other servers.
	other := env.APIServer(etcd, every(2*time.Second))
	next(t, ctx, announced, old)
	awaitGone(t, ctx, s.API(), old)
	harness.Check(t, other.Stop())
	if now := keyVersion(t, ctx, client); now <= written {
		t.Errorf("the key has version %d, had %d", now, written)
	}
}

func keyVersion(t *testing.T, ctx context.Context, client *clientv3.Client) int64 {
	t.Helper()
	r, err := client.Get(ctx, key)
	harness.Check(t, err)
	if len(r.Kvs) == 0 {
		return 0
	}
	return r.Kvs[0].Version
}

// TestCompaction_StrataAndUpstream_FollowEachOther: upstream's engine and Strata follow each other's compactions, and each continues without the
// other.
func TestCompaction_StrataAndUpstream_FollowEachOther(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	ours := env.APIServer(etcd, every(time.Second))
	stock := env.APIServer(etcd, every(time.Second), "--engine="+harness.Upstream)
	both := func(name string) {
		t.Helper()
		rev := create(t, ctx, ours.API(), name)
		a := next(t, ctx, announced, rev)
		requireCompacted(t, ctx, client, a.rev)
		awaitGone(t, ctx, ours.API(), rev)
		awaitGone(t, ctx, stock.API(), rev)
	}
	both("both-0")
	both("both-1")
	harness.Check(t, stock.Stop())
	rev := create(t, ctx, ours.API(), "ours")
	requireCompacted(t, ctx, client, next(t, ctx, announced, rev).rev)
	stock.Restart()
	harness.Check(t, ours.Stop())
	rev = create(t, ctx, stock.API(), "stock")
	requireCompacted(t, ctx, client, next(t, ctx, announced, rev).rev)
	ours.Restart()
	both("both-2")
}
