package readpath

import (
	"context"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"

	"k8s.io/apiserver/pkg/server/routine"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
)

// signal is an InitializationSignal that can be read.
type signal struct{ sent atomic.Bool }

func (s *signal) Signal() { s.sent.Store(true) }
func (s *signal) Wait()   {}

// notifier is a ResponseRecorder with the interfaces that upstream's wrappers expect of net/http's
// writers.
type notifier struct{ *httptest.ResponseRecorder }

func (notifier) CloseNotify() <-chan bool { return nil }

// TestWatch_WithTask_SendsInitialEventsBeforeTask: a watch whose filters run tasks holds its seat
// and their goroutine until its initial events are sent; the task serves the rest and ends with the
// request.
func TestWatch_WithTask_SendsInitialEventsBeforeTask(t *testing.T) {
	t.Parallel()
	w := watchedPods(t)
	w.put(t, w.object("first", nil))
	w.catchUp(t)
	task, seat := &routine.Task{}, &signal{}
	w.context = func(ctx context.Context) context.Context {
		return utilflowcontrol.WithInitializationSignal(routine.WithTask(ctx, task), seat)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	gvr := w.resource.GVR
	req := httptest.NewRequestWithContext(ctx, http.MethodGet, "/apis/"+gvr.GroupVersion().String()+"/namespaces/ns/"+gvr.Resource+"?watch=1&resourceVersion=0", nil)
	response := httptest.NewRecorder()
	w.ServeHTTP(notifier{response}, req)
	if got := response.Body.String(); !strings.Contains(got, `"type":"ADDED"`) || !strings.Contains(got, `"name":"first"`) {
		t.Errorf("before the task: %q", got)
	}
	if task.Func == nil || !seat.sent.Load() || !response.Flushed {
		t.Fatalf("task: %v, seat released: %v, flushed: %v; want all", task.Func != nil, seat.sent.Load(), response.Flushed)
	}
	cancel()
	task.Func()
}

// TestWatch_WithTask_ErrorIsAnswered without a task.
func TestWatch_WithTask_ErrorIsAnswered(t *testing.T) {
	t.Parallel()
	w := watchedPods(t)
	task := &routine.Task{}
	w.context = func(ctx context.Context) context.Context { return routine.WithTask(ctx, task) }
	gvr := w.resource.GVR
	req := httptest.NewRequest(http.MethodGet, "/apis/"+gvr.GroupVersion().String()+"/namespaces/ns/"+gvr.Resource+"?watch=1&resourceVersion=x", nil)
	response := httptest.NewRecorder()
	w.ServeHTTP(notifier{response}, req)
	if response.Code != http.StatusBadRequest || task.Func != nil {
		t.Errorf("status %d, task: %v; want 400 and none", response.Code, task.Func != nil)
	}
}
