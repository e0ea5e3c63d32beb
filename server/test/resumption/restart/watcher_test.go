package restart

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/server/test/internal/harness"
	"github.com/stratakube/strata/server/test/internal/recorded"
)

// watcher is a client that watches one path and records what it gets. It speaks HTTP itself, so it does exactly what the
// test says. It is used by one goroutine.
type watcher struct {
	path, query string
	sessions    recorded.Sessions
	position    int64 // the revision after which it would resume
	complete    int64 // the revision up to which it has got everything: of the last event's there may be more

	watch   *harness.Watch
	session *recorded.Session
}

// begin watches after a revision. A refusal is an error that apierrors knows.
func (w *watcher) begin(ctx context.Context, api *harness.API, after int64) error {
	w.end()
	watch, refused, err := api.Watch(ctx, w.path, w.query+"&resourceVersion="+strconv.FormatInt(after, 10))
	if err != nil {
		return err
	}
	if refused != nil {
		if status := refused.Status(); status.Code != 0 {
			return &apierrors.StatusError{ErrStatus: status}
		}
		return refused.Err()
	}
	w.watch, w.session, w.position, w.complete = watch, w.sessions.Begin(after), after, after
	return nil
}

// next returns the next event. An event of type ERROR is an error that apierrors knows.
func (w *watcher) next(ctx context.Context) (harness.Event, error) {
	e, err := w.watch.Next(ctx)
	if err != nil {
		return e, err
	}
	w.session.Add(e)
	if e.Type == "ERROR" {
		return e, &apierrors.StatusError{ErrStatus: e.Status}
	}
	w.position, err = strconv.ParseInt(e.Object.Metadata.ResourceVersion, 10, 64)
	if w.complete = w.position; e.Type != "BOOKMARK" {
		w.complete--
	}
	return e, err
}

// until reads until the position is at a revision or past it.
func (w *watcher) until(ctx context.Context, revision int64) error {
	for w.position < revision {
		if _, err := w.next(ctx); err != nil {
			return fmt.Errorf("at %d, waiting for %d: %w", w.position, revision, err)
		}
	}
	return nil
}

// drain reads until the watch ends, and returns the error that ended it, nil if the server ended it in order.
func (w *watcher) drain(ctx context.Context) error {
	for {
		if _, err := w.next(ctx); err != nil {
			if apierrors.ReasonForError(err) != metav1.StatusReasonUnknown {
				return err
			}
			return context.Cause(ctx)
		}
	}
}

// end closes the watch, if there is one.
func (w *watcher) end() {
	if w.watch != nil {
		w.watch.Close()
		w.watch = nil
	}
}

// retried calls f until its error is nil or not one that a client comes back after: no connection, or a server that says
// that it has too much to do or is not ready.
func retried(ctx context.Context, f func(context.Context) error) error {
	var last error
	err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		last = f(ctx)
		status := apierrors.APIStatus(nil)
		if s, ok := last.(apierrors.APIStatus); ok {
			status = s
		}
		again := last != nil && (status == nil || status.Status().Code == http.StatusTooManyRequests || status.Status().Code >= http.StatusInternalServerError)
		return !again, last
	})
	if err != nil {
		return err
	}
	return last
}

// collection returns the path of what f follows.
func collection(f follow) string {
	path := "/api/v1"
	if f.resource == gizmoResource.Resource {
		path = "/apis/" + gizmoGroup + "/v1"
	}
	if f.namespace != "" {
		path += "/namespaces/" + f.namespace
	}
	return path + "/" + f.resource
}

// judge compares what a watcher got with the history; it has got everything up to through.
func judge(t testing.TB, ctx context.Context, h *recorded.History, prefix string, f follow, w *watcher, through int64) {
	t.Helper()
	history, err := h.Now(ctx)
	harness.Check(t, err)
	sessions, err := w.sessions.Recorded(through)
	harness.Check(t, err)
	if err := history.Under(prefix).View(f.selects(t)).Check(sessions); err != nil {
		t.Errorf("watch of %s?%s: %v", w.path, w.query, err)
	}
}
