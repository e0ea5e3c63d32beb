package chaos

import (
	"context"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

const (
	clients      = 16
	namesPerKind = 5 // in each namespace
	// Limits of pages of lists with and without a selector: a list has a few pages.
	selectedLimit, allLimit = 3, 60
)

// kind is a kind of request.
type kind int

const (
	create kind = iota
	update
	remove
	get
)

func (k kind) String() string { return [...]string{"create", "update", "delete", "get"}[k] }

// outcome is the result of a request, as known to its client.
type outcome int

const (
	unknown  outcome = iota // no answer, or an error: the request may have taken effect
	done                    // the request took effect
	missing                 // the object does not exist
	exists                  // the object exists already
	conflict                // a precondition failed
	expired                 // the revision is compacted
)

func (o outcome) String() string {
	return [...]string{"unknown", "done", "missing", "exists", "conflict", "expired"}[o]
}

// mode is the consistency that a read requests.
type mode int

const (
	present  mode = iota // no resource version: includes all writes acknowledged before
	anything             // resource version 0
	notOlder             // at least a revision
	exact                // exactly a revision
)

func (m mode) String() string { return [...]string{"present", "any", "not older", "exact"}[m] }

// origin is the client, the replica and the time of a request.
type origin struct {
	client, replica int
	boot            int64 // of the replica; -1 if it restarted during the request
	call, ret       time.Duration
}

// op is a request for one object.
type op struct {
	origin
	kind    kind
	key     key
	value   string // to write
	half    string
	want    state // preconditions of a write: uid and revision, if set
	mode    mode  // of a get
	min     int64 // of a get with a minimum revision
	outcome outcome
	got     state // the object read; of a write the object written, of a delete the uid only
	said    string
}

func (o *op) String() string {
	text := fmt.Sprintf("client %d, replica %d, %v-%v: %v %s", o.client, o.replica, o.call, o.ret, o.kind, o.key)
	switch {
	case o.kind == get:
		text += fmt.Sprintf(" (%v %d)", o.mode, o.min)
	case o.want != state{}:
		text += fmt.Sprintf(" if it is %s@%d", o.want.uid, o.want.revision)
	}
	return fmt.Sprintf("%s %s: %v %+v", text, o.value, o.outcome, o.got)
}

// list is a read of a collection, possibly in pages.
type list struct {
	origin
	resource, namespace, half string
	mode                      mode
	asked                     int64
	pages                     int           // 0 for a list without a limit
	fixed                     time.Duration // end of the first page, which fixes the revision
	outcome                   outcome
	revision                  int64
	items                     map[key]state
	fault                     string // an error that does not depend on etcd's history
}

func (l *list) String() string {
	return fmt.Sprintf("client %d, replica %d, %v-%v: list %s/%s half=%q (%v %d, %d pages): %v at %d", l.client, l.replica, l.call, l.ret,
		l.resource, l.namespace, l.half, l.mode, l.asked, l.pages, l.outcome, l.revision)
}

// round is one period of a scene: its clients, watchers and faults.
type round struct {
	*scene
	seed       uint64
	namespaces []string
	began      time.Time
	asked      []*replica // by clients
	written    []*replica // by clients
	watched    []*replica // by watchers

	attempted atomic.Int64
	newest    atomic.Int64 // highest revision that a client has received

	mu       sync.Mutex // leaf
	ops      []*op
	lists    []*list
	seen     map[key]state // the state of a key in a client's last answer
	failures map[string]int
	odd      []string // answers without an explanation
	watchers []*watcher
}

func newRound(s *scene, seed uint64, namespaces []string) *round {
	return &round{scene: s, seed: seed, namespaces: namespaces, began: time.Now(), asked: s.replicas, written: s.replicas, watched: s.replicas,
		seen: map[key]state{}, failures: map[string]int{}}
}

// now is the time since the round began, by the monotonic clock.
func (r *round) now() time.Duration { return time.Since(r.began) }

// client sends requests until ctx ends. The requests are derived from its number.
func (r *round) client(ctx context.Context, n int) {
	rng := random(r.seed, n)
	for i := 0; ctx.Err() == nil; i++ {
		var ok bool
		r.attempted.Add(1)
		switch p := rng.IntN(100); {
		case p < 14:
			ok = r.write(rng, n, create, i)
		case p < 38:
			ok = r.write(rng, n, update, i)
		case p < 48:
			ok = r.write(rng, n, remove, i)
		case p < 62:
			ok = r.get(rng, n, present)
		case p < 66:
			ok = r.get(rng, n, anything)
		case p < 71:
			ok = r.get(rng, n, notOlder)
		case p < 81:
			ok = r.list(rng, n, present, false)
		case p < 85:
			ok = r.list(rng, n, anything, false)
		case p < 89:
			ok = r.list(rng, n, notOlder, false)
		case p < 93:
			ok = r.list(rng, n, exact, false)
		case p < 98:
			ok = r.list(rng, n, present, true)
		default:
			ok = r.list(rng, n, exact, true)
		}
		if !ok {
			harness.Pause(ctx, 30*time.Millisecond) // back off from a server that is down
		}
	}
}

func (r *round) drawKey(rng *rand.Rand) (resource, string, string, key) {
	res, ns := resources[rng.IntN(len(resources))], r.namespaces[rng.IntN(len(r.namespaces))]
	name := fmt.Sprintf("object-%d", rng.IntN(namesPerKind))
	return res, ns, name, keyOf(res.name, ns, name)
}

func (r *round) drawReplica(rng *rand.Rand) *replica { return r.asked[rng.IntN(len(r.asked))] }

// send sends a request to a replica, and gives up after requestTimeout.
func (r *round) send(o *origin, n int, to *replica, method, path, query string, body any) (*harness.Response, error) {
	o.client, o.replica, o.boot = n, to.n, to.boots.Load()
	ctx, cancel := context.WithTimeout(context.Background(), requestTimeout)
	defer cancel()
	o.call = r.now()
	resp, err := to.api.Do(ctx, method, path, query, body)
	o.ret = r.now()
	if o.boot%2 != 0 || to.boots.Load() != o.boot {
		o.boot = -1
	}
	return resp, err
}

// classify returns the outcome of a request. Answers with an unknown outcome are counted,
// unexpected ones recorded.
func (r *round) classify(what string, resp *harness.Response, err error, name string) outcome {
	said := "no answer"
	if err == nil {
		status := resp.Status()
		switch {
		case resp.Code/100 == 2:
			return done
		case resp.Code == http.StatusNotFound && status.Reason == metav1.StatusReasonNotFound && status.Details != nil && status.Details.Name == name && name != "":
			return missing
		case resp.Code == http.StatusConflict && status.Reason == metav1.StatusReasonAlreadyExists:
			return exists
		case resp.Code == http.StatusConflict && status.Reason == metav1.StatusReasonConflict:
			return conflict
		case resp.Code == http.StatusGone:
			return expired
		}
		said = fmt.Sprintf("%d %s", resp.Code, status.Reason)
		switch {
		case resp.Code == http.StatusTooManyRequests, resp.Code == http.StatusInternalServerError,
			resp.Code == http.StatusServiceUnavailable, resp.Code == http.StatusGatewayTimeout:
		case resp.Code == http.StatusForbidden && strings.Contains(status.Message, "not yet ready to handle request"):
			// admission, at the start
		default:
			r.mu.Lock()
			r.odd = append(r.odd, fmt.Sprintf("%s: %v", what, resp.Err()))
			r.mu.Unlock()
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.failures[said]++
	return unknown
}

// stateOfObject returns the state of an object as a client received it.
func stateOfObject(o harness.Object) (s state, err error) {
	s = state{uid: string(o.Metadata.UID), value: o.Metadata.Annotations[valueAnnotation], half: o.Metadata.Labels[halfLabel]}
	s.revision, err = strconv.ParseInt(o.Metadata.ResourceVersion, 10, 64)
	return s, err
}

func (r *round) note(k key, s state) {
	r.sawRevision(s.revision)
	r.mu.Lock()
	defer r.mu.Unlock()
	r.seen[k] = s
}

// sawRevision raises the minimum revision of the clients' NotOlderThan reads.
func (r *round) sawRevision(revision int64) {
	for {
		newest := r.newest.Load()
		if revision <= newest || r.newest.CompareAndSwap(newest, revision) {
			return
		}
	}
}

// body returns an object to write.
func body(name, value, half string, want state) object {
	metadata := object{"name": name, "annotations": object{valueAnnotation: value}, "labels": object{halfLabel: half}}
	if want.uid != "" {
		metadata["uid"] = want.uid
	}
	if want.revision != 0 {
		metadata["resourceVersion"] = strconv.FormatInt(want.revision, 10)
	}
	return object{"metadata": metadata}
}

// write creates, changes or deletes an object, with or without preconditions.
func (r *round) write(rng *rand.Rand, client int, k kind, i int) bool {
	res, ns, name, key := r.drawKey(rng)
	o := &op{kind: k, key: key, value: fmt.Sprintf("%d-%d-%d", r.seed, client, i), half: halves[rng.IntN(len(halves))]}
	to, precondition := r.written[rng.IntN(len(r.written))], rng.IntN(4)
	r.mu.Lock()
	seen := r.seen[key]
	r.mu.Unlock()
	if k != create && precondition&1 != 0 {
		o.want.revision = seen.revision
	}
	if k == remove && precondition&2 != 0 {
		o.want.uid = seen.uid
	}
	if !seen.exists() {
		o.want = state{}
	}
	var resp *harness.Response
	var err error
	switch k {
	case create:
		resp, err = r.send(&o.origin, client, to, http.MethodPost, res.path(ns), "", body(name, o.value, o.half, state{}))
	case update:
		resp, err = r.send(&o.origin, client, to, http.MethodPut, res.path(ns)+"/"+name, "", body(name, o.value, o.half, o.want))
	default:
		o.value = ""
		var options any
		if preconditions := (object{}); o.want != (state{}) {
			if o.want.uid != "" {
				preconditions["uid"] = o.want.uid
			}
			if o.want.revision != 0 {
				preconditions["resourceVersion"] = strconv.FormatInt(o.want.revision, 10)
			}
			options = object{"kind": "DeleteOptions", "apiVersion": "v1", "preconditions": preconditions}
		}
		resp, err = r.send(&o.origin, client, to, http.MethodDelete, res.path(ns)+"/"+name, "", options)
	}
	o.outcome = r.classify(k.String(), resp, err, name)
	switch {
	case o.outcome == done && k == remove:
		if details := resp.Status().Details; details != nil && details.UID != "" {
			o.got.uid = string(details.UID)
		} else {
			o.outcome = unknown
		}
	case o.outcome == done:
		var written harness.Object
		if err := json.Unmarshal(resp.Body, &written); err != nil {
			o.outcome = unknown
		} else if o.got, err = stateOfObject(written); err != nil {
			o.outcome = unknown
		} else {
			r.note(key, o.got)
		}
	case o.outcome == unknown && err != nil:
		o.said = err.Error()
	case o.outcome == unknown:
		o.said = resp.Err().Error()
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, o)
	return o.outcome != unknown
}

// get reads an object.
func (r *round) get(rng *rand.Rand, client int, m mode) bool {
	res, ns, name, key := r.drawKey(rng)
	o := &op{kind: get, key: key, mode: m}
	query := ""
	switch m {
	case anything:
		query = "resourceVersion=0"
	case notOlder:
		o.min = r.newest.Load()
		query = fmt.Sprintf("resourceVersion=%d", o.min)
	}
	resp, err := r.send(&o.origin, client, r.drawReplica(rng), http.MethodGet, res.path(ns)+"/"+name, query, nil)
	o.outcome = r.classify("get", resp, err, name)
	if o.outcome == done {
		var read harness.Object
		if err := json.Unmarshal(resp.Body, &read); err != nil {
			o.outcome = unknown
		} else if o.got, err = stateOfObject(read); err != nil {
			o.outcome = unknown
		} else {
			r.note(key, o.got)
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.ops = append(r.ops, o)
	return o.outcome != unknown
}

// drawPast returns a revision of the round that etcd still has, if a client has seen one.
func (r *round) drawPast(rng *rand.Rand) int64 {
	newest := r.newest.Load()
	return max(newest-rng.Int64N(200), r.compacted.Load(), 1)
}

// drawList draws the collection, the selector and the revision of a list; false if no revision is
// known that it may read.
func (r *round) drawList(rng *rand.Rand, m mode) (l *list, query url.Values, ok bool) {
	l = &list{resource: resources[rng.IntN(len(resources))].name, mode: m, items: map[key]state{}}
	if rng.IntN(4) > 0 {
		l.namespace = r.namespaces[rng.IntN(len(r.namespaces))]
	}
	if rng.IntN(3) == 0 {
		l.half = halves[rng.IntN(len(halves))]
	}
	query = url.Values{}
	if l.half != "" {
		query.Set("labelSelector", halfLabel+"="+l.half)
	}
	switch m {
	case anything:
		query.Set("resourceVersion", "0")
	case notOlder:
		l.asked = r.newest.Load()
		query.Set("resourceVersion", fmt.Sprint(l.asked))
		query.Set("resourceVersionMatch", "NotOlderThan")
	case exact:
		if l.asked = r.drawPast(rng); l.asked <= 1 {
			return nil, nil, false
		}
		query.Set("resourceVersion", fmt.Sprint(l.asked))
		query.Set("resourceVersionMatch", "Exact")
	}
	return l, query, true
}

// list reads a collection: one namespace or all, with or without a selector, whole or in pages,
// each from any replica.
func (r *round) list(rng *rand.Rand, client int, m mode, paged bool) bool {
	l, query, ok := r.drawList(rng, m)
	if !ok {
		return true
	}
	limit := allLimit
	if l.half != "" {
		limit = selectedLimit
	}
	if paged {
		query.Set("limit", strconv.Itoa(limit))
	}
	res := resources[slices.IndexFunc(resources, func(r resource) bool { return r.name == l.resource })]
	path, last := res.path(l.namespace), ""
	for tries := 0; ; {
		var at origin
		to := r.drawReplica(rng)
		resp, err := r.send(&at, client, to, http.MethodGet, path, query.Encode(), nil)
		if l.pages == 0 {
			l.origin = at
			l.fixed = at.ret
		}
		l.ret = at.ret
		l.outcome = r.classify("list", resp, err, "")
		if l.outcome == unknown && l.pages > 0 && tries < 3 {
			tries++ // a page may be retried on another replica
			harness.Pause(context.Background(), 30*time.Millisecond)
			continue
		}
		if l.outcome != done {
			break
		}
		page, err := resp.List()
		if err != nil {
			l.fault = err.Error()
			break
		}
		revision, err := strconv.ParseInt(page.Metadata.ResourceVersion, 10, 64)
		switch {
		case err != nil:
			l.fault = err.Error()
		case l.pages > 0 && revision != l.revision:
			l.fault = fmt.Sprintf("page %d is of %d, those before were of %d", l.pages, revision, l.revision)
		case paged && len(page.Items) > limit:
			l.fault = fmt.Sprintf("page %d has %d items", l.pages, len(page.Items))
		}
		if l.fault != "" {
			break
		}
		l.revision = revision
		for _, item := range page.Items {
			if item.Key() <= last {
				l.fault = fmt.Sprintf("%s comes after %s", item.Key(), last)
			}
			last = item.Key()
			s, err := stateOfObject(item)
			if err != nil {
				l.fault = err.Error()
			}
			l.items[keyOf(res.name, item.Metadata.Namespace, item.Metadata.Name)] = s
		}
		if !paged {
			break
		}
		l.pages++
		if page.Metadata.Continue == "" {
			break
		}
		query.Set("continue", page.Metadata.Continue)
		query.Del("resourceVersion")
		query.Del("resourceVersionMatch")
	}
	if l.outcome == done {
		r.sawRevision(l.revision)
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.lists = append(r.lists, l)
	return l.outcome != unknown
}

// transact changes several objects in one transaction, directly in etcd, until ctx ends: readers
// have to see the changes together.
func (r *round) transact(ctx context.Context) {
	rng := random(r.seed, clients)
	for i := 0; ctx.Err() == nil; i++ {
		ns := r.namespaces[rng.IntN(len(r.namespaces))]
		if err := r.commitTransaction(ctx, rng, ns, i); err != nil {
			harness.Pause(ctx, 100*time.Millisecond)
		}
		harness.Pause(ctx, 20*time.Millisecond)
	}
}
