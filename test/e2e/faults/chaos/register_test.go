package chaos

import (
	"testing"
	"time"

	"github.com/anishathalye/porcupine"
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

// TestVerdict_TenSecondsWithoutAnswers_AreViolation: single seconds without an answer are not.
func TestVerdict_TenSecondsWithoutAnswers_AreViolation(t *testing.T) {
	for silent, want := range map[int]bool{2: false, worstWindow - 1: false, worstWindow: true} {
		v := &verdict{found: map[string][]string{}}
		for second := range 30 {
			how := done
			if second >= 10 && second < 10+silent {
				how = unknown
			}
			for range 20 {
				v.ended(origin{ret: time.Duration(second) * time.Second}, how)
			}
		}
		if v.judgeSeconds(); (len(v.found[available]) > 0) != want {
			t.Errorf("%d seconds without answers: %v", silent, v.found)
		}
	}
}
