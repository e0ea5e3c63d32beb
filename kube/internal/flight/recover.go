package flight

import (
	"fmt"
	"runtime/debug"

	"k8s.io/klog/v2"
)

// RecoverPanic calls f and returns its error, or one for its panic, which is logged. A panic of the
// request's own goroutine is recovered by a filter; that of another goroutine would end the
// process.
func RecoverPanic(f func() error) (err error) {
	defer func() {
		if x := recover(); x != nil {
			klog.ErrorS(nil, "Observed a panic", "panic", x, "stacktrace", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", x)
		}
	}()
	return f()
}
