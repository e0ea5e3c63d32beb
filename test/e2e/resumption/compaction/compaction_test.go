package compaction

import (
	"context"
	"fmt"
	"net/http"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// TestCompaction_ByOthers_IsFollowed by a server that compacts nothing: manual compactions first,
// then those of another server.
func TestCompaction_ByOthers_IsFollowed(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	following := env.APIServer(etcd, every(0)).API()
	t.Run("not announced", func(t *testing.T) { followUnannounced(t, ctx, client, following) })
	t.Run("future revision", func(t *testing.T) { ignoreFuture(t, ctx, client, following) })
	harness.Check(t, following.Delete(ctx, maps))
	compacting := env.APIServer(etcd, every(4*time.Second)).API()
	t.Run("announced", func(t *testing.T) { followOther(t, ctx, client, following, compacting) })
}

// followUnannounced compacts by hand, as etcd itself may. The server's next poll, every 10 s,
// detects it.
func followUnannounced(t *testing.T, ctx context.Context, client *clientv3.Client, api *harness.API) {
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

// ignoreFuture announces a revision above etcd's, which has no effect, not even once etcd has
// reached that revision.
func ignoreFuture(t *testing.T, ctx context.Context, client *clientv3.Client, api *harness.API) {
	first := create(t, ctx, api, "fourth")
	rev := create(t, ctx, api, "fifth")
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

// followOther requires that the server follows the other one's compactions within a second of the
// key's write, and that below the revision the answer of both is 410, at the revision it is 200,
// and watches lose no events.
func followOther(t *testing.T, ctx context.Context, client *clientv3.Client, following, compacting *harness.API) {
	first := create(t, ctx, compacting, "map-0")
	for i := 1; i < 6; i++ {
		create(t, ctx, compacting, fmt.Sprint("map-", i))
	}
	announced := announcements(t, ctx, client)
	// on a busy machine a round may take any time; a server that only polls needs seconds in each
	soonest, judged := testTimeout, 0
	for round := 0; round < 3 || soonest > time.Second && round < 10; round++ {
		name := fmt.Sprint("new-", round)
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
			if gone(r) && overtaken(t, ctx, client, a.rev) {
				t.Logf("round %d: %d was compacted before the list", round, a.rev)
			} else if judged++; err != nil || list.Metadata.ResourceVersion != fmt.Sprint(a.rev) {
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
	if judged == 0 {
		t.Error("each compaction was overtaken by the next one")
	}
	if soonest > time.Second {
		t.Errorf("the server that only follows refuses a compacted revision after %s at the soonest", soonest)
	}

	// KEP-4988: compaction does not shorten the history of watches.
	for who, api := range map[string]*harness.API{"compacts": compacting, "follows": following} {
		w := harness.StartWatch(t, ctx, api, maps, fmt.Sprintf("resourceVersion=%d", first))
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != "ADDED" || e.Object.Metadata.Name != "map-1" {
			t.Errorf("the server that %s: a watch from %d begins with %s %s %v", who, first, e.Type, e.Object.Metadata.Name, e.Status.Message)
		}
		w.Close()
	}
}

// TestCompaction_TwoServers_AgreeWithEtcd with different intervals, also while the key is written
// by hand.
func TestCompaction_TwoServers_AgreeWithEtcd(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	servers := []*harness.Server{
		env.APIServer(etcd, every(time.Second)), env.APIServer(etcd, every(1500*time.Millisecond))}
	t.Run("revisions rise", func(t *testing.T) { requireRising(t, ctx, client, announced, servers) })
	t.Run("invalid key", func(t *testing.T) { ignoreInvalid(t, ctx, client, announced, servers) })
}

// requireRising requires that each revision is announced once, the revisions rise, and both servers
// agree with etcd.
func requireRising(t *testing.T, ctx context.Context, client *clientv3.Client,
	announced <-chan announcement, servers []*harness.Server) {
	last := int64(0)
	for i := range 6 {
		rev := create(t, ctx, servers[i%2].API(), fmt.Sprint("turn-", i))
		for last <= rev {
			a := next(t, ctx, announced, 0)
			if a.rev <= last {
				t.Errorf("%d is announced after %d", a.rev, last)
			}
			last = a.rev
		}
		for _, server := range servers {
			awaitGone(t, ctx, server.API(), rev)
		}
		requireCompacted(t, ctx, client, rev)
	}
}

// TestCompaction_StrataAndUpstream_FollowEachOther: upstream's engine and Strata follow each
// other's compactions, and each continues without the other. Strata's interval changes between two
// starts.
func TestCompaction_StrataAndUpstream_FollowEachOther(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	client := etcd.Client()
	announced := announcements(t, ctx, client)
	ours := env.APIServer(etcd, every(0))
	stock := env.APIServer(etcd, every(time.Second), "--engine="+harness.Upstream)
	follow := func(name string, servers ...*harness.Server) {
		t.Helper()
		rev := create(t, ctx, ours.API(), name)
		requireCompacted(t, ctx, client, next(t, ctx, announced, rev).rev)
		for _, s := range servers {
			awaitGone(t, ctx, s.API(), rev)
		}
	}
	follow("stock-0", ours) // ours compacts nothing
	harness.Check(t, stock.Stop())

	harness.Check(t, ours.Stop())
	ours.Restart(every(3 * time.Second))
	// the first of the two compactions starts later, and the second is announced after it is done
	began := time.Now()
	rev := create(t, ctx, ours.API(), "ours-0")
	next(t, ctx, announced, rev)
	rev = create(t, ctx, ours.API(), "ours-1")
	a := next(t, ctx, announced, rev)
	if between := a.at.Sub(began); between < 2900*time.Millisecond {
		t.Errorf("two compactions within %s, want 3 s between them at least", between)
	}
	requireCompacted(t, ctx, client, a.rev)
	awaitGone(t, ctx, ours.API(), a.rev-1)

	stock.Restart()
	follow("both", ours, stock) // upstream follows within 10 s
	harness.Check(t, ours.Stop())
	rev = create(t, ctx, stock.API(), "stock-1")
	requireCompacted(t, ctx, client, next(t, ctx, announced, rev).rev)
	if harness.Long() {
		ours.Restart()
		follow("both-1", ours, stock)
		follow("both-2", ours, stock)
		harness.Check(t, ours.Stop())
		ours.Restart(every(0))
		follow("stock-2", ours, stock)
	}
}
