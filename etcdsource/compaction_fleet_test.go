package etcdsource

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	"pgregory.net/rapid"
)

// fleetStep is one of TestCompactors_RandomFaults_CompactOnlyAnnouncedRevisions.
type fleetStep struct {
	what     string
	which, n int
	kind     string
	interval time.Duration
}

func drawFleetStep(r *rapid.T) fleetStep {
	return fleetStep{
		what:     rapid.SampledFrom([]string{"start", "start", "stop", "delete", "cut", "fail", "wait", "wait", "wait", "wait"}).Draw(r, "step"),
		which:    rapid.IntRange(0, 3).Draw(r, "which"),
		n:        rapid.IntRange(1, 90).Draw(r, "n"),
		kind:     rapid.SampledFrom([]string{"txn", "compact", "lost txn", "lost compact"}).Draw(r, "kind"),
		interval: time.Duration(rapid.SampledFrom([]int{0, 1, 7, 60}).Draw(r, "interval")) * time.Second,
	}
}

// replica is a compactor of a fleet, and the state of etcd's history at its start.
type replica struct {
	*Compactor
	since int
	found int64 // the value of the key at its start
}

// TestCompactors_RandomFaults_CompactOnlyAnnouncedRevisions: replicas with different intervals that
// start and stop during faults. etcd is never compacted above an announced revision, every replica
// records an announcement within a second and no higher revision, and after the faults there are
// compactions again.
func TestCompactors_RandomFaults_CompactOnlyAnnouncedRevisions(t *testing.T) {
	rapid.Check(t, func(r *rapid.T) {
		plan := rapid.SliceOfN(rapid.Custom(drawFleetStep), 5, 40).Draw(r, "plan")
		var wrong error
		synctest.Test(t, func(*testing.T) { wrong = playFleet(plan) })
		if wrong != nil {
			r.Fatal(wrong)
		}
	})
}

// fleet is the compactors of several API servers on one etcd.
type fleet struct {
	etcd     *oneKey
	log      *testLog
	replicas []replica

	mu   sync.Mutex
	fail map[string]int // number of requests of a kind that will fail
}

func newFleet() *fleet {
	f := &fleet{etcd: newOneKey(), log: &testLog{}, fail: map[string]int{}}
	f.etcd.before = func(kind string) error {
		if f.fails(kind) {
			return rpctypes.ErrNoLeader
		}
		return nil
	}
	f.etcd.after = func(kind string) error {
		if f.fails("lost " + kind) {
			return context.DeadlineExceeded
		}
		return nil
	}
	return f
}

func (f *fleet) fails(what string) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.fail[what]--
	return f.fail[what] >= 0
}

func (f *fleet) start(interval time.Duration) {
	e := f.etcd
	operations := e.operations()
	x := replica{since: len(operations)}
	e.mu.Lock()
	if e.key != nil {
		_, _ = fmt.Sscan(string(e.key.Value), &x.found)
	}
	e.mu.Unlock()
	x.Compactor = NewCompactor(e.client(), CompactorOptions{Interval: interval, Logger: f.log.logger()})
	f.replicas = append(f.replicas, x)
}

func (f *fleet) stop() {
	for _, c := range f.replicas {
		c.Stop()
	}
}

// step executes a step of a plan, and waits until the replicas have observed it.
func (f *fleet) step(step fleetStep) {
	switch step.what {
	case "start":
		if len(f.replicas) < 4 {
			f.start(step.interval)
		}
	case "stop":
		if step.which < len(f.replicas) {
			f.replicas[step.which].Stop()
			f.replicas = slices.Delete(f.replicas, step.which, step.which+1)
		}
	case "delete":
		f.etcd.remove()
	case "cut":
		f.etcd.cut()
	case "fail":
		f.mu.Lock()
		f.fail[step.kind] = step.n % 4
		f.mu.Unlock()
	case "wait":
		f.etcd.write(int64(step.n))
		time.Sleep(time.Duration(step.n) * time.Second)
	}
	time.Sleep(followLast)
	synctest.Wait()
}

// check compares the compactions with their announcements.
func (f *fleet) check() error {
	operations := f.etcd.operations()
	f.etcd.mu.Lock()
	compacted := f.etcd.compacted
	f.etcd.mu.Unlock()
	if high := highestPut(operations); compacted > high {
		return fmt.Errorf("compacted to %d, announced %d: %v", compacted, high, operations)
	}
	for _, c := range f.replicas {
		if got, want := c.CompactRevision(), max(c.found, highestPut(operations[c.since:])); got != want {
			return fmt.Errorf("CompactRevision of a replica is %d, want %d: %v", got, want, operations)
		}
	}
	return nil
}

// highestPut returns the highest revision that was written to the key.
func highestPut(history []string) (rev int64) {
	for _, h := range history {
		var n int64
		if _, err := fmt.Sscanf(h, "put %d", &n); err == nil {
			rev = max(rev, n)
		}
	}
	return rev
}

func playFleet(plan []fleetStep) error {
	f := newFleet()
	defer f.stop()
	for i, step := range plan {
		f.step(step)
		if err := f.check(); err != nil {
			return fmt.Errorf("step %d: %w", i, err)
		}
	}
	f.mu.Lock()
	clear(f.fail)
	f.mu.Unlock()
	e := f.etcd
	e.mu.Lock()
	now := e.rev
	e.mu.Unlock()
	f.start(time.Minute)
	for range 4 {
		turns(e, 1)
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.compacted < now {
		return fmt.Errorf("etcd was at %d and is compacted to %d after four intervals: %v", now, e.compacted, e.history)
	}
	return nil
}
