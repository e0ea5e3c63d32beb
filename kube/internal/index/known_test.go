package index

import (
	"fmt"
	"math"
	"slices"
	"testing"

	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestKnown_Negation_ReadsNoStoredValue: the walk compares a value of each hash; Known, which
// estimates before it, leaves that to the walk.
func TestKnown_Negation_ReadsNoStoredValue(t *testing.T) {
	f := finding(t)
	f.events(t, 1000)
	pred := podtest.Selecting(t, "", "spec.nodeName!=object-8")
	pred.IndexFields = []string{"spec.nodeName"}
	for round, want := range []bool{true, false} { // without digests, and with them
		r := f.of(t, pred)
		before := f.found.Load()
		k := r.plan.Known(r.snap, "", "", math.MaxInt)
		if k.N == 0 || f.found.Load() != before {
			t.Errorf("round %d: %d candidates are known, and %d stored values were read", round, k.N, f.found.Load()-before)
		}
		n := 0
		for range k.Candidates(r.plan, r.snap, "") {
			n++
		}
		if read := f.found.Load() - before; n != 990 || (read >= 1000) != want || read == 0 {
			t.Errorf("round %d: %d candidates, want 990; %d stored values were read", round, n, read)
		}
	}
}

// TestKnown_AnyLimitAndDigests_LeavesCandidates: Known keeps the candidates that it finds, up to
// its limit, to the first leaf without a digest, or to the bound of held candidates; a walk from
// there yields the same candidates as one without it.
func TestKnown_AnyLimitAndDigests_LeavesCandidates(t *testing.T) {
	for _, finds := range []bool{true, false}[:testrace.Count(2, 1)] {
		f := newFixture(t)
		if finds {
			f = finding(t)
		}
		put := func(from, to int) {
			for i := from; i < to; i++ {
				f.Put(t, podOn(fmt.Sprintf("event-%05d", i), fmt.Sprint("object-", i%2)))
			}
			f.CatchUp(t)
		}
		put(0, 10_000) // 5,000 of each object: more than Known holds
		for round := range testrace.Count(3, 2) {
			for _, selector := range []string{"involvedObject.name=object-1", "involvedObject.kind=Pod,involvedObject.name=object-1", "involvedObject.name!=object-1"} {
				for _, most := range []int{math.MaxInt, 1, 30, 32, 500, maxKnown, maxKnown + 1} {
					for _, from := range []int{0, 777, 9_990} {
						start := podtest.Root + fmt.Sprintf("ns/event-%05d", from)
						r := f.of(t, podtest.Selecting(t, "", selector))
						// Before the walk without it: that makes all digests.
						k := r.plan.Known(r.snap, start, "", most)
						var got []string
						for e := range k.Candidates(r.plan, r.snap, "") {
							got = append(got, nameOf(e))
						}
						if want := r.candidates(start); !slices.Equal(got, want) || len(want) == 0 || len(k.first) > maxKnown {
							t.Fatalf("%s from %d, limit %d, round %d: %d candidates (%d held), want %d", selector, from, most, round, len(got), len(k.first), len(want))
						}
					}
				}
				put(3000*round, 3000*round+70) // leaves without digests
			}
		}
	}
}
