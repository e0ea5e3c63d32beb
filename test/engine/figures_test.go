package enginetest

import (
	"context"
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// memory returns a field of the process's /proc status in MiB, -1 if there is no such file.
func (e *etcdProcess) memory(field string) int64 {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", e.pid))
	if err != nil {
		return -1
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, field+":"); ok {
			kib, err := strconv.ParseInt(strings.TrimSuffix(strings.TrimSpace(rest), " kB"), 10, 64)
			if err == nil {
				return kib >> 10
			}
		}
	}
	return -1
}

// forget makes etcd release the memory of earlier watches, and resets its peak memory.
func (e *etcdProcess) forget(t testing.TB, prefix string) {
	t.Helper()
	rev := put(t, e.client, "/elsewhere", "v")
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	put(t, e.client, prefix+"00000", "v")
	<-e.client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(rev))
	time.Sleep(2 * time.Second) // time for a garbage collection
	_ = os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", e.pid), []byte("5"), 0)
}

// TestReplayFigures measures the duration of a replay, the delay of a concurrent writer, and etcd's
// memory. STRATA_REPLAY selects the segments: "1999x32 999x40" means segments of 1,999 revisions,
// 32 concurrently, then of 999 revisions, 40 concurrently; "list" is one watch. STRATA_REPLAY_PAUSE
// replaces the bound on the time for which etcd blocks writers; 0 removes it.
func TestReplayFigures(t *testing.T) {
	if os.Getenv("STRATA_TEST_LONG") == "" {
		t.Skip("set STRATA_TEST_LONG=1")
	}
	plans := strings.Fields(os.Getenv("STRATA_REPLAY"))
	if len(plans) == 0 {
		plans = []string{""}
	}
	const prefix = "/registry/"
	bounds := mirror.DefaultReplay
	if pause := os.Getenv("STRATA_REPLAY_PAUSE"); pause != "" {
		var err error
		if bounds.Pause, err = time.ParseDuration(pause); err != nil {
			t.Fatalf("STRATA_REPLAY_PAUSE: %v", err)
		}
	}
	for _, scene := range []struct {
		revisions, value int
		replays          []int
	}{
		{200_000, 1_000, []int{1, 3}},
		{50_000, 10_000, []int{1, 3}},
	} {
		t.Run(fmt.Sprintf("%dx%d", scene.revisions, scene.value), func(t *testing.T) {
			e := startEtcds(t, 1)[0]
			writeMany(t, e.client, prefix, strings.Repeat("v", scene.value), scene.revisions)
			t.Logf("revisions  bytes  plan     replays  oldest in  took     longest write  etcd before  peak")
			for _, plan := range plans {
				for _, replays := range scene.replays {
					e.forget(t, prefix)
					e.figures(t, prefix, plan, replays, bounds, scene.value)
				}
			}
		})
	}
}

func (e *etcdProcess) figures(t *testing.T, prefix, plan string, replays int, bounds driver.ReplayBounds, value int) {
	before := e.memory("VmRSS")
	stop := make(chan struct{})
	var writer sync.WaitGroup
	var longest time.Duration
	writer.Go(func() {
		for {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				began := time.Now()
				put(t, e.client, prefix+"beside", "v")
				longest = max(longest, time.Since(began))
			}
		}
	})
	var group sync.WaitGroup
	var mu sync.Mutex
	var slowest, slowestOldest time.Duration
	var revisions int64
	for i := range replays {
		group.Go(func() {
			client := connect(t, strings.TrimPrefix(e.client.Endpoints()[0], "unix://"))
			s := etcdsource.New(client, fmt.Sprint(t.Name(), i), prefix+"probe")
			var segment int64
			var watches int
			if _, err := fmt.Sscanf(plan, "%dx%d", &segment, &watches); err == nil {
				s = s.WithSegments(segment, watches)
			}
			now := header(t, s)
			began := time.Now()
			oldest, err := s.Oldest(contextFor(t), prefix, now, bounds)
			if err != nil {
				t.Error(err)
				return
			}
			found := time.Since(began)
			now = header(t, s)
			began = time.Now()
			n := 0
			err = s.Replay(contextFor(t), prefix, driver.Header{ClusterID: now.ClusterID, Revision: oldest}, now.Revision, func(b driver.Batch) error {
				n += len(b.Changes)
				return nil
			})
			took := time.Since(began)
			if err != nil || int64(n) < now.Revision-oldest-100 {
				// some revisions were written outside the prefix
				t.Errorf("%d events of %d revisions: %v", n, now.Revision-oldest, err)
			}
			mu.Lock()
			defer mu.Unlock()
			slowest, slowestOldest, revisions = max(slowest, took), max(slowestOldest, found), now.Revision-oldest
		})
	}
	group.Wait()
	close(stop)
	writer.Wait()
	t.Logf("%9d  %5d  %-7s  %7d  %9s  %6s  %13s  %7d MiB  %d MiB", revisions, value, plan, replays,
		slowestOldest.Round(time.Millisecond), slowest.Round(time.Millisecond), longest.Round(time.Millisecond), before, e.memory("VmHWM"))
}
