package feed

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// change is an event of a watch without bookmarks, and of etcd's history.
type change struct {
	kind, name string
	revision   int64
}

func (c change) String() string { return fmt.Sprintf("%s %s@%d", c.kind, c.name, c.revision) }

// history returns the events of a prefix in etcd's history, after one revision and up to another,
// at which a key below the prefix was changed.
func history(t *testing.T, ctx context.Context, client *clientv3.Client, prefix string, after, through int64) []change {
	t.Helper()
	return historyOf(t, ctx, client, prefix, after, through, nil)
}

// labelled selects the objects that put has written with the value.
func labelled(value string) func(*mvccpb.KeyValue) bool {
	return func(kv *mvccpb.KeyValue) bool {
		var stored harness.Object
		return json.Unmarshal(kv.Value, &stored) == nil && stored.Metadata.Labels["value"] == value
	}
}

// historyOf is history for a watch that selects objects, all if selects is nil: an object that it
// selects no longer is deleted.
func historyOf(t *testing.T, ctx context.Context, client *clientv3.Client, prefix string, after, through int64, selects func(*mvccpb.KeyValue) bool) []change {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var all []change
	for r := range client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(after+1), clientv3.WithPrevKV()) {
		harness.Check(t, r.Err())
		for _, e := range r.Events {
			if e.Kv.ModRevision > through {
				return all
			}
			before, now := !e.IsCreate(), e.Type != clientv3.EventTypeDelete
			if selects != nil {
				before, now = e.PrevKv != nil && selects(e.PrevKv), now && selects(e.Kv)
			}
			kind := "MODIFIED"
			switch {
			case !before && !now:
				continue
			case !now:
				kind = "DELETED"
			case !before:
				kind = "ADDED"
			}
			all = append(all, change{kind, strings.TrimPrefix(string(e.Kv.Key), prefix), e.Kv.ModRevision})
		}
		if n := len(r.Events); n > 0 && r.Events[n-1].Kv.ModRevision == through {
			return all // a revision is never split over two responses
		}
	}
	t.Fatalf("history of %s ends: %v", prefix, context.Cause(ctx))
	return nil
}

// recording is a watch and all events that it has delivered.
type recording struct {
	what    string
	after   int64
	retries int // number of times that the server asked for a retry

	mu struct { // leaf
		sync.Mutex
		changes  []change
		revision int64 // of the last event or bookmark
		status   *metav1.Status
		err      error         // why it ended
		changed  chan struct{} // closed and replaced with each event, and at the end
	}
}

// record starts a watch of a path after a revision, and reads it until the context or the test
// ends. It retries when the server asks for it.
func record(t *testing.T, ctx context.Context, api *harness.API, path, query string, after int64) *recording {
	t.Helper()
	query = strings.TrimSuffix(fmt.Sprintf("resourceVersion=%d&%s", after, query), "&")
	r := &recording{what: path + "?" + query, after: after}
	r.mu.changed = make(chan struct{})
	var w *harness.Watch
	refused, n, err := retried(ctx, func() (refused *harness.Response, err error) {
		w, refused, err = api.Watch(ctx, path, query)
		return refused, err
	})
	if err != nil {
		t.Error(err)
		r.mu.err = err
		return r
	}
	r.retries = n
	if refused != nil {
		status := refused.Status()
		r.mu.status, r.mu.err = &status, refused.Err()
		return r
	}
	done := make(chan struct{})
	t.Cleanup(func() { w.Close(); <-done })
	go func() {
		defer close(done)
		for r.add(w.Next(context.Background())) {
		}
	}()
	return r
}

// retried sends a request until the server does not ask for a retry, and returns the number of
// retries. The response may be nil.
func retried(ctx context.Context, send func() (*harness.Response, error)) (r *harness.Response, retries int, err error) {
	err = harness.Poll(ctx, func(context.Context) (bool, error) {
		var err error
		r, err = send()
		if err != nil || r == nil || r.Code != http.StatusTooManyRequests && r.Code != http.StatusServiceUnavailable {
			return err == nil, err
		}
		retries++
		return false, r.Err()
	})
	return r, retries, err
}

// add records an event or error, and reports whether the watch continues.
func (r *recording) add(e harness.Event, err error) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	defer func() {
		close(r.mu.changed)
		r.mu.changed = make(chan struct{})
	}()
	if err != nil {
		r.mu.err = err
		return false
	}
	if e.Type == "ERROR" {
		r.mu.status = &e.Status
		return true
	}
	var revision int64
	if _, err := fmt.Sscan(e.Object.Metadata.ResourceVersion, &revision); err != nil {
		r.mu.err = fmt.Errorf("%s with resource version %q: %w", e.Type, e.Object.Metadata.ResourceVersion, err)
		return false
	}
	r.mu.revision = revision
	if e.Type != "BOOKMARK" {
		r.mu.changes = append(r.mu.changes, change{e.Type, e.Object.Metadata.Name, revision})
	}
	return true
}

// patience bounds the wait for expected events; it is long because machines may be busy.
const patience = time.Minute

// await returns when the condition on the recording, called with its lock held, is true; an error
// if the watch ends first.
func (r *recording) await(ctx context.Context, what string, condition func() bool) error {
	ctx, cancel := context.WithTimeoutCause(ctx, patience, fmt.Errorf("not after %v", patience))
	defer cancel()
	for {
		r.mu.Lock()
		ok, err, status, changed, n := condition(), r.mu.err, r.mu.status, r.mu.changed, len(r.mu.changes)
		r.mu.Unlock()
		switch {
		case ok:
			return nil
		case err != nil && status != nil:
			return fmt.Errorf("watch %s, after %d events, has not %s, but ended with %d %s: %s (%w)", r.what, n, what, status.Code, status.Reason, status.Message, err)
		case err != nil:
			return fmt.Errorf("watch %s, after %d events, has not %s, but ended: %w", r.what, n, what, err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("watch %s, after %d events, has not %s: %w", r.what, n, what, context.Cause(ctx))
		}
	}
}

// awaitRevision returns when the watch has delivered an event or a bookmark at a revision or later.
func (r *recording) awaitRevision(ctx context.Context, revision int64) error {
	return r.await(ctx, fmt.Sprintf("shown revision %d", revision), func() bool { return r.mu.revision >= revision })
}

// requireEvents waits for the last change, and fails the test unless the watch is open and has
// delivered exactly these changes.
func (r *recording) requireEvents(t *testing.T, ctx context.Context, want []change) {
	t.Helper()
	if len(want) > 0 {
		if err := r.awaitRevision(ctx, want[len(want)-1].revision); err != nil {
			t.Error(err)
			return
		}
		// Several changes of one revision may arrive separately.
		if err := r.await(ctx, fmt.Sprintf("shown %d events", len(want)), func() bool { return len(r.mu.changes) >= len(want) }); err != nil {
			t.Error(err)
			return
		}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.mu.err != nil || r.mu.status != nil {
		t.Errorf("watch %s ended: %+v, %v", r.what, r.mu.status, r.mu.err)
	}
	if d := difference(r.mu.changes, want); d != "" {
		t.Errorf("watch %s: %s", r.what, d)
	}
}

// difference describes the first difference between two histories; "" if they are equal.
func difference(got, want []change) string {
	for i := range max(len(got), len(want)) {
		switch {
		case i == len(got):
			return fmt.Sprintf("event %d of %d, %v, is missing", i, len(want), want[i])
		case i == len(want):
			return fmt.Sprintf("event %d, %v, is one too many", i, got[i])
		case got[i] != want[i]:
			return fmt.Sprintf("event %d is %v, want %v", i, got[i], want[i])
		}
	}
	return ""
}

// requireExpired fails the test unless the watch ends as the API prescribes for a compacted
// revision: an ERROR event with a Status, 410, reason Expired, and then the end of the stream. The
// answer to a new watch may be that Status instead.
func (r *recording) requireExpired(t *testing.T, ctx context.Context) {
	t.Helper()
	if err := r.await(ctx, "ended", func() bool { return r.mu.err != nil }); err != nil {
		t.Error(err)
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	switch s := r.mu.status; {
	case s == nil:
		t.Errorf("watch %s ended without a status (%v), want 410", r.what, r.mu.err)
	case s.Code != http.StatusGone || s.Reason != metav1.StatusReasonExpired || s.Status != metav1.StatusFailure:
		t.Errorf("watch %s ended with %d %s: %s, want 410 Expired", r.what, s.Code, s.Reason, s.Message)
	case r.mu.revision > 0 && !errors.Is(r.mu.err, harness.ErrEnded):
		t.Errorf("watch %s: after the error the stream ended with %v", r.what, r.mu.err)
	}
}

// requireEventsOrExpired fails the test unless one of the two holds.
func (r *recording) requireEventsOrExpired(t *testing.T, ctx context.Context, want []change) {
	t.Helper()
	harness.Check(t, r.await(ctx, "either ended or shown everything", func() bool { return r.mu.err != nil || len(r.mu.changes) >= len(want) }))
	r.mu.Lock()
	ended := r.mu.err != nil
	r.mu.Unlock()
	if ended {
		r.requireExpired(t, ctx)
	} else {
		r.requireEvents(t, ctx, want)
	}
}
