package chaos

import (
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/anishathalye/porcupine"

	"github.com/stratakube/strata/internal/test/testseed"
)

// TestRegisterModel_RejectsImpossibleHistories: possible and impossible histories of one key.
func TestRegisterModel_RejectsImpossibleHistories(t *testing.T) {
	first, second := state{uid: "x", revision: 2, value: "first"}, state{uid: "x", revision: 4, value: "second"}
	other := state{uid: "y", revision: 8, value: "other"}
	at := func(call, ret time.Duration) origin { return origin{call: call, ret: ret} }
	created := operation(at(1, 2), true, &step{kind: create, outcome: done, got: first, at: 2})
	updated := operation(at(3, 6), true, &step{kind: update, outcome: done, got: second, at: 4})
	reads := func(call, ret time.Duration, s state) porcupine.Operation {
		if !s.exists() {
			return operation(at(call, ret), true, &step{kind: get, outcome: missing})
		}
		return operation(at(call, ret), true, &step{kind: get, outcome: done, got: s})
	}
	deleted := operation(at(7, 8), true, &step{kind: remove, outcome: done, got: state{uid: "x"}, at: 6})
	for _, test := range []struct {
		name    string
		want    porcupine.CheckResult
		history []porcupine.Operation
	}{
		{"before and after", porcupine.Ok, []porcupine.Operation{reads(0, 1, state{}), created, reads(3, 4, first), updated, reads(7, 8, second)}},
		{"while it is written", porcupine.Ok, []porcupine.Operation{created, updated, reads(4, 5, second), reads(3, 5, first)}},
		{"a stale read", porcupine.Illegal, []porcupine.Operation{created, updated, reads(7, 8, first)}},
		{"a stale absence", porcupine.Illegal, []porcupine.Operation{created, reads(3, 4, state{})}},
		{"back in time", porcupine.Illegal, []porcupine.Operation{created, updated, reads(3, 4, second), reads(5, 6, first)}},
		{"an update that is lost", porcupine.Illegal, []porcupine.Operation{created, updated, deleted,
			operation(at(9, 10), true, &step{kind: update, outcome: done, got: state{uid: "x", revision: 8}, at: 8})}},
		{"an update without an answer takes effect later", porcupine.Ok, []porcupine.Operation{created,
			operation(at(3, 4), false, &step{kind: update, outcome: done, got: second, at: 4}), reads(9, 10, first), reads(20, 21, second)}},
		{"an update takes effect before its request", porcupine.Illegal, []porcupine.Operation{created,
			operation(at(30, 31), false, &step{kind: update, outcome: done, got: second, at: 4}), reads(20, 21, second)}},
		{"revisions that go back", porcupine.Illegal, []porcupine.Operation{updated,
			operation(at(1, 2), true, &step{kind: create, outcome: done, got: state{uid: "x", revision: 5}, at: 5})}},
		{"a refusal with a reason", porcupine.Ok, []porcupine.Operation{created, updated,
			operation(at(7, 8), true, &step{kind: update, outcome: conflict, want: state{revision: 2}})}},
		{"a refusal without", porcupine.Illegal, []porcupine.Operation{created, updated,
			operation(at(7, 8), true, &step{kind: update, outcome: conflict, want: state{revision: 4}})}},
		{"a precondition that was not met", porcupine.Illegal, []porcupine.Operation{created, updated,
			operation(at(7, 8), true, &step{kind: remove, outcome: done, want: state{revision: 2}, got: state{uid: "x"}, at: 6})}},
		{"created twice", porcupine.Illegal, []porcupine.Operation{created,
			operation(at(3, 4), true, &step{kind: create, outcome: done, got: other, at: 8})}},
		{"created again", porcupine.Ok, []porcupine.Operation{created, updated, deleted,
			operation(at(9, 10), true, &step{kind: create, outcome: done, got: other, at: 8}), reads(11, 12, other)}},
		{"AlreadyExists for a missing object", porcupine.Illegal, []porcupine.Operation{created, updated, deleted,
			operation(at(9, 10), true, &step{kind: create, outcome: exists})}},
		{"a get at an old revision", porcupine.Illegal, []porcupine.Operation{created, updated, deleted,
			operation(at(9, 10), true, &step{kind: get, outcome: missing, at: 5})}},
	} {
		if got := porcupine.CheckOperationsTimeout(registers, test.history, time.Minute); got != test.want {
			t.Errorf("%s: %v, want %v", test.name, got, test.want)
		}
	}
}

// TestVerdict_UnansweredReads_AreViolation: a round whose servers answer no reads fails, also if
// all else is right.
func TestVerdict_UnansweredReads_AreViolation(t *testing.T) {
	for name, c := range map[string]struct {
		gets, lists, unread int
		want                bool
	}{
		"most are answered":  {gets: 60, lists: 20, unread: 10},
		"none is answered":   {unread: 50, want: true},
		"none was asked":     {want: true},
		"half were answered": {gets: 10, lists: 10, unread: 20, want: true},
	} {
		v := &verdict{found: map[string][]string{}, gets: c.gets, lists: c.lists, unread: c.unread}
		if v.judgeAvailability(); (len(v.found[available]) > 0) != c.want {
			t.Errorf("%s: %v, want a violation: %v", name, v.found, c.want)
		}
	}
}

// TestVerdict_TenSecondsWithoutAnswers_AreViolation: of reads or of writes, whatever is answered of
// the others. Fewer seconds without an answer are none, except that reads have the higher floor.
func TestVerdict_TenSecondsWithoutAnswers_AreViolation(t *testing.T) {
	for silent, want := range map[int][]string{2: nil, worstWindow - 2: nil, worstWindow - 1: {"reads"}, worstWindow: {"reads", "writes"}} {
		for _, what := range []string{"reads", "writes"} {
			v := &verdict{found: map[string][]string{}}
			for second := range 30 {
				at, how := origin{ret: time.Duration(second) * time.Second}, map[string]outcome{"reads": done, "writes": done}
				if second >= 10 && second < 10+silent {
					how[what] = unknown
				}
				for range 20 {
					v.readShares.ended(at, how["reads"])
					v.writeShares.ended(at, how["writes"])
				}
			}
			if v.judgeSeconds(); (len(v.found[available]) > 0) != slices.Contains(want, what) {
				t.Errorf("%d seconds without answered %s: %v", silent, what, v.found)
			}
		}
	}
}

// TestWatcher_Sizes_AreThoseOfTheStates of a collection, at each revision.
func TestWatcher_Sizes_AreThoseOfTheStates(t *testing.T) {
	rng := random(testseed.New(t), 0)
	const last = 500
	l := &timeline{through: last, changes: map[key][]change{}}
	for revision := int64(0); revision <= last; revision++ {
		for range rng.IntN(3) {
			k := keyOf(resources[rng.IntN(len(resources))].name, fmt.Sprint("ns-", rng.IntN(2)), fmt.Sprint("object-", rng.IntN(4)))
			if changes := l.changes[k]; len(changes) > 0 && changes[len(changes)-1].revision == revision {
				continue
			}
			s := state{}
			if rng.IntN(3) > 0 {
				s = state{uid: "x", revision: revision, half: halves[rng.IntN(len(halves))]}
			}
			l.add(k, change{revision, s})
		}
	}
	for _, w := range []*watcher{{}, {ns: "ns-0"}, {half: halves[0]}, {ns: "ns-1", half: halves[1]}, {ns: "ns-0", name: "object-1"}} {
		w.resource = resources[0]
		sizes := w.sizes(l)
		for revision := int64(0); revision <= last; revision++ {
			n := 0
			for k := range l.all(w.resource.name, w.ns, w.half, revision) {
				if w.name == "" || k == keyOf(w.resource.name, w.ns, w.name) {
					n++
				}
			}
			for _, may := range []int{n, n + 1} {
				if got := mayBegin(sizes, may, revision, revision+1); (len(got) == 1) != (may == n) {
					t.Fatalf("%v with %d objects at %d: may begin at %v with %d", w, n, revision, got, may)
				}
			}
		}
	}
}
