package kubestorage

import (
	"k8s.io/apimachinery/pkg/watch"
)

// errorWatch is a watch that reports an error and ends.
func errorWatch(err error) watch.Interface {
	w := &staticWatch{events: make(chan watch.Event, 1)}
	w.events <- errorEvent(err)
	close(w.events)
	return w
}

// endedWatch is a watch that has ended and has nothing to report.
func endedWatch() watch.Interface {
	w := &staticWatch{events: make(chan watch.Event)}
	close(w.events)
	return w
}

type staticWatch struct{ events chan watch.Event }

func (w *staticWatch) ResultChan() <-chan watch.Event { return w.events }

func (w *staticWatch) Stop() {}

func errorEvent(err error) watch.Event {
	return watch.Event{Type: watch.Error, Object: ErrorStatus(err)}
}
