package watchcheck

import "fmt"

// Kind is what an event says.
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
	return 0, fmt.Errorf("no kind of event is called %q", name)
}

// Event is one event as a client got it.
type Event struct {
	Kind     Kind
	Key      string // "" for a bookmark
	Revision int64  // of the change, or up to which the bookmark vouches
	Extra    string // of a bookmark: what it carries beside the revision; "" for nothing
}

func (e Event) String() string {
	if e.Kind == Bookmark {
		return fmt.Sprintf("%v at %d", e.Kind, e.Revision)
	}
	return fmt.Sprintf("%v %s at %d", e.Kind, e.Key, e.Revision)
}

// Session is what one connection of a watch delivered. A client's sessions are in the order in which it made them; it may
// begin a session wherever it likes, not only where the last one ended.
type Session struct {
	// After is the revision after which the session begins: what the client asked for, or the revision of the initial state.
	After int64

	// Initial is the state at After with which the session began, as keys and the revision of the last change of each; nil
	// if the client did not ask for it.
	Initial map[string]int64

	Events []Event

	// Through is a revision up to which everything has been delivered, known to the test from somewhere else than the events;
	// 0 for none.
	Through int64
}

// vouched returns the revision up to which the session has claimed to be complete: that of its last bookmark, or just below
// that of its last event, because others of the same revision may have been on their way.
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

// Position returns the revision after which a client that has had the session would resume.
func (s *Session) Position() int64 {
	position := s.After
	if n := len(s.Events); n > 0 {
		position = s.Events[n-1].Revision
	}
	return position
}
