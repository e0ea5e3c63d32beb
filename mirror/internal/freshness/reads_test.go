package freshness

import (
	"context"
	"errors"
	"math"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// newTestReads returns shared reads of the revision returned by read. They end with the test.
func newTestReads(t *testing.T, read func(context.Context) (int64, error)) *Reads {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	published, _ := NewPublished(ctx.Done(), errors.New("closed"))
	none := NewProgress(published, 0, func(context.Context) { t.Error("progress was requested") })
	reads := NewReads(ctx, published, Env{Read: read, Known: func() int64 { return 0 }, Progress: none})
	t.Cleanup(func() {
		cancel()
		reads.Close()
	})
	return reads
}

// revisionSource answers each read when the test allows it.
type revisionSource struct {
	calls   chan struct{} // one element for each read that has begun
	answers chan int64    // one for each read that may end
	errs    chan error    // or fail
}

func (s *revisionSource) read(ctx context.Context) (int64, error) {
	s.calls <- struct{}{}
	select {
	case rev := <-s.answers:
		return rev, nil
	case err := <-s.errs:
		return 0, err
	case <-ctx.Done():
		return 0, ctx.Err()
	}
}

// sharedReads are calls of Reads on a source whose answers the test controls.
type sharedReads struct {
	*Reads
	t       *testing.T
	source  *revisionSource
	results chan int64 // of calls; -1 for an error
}

func newSharedReads(t *testing.T) *sharedReads {
	t.Helper()
	source := &revisionSource{calls: make(chan struct{}, 100), answers: make(chan int64), errs: make(chan error)}
	return &sharedReads{newTestReads(t, source.read), t, source, make(chan int64, 1000)}
}

// call starts n calls.
func (s *sharedReads) call(n int) {
	for range n {
		go func() {
			rev, err := s.ReadRevision(context.Background())
			if err != nil {
				rev = -1
			}
			s.results <- rev
		}()
	}
	synctest.Wait()
}

// requireReads fails unless n reads began.
func (s *sharedReads) requireReads(n int) {
	s.t.Helper()
	synctest.Wait()
	if len(s.source.calls) != n {
		s.t.Fatalf("%d reads began, want %d", len(s.source.calls), n)
	}
	for range n {
		<-s.source.calls
	}
}

// requireResults fails unless n calls returned rev.
func (s *sharedReads) requireResults(n int, rev int64) {
	s.t.Helper()
	synctest.Wait()
	if len(s.results) != n {
		s.t.Fatalf("%d calls returned, want %d", len(s.results), n)
	}
	for range n {
		if got := <-s.results; got != rev {
			s.t.Fatalf("a call returned %d, want %d", got, rev)
		}
	}
}

// TestReads_ConcurrentCalls_ShareNextRead: a lone call starts a read at once. Calls that arrive
// while one is in flight share the next read, never that one, because etcd may have answered it
// before they began (I6).
func TestReads_ConcurrentCalls_ShareNextRead(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSharedReads(t)
		s.call(1)
		s.requireReads(1) // at once
		s.call(500)
		s.requireReads(0) // one is in flight
		s.source.answers <- 10
		s.requireResults(1, 10) // only its own call
		s.requireReads(1)       // one for all other calls
		s.call(3)
		s.source.answers <- 11
		s.requireResults(500, 11)
		s.requireReads(1)
		s.source.errs <- errors.New("no leader")
		s.requireResults(3, -1)
		s.requireReads(0)
		s.call(1)
		s.requireReads(1)
		s.source.answers <- 12
		s.requireResults(1, 12)
		if got, calls := s.Counts(); got != 4 || calls != 505 {
			t.Errorf("%d reads for %d calls, want 4 for 505", got, calls)
		}
	})
}

// TestReads_OneCallerCancels_OthersGetResult: a read continues for the other callers after one
// cancels.
func TestReads_OneCallerCancels_OthersGetResult(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSharedReads(t)
		s.call(1)
		ctx, cancel := context.WithCancel(context.Background())
		go func() {
			if _, err := s.ReadRevision(ctx); !errors.Is(err, context.Canceled) {
				t.Errorf("cancelled: %v", err)
			}
		}()
		s.call(1)
		cancel()
		s.requireReads(1)
		s.source.answers <- 13
		s.requireResults(1, 13)
		s.requireReads(1)
		s.source.answers <- 14
		s.requireResults(1, 14)
	})
}

// TestReads_EtcdDoesNotAnswer_FailAfterAttempts: later calls are answered again.
func TestReads_EtcdDoesNotAnswer_FailAfterAttempts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := newSharedReads(t)
		s.call(1)
		s.requireReads(1)
		s.call(1)
		time.Sleep(time.Minute)
		s.requireResults(2, -1)
		if n := len(s.source.calls); n > 16 {
			t.Errorf("%d attempts for two reads", n)
		}
		for len(s.source.calls) > 0 {
			<-s.source.calls
		}
		time.Sleep(time.Hour)
		s.requireReads(0)
		s.call(1)
		s.requireReads(1)
		s.source.answers <- 15
		s.requireResults(1, 15)
	})
}

// TestReads_OverdueRead_StartsAnotherAttempt: a member that does not answer delays readers for 100
// ms; then another attempt also answers the callers of earlier attempts, which are canceled.
func TestReads_OverdueRead_StartsAnotherAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var newest atomic.Int64
		var mu sync.Mutex
		calls, givenUp, hang := 0, 0, 1
		reads := newTestReads(t, func(ctx context.Context) (int64, error) {
			mu.Lock()
			calls++
			hangs := calls <= hang
			mu.Unlock()
			if hangs {
				<-ctx.Done()
				mu.Lock()
				defer mu.Unlock()
				givenUp++
				return 0, ctx.Err()
			}
			time.Sleep(time.Millisecond)
			return newest.Load(), nil
		})
		begin := time.Now()
		var wg sync.WaitGroup
		for i := range 50 {
			wg.Go(func() {
				time.Sleep(time.Duration(i) * time.Millisecond)
				rev := newest.Add(1)
				if got, err := reads.ReadRevision(context.Background()); err != nil || got < rev {
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
			t.Errorf("%d attempts, %d canceled, want 2 and 1", calls, givenUp)
		}

		// Several attempts hang: each next one begins after 100 ms, up to eight at once.
		mu.Lock()
		calls, givenUp, hang = 0, 0, 100
		mu.Unlock()
		ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
		defer cancel()
		if _, err := reads.ReadRevision(ctx); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("Current: %v", err)
		}
		mu.Lock()
		if calls != 8 {
			t.Errorf("%d attempts in five seconds, want 8", calls)
		}
		hang = 8
		mu.Unlock()
		time.Sleep(time.Minute)
		if rev, err := reads.ReadRevision(context.Background()); err != nil || rev != newest.Load() {
			t.Errorf("Current: %d, %v", rev, err)
		}
	})
}

// overlapping are two attempts in flight, with a caller each: the second began when the first was
// overdue. answer ends the attempt with the number i.
func overlapping(t *testing.T) (first, second <-chan int64, answer func(i int, rev int64, err error)) {
	t.Helper()
	type result struct {
		rev int64
		err error
	}
	var began atomic.Int64
	answers := []chan result{make(chan result), make(chan result)}
	reads := newTestReads(t, func(ctx context.Context) (int64, error) {
		select {
		case r := <-answers[min(began.Add(1), 2)-1]:
			return r.rev, r.err
		case <-ctx.Done():
			return 0, ctx.Err()
		}
	})
	call := func() <-chan int64 {
		result := make(chan int64, 1)
		go func() {
			rev, err := reads.ReadRevision(context.Background())
			if err != nil {
				rev = -1
			}
			result <- rev
		}()
		synctest.Wait()
		return result
	}
	first = call()
	second = call()
	time.Sleep(revisionReadLate)
	synctest.Wait()
	if n := began.Load(); n != 2 {
		t.Fatalf("%d attempts, want 2", n)
	}
	return first, second, func(i int, rev int64, err error) {
		answers[i] <- result{rev, err}
		synctest.Wait()
	}
}

// requireWaiting fails if the call has returned.
func requireWaiting(t *testing.T, what string, call <-chan int64) {
	t.Helper()
	select {
	case rev := <-call:
		t.Fatalf("%s returned %d, want it to wait", what, rev)
	default:
	}
}

func requireReturned(t *testing.T, what string, call <-chan int64, want int64) {
	t.Helper()
	select {
	case rev := <-call:
		if rev != want {
			t.Errorf("%s returned %d, want %d", what, rev, want)
		}
	default:
		t.Errorf("%s still waits, want %d", what, want)
	}
}

// TestReads_EarlierAttemptFails_CallersGetLaterAnswer: a member that fails an overdue attempt is no
// error for its callers while another attempt is in flight.
func TestReads_EarlierAttemptFails_CallersGetLaterAnswer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, answer := overlapping(t)
		answer(0, 0, errors.New("no leader"))
		requireWaiting(t, "the caller of the failed attempt", first)
		answer(1, 20, nil)
		requireReturned(t, "the caller of the failed attempt", first, 20)
		requireReturned(t, "the caller of the second attempt", second, 20)
	})
}

// TestReads_LaterAttemptFails_EarlierCallersWait: the error of an attempt is an answer for its own
// callers only.
func TestReads_LaterAttemptFails_EarlierCallersWait(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		first, second, answer := overlapping(t)
		answer(1, 0, errors.New("no leader"))
		requireReturned(t, "the caller of the failed attempt", second, -1)
		requireWaiting(t, "the caller of the first attempt", first)
		answer(0, 10, nil)
		requireReturned(t, "the caller of the first attempt", first, 10)
	})
}

// TestReads_LaterAttemptsFailAtOnce_BeginAtIntervals: while the first attempt is unanswered, one
// that fails at once is not repeated at once.
func TestReads_LaterAttemptsFailAtOnce_BeginAtIntervals(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const intervals = 10
		answer := make(chan int64)
		var reads atomic.Int64
		s := newTestReads(t, func(ctx context.Context) (int64, error) {
			switch n := reads.Add(1); {
			case n > 10*intervals:
				<-ctx.Done() // so that the test ends
			case n > 1:
				return 0, errors.New("no leader")
			}
			select {
			case rev := <-answer:
				return rev, nil
			case <-ctx.Done():
				return 0, ctx.Err()
			}
		})
		returned := make(chan int64, 1)
		go func() {
			rev, err := s.ReadRevision(t.Context())
			if err != nil {
				t.Error(err)
			}
			returned <- rev
		}()
		time.Sleep(intervals*revisionReadLate + time.Millisecond)
		synctest.Wait()
		if n := reads.Load(); n != 1+intervals {
			t.Errorf("%d attempts began within %d intervals, want one for each and the first", n, intervals)
		}
		answer <- 7
		if rev := <-returned; rev != 7 {
			t.Errorf("revision %d, want that of the first attempt", rev)
		}
	})
}

// TestReads_WithProgress_RequestOnlyIfUseful: a read requests progress while progress ends waits,
// unless a wait is for a revision that etcd has. An answer at the published revision, which is 5,
// ends that state.
func TestReads_WithProgress_RequestOnlyIfUseful(t *testing.T) {
	for name, c := range map[string]struct {
		byProgress      bool
		waits           int64 // lowest revision of the waits
		known, answer   int64
		err             error
		requests, stays bool // byProgress afterwards
	}{
		"events":            {false, math.MaxInt64, 9, 6, nil, false, false},
		"no wait":           {true, math.MaxInt64, 9, 6, nil, true, true},
		"published":         {true, math.MaxInt64, 9, 5, nil, true, false},
		"failed":            {true, math.MaxInt64, 9, 5, errors.New("no leader"), true, true},
		"unknown revision":  {true, 10, 9, 6, nil, true, true},
		"known revision":    {true, 10, 10, 6, nil, false, true},
		"earlier revisions": {true, 10, 11, 6, nil, false, true},
	} {
		published, publisher := NewPublished(nil, nil)
		publisher.Publish(5, false)
		published.byProgress.Store(c.byProgress)
		published.min.Store(c.waits)
		progress := NewProgress(published, 0, nil)
		reads := NewReads(t.Context(), published, Env{
			Read:     func(context.Context) (int64, error) { return c.answer, c.err },
			Known:    func() int64 { return c.known },
			Progress: progress,
		})
		if rev, err := reads.ReadRevision(t.Context()); rev != c.answer || err != c.err {
			t.Errorf("%s: %d, %v", name, rev, err)
		}
		reads.Close()
		if requested := len(progress.due) > 0; requested != c.requests || published.byProgress.Load() != c.stays {
			t.Errorf("%s: a request: %t, byProgress: %t", name, requested, published.byProgress.Load())
		}
	}
}

// TestReads_Close_EndsCalls: Close returns when the read in flight has ended with the context, and
// later calls return the error of the mirror.
func TestReads_Close_EndsCalls(t *testing.T) {
	for _, inFlight := range []bool{false, true} {
		ctx, cancel := context.WithCancel(t.Context())
		errClosed := errors.New("closed")
		published, _ := NewPublished(ctx.Done(), errClosed)
		s := &revisionSource{calls: make(chan struct{}, 100)} // overdue reads are repeated
		reads := NewReads(ctx, published, Env{Read: s.read, Known: published.Revision})
		if inFlight {
			go func() { _, _ = reads.ReadRevision(ctx) }()
			<-s.calls
		}
		cancel()
		reads.Close()
		if _, err := reads.ReadRevision(t.Context()); err != errClosed {
			t.Errorf("after Close: %v", err)
		}
	}
}
