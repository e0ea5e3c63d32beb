package tables

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// watchRequests returns every combination for a WATCH, except at a revision that is never reached:
// that watch would not end. The short form combines continue tokens and limits, which no watch
// uses, in one scope; each of the others has neither or both. It has a third of the combinations in
// the other scopes and of those with an invalid value, so that every pair of parameters occurs.
func watchRequests() (all []request) {
	for i, s := range []*scope{scopes[namespace], scopes[everywhere], scopes[labels], scopes[oneName]} {
		for j, version := range []string{unset, zero, compacted, distant, old, present, future, garbage} {
			for k, match := range []string{unset, exact, notOlderThan, nonsense} {
				for l, initial := range []string{unset, "false", "true"} {
					for _, marks := range []bool{false, true} {
						for _, from := range []string{unset, old, garbage} {
							for _, limit := range []int{0, 1} {
								neither, both := from == unset && limit == 0, from == old && limit != 0
								if !harness.Long() && s != scopes[namespace] && !neither && !both {
									continue
								}
								invalid := version == garbage || match == nonsense || from == garbage
								if !harness.Long() && (s != scopes[namespace] || invalid) && (i+j+k+l)%3 != 0 {
									continue
								}
								all = append(all, request{verb: watch, scope: s, version: version, match: match, from: from, limit: limit, initial: initial, marks: marks})
							}
						}
					}
				}
			}
		}
	}
	return all
}

// watchRow returns the row of KEP-2340's table for a WATCH.
func watchRow(r request) string {
	first := 13 // the first of the six rows for the version
	switch r.version {
	case unset:
		first = 1
	case zero:
		first = 7
	}
	switch {
	case r.match == unset && r.initial == unset:
	case r.match == unset:
		first++
	case r.match == exact:
		first += 5
	case r.initial == unset:
		first += 2
	case r.initial == "false":
		first += 3
	default:
		first += 4
	}
	return fmt.Sprintf("W%d", first)
}

// stream is the expectation for an accepted watch. The initial part is delivered before the test
// writes.
type stream struct {
	expectation
	initial bool  // every object as ADDED
	closing bool  // a bookmark at the end of the initial events
	after   int64 // then the events after this revision
	failure string
}

// watch returns the expectation for a WATCH of a server.
func (h *history) watch(r request, s *server) stream {
	invalid := func(row string) stream {
		return stream{expectation: refused(row, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)}
	}
	if r.match == nonsense {
		return invalid("a match that is none")
	}
	row := watchRow(r)
	if !s.watchList && r.match+r.initial != "" {
		return invalid(row)
	}
	switch row {
	case "W2", "W3", "W6", "W8", "W9", "W12", "W14", "W15", "W18":
		return invalid(row)
	}
	// watchListed: the API turns a watch without a start revision into a request for initial
	// events.
	listed := s.watchList && r.match == unset && (row == "W1" || row == "W7")
	if r.from != unset && (listed || r.match != unset) { // watchWithToken
		return invalid(row)
	}
	if r.version == garbage {
		return stream{expectation: refused(row, http.StatusBadRequest, metav1.StatusReasonBadRequest)}
	}
	want := stream{
		expectation: expectation{row: row, aspects: aspects{code: strconv.Itoa(http.StatusOK)}},
		closing:     r.marks && (listed || r.match != unset),
		after:       h.revisions[present],
	}
	switch row {
	case "W1", "W5":
		want.initial, want.reads = true, consistent(s.memory)
	case "W4":
		want.closing, want.reads = false, revision
	case "W7", "W11":
		want.initial = true
	case "W10":
		want.closing = false
	case "W13", "W16":
		want.closing, want.after = false, h.revisions[r.version]
		if r.version == compacted || r.version == distant {
			want.failure = "ERROR 410 Expired"
		}
	case "W17":
		want.initial = true
		if r.version == future {
			want.failure = "ERROR 504 Timeout"
		}
	}
	if want.closing && want.failure == "" {
		want.rule = rule{least: h.revisions[present]}
	}
	return want
}

// begins returns the events that are delivered before the test writes.
func (s stream) begins(h *history, scope *scope) (all []string) {
	if s.failure != "" {
		return []string{s.failure, ended}
	}
	if s.initial {
		found, _, _ := h.page(scope, h.revisions[present], "", 0)
		for _, o := range found {
			all = append(all, "ADDED "+o)
		}
	}
	if s.closing {
		all = append(all, closing)
	}
	return all
}

// Events without an object.
const (
	closing = "BOOKMARK after the initial events"
	ended   = "the end"
)

// opened is an accepted watch.
type opened struct {
	*harness.Watch
	answer
	got   []string
	marks bool // the request allows bookmarks
}

// patience is the timeout for events of a watch. Only a failure takes so long.
const patience = time.Minute

// open starts a watch. If it is refused, the result is nil and the answer is complete.
func (r request) open(ctx context.Context, h *history, api *harness.API) (*opened, error) {
	w, refused, err := api.Watch(ctx, r.scope.path, r.query(h))
	for err == nil && refused != nil && refused.Refused() { // as in ask
		harness.Pause(ctx, time.Second)
		w, refused, err = api.Watch(ctx, r.scope.path, r.query(h))
	}
	if err != nil {
		return nil, err
	}
	if refused != nil {
		return &opened{answer: refusal(refused)}, nil
	}
	return &opened{Watch: w, marks: r.marks, answer: answer{aspects: aspects{code: strconv.Itoa(http.StatusOK)}}}, nil
}

// read reads events until done returns true, or the watch fails.
func (o *opened) read(ctx context.Context, done func() bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, errors.New("the watch has no further event"))
	defer cancel()
	for !done() && !slices.Contains(o.got, ended) {
		e, err := o.Next(ctx)
		switch {
		case errors.Is(err, harness.ErrEnded):
			o.got = append(o.got, ended)
		case err != nil:
			o.got = append(o.got, err.Error())
			return nil
		case e.Type == "ERROR":
			o.got = append(o.got, fmt.Sprintf("ERROR %d %s", e.Status.Code, e.Status.Reason))
			o.aspects[message] = class(e.Status)
		case e.Type == "BOOKMARK" && e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true":
			o.got = append(o.got, closing)
			if m := e.Object.Metadata; e.Object.Kind != "Secret" || m.Name != "" || len(e.Object.Data) != 0 {
				o.got = append(o.got, fmt.Sprintf("which is not only that: %+v", e.Object))
			}
			if o.version, err = strconv.ParseInt(e.Object.Metadata.ResourceVersion, 10, 64); err != nil {
				return err
			}
		case e.Type == "BOOKMARK" && o.marks: // the server chooses when to send bookmarks
		default:
			o.got = append(o.got, e.Type+" "+show(e.Object))
		}
	}
	return nil
}

// watchAll starts all watches on all servers, then makes changes that all of them deliver, and
// returns their answers. The last change is after the revision future, at which some watches begin.
func (w *world) watchAll(ctx context.Context, servers []*server, requests []request) (map[*server]answers, error) {
	started, err := onEach(servers, func(s *server) (map[request]*opened, error) { return w.startWatches(ctx, s, requests) })
	defer func() {
		for _, s := range servers {
			for _, o := range started[s] {
				if o != nil && o.Watch != nil {
					o.Close()
				}
			}
		}
	}()
	if err != nil {
		return nil, err
	}
	if err := w.put(ctx, "table", "a", true); err != nil {
		return nil, err
	}
	for at := int64(0); at <= w.revisions[future]; {
		resp, err := w.kv.Put(ctx, "/elsewhere", "")
		if err != nil {
			return nil, err
		}
		at = resp.Header.Revision
	}
	if err := w.put(ctx, "table", "a", true); err != nil {
		return nil, err
	}
	last := "MODIFIED " + w.last("table", "a").String()
	return onEach(servers, func(s *server) (answers, error) {
		got := answers{}
		_, err := onEachInOrder(requests, func(r request) (struct{}, error) {
			o := started[s][r]
			if o.Watch == nil {
				return struct{}{}, nil
			}
			err := o.read(ctx, func() bool { return slices.Contains(o.got, last) })
			o.aspects[events] = strings.Join(o.got, ", ")
			return struct{}{}, err
		})
		for r, o := range started[s] {
			want := w.watch(r, s)
			if o.version != 0 {
				o.aspects[version] = want.show(o.version)
			}
			got[r] = o.answer
		}
		return got, err
	})
}

// startWatches starts watches on one server, one after the other, and waits for the initial events
// of each.
func (w *world) startWatches(ctx context.Context, s *server, requests []request) (map[request]*opened, error) {
	started := map[request]*opened{}
	start := func(r request) (*opened, error) {
		o, err := r.open(ctx, w.history, s.api)
		if err != nil || o.Watch == nil {
			return o, err
		}
		begins := w.watch(r, s).begins(w.history, r.scope)
		return o, o.read(ctx, func() bool { return len(o.got) >= len(begins) })
	}
	var waiting []request
	for _, r := range requests {
		want := w.watch(r, s)
		if want.failure != "" && r.version == future {
			waiting = append(waiting, r)
			continue
		}
		asked, err := s.observe(want.reads, func() (err error) {
			if before := started[r]; before != nil && before.Watch != nil {
				before.Close()
			}
			started[r], err = start(r)
			return err
		})
		if err != nil {
			return started, err
		}
		started[r].aspects[etcd] = asked.String()
	}
	// Watches that wait in vain do so concurrently.
	asked, err := s.observe(nothing, func() error {
		all, err := onEachInOrder(waiting, start)
		for i, r := range waiting {
			started[r] = all[i]
		}
		return err
	})
	for _, r := range waiting {
		if started[r] != nil {
			started[r].aspects[etcd] = asked.String()
		}
	}
	return started, err
}

// expectWatch returns the expectation for a WATCH, once all changes were made.
func (w *world) expectWatch(r request, s *server) expectation {
	want := w.watch(r, s)
	if want.aspects[code] == strconv.Itoa(http.StatusOK) {
		all := want.begins(w.history, r.scope)
		if want.failure == "" {
			all = append(all, w.since(r.scope, want.after)...)
		}
		want.aspects[events] = strings.Join(all, ", ")
	}
	return want.expectation
}

// TestWatch_EveryCombination_MatchesTable sends every WATCH.
func TestWatch_EveryCombination_MatchesTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	w := open(t, ctx)
	requests := watchRequests()
	got, err := w.watchAll(ctx, w.servers, requests)
	harness.Check(t, err)
	compare(t, w.servers, requests, w.expectWatch, got)
}

// TestWatch_NoInitialEventsSupport_MatchesTable sends every WATCH to servers whose API does not
// support sendInitialEvents, the API for which KEP-2340's table was written.
func TestWatch_NoInitialEventsSupport_MatchesTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	w := open(t, ctx)
	requests := watchRequests()
	got, err := w.watchAll(ctx, w.older, requests)
	harness.Check(t, err)
	compare(t, w.older, requests, w.expectWatch, got)
}
