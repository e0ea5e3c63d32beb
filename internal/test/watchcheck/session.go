package watchcheck

import "fmt"

// Kind is the type of an event.
type Kind uint8

const (
	Added Kind = iota + 1
	Modified
	Deleted
	Bookmark
)

func (k Kind) String() string {
	switch k {
	case Added:
		return "ADDED"
	case Modified:
		return "MODIFIED"
	case Deleted:
		return "DELETED"
	case Bookmark:
		return "BOOKMARK"
	}
	return fmt.Sprintf("kind %d", uint8(k))
}

// KindOf returns the kind with that name in the API, such as "ADDED".
func KindOf(name string) (Kind, error) {
	for k := Added; k <= Bookmark; k++ {
		if k.String() == name {
			return k, nil
		}
	}
	return 0, fmt.Errorf("unknown event type %q", name)
}

// Event is one event as received by a client.
type Event struct {
	Kind     Kind
	Key      string // "" for a bookmark
	Revision int64  // of the change, or the revision that the bookmark vouches for
	Extra    string // content of a bookmark in addition to the revision; "" for none
}

func (e Event) String() string {
	if e.Kind == Bookmark {
		return fmt.Sprintf("%v at %d", e.Kind, e.Revision)
	}
	return fmt.Sprintf("%v %s at %d", e.Kind, e.Key, e.Revision)
}

// Session contains the events of one connection of a watch. A client's sessions are in the order of
// their connections; a session may begin at any revision, not only where the previous one ended.
type Session struct {
	// After is the revision after which the session begins: the requested revision, or that of the
	// initial state.
	After int64

	// Initial is the state at After with which the session began, as keys and the revision of the
	// last change of each; nil if the client did not request it.
	Initial map[string]int64

	Events []Event

	// Through is a revision up to which all events were delivered, known to the test from a source
	// other than the events; 0 for none.
	Through int64
}

// vouched returns the revision up to which the session claims to be complete: that of its last
// bookmark, or the one below that of its last event, because other events of the same revision may
// have been in flight.
func (s *Session) vouched() int64 {
	through := max(s.After, s.Through)
	for _, e := range s.Events {
		if e.Kind == Bookmark {
			through = max(through, e.Revision)
		} else {
			through = max(through, e.Revision-1)
		}
	}
	return through
}

// Position returns the revision after which a client would resume the session.
func (s *Session) Position() int64 {
	position := s.After
	if n := len(s.Events); n > 0 {
		position = s.Events[n-1].Revision
	}
	return position
}
