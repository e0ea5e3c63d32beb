package recorded

import (
	"fmt"
	"reflect"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
)

// Sessions are the watches of one client, one session each, in the order of their start. Their
// methods may be called concurrently.
type Sessions struct {
	mu       sync.Mutex // leaf
	sessions []*watchcheck.Session
	errs     []error // the server's errors: events of type ERROR
	faults   []error // events that cannot be recorded
}

// Begin starts a session after a revision.
func (s *Sessions) Begin(after int64) *Session {
	s.mu.Lock()
	defer s.mu.Unlock()
	n := &Session{of: s, session: &watchcheck.Session{After: after}}
	s.sessions = append(s.sessions, n.session)
	return n
}

// Recorded returns the sessions so far, and an error if an event could not be recorded. through is
// the revision up to which the client has received all events, if known; it is set in the last
// session.
func (s *Sessions) Recorded(through int64) ([]watchcheck.Session, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var sessions []watchcheck.Session
	for _, session := range s.sessions {
		sessions = append(sessions, *session)
	}
	if n := len(sessions); n > 0 {
		sessions[n-1].Through = through
	}
	if len(s.faults) > 0 {
		return sessions, s.faults[0]
	}
	return sessions, nil
}

// Errors returns the statuses that ended watches.
func (s *Sessions) Errors() []error {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]error(nil), s.errs...)
}

// Session records one watch.
type Session struct {
	of      *Sessions
	session *watchcheck.Session
	initial bool // the initial events are being received
}

// WithInitialEvents makes the events up to the bookmark that ends them the initial state of the
// session.
func (s *Session) WithInitialEvents() *Session {
	s.initial = true
	s.session.Initial = map[string]int64{}
	return s
}

// unfinished reports whether the initial events are incomplete.
func (s *Session) unfinished() bool {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	return s.initial
}

// Add records an event of the harness.
func (s *Session) Add(e harness.Event) {
	if e.Type == "ERROR" {
		s.add(e.Type, "", "", "", false, &e.Status)
		return
	}
	end := e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true"
	extra := ""
	if e.Type == "BOOKMARK" {
		extra = extraMeta(e.Object.Metadata, end)
		if len(e.Object.Data) > 0 {
			extra += fmt.Sprintf(" data %v", e.Object.Data)
		}
	}
	s.add(e.Type, e.Object.Key(), e.Object.Metadata.ResourceVersion, extra, end, nil)
}

// AddObject records an event of client-go.
func (s *Session) AddObject(e watch.Event) {
	if e.Type == watch.Error {
		status, _ := apierrors.FromObject(e.Object).(apierrors.APIStatus)
		var said metav1.Status
		if status != nil {
			said = status.Status()
		}
		s.add("ERROR", "", "", "", false, &said)
		return
	}
	o, err := meta.Accessor(e.Object)
	if err != nil {
		s.fault(err)
		return
	}
	end := o.GetAnnotations()[metav1.InitialEventsAnnotationKey] == "true"
	extra := ""
	if e.Type == watch.Bookmark {
		extra = extraObject(e.Object, end)
	}
	key := o.GetName()
	if o.GetNamespace() != "" {
		key = o.GetNamespace() + "/" + key
	}
	s.add(string(e.Type), key, o.GetResourceVersion(), extra, end, nil)
}

func (s *Session) fault(err error) {
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	s.of.faults = append(s.of.faults, err)
}

func (s *Session) add(name, key, resourceVersion, extra string, end bool, status *metav1.Status) {
	if status != nil {
		s.of.mu.Lock()
		defer s.of.mu.Unlock()
		s.of.errs = append(s.of.errs, &apierrors.StatusError{ErrStatus: *status})
		return
	}
	kind, err := watchcheck.KindOf(name)
	if err != nil {
		s.fault(err)
		return
	}
	revision, err := strconv.ParseInt(resourceVersion, 10, 64)
	if err != nil {
		s.fault(fmt.Errorf("%v %s: %w", kind, key, err))
		return
	}
	s.of.mu.Lock()
	defer s.of.mu.Unlock()
	switch {
	case s.initial && end:
		s.initial = false
		s.session.After = revision
		if extra != "" {
			s.of.faults = append(s.of.faults, fmt.Errorf("the bookmark that ends the initial events carries %s", extra))
		}
	case s.initial && kind == watchcheck.Added:
		s.session.Initial[key] = revision
	case s.initial:
		s.of.faults = append(s.of.faults, fmt.Errorf("%v %s among the initial events", kind, key))
	default:
		s.session.Events = append(s.session.Events, watchcheck.Event{Kind: kind, Key: key, Revision: revision, Extra: extra})
	}
}

// extraMeta returns the metadata of a bookmark other than the resource version.
func extraMeta(m metav1.ObjectMeta, end bool) string {
	m.ResourceVersion = ""
	if end {
		m.Annotations = nil
	}
	if equality.Semantic.DeepEqual(m, metav1.ObjectMeta{}) {
		return ""
	}
	return fmt.Sprintf("metadata %+v", m)
}

// extraObject returns the fields of a bookmark's object other than its kind and the resource
// version.
func extraObject(o runtime.Object, end bool) string {
	if u, ok := o.(*unstructured.Unstructured); ok {
		u = u.DeepCopy()
		u.SetResourceVersion("")
		if end {
			u.SetAnnotations(nil)
		}
		unstructured.RemoveNestedField(u.Object, "metadata", "creationTimestamp") // null
		if len(u.Object) == 3 && len(u.Object["metadata"].(map[string]any)) == 0 && u.GetKind() != "" && u.GetAPIVersion() != "" {
			return ""
		}
		return fmt.Sprint(u.Object)
	}
	o = o.DeepCopyObject()
	o.GetObjectKind().SetGroupVersionKind(o.GetObjectKind().GroupVersionKind())
	accessor, err := meta.Accessor(o)
	if err != nil {
		return err.Error()
	}
	accessor.SetResourceVersion("")
	if end {
		accessor.SetAnnotations(nil)
	}
	empty := reflect.New(reflect.TypeOf(o).Elem()).Interface().(runtime.Object)
	empty.GetObjectKind().SetGroupVersionKind(o.GetObjectKind().GroupVersionKind())
	if equality.Semantic.DeepEqual(o, empty) {
		return ""
	}
	return fmt.Sprintf("%+v", o)
}

// Watch returns a watch with the events of w that records each one before it delivers it.
func (s *Session) Watch(w watch.Interface) watch.Interface {
	return watch.Filter(w, func(e watch.Event) (watch.Event, bool) {
		s.AddObject(e)
		return e, true
	})
}
