package chaos

import (
	"maps"
	"slices"
	"sort"
	"strings"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness/recorded"
)

// key names an object: resource/namespace/name.
type key string

func keyOf(resource, namespace, name string) key { return key(resource + "/" + namespace + "/" + name) }

func (k key) in(resource, namespace string) bool {
	if namespace == "" {
		return strings.HasPrefix(string(k), resource+"/")
	}
	return strings.HasPrefix(string(k), resource+"/"+namespace+"/")
}

// state is an object as of a revision; the zero value means that it did not exist.
type state struct {
	uid      string
	revision int64 // of its last change
	value    string
	half     string // the label that selectors use
}

func (s state) exists() bool { return s.uid != "" }

// change is a change of one key.
type change struct {
	revision int64
	state    state // after it
}

// timeline is etcd's history of each key, in revision order. A timeline is immutable.
type timeline struct {
	through int64
	changes map[key][]change
	values  map[string][]key // that have had the value, one per write
}

// newTimeline reads a history whose keys begin with the resource.
func newTimeline(h *watchcheck.History) *timeline {
	l := &timeline{through: h.Through, changes: map[key][]change{}, values: map[string][]key{}}
	for name, o := range h.Base {
		l.add(key(name), change{0, stateOf(o, 0)})
	}
	for _, c := range h.Changes {
		l.add(key(c.Key), change{c.Revision, stateOf(c.State, c.Revision)})
	}
	return l
}

func (l *timeline) add(k key, c change) {
	l.changes[k] = append(l.changes[k], c)
	if c.state.value != "" {
		l.values[c.state.value] = append(l.values[c.state.value], k)
	}
}

func stateOf(o any, revision int64) state {
	stored, ok := o.(*recorded.Object)
	if !ok || stored == nil {
		return state{}
	}
	return state{stored.UID, revision, stored.Annotations[valueAnnotation], stored.Labels[halfLabel]}
}

// at returns a key's state at a revision, and the revision of its next change; 0 if there is none.
func (l *timeline) at(k key, revision int64) (s state, next int64) {
	changes := l.changes[k]
	n := sort.Search(len(changes), func(i int) bool { return changes[i].revision > revision })
	if n > 0 {
		s = changes[n-1].state
	}
	if n < len(changes) {
		next = changes[n].revision
	}
	return s, next
}

// validFrom reports whether the key was in the state at a revision that is not below min.
func (l *timeline) validFrom(k key, s state, min int64) bool {
	if s.exists() {
		had, next := l.at(k, s.revision)
		return had == s && (next == 0 || next > min)
	}
	now, _ := l.at(k, min)
	return !now.exists() || slices.ContainsFunc(l.changes[k], func(c change) bool { return c.revision > min && !c.state.exists() })
}

// all returns the state of a collection at a revision, by key.
func (l *timeline) all(resource, namespace, half string, revision int64) map[key]state {
	all := map[key]state{}
	for k := range l.changes {
		if !k.in(resource, namespace) {
			continue
		}
		if s, _ := l.at(k, revision); s.exists() && (half == "" || s.half == half) {
			all[k] = s
		}
	}
	return all
}

// deletion is a deletion of an object.
type deletion struct {
	revision int64
	last     state // before it
}

// deletions returns the deletions of a key.
func (l *timeline) deletions(k key) (all []deletion) {
	var last state
	for _, c := range l.changes[k] {
		if !c.state.exists() && last.exists() {
			all = append(all, deletion{c.revision, last})
		}
		last = c.state
	}
	return all
}

// sortedKeys returns the keys of a map in order.
func sortedKeys[V any](m map[key]V) []key { return slices.Sorted(maps.Keys(m)) }
