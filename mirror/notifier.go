package mirror

import "sync"

// notifier wakes all goroutines that wait for the next change.
type notifier struct {
	mu sync.Mutex // leaf
	ch chan struct{}
}

// next returns a channel that is closed at the next change. Call it before checking for changes, or
// a change may be missed.
func (n *notifier) next() <-chan struct{} {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch == nil {
		n.ch = make(chan struct{})
	}
	return n.ch
}

func (n *notifier) wake() {
	n.mu.Lock()
	defer n.mu.Unlock()
	if n.ch != nil {
		close(n.ch)
		n.ch = nil
	}
}
