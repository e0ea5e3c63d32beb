package watchcheck

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// History contains every change of a set of keys after revision From. Fill it before use and do not
// change it afterwards.
type History struct {
	From    int64          // the revision before the first change
	Base    map[string]any // the state of each key that existed at From
	Through int64          // the history is complete up to this revision
	Changes []Change       // in the order in which they happened
}

// Change is a change of one key. Changes of one transaction have one revision.
type Change struct {
	Revision int64
	Key      string
	State    any // of the key after the change; nil if the change deletes it
}

// Select reports whether a watch selects a key in a state, which is never nil.
type Select func(key string, state any) bool

// View contains the events that a watch with a certain selector has to deliver. It may be used
// concurrently.
type View struct {
	history *History
	sel     Select
	events  []Event // by revision; those of one revision in the order of the history
}

// View returns the events of the history that a watch with the selector sel has to deliver. A key
// that becomes selected is added, a key that is no longer selected is deleted. Cost is O(changes).
func (h *History) View(sel Select) *View {
	v := &View{history: h, sel: sel}
	state := maps.Clone(h.Base)
	if state == nil {
		state = map[string]any{}
	}
	selected := func(key string) bool {
		s := state[key]
		return s != nil && sel(key, s)
	}
	for _, c := range h.Changes {
		before := selected(c.Key)
		if c.State == nil {
			delete(state, c.Key)
		} else {
			state[c.Key] = c.State
		}
		switch after := selected(c.Key); {
		case !before && after:
			v.events = append(v.events, Event{Kind: Added, Key: c.Key, Revision: c.Revision})
		case before && after:
			v.events = append(v.events, Event{Kind: Modified, Key: c.Key, Revision: c.Revision})
		case before && !after:
			v.events = append(v.events, Event{Kind: Deleted, Key: c.Key, Revision: c.Revision})
		}
	}
	return v
}

// Check returns an error if the history contradicts itself or is not in order: it is then unusable
// for validation.
func (h *History) Check() error {
	last := h.From
	seen := map[string]int64{}
	for _, c := range h.Changes {
		if c.Revision < last || c.Revision <= h.From || c.Revision > h.Through {
			return fmt.Errorf("change of %s at %d after change at %d in a history from %d through %d", c.Key, c.Revision, last, h.From, h.Through)
		}
		if seen[c.Key] == c.Revision {
			return fmt.Errorf("two changes of %s at %d", c.Key, c.Revision)
		}
		last, seen[c.Key] = c.Revision, c.Revision
	}
	return nil
}

// at returns the keys selected at a revision, with the revision of the last change of each (0 if it
// is in Base).
func (v *View) at(revision int64) map[string]int64 {
	keys := map[string]int64{}
	for key, state := range v.history.Base {
		if v.sel(key, state) {
			keys[key] = 0
		}
	}
	for _, c := range v.history.Changes {
		if c.Revision > revision {
			break
		}
		if c.State != nil && v.sel(c.Key, c.State) {
			keys[c.Key] = c.Revision
		} else {
			delete(keys, c.Key)
		}
	}
	return keys
}

// between returns the events with after < revision <= through.
func (v *View) between(after, through int64) []Event {
	from, _ := slices.BinarySearchFunc(v.events, after+1, byRevision)
	to, _ := slices.BinarySearchFunc(v.events, through+1, byRevision)
	return v.events[from:max(from, to)]
}

func byRevision(e Event, revision int64) int {
	switch {
	case e.Revision < revision:
		return -1
	case e.Revision > revision:
		return 1
	}
	return 0
}

// Events returns the number of events of the view after a revision.
func (v *View) Events(after int64) int { return len(v.between(after, v.history.Through)) }

// Under returns the part of the history below a prefix, with the prefix cut from the keys.
func (h *History) Under(prefix string) *History {
	part := &History{From: h.From, Through: h.Through, Base: map[string]any{}}
	for key, state := range h.Base {
		if rest, ok := strings.CutPrefix(key, prefix); ok {
			part.Base[rest] = state
		}
	}
	for _, c := range h.Changes {
		if rest, ok := strings.CutPrefix(c.Key, prefix); ok {
			part.Changes = append(part.Changes, Change{Revision: c.Revision, Key: rest, State: c.State})
		}
	}
	return part
}
