package mirror

import (
	"runtime"
	"sync"
	"time"
)

// CheckInvariants is true with the build tag strata_invariants.
const CheckInvariants = checkInvariants

// Check runs the invariant check on the writer and returns its error. It is also a barrier: all
// earlier commands have been executed.
func (m *Mirror) Check() error {
	done := make(chan error, 1)
	m.registry.enqueue(func(w *writer) { done <- w.check() })
	select {
	case err := <-done:
		return err
	case <-m.ctx.Done():
		return ErrClosed
	}
}

// HoldWriter stops the writer between two batches until release is called.
func (m *Mirror) HoldWriter() (release func()) {
	held, gate := make(chan struct{}), make(chan struct{})
	m.registry.enqueue(func(*writer) { close(held); <-gate })
	<-held
	return sync.OnceFunc(func() { close(gate) })
}

// Weigh weighs the past versions now, and returns when that is done.
func (m *Mirror) Weigh() {
	for {
		begun := make(chan bool)
		m.registry.enqueue(func(w *writer) {
			busy := w.measuring
			if !busy {
				w.weighAgain = time.Time{}
				w.weigh(time.Now())
			}
			begun <- !busy && !w.measuring // no versions to weigh
		})
		if <-begun {
			return
		}
		runtime.Gosched()
	}
}

// ReadyChanged returns a channel that is closed when the resource changes.
func (r *Resource) ReadyChanged() <-chan struct{} { return r.changed.next() }

// Versions returns the number of retained past versions.
func (r *Resource) Versions() int { return r.lineage.Load().versions() }

// ForgetPast drops the versions cached for readers.
func (r *Resource) ForgetPast() { r.lineage.Load().dropCached(func(*version) bool { return true }) }

// Pending returns the number of changes that wait for the resource's list.
func (m *Mirror) Pending(r *Resource) int {
	n := make(chan int)
	m.registry.enqueue(func(w *writer) { n <- len(w.tables[r.prefix].pending) })
	return <-n
}

// Topics returns the number of topics of keys and directories.
func Topics(r *Resource) (n int) {
	c := &r.changed
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, ts := range c.keys {
		n += len(ts.byName)
	}
	return n + int(c.subscribed.Load())
}

// Sorted returns the number of topics in the watch index.
func (p *WatchIndex) Sorted() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cur == nil {
		return 0
	}
	p.cur.mu.Lock()
	defer p.cur.mu.Unlock()
	return len(p.cur.byName)
}

// Known returns the number of resources of the registry, or of the writer's tables if that is
// larger.
func (m *Mirror) Known() int {
	n := make(chan int)
	m.registry.enqueue(func(w *writer) { n <- len(w.tables) })
	routed := <-n
	m.registry.mu.Lock()
	defer m.registry.mu.Unlock()
	return max(len(m.registry.resources), routed)
}
