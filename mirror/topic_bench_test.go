package mirror_test

import (
	"context"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/mirror"
)

// cpuTime returns the processor time that the process has used.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

// benchFollowers are cursors on separate goroutines.
type benchFollowers struct {
	cursors              []*mirror.Cursor
	part                 *mirror.WatchIndex // by key
	seen, wakes, waiting atomic.Int64
}

// newCursor returns a cursor for the key: it reads the key without following it, or follows the
// key, its directory of 1,000 keys, or its value.
func (f *benchFollowers) newCursor(snap mirror.Snapshot, how, key string, i int) *mirror.Cursor {
	c := snap.Cursor(key, key+"\x00")
	switch how {
	case "key":
		c.Follow()
	case "directory":
		dir := fmt.Sprintf("%sr000/namespace-%03d/", root, i/1000)
		c = snap.Cursor(dir, dir[:len(dir)-1]+"0")
		c.Follow()
	case "value":
		c = snap.Cursor("", "")
		c.FollowIndex(f.part, key)
	}
	c.Changed()
	return c
}

// read reads all events of the cursor, and waits for more, until the context ends.
func (f *benchFollowers) read(ctx context.Context, c *mirror.Cursor) {
	defer c.Unfollow()
	var buf []*mirror.Event
	for {
		changed := c.Changed()
		var err error
		if buf, err = c.Next(buf[:0], 64); err != nil {
			return
		}
		f.seen.Add(int64(len(buf)))
		if len(buf) > 0 {
			continue
		}
		f.waiting.Add(1)
		select {
		case <-changed:
		case <-ctx.Done():
			return
		}
		f.waiting.Add(-1)
		f.wakes.Add(1)
	}
}

// settle returns when the mirror is at rev and every cursor waits.
func (f *benchFollowers) settle(m *mirror.Mirror, rev mirror.Revision) {
	for m.PublishedRevision() < rev || f.waiting.Load() < int64(len(f.cursors)) {
		runtime.Gosched()
	}
}

// BenchmarkFollowers measures an event of one key while 5,000 cursors wait, each for its own key on
// its own goroutine: the processor time of the whole process, from the event's arrival until every
// cursor waits again; and the heap of a waiting cursor without its goroutine.
func BenchmarkFollowers(b *testing.B) {
	const n = 5000
	for _, how := range []string{"everything", "key", "directory", "value"} {
		b.Run(fmt.Sprintf("cursors=%d/of=%s", n, how), func(b *testing.B) {
			s := newBenchSource(n, 1, 1024)
			m, claimed := startBench(b, s, 1, nil)
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			f := &benchFollowers{cursors: make([]*mirror.Cursor, n)}
			f.part = mirror.NewWatchIndex(ctx, claimed[0], func(run func()) bool { wg.Go(run); return true },
				func(ev *mirror.Event) (before, now string, known bool) { return ev.Key(), ev.Key(), true }, nil)
			snap, err := claimed[0].Latest()
			if err != nil {
				b.Fatal(err)
			}
			held := heapOf(func() {
				for i := range f.cursors {
					f.cursors[i] = f.newCursor(snap, how, string(s.keys[i]), i)
				}
			})
			for _, c := range f.cursors {
				wg.Go(func() { f.read(ctx, c) })
			}
			f.settle(m, s.rev)
			each := int64(1)
			if how == "directory" {
				each = 1000
			}
			var events int64
			cpu := cpuTime()
			b.ReportAllocs()
			for b.Loop() {
				events++
				s.feed <- s.batch(1, func() int { return int(events*7919) % n })
				for f.seen.Load() < events*each {
					runtime.Gosched()
				}
				f.settle(m, s.rev)
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(events), "cpu-ns/event")
			b.ReportMetric(float64(f.wakes.Load())/float64(events), "wakes/event")
			b.ReportMetric(float64(held)/n, "B/cursor")
		})
	}
}

// heapOf returns the heap memory that f retains.
func heapOf(f func()) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	f()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}
