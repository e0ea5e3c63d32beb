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

const (
	decodedLimit   = 64 << 20
	decodedLargest = decodedLimit * 3 / 8
)

// beginDecoded begins a list of the level with factor 1.
func beginDecoded(l *Admission, level string) (*Decoded, func()) {
	_, d := l.Begin(context.Background(), Level{Name: level}, Form{Factor: 1})
	return d, d.End
}

func TestDecoded_SmallList_IsNeverRefused(t *testing.T) {
	l := New(decodedLimit)
	all, end := beginDecoded(l, "")
	defer end()
	testcheck.NoError(t, all.Take(t.Context(), 0, decodedLargest-decodedOverhead))
	small, end := beginDecoded(l, "")
	defer end()
	if err := small.Take(t.Context(), 500, 1<<20); err != nil {
		t.Errorf("a page of 500 objects during a list that uses the whole budget: %v", err)
	}
}

func TestDecoded_LevelFull_WaitsForAnotherList(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(decodedLimit)
		const more = decodedLargest/2 + 2<<20 // two exceed the maximum of a level
		first, end := beginDecoded(l, "")
		testcheck.NoError(t, first.Take(t.Context(), 0, more))
		time.AfterFunc(listWait-time.Second, end)
		second, end := beginDecoded(l, "")
		if err := second.Take(t.Context(), 0, more); err != nil {
			t.Fatalf("the first has ended after %v, and the second: %v", listWait-time.Second, err)
		}
		other, endOther := beginDecoded(l, "another level")
		began := time.Now()
		if err := other.Take(t.Context(), 0, more); err != nil || time.Since(began) > 0 {
			t.Errorf("a list of another level, after %v: %v", time.Since(began), err)
		}
		endOther()
		third, endThird := beginDecoded(l, "")
		defer endThird()
		began = time.Now()
		err := third.Take(t.Context(), 0, more)
		if !apierrors.IsTooManyRequests(err) {
			t.Errorf("a list that finds no room: %v, want 429", err)
		}
		if seconds, ok := apierrors.SuggestsClientDelay(err); !ok || seconds <= 0 {
			t.Errorf("the 429 has no Retry-After: %v", err)
		}
		if waited := time.Since(began); waited != listWait {
			t.Errorf("it has waited for %v, want %v", waited, listWait)
		}
		end()
		if used := l.InFlight(); used != 0 {
			t.Errorf("%d bytes are in use when all lists have ended", used)
		}
	})
}

func TestDecoded_LargerThanBound_IsTooLarge(t *testing.T) {
	l := New(decodedLimit)
	d, end := beginDecoded(l, "level")
	defer end()
	if err := d.Take(t.Context(), 0, decodedLargest+1); !apierrors.IsRequestEntityTooLargeError(err) {
		t.Errorf("a list of more than the bound: %v, want 413", err)
	}
	if n := d.level.refused[refusedTooLarge]; n != 1 {
		t.Errorf("%d lists were counted as too large, want 1", n)
	}
}

// TestDecoded_PlainList_IsNeverTooLarge: informers cannot request fewer objects, or another form.
func TestDecoded_PlainList_IsNeverTooLarge(t *testing.T) {
	l := New(decodedLimit)
	for range 2 { // the first list releases its bytes
		ctx, d := l.Begin(t.Context(), Level{}, Form{Factor: 2, Plain: true})
		if err := d.Take(ctx, 1000, 10*decodedLimit); err != nil {
			t.Errorf("a list of ten times the bound: %v", err)
		}
		if err := d.Grow(decodedLimit); err != nil {
			t.Errorf("an object more: %v", err)
		}
		if n := d.Held(); n != decodedLargest {
			t.Errorf("it holds %d bytes, want %d", n, decodedLargest)
		}
		d.End()
	}
}

// TestDecoded_RandomTakeAndGrow_StaysWithinBound: for random calls of Take and Grow, the bytes held
// by all lists never exceed the bound, cover the need of each list beyond its free part, and are
// released.
func TestDecoded_RandomTakeAndGrow_StaysWithinBound(t *testing.T) {
	gone, cancel := context.WithCancel(t.Context())
	cancel() // lists do not wait
	rapid.Check(t, func(t *rapid.T) {
		l := New(decodedLimit)
		var lists []*Decoded
		draw := func() *Decoded {
			if len(lists) == 0 || rapid.Bool().Draw(t, "new") {
				d, _ := beginDecoded(l, rapid.SampledFrom([]string{"a", "b", "c"}).Draw(t, "level"))
				lists = append(lists, d)
				return d
			}
			return lists[rapid.IntRange(0, len(lists)-1).Draw(t, "which")]
		}
		known := func(err error) {
			if err != nil && !apierrors.IsTooManyRequests(err) && !apierrors.IsRequestEntityTooLargeError(err) {
				t.Fatal(err)
			}
		}
		granted := map[*Decoded]int64{} // bytes granted; a list ends with the first refusal
		ask := func(d *Decoded, bytes int64, ask func() error) {
			if err := ask(); err != nil {
				known(err)
				d.End()
				d.needed, granted[d] = 0, 0
				return
			}
			granted[d] += bytes + decodedOverhead
		}
		t.Repeat(map[string]func(*rapid.T){
			"take": func(t *rapid.T) {
				d, bytes := draw(), rapid.Int64Range(0, decodedLimit+1).Draw(t, "bytes")
				ask(d, bytes, func() error { return d.Take(gone, 1, bytes) })
			},
			"grow": func(t *rapid.T) {
				d, bytes := draw(), rapid.Int64Range(0, 3<<20).Draw(t, "bytes")
				ask(d, bytes, func() error { return d.Grow(bytes) })
			},
			"end": func(t *rapid.T) {
				d := draw()
				d.End()
				d.needed, granted[d] = 0, 0
			},
			"": func(t *rapid.T) {
				var held int64
				for _, d := range lists {
					held += d.acquired.Load()
					if granted[d] > freeListBytes && granted[d] > d.acquired.Load() {
						t.Fatalf("a list needs %d bytes and holds %d", granted[d], d.acquired.Load())
					}
				}
				if held > decodedLimit || held != l.InFlight() {
					t.Fatalf("lists hold %d bytes, %d by the metric, of %d", held, l.InFlight(), decodedLimit)
				}
			},
		})
		for _, d := range lists {
			d.End()
		}
		if n := l.InFlight(); n != 0 {
			t.Fatalf("%d bytes are not released", n)
		}
	})
}

// TestDecoded_ConcurrentLists_TakeTurns: the number of lists encoded concurrently is one less than
// that of processors, with levels in turn; small lists, exempt ones, and lists waiting for their
// client do not count.
func TestDecoded_ConcurrentLists_TakeTurns(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		l := New(decodedLimit)
		l.freeTurns = 1
		begin := func(level string, bytes int64) *Decoded {
			_, d := l.Begin(t.Context(), Level{Name: level, Exempt: level == "exempt"}, Form{Factor: 1})
			testcheck.NoError(t, d.Take(t.Context(), 0, bytes))
			return d
		}
		const large = 3 << 20
		first := begin("a", large)
		check := func(err error) {
			if err != nil {
				t.Error(err)
			}
		}
		check(first.TakeTurn(t.Context()))
		for _, other := range []*Decoded{begin("a", 1000), begin("exempt", large), nil} {
			check(other.TakeTurn(t.Context())) // does not wait
		}
		var order []string
		for _, name := range []string{"a1", "a2", "b1"} {
			d := begin(name[:1], large)
			go func() {
				check(d.TakeTurn(t.Context()))
				order = append(order, name)
				time.Sleep(time.Second)
				d.End()
			}()
			synctest.Wait()
		}
		gone, cancel := context.WithCancel(t.Context())
		left := begin("b", large)
		go func() {
			if err := left.TakeTurn(gone); err == nil {
				t.Error("a list whose request has ended is encoded")
			}
		}()
		synctest.Wait()
		cancel()
		synctest.Wait()
		if left.hasTurn || len(order) != 0 {
			t.Fatalf("encoded during the first list: %v", order)
		}
		first.Yield(t.Context(), func() { time.Sleep(yieldAfter / 2) })
		synctest.Wait()
		if len(order) != 0 {
			t.Errorf("%v encoded although the client of the first list reads", order)
		}
		first.Yield(t.Context(), func() { time.Sleep(time.Minute) })
		if fmt.Sprint(order) != "[b1 a1 a2]" && fmt.Sprint(order) != "[a1 b1 a2]" {
			t.Errorf("encoded in the order %v, want levels in turn", order)
		}
		if !first.hasTurn {
			t.Error("the first list is encoded further without a turn")
		}
		first.End()
		left.End()
		if l.freeTurns != 1 {
			t.Errorf("%d turns are free, want 1", l.freeTurns)
		}
	})
}
