package watchcheck

import (
	"errors"
	"fmt"
)

// maxFaults bounds the faults that one validator reports: the first ones explain the others.
const maxFaults = 5

// faults collects the faults found by a validator.
type faults struct {
	guarantee string
	found     []error
	more      int
}

func (f *faults) add(session int, format string, args ...any) {
	if len(f.found) == maxFaults {
		f.more++
		return
	}
	f.found = append(f.found, fmt.Errorf("not %s: session %d: %s", f.guarantee, session, fmt.Sprintf(format, args...)))
}

func (f *faults) err() error {
	if f.more > 0 {
		return errors.Join(append(f.found, fmt.Errorf("not %s: %d more faults", f.guarantee, f.more))...)
	}
	return errors.Join(f.found...)
}

// Check runs all validators on the sessions of one client.
func (v *View) Check(sessions []Session) error {
	return errors.Join(v.Ordered(sessions), v.Unique(sessions), v.Reliable(sessions), v.Atomic(sessions),
		v.Resumable(sessions), v.Bookmarkable(sessions))
}

// Ordered: in a session, revisions never decrease, bookmarks included, and the revisions of one key
// increase.
func (v *View) Ordered(sessions []Session) error {
	f := faults{guarantee: "Ordered"}
	for i, s := range sessions {
		last := Event{Revision: s.After}
		of := map[string]int64{}
		for _, e := range s.Events {
			if e.Revision < last.Revision {
				f.add(i, "%v after %v", e, last)
			}
			last = e
			if e.Kind == Bookmark {
				continue
			}
			if before, ok := of[e.Key]; ok && e.Revision < before {
				f.add(i, "%v after one of the same key at %d", e, before)
			}
			of[e.Key] = e.Revision
		}
	}
	return f.err()
}

// Unique: a session delivers no event twice, and no event at or below its start revision.
func (v *View) Unique(sessions []Session) error {
	f := faults{guarantee: "Unique"}
	type change struct {
		key      string
		revision int64
	}
	for i, s := range sessions {
		seen := map[change]bool{}
		for _, e := range s.Events {
			if e.Kind == Bookmark {
				continue
			}
			c := change{e.Key, e.Revision}
			if e.Revision <= s.After {
				f.add(i, "%v is not after the start revision %d", e, s.After)
			} else if seen[c] {
				f.add(i, "%v was delivered twice", e)
			}
			seen[c] = true
		}
	}
	return f.err()
}

// Reliable: the session has every event up to the revision it vouches for, the initial state is
// correct, and every delivered event is in the history with the same kind.
func (v *View) Reliable(sessions []Session) error {
	f := faults{guarantee: "Reliable"}
	for i, s := range sessions {
		if s.After < v.history.From {
			f.add(i, "the session starts after %d, before the history, which starts after %d", s.After, v.history.From)
			continue
		}
		v.checkInitial(&f, i, s)
		got := map[string]map[int64]Kind{} // by key and revision
		for _, e := range s.Events {
			if e.Kind == Bookmark {
				continue
			}
			if got[e.Key] == nil {
				got[e.Key] = map[int64]Kind{}
			}
			got[e.Key][e.Revision] = e.Kind
		}
		through := s.vouched()
		if through > v.history.Through {
			f.add(i, "the session claims completeness through %d, but the history ends at %d", through, v.history.Through)
			through = v.history.Through
		}
		for _, want := range v.between(s.After, v.history.Through) {
			kind, ok := got[want.Key][want.Revision]
			switch {
			case !ok && want.Revision <= through:
				f.add(i, "%v is missing; the session is from %d through %d", want, s.After, through)
			case ok && kind != want.Kind:
				f.add(i, "%v was delivered as %v", want, kind)
			}
			delete(got[want.Key], want.Revision)
		}
		for key, events := range got {
			for revision, kind := range events {
				if revision > s.After { // otherwise Unique reports it
					f.add(i, "%v is not in the history", Event{Kind: kind, Key: key, Revision: revision})
				}
			}
		}
	}
	return f.err()
}

// checkInitial compares the initial state of a session with the history.
func (v *View) checkInitial(f *faults, i int, s Session) {
	if s.Initial == nil {
		return
	}
	want := v.at(s.After)
	for key, revision := range want {
		if got, ok := s.Initial[key]; !ok {
			f.add(i, "%s is missing in the state at %d", key, s.After)
		} else if revision != 0 && got != revision {
			f.add(i, "%s is at %d in the state at %d, want %d", key, got, s.After, revision)
		}
	}
	for key := range s.Initial {
		if _, ok := want[key]; !ok {
			f.add(i, "%s is in the state at %d, but is not selected", key, s.After)
		}
	}
}

// Atomic: before a later event or a bookmark at a revision arrives, all events of that revision
// have arrived. If a session ends within a revision, the next session does not begin after it,
// unless an earlier session had vouched for it.
func (v *View) Atomic(sessions []Session) error {
	f := faults{guarantee: "Atomic"}
	known := int64(0) // the highest revision that earlier sessions have vouched for
	for i, s := range sessions {
		missing := map[string]bool{} // of the current revision
		open := s.After
		for _, e := range s.Events {
			if e.Kind == Bookmark || e.Revision != open {
				for key := range missing {
					f.add(i, "%v comes before the event of %s at %d", e, key, open)
				}
				clear(missing)
				open = e.Revision
				if e.Kind == Bookmark {
					continue
				}
				for _, want := range v.between(open-1, open) {
					missing[want.Key] = true
				}
			}
			delete(missing, e.Key)
		}
		if i+1 < len(sessions) && sessions[i+1].After == open && open > known {
			for key := range missing {
				f.add(i, "the session ended within revision %d before the event of %s, and the next session started after that revision", open, key)
			}
		}
		known = max(known, s.vouched())
	}
	return f.err()
}

// Resumable: the events of a session are the first ones after its start revision, without a gap.
// Events of one revision may be in any order.
func (v *View) Resumable(sessions []Session) error {
	f := faults{guarantee: "Resumable"}
	for i, s := range sessions {
		want := v.between(s.After, v.history.Through)
		n := 0
		for _, e := range s.Events {
			if e.Kind == Bookmark {
				continue
			}
			if n == len(want) {
				f.add(i, "the session from %d delivered %v after all events of the history", s.After, e)
				break
			}
			if e.Revision != want[n].Revision {
				f.add(i, "the session from %d delivered %v, want %v next", s.After, e, want[n])
				break
			}
			n++
		}
	}
	return f.err()
}

// Bookmarkable: all events up to a bookmark's revision arrive before it, all events after it are
// later, and it carries only the revision.
func (v *View) Bookmarkable(sessions []Session) error {
	f := faults{guarantee: "Bookmarkable"}
	for i, s := range sessions {
		had := map[Event]bool{}
		after, bookmark := s.After, int64(0)
		for _, e := range s.Events {
			if e.Kind != Bookmark {
				if e.Revision <= bookmark {
					f.add(i, "%v after a bookmark at %d", e, bookmark)
				}
				had[Event{Key: e.Key, Revision: e.Revision}] = true
				continue
			}
			if e.Extra != "" {
				f.add(i, "%v carries %s", e, e.Extra)
			}
			if e.Revision < bookmark {
				f.add(i, "%v after one at %d", e, bookmark)
			}
			for _, want := range v.between(after, e.Revision) {
				if !had[Event{Key: want.Key, Revision: want.Revision}] {
					f.add(i, "%v comes before %v", e, want)
				}
			}
			after = max(after, e.Revision)
			bookmark = max(bookmark, e.Revision)
		}
	}
	return f.err()
}
