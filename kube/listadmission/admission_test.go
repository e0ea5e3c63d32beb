package listadmission

import (
	"context"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"pgregory.net/rapid"

	"github.com/stratakube/strata/internal/test/testcheck"
)

const listLimit = 256 << 20

var (
	low    = Level{Name: "low"}
	high   = Level{Name: "high"}
	exempt = Level{Name: "exempt", Exempt: true}
)

func enter(t *testing.T, a *Admission, level Level, bytes int64) *Share {
	t.Helper()
	s, err := a.Enter(t.Context(), level, bytes)
	testcheck.NoError(t, err)
	return s
}

// TestAdmission_LevelFull_WaitsForItsOwnLists and for no others: exempt lists never wait.
func TestAdmission_LevelFull_WaitsForItsOwnLists(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(listLimit)
		first, second := enter(t, a, low, 10*listLimit), enter(t, a, low, 10*listLimit)
		began := time.Now()
		time.AfterFunc(listWait-time.Second, first.Leave)
		third := enter(t, a, low, 10*listLimit)
		if waited := time.Since(began); waited != listWait-time.Second {
			t.Errorf("a third list of any size waits %v", waited)
		}
		began = time.Now()
		for range 5 {
			enter(t, a, exempt, 10*listLimit)
		}
		large, another := enter(t, a, high, 10*listLimit), enter(t, a, high, 8<<20)
		if small := enter(t, a, low, freeListBytes); small != nil {
			t.Error("a small list was counted")
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("lists of other levels, and small ones, wait %v", waited)
		}
		_, err := a.Enter(t.Context(), low, 10*listLimit)
		if seconds, ok := apierrors.SuggestsClientDelay(err); !apierrors.IsTooManyRequests(err) || !ok || seconds <= 0 {
			t.Errorf("a list above the budget: %v, want 429 with Retry-After", err)
		}
		if waited := time.Since(began); waited != listWait {
			t.Errorf("it has waited %v, want %v", waited, listWait)
		}
		began = time.Now()
		short, cancel := context.WithTimeout(t.Context(), 4*time.Second)
		defer cancel()
		if _, err := a.Enter(short, low, 10*listLimit); !apierrors.IsTooManyRequests(err) || time.Since(began) != 2*time.Second {
			t.Errorf("a list that has 4 s left: %v after %v, want 429 after half of that", err, time.Since(began))
		}
		for range 2 { // the second call has no effect
			for _, s := range []*Share{second, third, large, another} {
				s.Leave()
			}
		}
		for _, l := range a.levels {
			if !l.Exempt && l.used != 0 {
				t.Errorf("%d bytes of %s are not released", l.used, l.Name)
			}
		}
	})
}

// TestAdmission_LevelWithoutList_NeverWaits: a level without a list in flight never waits, under
// any load of other levels.
func TestAdmission_LevelWithoutList_NeverWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(listLimit)
		began := time.Now()
		for i := range 20 {
			enter(t, a, Level{Name: fmt.Sprint(i)}, 10*listLimit)
		}
		if waited := time.Since(began); waited != 0 {
			t.Errorf("the first lists of 20 levels wait %v", waited)
		}
	})
}

// TestShare_SentBytes_AreReleased as its bytes are sent, so that the next list starts before the
// client has all of them.
func TestShare_SentBytes_AreReleased(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(listLimit)
		first := enter(t, a, low, 10*listLimit)
		enter(t, a, low, 10*listLimit)
		var entered time.Time
		done := make(chan struct{})
		go func() {
			defer close(done)
			enter(t, a, low, 40<<20)
			entered = time.Now()
		}()
		began := time.Now()
		for left := int64(200 << 20); left > 0; left -= 10 << 20 {
			first.Shrink(left)
			time.Sleep(time.Second)
		}
		<-done
		if after := entered.Sub(began); after < 17*time.Second || after >= 20*time.Second {
			t.Errorf("a list of 40 MiB started after %v of 20 s", after)
		}
		first.Leave()
		a.mu.Lock()
		defer a.mu.Unlock()
		if used := a.levelLocked(low).used; used != a.levelMaxLocked()/2+40<<20 {
			t.Errorf("%d bytes are in use", used)
		}
	})
}

// TestShare_ListLargerThanEstimate_IsCorrected when a list turns out to be larger than its
// estimate.
func TestShare_ListLargerThanEstimate_IsCorrected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := New(listLimit)
		fit := func(expected, bytes, want int64) {
			t.Helper()
			s, err := enter(t, a, low, expected).Fit(t.Context(), a, low, bytes)
			testcheck.NoError(t, err)
			if a.InFlight() != want {
				t.Errorf("a list of %d bytes, taken for one of %d, counts %d", bytes, expected, a.InFlight())
			}
			s.Leave()
		}
		fit(1<<20, 8<<20, 8<<20)
		fit(1<<20, 2<<20, 0)
		fit(20<<20, 4<<20, 4<<20)
		fit(20<<20, 30<<20, 30<<20)

		// Two lists whose sizes exceed the room for both do not wait for one another.
		one, two := enter(t, a, low, 30<<20), enter(t, a, low, 30<<20)
		done := make(chan error)
		for _, s := range []*Share{one, two} {
			go func() {
				s, err := s.Fit(t.Context(), a, low, 10*listLimit)
				if err == nil {
					time.Sleep(time.Second)
					s.Leave()
				}
				done <- err
			}()
		}
		for range 2 {
			if err := <-done; err != nil {
				t.Error(err)
			}
		}
	})
}

// TestAdmission_RandomLists_KeepsBounds: for random lists of random levels, no level exceeds its
// maximum, the levels together do not exceed the limit and one list for each, waiting lists do not
// fit, and all bytes are released.
func TestAdmission_RandomLists_KeepsBounds(t *testing.T) {
	rapid.Check(t, func(rt *rapid.T) {
		synctest.Test(t, func(t *testing.T) {
			a := New(listLimit)
			var shares []*Share
			admitted := make(chan *Share, 1000)
			ctx, cancel := context.WithCancel(t.Context())
			for range rapid.IntRange(1, 60).Draw(rt, "steps") {
				switch rapid.IntRange(0, 3).Draw(rt, "step") {
				case 0, 1:
					level := Level{Name: fmt.Sprint(rapid.IntRange(0, 9).Draw(rt, "level"))}
					bytes := rapid.Int64Range(0, listLimit).Draw(rt, "bytes")
					go func() {
						if s, err := a.Enter(ctx, level, bytes); err == nil && s != nil {
							admitted <- s
						}
					}()
				case 2:
					if len(shares) > 0 {
						i := rapid.IntRange(0, len(shares)-1).Draw(rt, "which")
						shares[i].Shrink(rapid.Int64Range(0, listLimit).Draw(rt, "left"))
					}
				case 3:
					time.Sleep(rapid.SampledFrom([]time.Duration{0, time.Second, listWait}).Draw(rt, "time"))
				}
				synctest.Wait()
				for len(admitted) > 0 {
					shares = append(shares, <-admitted)
				}
				a.mu.Lock()
				var all, held int64
				for _, l := range a.levels {
					all += l.used
					if l.used > listLimit*(3.0/8+1.0/32)+1 {
						rt.Fatalf("level %s has %d bytes", l.Name, l.used)
					}
					if front := l.waiting.Front(); front != nil && a.fitsLocked(l, front.Value.(*waitingList).bytes, false) {
						rt.Fatalf("a list of %s waits, and fits", l.Name)
					}
				}
				for _, s := range shares {
					held += s.bytes
				}
				if all != held || all > listLimit+int64(len(a.levels))*a.levelMaxLocked()/2 {
					rt.Fatalf("%d bytes are in use, %d held", all, held)
				}
				a.mu.Unlock()
			}
			cancel()
			synctest.Wait()
			for len(admitted) > 0 {
				shares = append(shares, <-admitted)
			}
			for _, s := range shares {
				s.Leave()
			}
			for _, l := range a.levels {
				if l.used != 0 || l.waiting.Len() != 0 {
					rt.Fatalf("level %s has %d bytes, %d wait", l.Name, l.used, l.waiting.Len())
				}
			}
		})
	})
}

// TestAdmission_DeletedLevels_AreDropped: deleted priority levels are dropped; one with a list in
// flight keeps its account.
func TestAdmission_DeletedLevels_AreDropped(t *testing.T) {
	const mib = 1 << 20
	a := New(512 * mib)
	busy, err := a.Enter(t.Context(), Level{Name: "busy"}, 10*mib)
	testcheck.NoError(t, err)
	_, decoded := a.Begin(t.Context(), Level{Name: "decoded"}, Form{Factor: 1, Plain: true})
	for i := range 10 * knownLevels {
		s, err := a.Enter(t.Context(), Level{Name: fmt.Sprint(i)}, 10*mib)
		testcheck.NoError(t, err)
		s.Leave()
	}
	if n := len(a.levels); n > knownLevels {
		t.Errorf("%d levels are known", n)
	}
	testcheck.NoError(t, decoded.Take(t.Context(), 0, 10*mib))
	if n := a.InFlight(); n != 20*mib {
		t.Errorf("%d bytes are in flight, want those of two lists", n)
	}
	busy.Leave()
	decoded.End()
	if n := a.InFlight(); n != 0 {
		t.Errorf("%d bytes are in flight at the end", n)
	}
}

// TestDecoded_IdleLevel_IsAdmittedAtOnce: under any load of two levels, a list of decoded objects
// of a third is admitted at once.
func TestDecoded_IdleLevel_IsAdmittedAtOnce(t *testing.T) {
	const mib = 1 << 20
	a := New(512 * mib)
	for _, name := range []string{"a", "b"} {
		for range 2 { // the largest admitted list, and then as much as is admitted
			_, d := a.Begin(t.Context(), Level{Name: name}, Form{Factor: 1, Plain: true})
			defer d.End()
			for size := a.largest(); size >= mib; size /= 2 {
				if a.tryAcquire(d.level, size, true, false) {
					defer a.release(d.level, size)
				}
			}
		}
	}
	_, third := a.Begin(t.Context(), Level{Name: "c"}, Form{Factor: 1})
	defer third.End()
	if !a.tryAcquire(third.level, a.common()/6, true, false) {
		t.Error("a third level finds no room")
	}
	a.release(third.level, a.common()/6)
}
