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
	"github.com/stratakube/strata/mirror"
)

// asks records when progress is asked for.
type asks struct {
	mu    sync.Mutex
	times []time.Time
}

func (a *asks) source(store *memory.Store) mirror.Source {
	return &script{Source: store, progress: func(ctx context.Context) error {
		a.mu.Lock()
		a.times = append(a.times, time.Now())
		a.mu.Unlock()
		return store.RequestProgress(ctx)
	}}
}

// since returns the times asked since begin, in milliseconds, and forgets them.
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

// TestProgressIsAskedForWhileSomebodyWaits: quickly at first, then at intervals that
// grow to 100 ms, and not at all when nobody waits.
func TestProgressIsAskedForWhileSomebodyWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var a asks
		m := start(t, a.source(store), func(o *mirror.Options) { o.FeedPatience = -1 })
		reach(t, m, store.Revision())
		store.Put("/registry/a/x", "1")
		reach(t, m, store.Revision())
		if got := a.since(time.Now()); len(got) != 0 {
			t.Errorf("asked %d times for what an event has told", len(got))
		}
		time.Sleep(time.Hour)
		if got := a.since(time.Now()); len(got) != 0 {
			t.Fatalf("asked %d times though nobody waits", len(got))
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
			t.Errorf("asked at %v ms, want %v", got, want)
		}
		time.Sleep(time.Hour)
		if got := a.since(time.Now()); len(got) != 0 {
			t.Errorf("asked %d times though nobody waits any more", len(got))
		}

		// The next one does not wait for the interval of the last.
		store.Stall(false)
		begin = time.Now()
		reach(t, m, rev)
		if took := time.Since(begin); took != 2*time.Millisecond {
			t.Errorf("a feed that is in step took %v, want 2ms", took)
		}
		// Now it is known that progress, not an event, is what readers wait for.
		rev = store.Put("/elsewhere", "2")
		begin = time.Now()
		reach(t, m, rev)
		if took := time.Since(begin); took != 0 {
			t.Errorf("a feed that is in step took %v, want no time", took)
		}
		// Until an event has ended a wait.
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
			t.Errorf("asked at %v ms, want %v", got, want)
		}
	})
}

// TestAWaitForTheHighestRevision disturbs nobody; a client may ask for any.
func TestAWaitForTheHighestRevision(t *testing.T) {
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

// TestWritesDoNotMakeReadersAskQuickly: while events move the clock, those who wait are
// served by them, and progress is not asked for every other millisecond.
func TestWritesDoNotMakeReadersAskQuickly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		m := start(t, store, nil)
		reach(t, m, store.Revision())
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		for range 4 { // somebody waits for the next write, always
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
			t.Errorf("asked %d times in ten seconds, want at most once in 100 ms", asked)
		}
	})
}

// TestAFarWaitIsNobodysInterval: somebody waits for a revision that does not come. Reads
// of writes outside the prefix are served as quickly as without, and without reads
// progress is asked for every 100 ms, though it moves the clock each time.
func TestAFarWaitIsNobodysInterval(t *testing.T) {
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
			t.Errorf("asked %d times in a second, want every 100 ms", asked)
		}
		for i := range 20 {
			store.Put("/elsewhere", "1")
			begin := time.Now()
			rev, err := m.Current(context.Background())
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

// TestProgressGoesOutWithTheRevisionRead: when writes outside the prefix are what readers
// wait for, both questions are asked at the same moment.
func TestProgressGoesOutWithTheRevisionRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var a asks
		source := a.source(store).(*script)
		source.current = func(ctx context.Context) (mirror.Header, error) {
			time.Sleep(time.Millisecond) // as long as a round trip
			return store.Current(ctx)
		}
		m := start(t, source, nil)
		reach(t, m, store.Revision())
		read := func() (took time.Duration) {
			begin := time.Now()
			rev, err := m.Current(context.Background())
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
				t.Errorf("asked at %v ms, want %v", got, want)
			}
		}
		// A quiet etcd has nothing to tell: it is not asked again and again.
		for range 10 {
			if took := read(); took != time.Millisecond {
				t.Errorf("a read took %v, want a round trip", took)
			}
		}
		if got := a.since(time.Now()); len(got) != 1 {
			t.Errorf("asked %d times for nothing, want once", len(got))
		}
	})
}

// TestIdleProgress: the clock follows writes outside the prefix while somebody wants
// that, though nobody waits.
func TestIdleProgress(t *testing.T) {
	for _, tt := range []struct {
		name     string
		interval time.Duration
		want     int // requests in a minute
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
					t.Errorf("asked %d times though nobody wants it", len(got))
				}
				first, second := m.WantProgress(), m.WantProgress()
				rev := store.Put("/elsewhere", "1")
				time.Sleep(time.Minute)
				first()
				if got := len(a.since(time.Now())); got < tt.want-1 || got > tt.want {
					t.Errorf("asked %d times in a minute, want %d", got, tt.want)
				}
				if followed := m.Clock() == rev; followed != (tt.want > 0) {
					t.Errorf("the clock is at %d, etcd at %d", m.Clock(), rev)
				}
				// Answers that move the clock do not put the next question off.
				a.since(time.Now())
				for range 60 {
					store.Put("/elsewhere", "1")
					time.Sleep(time.Second)
				}
				if got := len(a.since(time.Now())); got < tt.want-1 || got > tt.want {
					t.Errorf("asked %d times in a minute of writes elsewhere, want %d", got, tt.want)
				}
				// Events are news enough.
				for i := range 600 {
					store.Put("/registry/a/x", fmt.Sprint(i))
					time.Sleep(100 * time.Millisecond)
				}
				if got := a.since(time.Now()); len(got) > 1 {
					t.Errorf("asked %d times while the clock moved", len(got))
				}
				second()
				time.Sleep(time.Minute)
				if got := a.since(time.Now()); len(got) > 1 {
					t.Errorf("asked %d times after the last one has gone", len(got))
				}
			})
		})
	}
}

// TestEventsOnly: progress neither moves the clock nor is asked for, and a resource that
// is claimed late is read at the clock, which waits for nothing.
func TestEventsOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "1")
		var a asks
		m := start(t, a.source(store), func(o *mirror.Options) { o.EventsOnly = true; o.UnclaimedBytes = 1 })
		at := store.Revision()
		reach(t, m, at)
		m.WantProgress()
		rev := store.Put("/elsewhere", "1")
		store.RequestProgress(context.Background()) // by somebody else on the stream
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := m.Wait(ctx, rev); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Wait: %v, want it to wait for an event", err)
		}
		if got := a.since(time.Now()); len(got) != 0 || m.Clock() != at {
			t.Errorf("asked %d times, clock %d, want 0 and %d", len(got), m.Clock(), at)
		}
		r := claim(t, m, "/registry/a/") // its value was not kept
		if err := r.WaitReady(context.Background()); err != nil {
			t.Fatal(err)
		}
		if got := read(latest(t, r))["/registry/a/x"]; got != fmt.Sprintf("1@%d", at) {
			t.Errorf("read %q", got)
		}
		reach(t, m, store.Put("/registry/a/x", "2"), r)

		// etcd is compacted past the clock, which stands still: everything is listed anew.
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

// TestReadersDoNotWaitForTheIntervalOfOthers: revisions come and go outside the
// prefix and somebody always waits for one; each is answered as quickly as the
// first (k/k: p90 = 93 ms on a quiet resource).
func TestReadersDoNotWaitForTheIntervalOfOthers(t *testing.T) {
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
			t.Errorf("asked %d times in three seconds", asked)
		}
	})
}

// TestWaitersWakeByRevision: each as soon as the clock has reached its own.
func TestWaitersWakeByRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		feed := make(chan mirror.Batch)
		m := start(t, &script{Source: memory.New(), watch: func(ctx context.Context, _ string, _ mirror.Header, deliver func(mirror.Batch) error) error {
			for {
				select {
				case b := <-feed:
					if err := deliver(b); err != nil {
						return err
					}
				case <-ctx.Done():
					return ctx.Err()
				}
			}
		}}, nil)
		reach(t, m, 1)
		var mu sync.Mutex
		var woken []mirror.Revision
		for _, rev := range []mirror.Revision{9, 3, 7, 3, 5, 11} {
			go func() {
				if err := m.Wait(context.Background(), rev); err == nil {
					mu.Lock()
					defer mu.Unlock()
					woken = append(woken, rev)
					if now := m.Clock(); now < rev {
						t.Errorf("woken for %d at %d", rev, now)
					}
				}
			}()
		}
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			if err := m.Wait(ctx, 6); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled wait: %v", err)
			}
		}()
		synctest.Wait()
		cancel()
		for _, step := range []struct {
			through mirror.Revision
			want    []mirror.Revision
		}{{2, nil}, {3, []mirror.Revision{3, 3}}, {8, []mirror.Revision{5, 7}}, {8, nil}, {20, []mirror.Revision{9, 11}}} {
			feed <- mirror.Batch{Through: step.through}
			synctest.Wait()
			slices.Sort(woken)
			if !slices.Equal(woken, step.want) {
				t.Errorf("at %d woken for %v, want %v", step.through, woken, step.want)
			}
			woken = nil
		}
		if err := m.Wait(context.Background(), 20); err != nil {
			t.Error(err)
		}
	})
}

// revisionSource answers Current only when told to.
type revisionSource struct {
	script
	calls   chan struct{}        // one element for each call that began
	answers chan mirror.Revision // one for each that may end
	errs    chan error           // or so
}

func newRevisionSource(store *memory.Store) *revisionSource {
	s := &revisionSource{calls: make(chan struct{}, 100), answers: make(chan mirror.Revision), errs: make(chan error)}
	s.script = script{Source: store, current: func(ctx context.Context) (mirror.Header, error) {
		s.calls <- struct{}{}
		select {
		case rev := <-s.answers:
			return mirror.Header{ClusterID: 1, Revision: rev}, nil
		case err := <-s.errs:
			return mirror.Header{}, err
		case <-ctx.Done():
			return mirror.Header{}, ctx.Err()
		}
	}}
	return s
}

// TestConsistentReadsShareRevisionReads: a lone call starts a read at once. Calls
// that arrive while one is in flight share the next, never that one, because etcd
// may have answered it before they began (I6).
func TestConsistentReadsShareRevisionReads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		source := newRevisionSource(memory.New())
		m := start(t, source, presentOnly)
		reach(t, m, 1)
		results := make(chan mirror.Revision, 1000)
		call := func(n int) {
			for range n {
				go func() {
					rev, err := m.Current(context.Background())
					if err != nil {
						rev = -1
					}
					results <- rev
				}()
			}
			synctest.Wait()
		}
		requireCalls := func(n int) {
			t.Helper()
			synctest.Wait()
			if len(source.calls) != n {
				t.Fatalf("%d reads began, want %d", len(source.calls), n)
			}
			for range n {
				<-source.calls
			}
		}
		requireResults := func(n int, rev mirror.Revision) {
			t.Helper()
			synctest.Wait()
			if len(results) != n {
				t.Fatalf("%d calls returned, want %d", len(results), n)
			}
			for range n {
				if got := <-results; got != rev {
					t.Fatalf("a call returned %d, want %d", got, rev)
				}
			}
		}

		call(1)
		requireCalls(1) // at once
		call(500)
		requireCalls(0) // one is in flight
		source.answers <- 10
		requireResults(1, 10) // only the one that it was made for
		requireCalls(1)       // one for all the others
		call(3)
		source.answers <- 11
		requireResults(500, 11)
		requireCalls(1)
		source.errs <- errors.New("no leader")
		requireResults(3, -1)
		requireCalls(0)
		call(1)
		requireCalls(1)
		source.answers <- 12
		requireResults(1, 12)
		if got := m.Stats().RevisionReads; got != 4 {
			t.Errorf("%d reads for 505 calls, want 4", got)
		}

		// Who gives up does not take the read away from the others.
		call(1)
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			if _, err := m.Current(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled: %v", err)
			}
		}()
		call(1)
		cancel()
		requireCalls(1)
		source.answers <- 13
		requireResults(1, 13)
		requireCalls(1)
		source.answers <- 14
		requireResults(1, 14)

		// Reads that nobody answers end, and so do the attempts to have them answered.
		call(1)
		requireCalls(1)
		call(1)
		time.Sleep(time.Minute)
		requireResults(2, -1)
		if n := len(source.calls); n > 16 {
			t.Errorf("%d attempts for two reads", n)
		}
		for len(source.calls) > 0 {
			<-source.calls
		}
		time.Sleep(time.Hour)
		requireCalls(0)
		call(1)
		requireCalls(1)
		source.answers <- 15
		requireResults(1, 15)
	})
}

// TestAnOverdueReadHoldsUpNobody: a member of etcd that does not answer keeps readers for
// 100 ms; then another attempt answers for those before as well, which are given up.
func TestAnOverdueReadHoldsUpNobody(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		var mu sync.Mutex
		calls, givenUp, hang := 0, 0, 1
		m := start(t, &script{Source: store, current: func(ctx context.Context) (mirror.Header, error) {
			mu.Lock()
			calls++
			hangs := calls <= hang
			mu.Unlock()
			if hangs {
				<-ctx.Done()
				mu.Lock()
				defer mu.Unlock()
				givenUp++
				return mirror.Header{}, ctx.Err()
			}
			time.Sleep(time.Millisecond)
			return store.Current(ctx)
		}}, presentOnly)
		reach(t, m, store.Revision())
		begin := time.Now()
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				rev := store.Put("/elsewhere", "1")
				if got, err := m.Current(context.Background()); err != nil || got < rev {
					t.Errorf("read %d: %d, %v, want at least %d", i, got, err, rev)
				}
			})
		}
		wg.Wait()
		if took := time.Since(begin); took != 101*time.Millisecond {
			t.Errorf("they took %v, want 100ms and a round trip", took)
		}
		synctest.Wait()
		if calls != 2 || givenUp != 1 {
			t.Errorf("%d attempts, %d given up, want 2 and 1", calls, givenUp)
		}

		// Several hang: the next follows each in 100 ms, up to eight at once.
		mu.Lock()
		calls, givenUp, hang = 0, 0, 100
		mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := m.Current(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Current: %v", err)
		}
		mu.Lock()
		if calls != 8 {
			t.Errorf("%d attempts in five seconds, want 8", calls)
		}
		hang = 8
		mu.Unlock()
		time.Sleep(time.Minute)
		if rev, err := m.Current(context.Background()); err != nil || rev != store.Revision() {
			t.Errorf("Current: %d, %v", rev, err)
		}
	})
}

// TestCurrentNeedsNoFeed: the revision is known though the feed stalls, and reads
// of what is held go on.
func TestCurrentNeedsNoFeed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		store := memory.New()
		store.Put("/registry/a/x", "1")
		m := start(t, store, nil)
		r := claim(t, m, "/registry/a/")
		reach(t, m, store.Revision(), r)
		store.Stall(true)
		before := store.Revision()
		rev := store.Put("/registry/a/x", "2")
		got, err := m.Current(context.Background())
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
