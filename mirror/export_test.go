package mirror

import (
	"runtime"
	"sync"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// CheckInvariants is true with the build tag strata_invariants.
const CheckInvariants = checkInvariants

// ErrDiverged is errDiverged.
var ErrDiverged = errDiverged

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

// HoldBeforePublication stops the writer, until release is called, as if it had stored a head of
// the resource and not yet published its revision.
func (r *Resource) HoldBeforePublication() (release func()) {
	held, gate := make(chan struct{}), make(chan struct{})
	r.m.registry.enqueue(func(w *writer) {
		lin := r.lineage.Load()
		head := lin.head.Load()
		lin.head.Store(&version{rev: w.published.Revision() + 1, tree: head.tree, seq: head.seq})
		close(held)
		<-gate
		lin.head.Store(head)
	})
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

// CompressAll compresses all values of the claimed resources, and returns the number of times that
// a value was compressed since the mirror was created. The test has made dictionaries that fit the
// values.
func (m *Mirror) CompressAll() int64 {
	c := newCompressor(m.shared, compression{})
	for range 2 { // the first pass clears marks of reads
		for more := true; more; {
			var err error
			if more, err = c.round(m.ctx); err != nil {
				return 0
			}
		}
	}
	return m.stats.CompressedValues.Load()
}

// CompressMeanwhile compresses values of the claimed resources, a batch of each, calls meanwhile,
// and installs the compressed values. It returns the number of values that it has compressed.
func (m *Mirror) CompressMeanwhile(meanwhile func()) (n int) {
	c := newCompressor(m.shared, compression{})
	var batches []*compressedBatch
	for range 2 { // the first pass clears marks of reads
		for _, r := range m.registry.claimed() {
			if x := c.ofResource(r); x != nil {
				b := &compressedBatch{compressing: x}
				c.superseded(b)
				c.unreadEntries(b)
				batches = append(batches, b)
			}
		}
	}
	meanwhile()
	for _, b := range batches {
		if c.command(m.ctx, func(w *writer) { w.installCompressed(b) }) != nil {
			return 0
		}
		n += len(b.values)
	}
	return n
}

// CompressValues is the number of values in a full batch of the compressor.
const CompressValues = compressValues

// Compressed reports whether the value is compressed.
func (e *Entry) Compressed() bool { return e.isCompressed() }

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

// NewEvent returns the event of a change, without the previous entry unless that is its key.
func NewEvent(c driver.Change) *Event {
	e := newEntry(&c.KV, true)
	if c.Deleted {
		return &Event{Rev: c.ModRevision, Prev: e}
	}
	return &Event{Rev: c.ModRevision, Entry: e}
}
