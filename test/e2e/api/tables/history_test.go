package tables

import (
	"cmp"
	"context"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// Resource versions of a request, or the origin of its continue token.
const (
	unset        = ""
	zero         = "0"
	compacted    = "compacted"    // etcd has compacted it
	distant      = "distant"      // etcd has it; the servers were started later
	old          = "old"          // memory has it, and it is not the present one
	present      = "present"      // that of the last change
	future       = "future"       // is not reached while the request waits
	far          = "far"          // is never reached
	garbage      = "garbage"      // is invalid
	inconsistent = "inconsistent" // of a token: the revision that is present when the token is used
)

// scope is the subset of all secrets that a request selects.
type scope struct {
	name, path, labels, fields string
	one                        string // the name that is selected, if there is only one
	within, selects            func(object) bool
}

// Indexes of scopes.
const (
	namespace = iota
	everywhere
	labels
	oneName
	noName
)

var scopes = []*scope{
	namespace:  {name: "namespace", path: secrets("table"), within: inTable, selects: all},
	everywhere: {name: "everywhere", path: "/api/v1/secrets", within: all, selects: all},
	labels:     {name: "labels", path: secrets("table"), labels: "pick=yes", within: inTable, selects: func(o object) bool { return o.picked }},
	oneName:    {name: "one-name", path: secrets("table"), fields: "metadata.name=a", one: "a", within: inTable, selects: named("a")},
	noName:     {name: "no-name", path: secrets("table"), fields: "metadata.name=nobody", one: "nobody", within: inTable, selects: named("nobody")},
}

func all(object) bool       { return true }
func inTable(o object) bool { return o.namespace == "table" }
func named(name string) func(object) bool {
	return func(o object) bool { return inTable(o) && o.name == name }
}

func secrets(namespace string) string { return "/api/v1/namespaces/" + namespace + "/secrets" }

// selective reports whether the number of objects after a page is unknown.
func (s *scope) selective() bool { return s.labels+s.fields != "" }

// shows reports whether the scope selects o, which may be nil.
func (s *scope) shows(o *object) bool { return o != nil && s.within(*o) && s.selects(*o) }

// object is a secret as it was stored at a revision.
type object struct {
	namespace, name string
	revision        int64
	picked          bool // has the label that the scope labels selects
}

func (o object) key() string { return o.namespace + "/" + o.name }

// String is the object's form in items and events.
func (o object) String() string { return fmt.Sprintf("%s@%d", o.key(), o.revision) }

// change is one write. before is nil for a creation, after for a deletion.
type change struct {
	before, after *object
	revision      int64
}

// token is a continue token that a server has returned.
type token struct {
	value    string
	revision int64  // of its list; 0 for the present
	after    string // the key of the last object of the page
}

// history is all writes, with the revisions and tokens that requests use.
type history struct {
	api     *harness.API // returns tokens; nil before the servers start
	kv      *clientv3.Client
	changes []change
	writes  int

	revisions map[string]int64 // compacted, distant, old, present, future, far
	tokens    map[string]map[string]token
}

func newHistory(kv *clientv3.Client) *history {
	h := &history{kv: kv, revisions: map[string]int64{far: 1<<63 - 1}, tokens: map[string]map[string]token{}}
	for _, s := range scopes {
		h.tokens[s.name] = map[string]token{}
	}
	return h
}

// at returns the objects as they stood at a revision, by key.
func (h *history) at(revision int64) []object {
	state := map[string]object{}
	for _, c := range h.changes {
		switch {
		case c.revision > revision:
		case c.after == nil:
			delete(state, c.before.key())
		default:
			state[c.after.key()] = *c.after
		}
	}
	objects := make([]object, 0, len(state))
	for _, o := range state {
		objects = append(objects, o)
	}
	slices.SortFunc(objects, func(a, b object) int { return cmp.Compare(a.key(), b.key()) })
	return objects
}

// page returns the expected result of a list: the objects of the scope at a revision that match its
// selectors, with keys after after, at most limit of them. more is set if further objects follow;
// remaining is their number, if known.
func (h *history) page(s *scope, revision int64, after string, limit int) (items []string, more bool, remaining string) {
	var walk []object
	for _, o := range h.at(revision) {
		if s.within(o) && o.key() > after {
			walk = append(walk, o)
		}
	}
	for i, o := range walk {
		if s.selects(o) {
			items = append(items, o.String())
		}
		if limit > 0 && len(items) == limit {
			more = i < len(walk)-1
			break
		}
	}
	if more && !s.selective() {
		remaining = fmt.Sprint(len(walk) - limit)
	}
	return items, more, remaining
}

// since returns the events of a watch that starts at a revision.
func (h *history) since(s *scope, revision int64) (events []string) {
	for _, c := range h.changes {
		if c.revision <= revision {
			continue
		}
		switch before, after := s.shows(c.before), s.shows(c.after); {
		case before && after:
			events = append(events, "MODIFIED "+c.after.String())
		case after:
			events = append(events, "ADDED "+c.after.String())
		case before:
			last := *c.before
			last.revision = c.revision
			events = append(events, "DELETED "+last.String())
		}
	}
	return events
}

// past writes revisions that are older than the memory of servers started afterwards, and compacts
// some of them.
func (h *history) past(ctx context.Context) error {
	return inOrder(
		func() error { return h.put(ctx, "other", "m", true) },
		func() error { return h.put(ctx, "other", "n", false) },
		func() error { return h.put(ctx, "table", "a", true) },
		func() error { return h.put(ctx, "table", "b", false) },
		func() error { return h.put(ctx, "table", "d", true) },
		func() error { return h.mark(ctx, compacted) },
		func() error { return h.put(ctx, "table", "b", false) },
		func() error { return h.compact(ctx) },
		func() error { return h.put(ctx, "table", "g", false) },
		func() error { return h.mark(ctx, distant) },
		func() error { return h.delete(ctx, "table", "b") },
	)
}

// recent writes revisions that all servers receive as events. Further calls move old, present and
// future.
func (h *history) recent(ctx context.Context) error {
	return inOrder(
		func() error { return h.put(ctx, "table", "d", true) },
		func() error { return h.delete(ctx, "table", "e") },
		func() error { return h.put(ctx, "table", "c", false) },
		func() error { return h.mark(ctx, old) },
		func() error { return h.put(ctx, "table", "a", true) },
		func() error { return h.put(ctx, "table", "d", false) }, // no longer selected
		func() error { return h.put(ctx, "table", "e", true) },
		func() error { return h.delete(ctx, "table", "c") },
		func() error { return h.put(ctx, "other", "m", true) },
		func() error { return h.mark(ctx, present) },
	)
}

func inOrder(steps ...func() error) error {
	for _, step := range steps {
		if err := step(); err != nil {
			return err
		}
	}
	return nil
}

// last returns the current object, nil if there is none.
func (h *history) last(namespace, name string) *object {
	for _, c := range slices.Backward(h.changes) {
		for _, o := range []*object{c.after, c.before} {
			if o != nil && o.namespace == namespace && o.name == name {
				return c.after
			}
		}
	}
	return nil
}

// put creates or updates an object in etcd: in JSON, which servers decode like their own format.
func (h *history) put(ctx context.Context, namespace, name string, picked bool) error {
	h.writes++
	label := "no"
	if picked {
		label = "yes"
	}
	stored := fmt.Sprintf(`{"apiVersion":"v1","kind":"Secret","metadata":{"name":%q,"namespace":%q,"uid":%q,"labels":{"pick":%q},"annotations":{"write":"%d"}}}`,
		name, namespace, namespace+"-"+name, label, h.writes)
	before := h.last(namespace, name)
	written, err := h.kv.Put(ctx, "/registry/secrets/"+namespace+"/"+name, stored)
	if err != nil {
		return err
	}
	revision := written.Header.Revision
	h.changes = append(h.changes, change{before, &object{namespace, name, revision, picked}, revision})
	return nil
}

// delete deletes an object if it exists.
func (h *history) delete(ctx context.Context, namespace, name string) error {
	before := h.last(namespace, name)
	if before == nil {
		return nil
	}
	deleted, err := h.kv.Delete(ctx, "/registry/secrets/"+before.key())
	if err != nil {
		return err
	}
	h.changes = append(h.changes, change{before: before, revision: deleted.Header.Revision})
	return nil
}

// mark names the present revision and gets a token at that revision for each scope. Before the
// servers start, it makes the tokens that they would return.
func (h *history) mark(ctx context.Context, name string) error {
	h.revisions[name] = h.changes[len(h.changes)-1].revision
	h.revisions[future] = h.revisions[name] + 1000
	for _, s := range scopes {
		if s.one != "" { // a list of one name has no pages
			h.tokens[s.name][name] = h.tokens[scopes[namespace].name][name]
			continue
		}
		if h.api == nil {
			revision := h.revisions[name]
			first, _, _ := h.page(s, revision, "", 1)
			after, _, _ := strings.Cut(first[0], "@")
			start := after
			if s != scopes[everywhere] {
				start = strings.TrimPrefix(after, "table/")
			}
			h.tokens[s.name][name] = token{plain(fmt.Sprintf(`{"v":"meta.k8s.io/v1","rv":%d,"start":"%s\u0000"}`, revision, start)), revision, after}
			continue
		}
		list, err := h.api.List(ctx, s.path, request{verb: list, scope: s, limit: 1}.query(h))
		if err != nil {
			return err
		}
		revision, err := strconv.ParseInt(list.Metadata.ResourceVersion, 10, 64)
		if err != nil || len(list.Items) != 1 || list.Metadata.Continue == "" {
			return fmt.Errorf("a page of %s: %+v, %w", s.name, list, err)
		}
		h.tokens[s.name][name] = token{list.Metadata.Continue, revision, list.Items[0].Key()}
	}
	return nil
}

// compact compacts etcd to the last change, like the compactor of an API server: through the key
// that servers watch.
func (h *history) compact(ctx context.Context) error {
	revision := h.changes[len(h.changes)-1].revision
	if _, err := h.kv.Put(ctx, "compact_rev_key", fmt.Sprint(revision)); err != nil {
		return err
	}
	_, err := h.kv.Compact(ctx, revision)
	return err
}

// continueAtLatest gets the tokens that an API server offers in place of a compacted token, from a
// server that was started after the compaction.
func (h *history) continueAtLatest(ctx context.Context) error {
	for _, s := range scopes {
		used := h.tokens[s.name][compacted]
		r, err := h.api.Read(ctx, s.path, "continue="+url.QueryEscape(used.value), "")
		if err != nil {
			return err
		}
		offered := r.Status().Continue
		if r.Code != http.StatusGone || offered == "" {
			return fmt.Errorf("the token of a compacted revision: %w", r.Err())
		}
		h.tokens[s.name][inconsistent] = token{value: offered, after: used.after}
	}
	return nil
}
