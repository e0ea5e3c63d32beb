package handlerchain

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"sync/atomic"
	"testing"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/routine"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
)

// countedWatches is a priority and fairness that counts the registered watches.
type countedWatches struct {
	*seats
	n atomic.Int32
}

func (c *countedWatches) RegisterWatch(*http.Request) utilflowcontrol.ForgetWatchFunc {
	c.n.Add(1)
	return func() { c.n.Add(-1) }
}

// routineConfig is chainConfig with an audit log and countedWatches.
func routineConfig() (*genericapiserver.Config, *countedWatches, *auditLog) {
	c, s := chainConfig()
	withAuditLog(c)
	counted := &countedWatches{seats: s}
	c.FlowControl = counted
	return c, counted, c.AuditBackend.(*auditLog)
}

// TestFastChain_WatchTask_RunsWithinAuditAndRegistration: while the task of a watch runs, the watch
// is registered with priority and fairness and its last audit event is not sent, but its seat and
// its filters have ended.
func TestFastChain_WatchTask_RunsWithinAuditAndRegistration(t *testing.T) {
	c, counted, log := routineConfig()
	var started, during []auditinternal.Stage
	var taken, registered int32
	chain := fastChain(c, func(w http.ResponseWriter, req *http.Request) {
		w.WriteHeader(http.StatusOK)
		started = log.stages()
		routine.TaskFrom(req.Context()).Func = func() {
			during, taken, registered = log.stages(), counted.taken.Load(), counted.n.Load()
			_, _ = w.Write([]byte("event"))
		}
	})
	w := httptest.NewRecorder()
	requireFast{t, chain}.ServeHTTP(w, readBy("reader", "?watch=1"))
	begin := []auditinternal.Stage{auditinternal.StageRequestReceived, auditinternal.StageResponseStarted}
	if !slices.Equal(started, begin) || !slices.Equal(during, begin) {
		t.Errorf("audit events %v at the start and %v during the task, want %v", started, during, begin)
	}
	if want := append(begin, auditinternal.StageResponseComplete); !slices.Equal(log.stages(), want) {
		t.Errorf("audit events %v, want %v", log.stages(), want)
	}
	if taken != 0 || registered != 1 {
		t.Errorf("during the task: %d seats and %d registered watches, want 0 and 1", taken, registered)
	}
	if n := counted.n.Load(); n != 0 {
		t.Errorf("%d watches are still registered", n)
	}
	if w.Code != http.StatusOK || w.Body.String() != "event" {
		t.Errorf("response %d %q", w.Code, w.Body)
	}
}

// TestFastChain_WatchWithoutTask_IsForgotten: the registration of a watch that the handler has
// answered ends with the handler.
func TestFastChain_WatchWithoutTask_IsForgotten(t *testing.T) {
	c, counted, log := routineConfig()
	chain := fastChain(c, func(w http.ResponseWriter, _ *http.Request) {
		if n := counted.n.Load(); n != 1 {
			t.Errorf("%d registered watches, want 1", n)
		}
		w.WriteHeader(http.StatusTooManyRequests)
	})
	requireFast{t, chain}.ServeHTTP(httptest.NewRecorder(), readBy("reader", "?watch=1"))
	if n := counted.n.Load(); n != 0 {
		t.Errorf("%d watches are still registered", n)
	}
	if ev := log.last(); ev.Stage != auditinternal.StageResponseComplete || ev.ResponseStatus.Code != http.StatusTooManyRequests {
		t.Errorf("the last audit event is %s %s", ev.Stage, describe(ev))
	}
}

// TestFastChain_WatchPanics_IsAuditedAndForgotten: a panic of the handler or of its task reaches
// the audit log.
func TestFastChain_WatchPanics_IsAuditedAndForgotten(t *testing.T) {
	crash := utilruntime.ReallyCrash
	t.Cleanup(func() { utilruntime.ReallyCrash = crash })
	utilruntime.ReallyCrash = false
	for name, handler := range map[string]func(req *http.Request){
		"handler": func(*http.Request) { panic("of a test") },
		"task":    func(req *http.Request) { routine.TaskFrom(req.Context()).Func = func() { panic("of a test") } },
	} {
		t.Run(name, func(t *testing.T) {
			c, counted, log := routineConfig()
			w := httptest.NewRecorder()
			requireFast{t, fastChain(c, func(_ http.ResponseWriter, req *http.Request) { handler(req) })}.ServeHTTP(w, readBy("reader", "?watch=1"))
			if n := counted.n.Load(); n != 0 {
				t.Errorf("%d watches are still registered", n)
			}
			if ev := log.last(); ev.Stage != auditinternal.StagePanic || w.Code != http.StatusInternalServerError {
				t.Errorf("status %d, the last audit event is %s %s", w.Code, ev.Stage, describe(ev))
			}
		})
	}
}

// TestFastChain_PassedOnWatch_HasNoTask: upstream's handlers serve a watch within its filters.
func TestFastChain_PassedOnWatch_HasNoTask(t *testing.T) {
	c, _ := chainConfig()
	passed := false
	h := New(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		passed = true
		if routine.TaskFrom(req.Context()) != nil {
			t.Error("upstream's handler has a task")
		}
	}), c, Options{Mount: func(next http.Handler) http.Handler {
		return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			if routine.TaskFrom(req.Context()) == nil {
				t.Error("the read handler has no task")
			}
			next.ServeHTTP(w, req)
		})
	}})
	h.complete.Store(true)
	requireFast{t, h}.ServeHTTP(httptest.NewRecorder(), readBy("reader", "?watch=1"))
	if !passed {
		t.Error("the request was not passed on")
	}
}

// TestWithRoutine_PanicAfterTaskIsSet_RunsTask: the resources of a started watch are released if a
// filter panics afterwards.
func TestWithRoutine_PanicAfterTaskIsSet_RunsTask(t *testing.T) {
	c, _ := chainConfig()
	ran := false
	h := fastChain(c, nil)
	h.fast = withRoutine(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
		routine.TaskFrom(req.Context()).Func = func() { ran = true }
		panic(http.ErrAbortHandler)
	}))
	defer func() {
		if p := recover(); p != http.ErrAbortHandler || !ran {
			t.Errorf("panic %v, the task ran: %v", p, ran)
		}
	}()
	h.ServeHTTP(httptest.NewRecorder(), readBy("reader", "?watch=1"))
}
