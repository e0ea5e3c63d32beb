package watchcheck

import (
	"maps"
	"slices"
	"strings"
	"testing"
)

// The state of a key in these tests is a label; the watch selects those with "on".
func on(_ string, state any) bool { return state == "on" }

// history has a transaction of three keys at 5, keys that become selected and unselected, and one
// that is never selected.
func history() *History {
	return &History{
		From: 2, Through: 14, Base: map[string]any{"old": "on", "other": "off"},
		Changes: []Change{
			{3, "a", "on"},     // ADDED
			{4, "a", "on"},     // MODIFIED
			{5, "x", "on"},     // ADDED, and
			{5, "y", "on"},     // ADDED, and
			{5, "z", "off"},    // no event
			{6, "other", "on"}, // ADDED: it becomes selected
			{7, "quiet", "off"},
			{8, "a", "off"}, // DELETED: it is no longer selected
			{9, "a", nil},
			{10, "old", nil},   // DELETED
			{11, "old", "on"},  // ADDED: it is created again
			{12, "x", nil},     // DELETED, and
			{12, "y", nil},     // DELETED
			{13, "quiet", nil}, // no event
			{14, "old", "on"},  // MODIFIED
		},
	}
}

func event(kind Kind, key string, revision int64) Event {
	return Event{Kind: kind, Key: key, Revision: revision}
}

func bookmark(revision int64) Event { return event(Bookmark, "", revision) }

// right returns valid sessions of a client with that watch: two reconnects, one at an event and one
// at a bookmark.
func right() []Session {
	return []Session{
		{After: 2, Initial: map[string]int64{"old": 2}, Events: []Event{
			event(Added, "a", 3), event(Modified, "a", 4), event(Added, "y", 5), event(Added, "x", 5)}},
		{After: 5, Events: []Event{event(Added, "other", 6), bookmark(7)}},
		{After: 7, Events: []Event{
			event(Deleted, "a", 8), bookmark(9), bookmark(9), event(Deleted, "old", 10), event(Added, "old", 11),
			event(Deleted, "x", 12), event(Deleted, "y", 12), bookmark(13)}, Through: 13},
	}
}

func TestView_CorrectSessions_Pass(t *testing.T) {
	h := history()
	if err := h.Check(); err != nil {
		t.Fatal(err)
	}
	v := h.View(on)
	if err := v.Check(right()); err != nil {
		t.Error(err)
	}
	again := []Session{{After: 4, Events: []Event{event(Added, "x", 5)}}, {After: 4, Events: []Event{event(Added, "x", 5), event(Added, "y", 5)}}}
	if err := v.Check(again); err != nil {
		t.Error("a session that begins before the end of the one before:", err)
	}
	back := []Session{right()[0], {After: 5, Events: []Event{bookmark(5)}}, {After: 4, Events: []Event{event(Added, "x", 5)}}, {After: 5}}
	if err := v.Check(back); err != nil {
		t.Error("a session that ends within a revision that the client has had:", err)
	}
}

// replace, insert, remove and swap change the events of a session.
func replace(s []Session, session int, events ...Event) []Session {
	s[session].Events = events
	return s
}

func insert(s []Session, session, at int, events ...Event) []Session {
	s[session].Events = slices.Insert(s[session].Events, at, events...)
	return s
}

func remove(s []Session, session, at int) []Session {
	s[session].Events = slices.Delete(s[session].Events, at, at+1)
	return s
}

func swap(s []Session, session, a, b int) []Session {
	events := s[session].Events
	events[a], events[b] = events[b], events[a]
	return s
}

// defects are sessions that break one guarantee of a watch of history().
var defects = []struct {
	name      string
	guarantee string
	sessions  []Session
}{
	{"two events in the wrong order", "Ordered", swap(right(), 0, 0, 1)},
	{"events of two keys in the wrong order", "Ordered", swap(right(), 2, 0, 3)},
	{"an event from before the session", "Ordered", insert(right(), 1, 0, event(Modified, "a", 4))},
	{"a bookmark that goes back", "Ordered", insert(right(), 2, 3, bookmark(8))},

	{"an event twice", "Unique", insert(right(), 0, 2, event(Modified, "a", 4))},
	{"an event twice, as two kinds", "Unique", insert(right(), 0, 2, event(Added, "a", 4))},
	{"an event again after a reconnect", "Unique", insert(right(), 1, 0, event(Added, "x", 5))},

	{"an event is missing between others", "Reliable", remove(right(), 2, 3)},
	{"the first event is missing", "Reliable", remove(right(), 0, 0)},
	{"an event is missing before a bookmark", "Reliable", remove(right(), 1, 0)},
	{"a sent event is missing", "Reliable", func() []Session {
		s := right()
		s[2].Through = 14
		return s
	}()},
	{"an event that never happened", "Reliable", insert(right(), 0, 2, event(Modified, "b", 4))},
	{"an event that is not selected", "Reliable", insert(right(), 2, 0, event(Modified, "z", 8))},
	{"a key that ceases to be selected is modified", "Reliable", func() []Session {
		s := right()
		s[2].Events[0].Kind = Modified
		return s
	}()},
	{"a key that begins to be selected is modified", "Reliable", func() []Session {
		s := right()
		s[1].Events[0].Kind = Modified
		return s
	}()},
	{"a key is missing in the initial state", "Reliable", func() []Session {
		s := right()
		s[0].Initial = map[string]int64{}
		return s
	}()},
	{"a key that is not selected is in the initial state", "Reliable", func() []Session {
		s := right()
		s[0].Initial["other"] = 2
		return s
	}()},
	{"an initial state of an older revision", "Reliable", []Session{{After: 4, Initial: map[string]int64{"old": 2, "a": 3}}}},
	{"a bookmark of the future", "Reliable", []Session{{After: 14, Events: []Event{bookmark(15)}}}},
	{"a session from before the history", "Reliable", []Session{{After: 1}}},

	{"a later event between two of one revision", "Atomic",
		replace(right(), 0, event(Added, "a", 3), event(Modified, "a", 4), event(Added, "x", 5), event(Added, "other", 6), event(Added, "y", 5))},
	{"a bookmark between two of one revision", "Atomic", insert(right(), 0, 3, bookmark(5))},
	{"a revision split over a reconnect", "Atomic", remove(right(), 0, 3)},

	{"a resumed session leaves the first event out", "Resumable", remove(right(), 2, 0)},
	{"a resumed session begins too early", "Resumable", insert(right(), 2, 0, event(Added, "other", 6))},
	{"a resumed session delivers an old event", "Resumable", []Session{{After: 14, Events: []Event{event(Modified, "old", 14)}}}},

	{"a bookmark before an event that it covers", "Bookmarkable", swap(right(), 1, 0, 1)},
	{"a bookmark before the second event of its revision", "Bookmarkable", insert(right(), 0, 3, bookmark(5))},
	{"an event that an earlier bookmark covers", "Bookmarkable", insert(right(), 2, 3, event(Deleted, "a", 8))},
	{"a bookmark with more than a revision", "Bookmarkable", func() []Session {
		s := right()
		s[1].Events[1].Extra = "a name"
		return s
	}()},
}

// TestView_EachDefect_IsReported: the validator of the broken guarantee reports each defect, and so
// does Check.
func TestView_EachDefect_IsReported(t *testing.T) {
	for _, tc := range defects {
		t.Run(tc.name, func(t *testing.T) {
			v := history().View(on)
			validators := map[string]func([]Session) error{
				"Ordered": v.Ordered, "Unique": v.Unique, "Reliable": v.Reliable, "Atomic": v.Atomic,
				"Resumable": v.Resumable, "Bookmarkable": v.Bookmarkable}
			err := validators[tc.guarantee](tc.sessions)
			if err == nil {
				t.Fatalf("%s has not seen it", tc.guarantee)
			}
			if !strings.Contains(err.Error(), "not "+tc.guarantee) {
				t.Errorf("%s returned %v", tc.guarantee, err)
			}
			if v.Check(tc.sessions) == nil {
				t.Error("Check has not seen it")
			}
		})
	}
}

func TestHistory_Contradiction_IsReported(t *testing.T) {
	for name, h := range map[string]*History{
		"out of order":        {From: 2, Through: 9, Changes: []Change{{5, "a", "on"}, {4, "b", "on"}}},
		"before its begin":    {From: 2, Through: 9, Changes: []Change{{2, "a", "on"}}},
		"after its end":       {From: 2, Through: 9, Changes: []Change{{10, "a", "on"}}},
		"twice in a revision": {From: 2, Through: 9, Changes: []Change{{5, "a", "on"}, {5, "a", nil}}},
	} {
		if h.Check() == nil {
			t.Errorf("%s: no error", name)
		}
	}
}

func TestHistory_Under_CutsPrefix(t *testing.T) {
	h := &History{From: 2, Through: 9, Base: map[string]any{"/a/x": "on", "/b/y": "on"},
		Changes: []Change{{5, "/a/z", "on"}, {6, "/b/z", "on"}, {7, "/a/x", nil}}}
	got := h.Under("/a/")
	if err := got.Check(); err != nil {
		t.Error(err)
	}
	if want := []Change{{5, "z", "on"}, {7, "x", nil}}; !slices.Equal(got.Changes, want) {
		t.Errorf("changes %v, want %v", got.Changes, want)
	}
	if want := map[string]any{"x": "on"}; !maps.Equal(got.Base, want) {
		t.Errorf("base %v, want %v", got.Base, want)
	}
}

func TestView_ReportedFaults_AreBounded(t *testing.T) {
	v := history().View(on)
	err := v.Reliable([]Session{{After: 2, Through: 14}})
	if n := strings.Count(err.Error(), "\n"); n != maxFaults || !strings.Contains(err.Error(), "more faults") {
		t.Errorf("%d lines of faults, want %d and how many more there are: %v", n+1, maxFaults+1, err)
	}
}
