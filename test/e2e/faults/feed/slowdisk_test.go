package feed

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/etcdcluster"
)

// TestFeed_SlowDisk_LosesNothing: the members of etcd sync their writes. The disk of one, which is
// the leader or a follower, takes 200 ms, and 2 s in the long form, for a sync; then it is killed
// while it writes. No watch ends or loses an event, and no acknowledged write is lost.
func TestFeed_SlowDisk_LosesNothing(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	s := newMembersOf(t, ctx, e, etcdcluster.StartSynced(t, e, 3))
	acknowledged := 0
	for _, delay := range harness.Pick([]time.Duration{200 * time.Millisecond}, []time.Duration{200 * time.Millisecond, 2 * time.Second}) {
		for _, leads := range []bool{false, true} {
			leader, err := s.Leader(ctx)
			harness.Check(t, err)
			slow := leader
			for i, m := range s.Members {
				if m == leader && !leads {
					slow = s.Members[(i+1)%len(s.Members)]
				}
			}
			harness.Check(t, slow.SlowSyncs(delay))
			put := func() {
				began := time.Now()
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
					defer cancel()
					name := fmt.Sprintf("kept-%03d", acknowledged)
					_, err := s.client.Txn(ctx).Then(maps.put(name, ""), secrets.put(name, "")).Commit()
					return err == nil, err
				}))
				acknowledged++
				t.Logf("slow by %v, the leader: %v: a write took %v", delay, leads, time.Since(began).Round(time.Millisecond))
			}
			for range 5 {
				put()
			}
			var killed sync.WaitGroup
			killed.Go(slow.Kill)
			put()
			killed.Wait()
			put()
			harness.Check(t, slow.SlowSyncs(0))
			slow.Start()
		}
	}
	s.requireHistory(t, ctx)
	list := harness.AwaitList(t, ctx, s.api, maps.path)
	if want := acknowledged + 2; len(list.Items) != want { // one, and the fence
		t.Errorf("%d objects, want %d", len(list.Items), want)
	}
}
