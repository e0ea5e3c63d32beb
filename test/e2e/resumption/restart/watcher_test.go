package restart

import (
	"context"
	"fmt"
	"net/http"
	"strconv"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
	"github.com/stratakube/strata/test/harness/recorded"
)

// watcher is a client that watches one path and records its events. It speaks HTTP directly,
// without a library's retries or relists. It is used by one goroutine.
type watcher struct {
	path, query string
	sessions    recorded.Sessions
	position    int64 // the revision to resume after
	// the revision up to which all events were received: the last event's revision may have more
	complete int64

	watch   *harness.Watch
	session *recorded.Session
}

// begin watches after a revision. A refusal is returned as an error that apierrors can classify.
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

// next returns the next event. An event of type ERROR is returned as an error that apierrors can
// classify.
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

// until reads until the position has reached a revision.
func (w *watcher) until(ctx context.Context, revision int64) error {
	for w.position < revision {
		if _, err := w.next(ctx); err != nil {
			return fmt.Errorf("at %d, waiting for %d: %w", w.position, revision, err)
		}
	}
	return nil
}

// catchUp is until for a watch that may end before, by its timeout: then it is repeated.
func (w *watcher) catchUp(ctx context.Context, api *harness.API, revision int64) error {
	for w.until(ctx, revision) != nil {
		if err := w.begin(ctx, api, w.position); err != nil {
			return err
		}
	}
	return nil
}

// drain reads until the watch ends, and returns its error, nil for an orderly end by the server.
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

// retried calls f until its error is nil or not retryable. Connection errors, overload and unready
// servers are retryable.
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

// collection returns the path of the objects of f.
func collection(f informer.Follow) string {
	path := "/api/v1"
	if f.Group != "" {
		path = "/apis/" + f.Group + "/v1"
	}
	if f.Namespace != "" {
		path += "/namespaces/" + f.Namespace
	}
	return path + "/" + f.Resource
}

// judge compares a watcher's events with the history; the watcher has received all events up to
// through.
func judge(t testing.TB, ctx context.Context, h *recorded.History, prefix string, f informer.Follow, w *watcher, through int64) {
	t.Helper()
	history, err := h.Now(ctx)
	harness.Check(t, err)
	sessions, err := w.sessions.Recorded(through)
	harness.Check(t, err)
	if err := history.Under(prefix).View(f.Selects(t)).Check(sessions); err != nil {
		t.Errorf("watch of %s?%s: %v", w.path, w.query, err)
	}
}
