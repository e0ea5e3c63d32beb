package handlerchain

import (
	"net/http"
	"runtime/debug"

	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/server/routine"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	"k8s.io/klog/v2"
)

// withRoutine calls handler for a watch on a goroutine of its own, which ends when handler returns.
// If handler left a task (routine.Task), the calling goroutine then runs it. So the filters and the
// start of a watch do not grow the stack that an idle watch keeps. If handler panics, the panic
// continues on the calling goroutine, after the task: as if handler had served the watch itself.
//
// Upstream's filter of the gate APIServingWithRoutine does the same, but a panic loses its stack
// trace and the task, and filters that end with the watch, as audit does, end with its start.
func withRoutine(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		if info, ok := request.RequestInfoFrom(ctx); !ok || info.Verb != "watch" {
			handler.ServeHTTP(w, req)
			return
		}
		task := &routine.Task{}
		if p := <-start(handler, w, req.WithContext(routine.WithTask(ctx, task))); p != nil {
			defer panic(p)
		}
		if task.Func != nil {
			task.Func()
		}
	})
}

// start calls handler on a new goroutine. The result receives the value of its panic, or nil.
func start(handler http.Handler, w http.ResponseWriter, req *http.Request) <-chan any {
	panicked := make(chan any, 1)
	go func() {
		defer func() {
			p := recover()
			if p != nil && p != http.ErrAbortHandler {
				klog.ErrorS(nil, "Observed a panic", "panic", p, "stacktrace", string(debug.Stack()))
			}
			panicked <- p
		}()
		handler.ServeHTTP(w, req)
	}()
	return panicked
}

// onCaller leaves handler as the task of withRoutine. handler then ends with the watch, although
// the filters before it have returned.
func onCaller(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		task := routine.TaskFrom(req.Context())
		if task == nil {
			handler.ServeHTTP(w, req)
			return
		}
		task.Func = func() { handler.ServeHTTP(w, req) }
	})
}

// withoutTask hides the task from upstream's handlers, to which a watch is passed on. They would
// make a task of the watch before its initial events are sent, and so release its seat.
func withoutTask(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if ctx := req.Context(); routine.TaskFrom(ctx) != nil {
			req = req.WithContext(routine.WithTask(ctx, nil))
		}
		handler.ServeHTTP(w, req)
	})
}

// flowControl is priority and fairness for a chain with withRoutine: a watch is registered until
// its task ends. Its seat ends before the task begins, because a watch sends its initial events
// before it becomes a task.
type flowControl struct{ utilflowcontrol.Interface }

// RegisterWatch implements utilflowcontrol.Interface.
func (f flowControl) RegisterWatch(req *http.Request) utilflowcontrol.ForgetWatchFunc {
	forget, task := f.Interface.RegisterWatch(req), routine.TaskFrom(req.Context())
	if forget == nil || task == nil {
		return forget
	}
	return func() {
		serve := task.Func
		if serve == nil {
			forget()
			return
		}
		task.Func = func() {
			defer forget()
			serve()
		}
	}
}
