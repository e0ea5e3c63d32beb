package mirror_test

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// benchSource lists prepared keys and delivers the batches that it is given. Values are shared, as
// the mirror copies them.
type benchSource struct {
	driver.Source // nil: its other methods are not called
	keys          [][]byte
	versions      []int64
	value         []byte
	rev           mirror.Revision
	past          []driver.Batch // delivered by Replay: revisions after 1
	feed          chan driver.Batch
}

// newBenchSource has n keys of several resources, in key order, with values of valueBytes bytes.
func newBenchSource(n, resources, valueBytes int) *benchSource {
	s := &benchSource{value: make([]byte, valueBytes), rev: 1, feed: make(chan driver.Batch)}
	for r := range resources {
		for i := range n / resources {
			s.keys = append(s.keys, fmt.Appendf(nil, "%sr%03d/namespace-%03d/name-%07d", root, r, i/1000, i))
			s.versions = append(s.versions, 1)
		}
	}
	return s
}

func (s *benchSource) List(ctx context.Context, prefix string, _ mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	for part := range slices.Chunk(s.keys, 5000) {
		kvs := make([]driver.KV, len(part))
		for i, k := range part {
			kvs[i] = driver.KV{Key: k, Value: s.value, CreateRevision: 1, ModRevision: 1, Version: 1}
		}
		if err := page(kvs); err != nil {
			return driver.Header{}, err
		}
	}
	return driver.Header{ClusterID: 1, Revision: s.oldest()}, nil
}

func (s *benchSource) oldest() mirror.Revision {
	if len(s.past) > 0 {
		return 1
	}
	return s.rev
}

func (s *benchSource) Watch(ctx context.Context, _ string, _ driver.Header, deliver func(driver.Batch) error) error {
	for {
		select {
		case b := <-s.feed:
			if err := deliver(b); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *benchSource) Oldest(_ context.Context, _ string, now driver.Header, _ driver.ReplayBounds) (mirror.Revision, error) {
	return s.oldest(), nil
}

func (s *benchSource) Replay(_ context.Context, _ string, _ driver.Header, _ mirror.Revision, deliver func(driver.Batch) error) error {
	for _, b := range s.past {
		if err := deliver(b); err != nil {
			return err
		}
	}
	return nil
}

// Keys returns all keys of the resource.
func (s *benchSource) Keys(_ context.Context, _ string, _ mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	for left := s.keys; len(left) > 0; {
		kvs := make([]driver.KV, min(len(left), most(string(left[0]))))
		for i, k := range left[:len(kvs)] {
			kvs[i] = driver.KV{Key: bytes.Clone(k), CreateRevision: 1, ModRevision: 1, Version: 1}
		}
		if err := page(kvs); err != nil {
			return driver.Header{}, err
		}
		left = left[len(kvs):]
	}
	return driver.Header{ClusterID: 1, Revision: s.rev}, nil
}

func (s *benchSource) RequestProgress(context.Context) error { return nil }

func (s *benchSource) ReadRevision(context.Context) (driver.Header, error) {
	return driver.Header{ClusterID: 1, Revision: s.rev}, nil
}

// batch updates n keys chosen by pick, each in its own revision.
func (s *benchSource) batch(n int, pick func() int) driver.Batch {
	b := driver.Batch{Changes: make([]driver.Change, n)}
	for i := range b.Changes {
		k := pick()
		s.rev++
		s.versions[k]++
		b.Changes[i] = driver.Change{KV: driver.KV{Key: s.keys[k], Value: s.value, CreateRevision: 1, ModRevision: s.rev, Version: s.versions[k]}}
	}
	b.Through = s.rev
	return b
}

// startBench runs a mirror in which the resources are claimed.
func startBench(b testing.TB, s *benchSource, resources int, change func(*mirror.Options)) (*mirror.Mirror, []*mirror.Resource) {
	b.Helper()
	opts := mirror.Options{Prefix: root, Source: s, Logger: quiet()}
	if change != nil {
		change(&opts)
	}
	m, err := mirror.New(opts)
	testcheck.NoError(b, err)
	b.Cleanup(m.Close)
	var claimed []*mirror.Resource
	for i := range resources {
		r, err := m.Claim(fmt.Sprintf("%sr%03d/", root, i))
		testcheck.NoError(b, err)
		claimed = append(claimed, r)
	}
	testcheck.NoError(b, m.Wait(context.Background(), 1))
	testcheck.NoError(b, m.Check())
	return m, claimed
}

// BenchmarkApply measures the writer alone: 100,000 objects of 1 KB, updated at random.
func BenchmarkApply(b *testing.B) {
	for _, tt := range []struct {
		name      string
		resources int
		claimed   bool
	}{{"claimed", 1, true}, {"claimed", 50, true}, {"unclaimed", 50, false}} {
		for _, n := range []int{1, 100, 1000} {
			b.Run(fmt.Sprintf("%s=%d/batch=%d", tt.name, tt.resources, n), func(b *testing.B) {
				s := newBenchSource(100_000, tt.resources, 1024)
				claims := tt.resources
				if !tt.claimed {
					claims = 0
				}
				m, _ := startBench(b, s, claims, nil)
				rnd := rand.New(rand.NewPCG(1, 2))
				b.ReportAllocs()
				for b.Loop() { // includes building the batch, concurrently with the writer
					s.feed <- s.batch(n, func() int { return rnd.IntN(len(s.keys)) })
				}
				for m.PublishedRevision() < s.rev {
					runtime.Gosched()
				}
				b.ReportMetric(float64(b.N*n)/b.Elapsed().Seconds(), "events/s")
			})
		}
	}
}

// BenchmarkRead measures reads: 100,000 objects, 40,000 events of history.
func BenchmarkRead(b *testing.B) {
	s := newBenchSource(100_000, 1, 1024)
	m, claimed := startBench(b, s, 1, nil)
	rnd := rand.New(rand.NewPCG(1, 2))
	for range 40_000 {
		s.feed <- s.batch(1, func() int { return rnd.IntN(len(s.keys)) })
	}
	testcheck.NoError(b, m.Wait(context.Background(), s.rev))
	r := claimed[0]
	snap, err := r.Latest()
	testcheck.NoError(b, err)
	keys := make([]string, len(s.keys))
	for i, k := range s.keys {
		keys[i] = string(k)
	}
	b.Run("Latest", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if _, err := r.Latest(); err != nil {
				b.Fatal(err)
			}
		}
	})
	b.Run("Get", func(b *testing.B) {
		b.ReportAllocs()
		for i := 0; b.Loop(); i += 7919 {
			if _, ok := snap.Get(keys[i%len(keys)]); !ok {
				b.Fatal("lost")
			}
		}
	})
	b.Run("Count", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if n, _ := snap.Count(root+"r000/namespace-010/", root+"r000/namespace-090/"); n != 80_000 {
				b.Fatal(n)
			}
		}
	})
	for _, back := range []mirror.Revision{0, 1, 500, 5000, 20_000, 35_000, s.rev - 1} {
		for _, again := range []bool{false, true} {
			name := fmt.Sprintf("At/back=%d", back)
			if again {
				name += "/again" // it was read before
			}
			b.Run(name, func(b *testing.B) {
				b.ReportAllocs()
				for b.Loop() {
					if !again {
						r.ForgetPast()
					}
					if _, err := r.At(s.rev - back); err != nil {
						b.Fatal(err)
					}
				}
			})
		}
	}
	b.Run("All", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			n := 0
			for range snap.All("", "") {
				n++
			}
			if n != len(keys) {
				b.Fatal(n)
			}
		}
	})
}

// BenchmarkCursorNext measures one event that is applied and then read by every cursor; it also
// reports the time per cursor.
func BenchmarkCursorNext(b *testing.B) {
	for _, n := range []int{1, 1000} {
		b.Run(fmt.Sprintf("cursors=%d", n), func(b *testing.B) {
			s := newBenchSource(10_000, 1, 1024)
			m, claimed := startBench(b, s, 1, nil)
			snap, err := claimed[0].Latest()
			testcheck.NoError(b, err)
			var cursors []*mirror.Cursor
			for range n {
				cursors = append(cursors, snap.Cursor("", ""))
			}
			var buf []*mirror.Event
			b.ReportAllocs()
			for i := 0; b.Loop(); i++ {
				s.feed <- s.batch(1, func() int { return i % len(s.keys) })
				for m.PublishedRevision() < s.rev {
					runtime.Gosched()
				}
				for _, c := range cursors {
					if buf, err = c.Next(buf[:0], 100); err != nil || len(buf) != 1 {
						b.Fatal(len(buf), err)
					}
				}
			}
			b.ReportMetric(float64(b.Elapsed().Nanoseconds())/float64(b.N*n), "ns/cursor")
		})
	}
}

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var ms runtime.MemStats
	runtime.ReadMemStats(&ms)
	return int64(ms.HeapAlloc)
}

// BenchmarkMemory measures the memory of 100,000 objects and 50,000 events of history, in addition
// to the bytes of keys and values.
func BenchmarkMemory(b *testing.B) {
	const objects, events = 100_000, 50_000
	for _, size := range []int{200, 1024, 10_240} {
		b.Run(fmt.Sprintf("value=%d", size), func(b *testing.B) {
			for b.Loop() {
				s := newBenchSource(objects, 1, size)
				payload := int64(0)
				for _, k := range s.keys {
					payload += int64(len(k) + size)
				}
				before := heap()
				m, _ := startBench(b, s, 1, func(o *mirror.Options) {
					o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 1 << 40}
				})
				present := heap() - before - payload
				rnd := rand.New(rand.NewPCG(1, 2))
				for range events {
					s.feed <- s.batch(1, func() int { return rnd.IntN(len(s.keys)) })
				}
				testcheck.NoError(b, m.Wait(context.Background(), s.rev))
				m.HoldWriter()() // the writer's work after the published revision has moved
				history := heap() - before - payload - present
				counted := m.Stats().HistoryBytes
				b.ReportMetric(float64(present)/objects, "B/object")
				b.ReportMetric(float64(history)/events, "B/event")
				b.ReportMetric(float64(counted)/events, "counted-B/event")
				m.Close()
			}
		})
	}
}

// historyMemory returns the heap memory of random updates of objects of 1 KB, in bytes for each
// revision and in addition to the superseded keys and values; versions is the part that the mirror
// counts as versions.
func historyMemory(t testing.TB, objects, revisions int) (perRevision, versions float64) {
	const size = 1024
	s := newBenchSource(objects, 1, size)
	before := heap()
	m, claimed := startBench(t, s, 1, func(o *mirror.Options) {
		o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 1 << 40}
	})
	present := heap() - before
	rnd := rand.New(rand.NewPCG(1, 2))
	superseded := int64(0)
	for range revisions {
		s.feed <- s.batch(1, func() int {
			k := rnd.IntN(len(s.keys))
			superseded += int64(len(s.keys[k]) + size)
			return k
		})
	}
	testcheck.NoError(t, m.Wait(context.Background(), s.rev))
	m.Weigh()
	history := heap() - before - present - superseded
	st := claimed[0].Stats()
	if st.Events != revisions || st.OldestRevision != 1 {
		t.Fatalf("%d events, the oldest revision is %d", st.Events, st.OldestRevision)
	}
	runtime.KeepAlive(s)
	return float64(history) / float64(revisions), float64(st.VersionBytes) / float64(revisions)
}
