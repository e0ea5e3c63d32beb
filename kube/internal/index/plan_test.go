package index

import (
	"fmt"
	"slices"
	"testing"

	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// TestEagerField_FirstList_UsesIndex: the first list by the involved object of events makes the
// index, that by another field does not.
func TestEagerField_FirstList_UsesIndex(t *testing.T) {
	f := newFixture(t)
	f.events(t, 500)
	for _, c := range []struct {
		selector, plan string
		want           int
	}{
		{"spec.nodeName=object-7", byScan, 5},
		{"involvedObject.name=object-7", byIndex, 5},
		{"involvedObject.kind=Pod,involvedObject.name=object-8", byIndex, 5},
		{"involvedObject.name!=object-7", byIndex, 495},
	} {
		pred := podtest.Selecting(t, "", c.selector)
		f.require(t, pred, c.plan, c.want)
		if DeclaredIndex(&pred) != nil {
			t.Errorf("%s: page tokens depend on an index that upstream does not declare", c.selector)
		}
	}
}

// TestDeclaredIndex_Any_FindsEntriesOfIndex: with the index of a plan, with another plan, and
// without one.
func TestDeclaredIndex_Any_FindsEntriesOfIndex(t *testing.T) {
	f := newFixture(t)
	f.events(t, 500)
	pred := onNode(t, "object-7")
	d := DeclaredIndex(&pred)
	if d == nil {
		t.Fatal("no declared index")
	}
	for name, plan := range map[string]*Plan{"its own": f.of(t, pred).plan, "another": f.of(t, podtest.Selecting(t, "", "involvedObject.kind=Pod")).plan, "none": nil} {
		for start, want := range map[string]bool{"": true, "event-00407\x00": false, "event-00407": true} {
			if start != "" {
				start = podtest.Root + "ns/" + start
			}
			if got := d.Any(podtest.Context(t), plan, f.View.CurrentGeneration(), f.Latest(t), start, ""); got != want {
				t.Errorf("plan %s: entries from %q: %t, want %t", name, start, got, want)
			}
		}
	}
}

// TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves: a term that every object meets makes no
// digests where another term excludes the leaf, though it is the first one of the selector.
func TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves(t *testing.T) {
	f := newFixture(t)
	f.events(t, 6400) // at least 100 leaves
	f.require(t, podtest.Selecting(t, "", "involvedObject.kind=Pod,metadata.name=event-06399,involvedObject.name=object-99"), byIndex, 1)
	counts := f.digests(t)
	if len(counts) != 2 || counts[1] < 100 {
		t.Fatalf("digests by index: %v, want two indexes, one with a digest on each of 100 leaves or more", counts)
	}
	if counts[0] == 0 {
		t.Error("the first term was never tested")
	}
}

// TestPlan_AnySelectorAndRevision_EqualsModel plans lists with random selectors at the latest and
// at old revisions, and compares the selected candidates with a filter of the model's state at that
// revision. Short hashes let values collide.
func TestPlan_AnySelectorAndRevision_EqualsModel(t *testing.T) {
	for _, bits := range []int{32, 3} {
		for _, finds := range []bool{false, true} {
			t.Run(fmt.Sprintf("hashes of %d bits, values found in stored bytes %t", bits, finds), func(t *testing.T) {
				if bits < 32 {
					hashMask = 1<<bits - 1
					defer func() { hashMask = ^uint32(0) }()
				}
				f := newFixture(t)
				if finds {
					f = finding(t)
				}
				testPlans(t, f)
			})
		}
	}
}

func testPlans(t *testing.T, f *fixture) {
	t.Helper()
	seed := testseed.New(t)
	m := podtest.NewModel(seed, 1)
	planned, rounds := 0, testrace.Count(20, 5)
	for range rounds {
		// Two rounds write more pods than smallRange.
		for range smallRange/2 + 1 + m.Rand.IntN(100) {
			m.Step(t, f.Etcd)
		}
		f.CatchUp(t)
		for range 30 {
			pred, at, snap := m.Selector(t), len(m.Revs)-1, f.Latest(t)
			if m.Rand.IntN(2) == 0 {
				at = m.Rand.IntN(len(m.Revs))
				var err error
				if snap, err = f.Resource.At(m.Revs[at]); err != nil {
					t.Fatal(err)
				}
			}
			r := f.read(podtest.Context(t), snap, pred)
			if r.plan != nil {
				planned++
			}
			got, err := r.selected(podtest.Context(t))
			if want := m.Selected(t, at, "", pred); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%q %q at %d: %d pods (%v), want %d: %v, want %v", pred.Label, pred.Field, m.Revs[at], len(got), err, len(want), got, want)
			}
		}
	}
	if planned < 5*rounds {
		t.Errorf("only %d lists used a plan", planned)
	}
}

// TestIndex_OldRevision_ExaminesSelectedOnly: the candidates of a declared field at an old revision
// are the selected objects.
func TestIndex_OldRevision_ExaminesSelectedOnly(t *testing.T) {
	f := newFixture(t)
	m := podtest.NewModel(testseed.New(t), 0)
	for range 400 {
		m.Step(t, f.Etcd)
	}
	f.CatchUp(t)
	for _, at := range []int{399, 380, 300, 200} {
		snap, err := f.Resource.At(m.Revs[at])
		if err != nil {
			t.Fatal(err)
		}
		for node := range 50 {
			pred := onNode(t, fmt.Sprint("node-", node))
			if got, want := f.read(podtest.Context(t), snap, pred).candidates(""), m.Selected(t, at, "", pred); !slices.Equal(got, want) {
				t.Fatalf("node-%d at %d has the candidates %v, want %v", node, m.Revs[at], got, want)
			}
		}
	}
}
