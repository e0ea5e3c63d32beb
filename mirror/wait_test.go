package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// asks records the times of progress requests.
type asks struct {
	mu    sync.Mutex
	times []time.Time
}

func (a *asks) source(store *memory.Store) driver.Source {
	return &script{Source: store, progress: func(ctx context.Context) error {
		a.mu.Lock()
		a.times = append(a.times, time.Now())
		a.mu.Unlock()
		return store.RequestProgress(ctx)
	}}
}

// since returns the times of the requests since begin, in milliseconds, and clears them.
func (a *asks) since(begin time.Time) (ms []int) {
	synctest.Wait()
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, at := range a.times {
		ms = append(ms, int(at.Sub(begin).Milliseconds()))
	}
	a.times = nil
	return ms
}

// TestProgress_ReaderWaits_IsRequestedAtIntervals: the intervals are short at first and grow to 100
// ms; there are no requests without a waiting reader.
func TestProgress_ReaderWaits_IsRequestedAtIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var a asks
		m := start(t, a.source(store), func(o *mirror.Options) { o.FeedPatience = -1 })
		reach(t, m, store.Revision())
		store.Put("/registry/a/x", "1")
		reach(t, m, store.Revision())
		if got := a.since(time.Now()); len(got) != 0 {
			t.Errorf("%d progress requests for a revision that an event has published, want 0", len(got))
		}
		time.Sleep(time.Hour)
		if got := a.since(time.Now()); len(got) != 0 {
			t.Fatalf("%d progress requests without a waiting reader, want 0", len(got))
		}

		store.Stall(true)
		rev := store.Put("/elsewhere", "1")
		begin := time.Now()
		ctx, cancel := context.WithTimeout(context.Background(), 500*time.Millisecond)
		defer cancel()
		if err := m.Wait(ctx, rev); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait on a stalled feed: %v", err)
		}
		if took := time.Since(begin); took != 500*time.Millisecond {
			t.Errorf("Wait returned after %v, its context ended after 500ms", took)
		}
		if got, want := a.since(begin), []int{2, 6, 14, 30, 62, 126, 226, 326, 426}; !slices.Equal(got, want) {
			t.Errorf("progress requests at %v ms, want %v", got, want)
		}
		time.Sleep(time.Hour)
		if got := a.since(time.Now()); len(got) != 0 {
			t.Errorf("%d progress requests after the last reader stopped waiting, want 0", len(got))
		}

		// The next wait starts at the first interval.
		store.Stall(false)
		begin = time.Now()
		reach(t, m, rev)
		if took := time.Since(begin); took != 2*time.Millisecond {
			t.Errorf("a feed that is in step took %v, want 2ms", took)
		}
		// Readers now wait for progress, not for an event.
		rev = store.Put("/elsewhere", "2")
		begin = time.Now()
		reach(t, m, rev)
		if took := time.Since(begin); took != 0 {
			t.Errorf("a feed that is in step took %v, want no time", took)
		}
		// An event ends a wait.
		rev = store.Revision() + 1
		go func() {
			time.Sleep(time.Millisecond)
			store.Put("/registry/a/x", "2")
		}()
		reach(t, m, rev)
		time.Sleep(time.Second)
		a.since(time.Now())
		store.Stall(true)
		defer store.Stall(false)
		rev = store.Put("/elsewhere", "3")
		begin = time.Now()
		short, cancel := context.WithTimeout(context.Background(), 5*time.Millisecond)
		defer cancel()
		if err := m.Wait(short, rev); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait on a stalled feed: %v", err)
		}
		if got, want := a.since(begin), []int{2}; !slices.Equal(got, want) {
			t.Errorf("progress requests at %v ms, want %v", got, want)
		}
	})
}

// TestWait_HighestRevision_DoesNotAffectOtherWaits: a client may wait for any revision, without an
// effect on other waits.
func TestWait_HighestRevision_DoesNotAffectOtherWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		var wg sync.WaitGroup
		for range 3 {
			wg.Go(func() {
				if err := m.Wait(ctx, math.MaxInt64); !errors.Is(err, context.DeadlineExceeded) {
					t.Errorf("Wait: %v", err)
				}
			})
		}
		reach(t, m, store.Put("/elsewhere", "1"))
		wg.Wait()
		reach(t, m, store.Put("/registry/a/x", "1"))
	})
}

// TestProgress_EventsEndWaits_KeepsInterval: while events move the published revision and end the
// waits, progress is not requested every other millisecond.
func TestProgress_EventsEndWaits_KeepsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 4 { // a reader always waits for the next write
			wg.Go(func() {
				for m.Wait(ctx, store.Revision()+1) == nil {
				}
			})
		}
		for i := range 10_000 {
			store.Put("/registry/a/x", fmt.Sprint(i))
			time.Sleep(time.Millisecond)
		}
		cancel()
		wg.Wait()
		if asked := m.Stats().ProgressRequests; asked > 110 {
			t.Errorf("%d progress requests in ten seconds, want at most one in 100 ms", asked)
		}
	})
}

// TestProgress_DistantWait_KeepsInterval: a reader waits for a revision that does not come. Reads
// of writes outside the prefix are served as quickly as without this wait. Without reads, progress
// is requested every 100 ms, although it moves the published revision each time.
func TestProgress_DistantWait_KeepsInterval(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		ctx, cancel := context.WithCancel(context.Background())
		defer cancel()
		far := make(chan error, 1)
		go func() { far <- m.Wait(ctx, 1<<40) }()
		time.Sleep(time.Second)

		before := m.Stats().ProgressRequests
		for range 1000 {
			store.Put("/elsewhere", "1")
			time.Sleep(time.Millisecond)
		}
		if asked := m.Stats().ProgressRequests - before; asked < 9 || asked > 11 {
			t.Errorf("%d progress requests in a second, want one in 100 ms", asked)
		}
		for i := range 20 {
			store.Put("/elsewhere", "1")
			begin := time.Now()
			rev, err := m.ReadRevision(context.Background())
			if err == nil {
				err = m.Wait(context.Background(), rev)
			}
			if took := time.Since(begin); err != nil || took > 2*time.Millisecond {
				t.Errorf("read %d took %v, %v", i, took, err)
			}
			time.Sleep(time.Duration(i*7) * time.Millisecond)
		}
		cancel()
		<-far
	})
}

// TestProgress_WaitingReaders_IsSentWithRevisionRead: when readers wait for writes outside the
// prefix, progress is requested at the same time as the revision.
func TestProgress_WaitingReaders_IsSentWithRevisionRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var a asks
		source := a.source(store).(*script)
		source.current = func(ctx context.Context) (driver.Header, error) {
			time.Sleep(time.Millisecond) // about a round trip
			return store.ReadRevision(ctx)
		}
		m := start(t, source, nil)
		reach(t, m, store.Revision())
		read := func() (took time.Duration) {
			begin := time.Now()
			rev, err := m.ReadRevision(context.Background())
			if err == nil {
				err = m.Wait(context.Background(), rev)
			}
			if err != nil {
				t.Error(err)
			}
			return time.Since(begin)
		}
		store.Put("/elsewhere", "1")
		if took := read(); took != 3*time.Millisecond {
			t.Errorf("the first read took %v, want a round trip and 2ms", took)
		}
		a.since(time.Now())
		for i := range 3 {
			store.Put("/elsewhere", fmt.Sprint(i))
			begin := time.Now()
			if took := read(); took != time.Millisecond {
				t.Errorf("a read took %v, want a round trip", took)
			}
			if got, want := a.since(begin), []int{0}; !slices.Equal(got, want) {
				t.Errorf("progress requests at %v ms, want %v", got, want)
			}
		}
		// An idle etcd has no new progress: it is not requested repeatedly.
		for range 10 {
			if took := read(); took != time.Millisecond {
				t.Errorf("a read took %v, want a round trip", took)
			}
		}
		if got := a.since(time.Now()); len(got) != 1 {
			t.Errorf("%d progress requests without a result, want 1", len(got))
		}
	})
}

// TestProgress_WantedWhileIdle_IsRequestedAtIntervals: with WantProgress the published revision
// follows writes outside the prefix without a waiting reader.
func TestProgress_WantedWhileIdle_IsRequestedAtIntervals(t *testing.T) {
	for _, tt := range []struct {
		name     string
		interval time.Duration
		want     int // requests per minute
	}{
		{"default", 0, 12},
		{"every second", time.Second, 60},
		{"never", -1, 0},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				store := memory.New()
				var a asks
				m := start(t, a.source(store), func(o *mirror.Options) { o.IdleProgress, o.FeedPatience = tt.interval, -1 })
				reach(t, m, store.Revision())
				a.since(time.Now())
				time.Sleep(time.Minute)
				if got := a.since(time.Now()); len(got) != 0 {
					t.Errorf("%d progress requests without a waiting reader, want 0", len(got))
				}
				first, second := m.WantProgress(), m.WantProgress()
				rev := store.Put("/elsewhere", "1")
				time.Sleep(time.Minute)
				first()
				if got := len(a.since(time.Now())); got < tt.want-1 || got > tt.want {
					t.Errorf("%d progress requests in a minute, want %d", got, tt.want)
				}
				if followed := m.PublishedRevision() == rev; followed != (tt.want > 0) {
					t.Errorf("published revision is %d, etcd is at %d", m.PublishedRevision(), rev)
				}
				// Answers that move the published revision do not delay the next request.
				a.since(time.Now())
				for range 60 {
					store.Put("/elsewhere", "1")
					time.Sleep(time.Second)
				}
				if got := len(a.since(time.Now())); got < tt.want-1 || got > tt.want {
					t.Errorf("%d progress requests in a minute of writes to other prefixes, want %d", got, tt.want)
				}
				// Events make progress requests unnecessary.
				for i := range 600 {
					store.Put("/registry/a/x", fmt.Sprint(i))
					time.Sleep(100 * time.Millisecond)
				}
				if got := a.since(time.Now()); len(got) > 1 {
					t.Errorf("%d progress requests while the published revision advanced", len(got))
				}
				second()
				time.Sleep(time.Minute)
				if got := a.since(time.Now()); len(got) > 1 {
					t.Errorf("%d progress requests after the last reader left", len(got))
				}
			})
		})
	}
}

// TestEventsOnly_IgnoresProgress: progress neither moves the published revision nor is requested,
// and a resource that is claimed late is read at the published revision without a wait.
func TestEventsOnly_IgnoresProgress(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "1")
		var a asks
		m := start(t, a.source(store), func(o *mirror.Options) { o.EventsOnly = true; o.UnclaimedBytes = 1 })
		at := store.Revision()
		reach(t, m, at)
		m.WantProgress()
		rev := store.Put("/elsewhere", "1")
		// Another client on the stream requests progress.
		testcheck.NoError(t, store.RequestProgress(context.Background()))
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Wait(ctx, rev); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait: %v, want it to wait for an event", err)
		}
		if got := a.since(time.Now()); len(got) != 0 || m.PublishedRevision() != at {
			t.Errorf("%d progress requests, published revision %d; want 0 and %d", len(got), m.PublishedRevision(), at)
		}
		r := claim(t, m, "/registry/a/") // its value was not stored
		testcheck.NoError(t, r.WaitReady(context.Background()))
		if got := read(latest(t, r))["/registry/a/x"]; got != fmt.Sprintf("1@%d", at) {
			t.Errorf("read %q", got)
		}
		reach(t, m, store.Put("/registry/a/x", "2"), r)

		// etcd is compacted past the published revision, which does not advance: the whole prefix
		// is relisted.
		rev = store.Put("/elsewhere", "2")
		store.Compact(rev)
		store.Put("/registry/b/y", "1")
		reach(t, m, store.Revision())
		rev = store.Put("/elsewhere", "3")
		store.Compact(rev)
		late := claim(t, m, "/registry/b/")
		if err := late.WaitReady(ctxFor(t)); err != nil {
			t.Fatalf("a resource that is claimed after a compaction: %v", err)
		}
		if got := read(latest(t, late)); len(got) != 1 {
			t.Errorf("read %v", got)
		}
	})
}

func ctxFor(t *testing.T) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), time.Hour)
	t.Cleanup(cancel)
	return ctx
}

// TestProgress_OtherReaderWaits_NewReaderIsNotDelayed: there are writes outside the prefix, and
// always a reader that waits for one; each is answered as quickly as the first (k/k: p90 = 93 ms on
// a quiet resource).
func TestProgress_OtherReaderWaits_NewReaderIsNotDelayed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		longest := time.Duration(0)
		for range 3 {
			var wg sync.WaitGroup
			var mu sync.Mutex
			for range 1000 {
				rev := store.Put("/elsewhere", "1")
				wg.Go(func() {
					begin := time.Now()
					if err := m.Wait(context.Background(), rev); err != nil {
						t.Error(err)
					}
					mu.Lock()
					defer mu.Unlock()
					longest = max(longest, time.Since(begin))
				})
				time.Sleep(time.Millisecond)
			}
			wg.Wait()
		}
		if longest > 10*time.Millisecond {
			t.Errorf("a reader waited %v for a feed that is in step", longest)
		}
		if asked := m.Stats().ProgressRequests; asked > 3100 {
			t.Errorf("%d progress requests in three seconds", asked)
		}
	})
}

// TestReadRevision_FeedStalled_ReturnsEtcdRevision: the revision is known although the feed stalls,
// and the cached state can still be read.
func TestReadRevision_FeedStalled_ReturnsEtcdRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "1")
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		store.Stall(true)
		before := store.Revision()
		rev := store.Put("/registry/a/x", "2")
		got, err := m.ReadRevision(context.Background())
		if err != nil || got != rev {
			t.Errorf("Current: %d, %v; want %d", got, err, rev)
		}
		s := latest(t, r)
		if want := (state{"/registry/a/x": fmt.Sprintf("1@%d", before)}); s.Rev != before || read(s)["/registry/a/x"] != want["/registry/a/x"] {
			t.Errorf("at %d: %v, want %v", s.Rev, read(s), want)
		}
		store.Stall(false)
		reach(t, m, rev)
		if s := latest(t, r); s.Rev != rev || read(s)["/registry/a/x"] != fmt.Sprintf("2@%d", rev) {
			t.Errorf("at %d: %v", s.Rev, read(s))
		}
	})
}
