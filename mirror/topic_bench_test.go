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

// BenchmarkFollowers is what an event of one key costs when 5,000 cursors wait, each for a key
// of its own, on a goroutine of its own: processor time of the whole process, from the
// event's arrival until everybody waits again; and what a waiting cursor takes, without
// its goroutine.
func BenchmarkFollowers(b *testing.B) {
	const n = 5000
	for _, how := range []string{"everything", "key", "directory", "value"} {
		b.Run(fmt.Sprintf("cursors=%d/of=%s", n, how), func(b *testing.B) {
			s := newBenchSource(n, 1, 1024)
			m, claimed := startBench(b, s, 1, nil)
			r := claimed[0]
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			part := mirror.NewPartition(ctx, r, func(run func()) bool { wg.Go(run); return true },
				func(ev *mirror.Event) (before, now string, known bool) { return ev.Key(), ev.Key(), true })
			snap, err := r.Latest()
			if err != nil {
				b.Fatal(err)
			}
			cursors := make([]*mirror.Cursor, n)
			held := heapOf(func() {
				for i := range cursors {
					key := string(s.keys[i])
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
						c.FollowValue(part, key)
					}
					c.Changed()
					cursors[i] = c
				}
			})
			var seen, wakes atomic.Int64
			var waiting atomic.Int64
			for _, c := range cursors {
				wg.Go(func() {
					defer c.Close()
					var buf []*mirror.Event
					for {
						changed := c.Changed()
						var err error
						if buf, err = c.Next(buf[:0], 64); err != nil {
							return
						}
						seen.Add(int64(len(buf)))
						if len(buf) > 0 {
							continue
						}
						waiting.Add(1)
						select {
						case <-changed:
						case <-ctx.Done():
							return
						}
						waiting.Add(-1)
						wakes.Add(1)
					}
				})
			}
			settle := func() {
				for m.Clock() < s.rev || waiting.Load() < n {
					runtime.Gosched()
				}
			}
			settle()
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
				for seen.Load() < events*each {
					runtime.Gosched()
				}
				settle()
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(events), "cpu-ns/event")
			b.ReportMetric(float64(wakes.Load())/float64(events), "wakes/event")
			b.ReportMetric(float64(held)/n, "B/cursor")
		})
	}
}

// heapOf returns what f leaves on the heap.
func heapOf(f func()) int64 {
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	f()
	runtime.GC()
	runtime.ReadMemStats(&after)
	return int64(after.HeapAlloc) - int64(before.HeapAlloc)
}
