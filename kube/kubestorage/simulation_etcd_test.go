package kubestorage_test

import (
	"context"
	"errors"
	"fmt"
	"sync"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// simEtcd is a simulated etcd cluster: a store that all members share, and what was written to it
// since the start of the simulation.
type simEtcd struct {
	*memory.Store

	kv        *podtest.KV // of all servers, whose transactions it orders
	compacted mirror.Revision
	lineages  []lineage // before the last restore
	base      mirror.Revision
}

// lineage is the history of the cluster between two restores from a backup. Revisions of different
// lineages differ: a restore raises the revision, as etcd's documentation recommends.
type lineage struct {
	base, last, compacted mirror.Revision
	changes               []driver.Change // with those that made the state at base
}

func newSimEtcd() *simEtcd {
	store := memory.New()
	return &simEtcd{Store: store, kv: podtest.NewKV(store, nil), base: 1}
}

// lineage returns that of now.
func (e *simEtcd) lineage() lineage {
	return lineage{base: e.base, last: e.Revision(), compacted: e.compacted, changes: e.Changes("", 0)}
}

// compact compacts the cluster at rev.
func (e *simEtcd) compact(rev mirror.Revision) {
	if rev > e.compacted && rev <= e.Revision() {
		e.compacted = rev
		e.Store.Compact(rev)
	}
}

// restore replaces the state by that at an earlier revision, with a raised revision.
func (e *simEtcd) restore(at mirror.Revision) {
	keys := map[string]string{}
	if _, err := e.Store.List(context.Background(), "", at, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			keys[string(kv.Key)] = string(kv.Value)
		}
		return nil
	}); err != nil {
		return // compacted
	}
	e.lineages = append(e.lineages, e.lineage())
	e.base = (e.Revision()/1000 + 1) * 1000
	e.compacted = e.base
	e.Store.Restore(e.base, keys)
	e.Store.Compact(e.base)
}

// client returns a client of the cluster. It serves what upstream's store and the engine use.
func (e *simEtcd) client() *kubernetes.Client {
	c := &kubernetes.Client{Client: clientv3.NewCtxClient(context.Background())}
	c.KV = e.kv
	c.Kubernetes = c
	return c
}

// member is the member of the cluster that one server reads from. By itself it does nothing: the
// simulation decides which revisions its watch delivers and reports as progress, and when a list
// and a read of the revision are answered.
type member struct {
	*simEtcd

	mu sync.Mutex // guards the fields below
	// calm: step answers everything at once.
	calm    bool
	stream  *simStream // nil without a watch
	waiting []*simCall // lists and reads of the revision, oldest first
	asked   int        // requests for progress that are not answered
	failing bool       // lists and reads of the revision fail
}

// simStream is a watch of a member.
type simStream struct {
	cluster  uint64
	prefix   string
	sent     mirror.Revision // the changes up to here were delivered
	reported mirror.Revision // the highest revision that was reported
	feed     chan driver.Batch
	ended    chan error
}

// simCall is a request that waits for its answer.
type simCall struct {
	execute func() error
	answer  chan error
}

// call executes a request when the simulation decides so.
func (m *member) call(ctx context.Context, execute func() error) error {
	c := &simCall{execute: execute, answer: make(chan error, 1)}
	m.mu.Lock()
	m.waiting = append(m.waiting, c)
	m.mu.Unlock()
	select {
	case err := <-c.answer:
		return err
	case <-ctx.Done():
		m.mu.Lock()
		defer m.mu.Unlock()
		for i, other := range m.waiting {
			if other == c {
				m.waiting = append(m.waiting[:i:i], m.waiting[i+1:]...)
				break
			}
		}
		return ctx.Err()
	}
}

// List implements driver.Source. Its pages arrive after it was executed.
func (m *member) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	var header driver.Header
	var listed [][]driver.KV
	if err := m.call(ctx, func() (err error) {
		header, err = m.Store.List(ctx, prefix, at, func(kvs []driver.KV) error {
			listed = append(listed, append([]driver.KV(nil), kvs...))
			return nil
		})
		return err
	}); err != nil {
		return header, err
	}
	for _, kvs := range listed {
		if err := page(kvs); err != nil {
			return header, err
		}
	}
	return header, ctx.Err()
}

// ReadRevision implements driver.Source.
func (m *member) ReadRevision(ctx context.Context) (header driver.Header, err error) {
	err = m.call(ctx, func() (err error) {
		header, err = m.Store.ReadRevision(ctx)
		return err
	})
	return header, err
}

// RequestProgress implements driver.Source.
func (m *member) RequestProgress(context.Context) error {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.asked++
	return nil
}

// Watch implements driver.Source.
func (m *member) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	now, err := m.Store.ReadRevision(ctx)
	if err != nil {
		return err
	}
	if after.ReplacedBy(now) {
		return fmt.Errorf("%w: simulated", mirror.ErrRestored)
	}
	st := &simStream{cluster: now.ClusterID, prefix: prefix, sent: after.Revision, reported: after.Revision, feed: make(chan driver.Batch), ended: make(chan error, 1)}
	m.mu.Lock()
	m.stream, m.asked = st, 0
	m.mu.Unlock()
	defer func() {
		m.mu.Lock()
		defer m.mu.Unlock()
		if m.stream == st {
			m.stream = nil
		}
	}()
	for {
		select {
		case b := <-st.feed:
			if err := deliver(b); err != nil {
				return err
			}
		case err := <-st.ended:
			return err
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// current returns the running watch, nil if there is none. A watch that needs compacted revisions,
// or that is of another cluster, ends.
func (m *member) current() *simStream {
	m.mu.Lock()
	defer m.mu.Unlock()
	st := m.stream
	if st == nil {
		return nil
	}
	now, _ := m.Store.ReadRevision(context.Background())
	var err error
	switch {
	case st.cluster != now.ClusterID:
		err = memory.ErrBroken
	case len(m.due(st)) > 0 && st.sent+1 < m.compacted:
		err = fmt.Errorf("%w: simulated watch at %d", mirror.ErrCompacted, st.sent+1)
	default:
		return st
	}
	m.stream = nil
	st.ended <- err
	return nil
}

func (m *member) due(st *simStream) []driver.Change { return m.Changes(st.prefix, st.sent) }

// deliver makes the watch deliver the changes of at most n revisions in one batch. It reports
// whether there were any.
func (m *member) deliver(n int) bool {
	st := m.current()
	if st == nil {
		return false
	}
	var b driver.Batch
	for _, c := range m.due(st) {
		if c.ModRevision != st.sent {
			if n--; n < 0 {
				break
			}
		}
		st.sent = c.ModRevision
		b.Changes = append(b.Changes, c)
	}
	if len(b.Changes) == 0 {
		return false
	}
	st.reported = max(st.reported, st.sent)
	b.Through = st.reported
	st.feed <- b
	return true
}

// progress answers requests for progress, as far behind as lag revisions. It reports whether there
// was a request.
func (m *member) progress(lag mirror.Revision) bool {
	st := m.current()
	if st == nil {
		return false
	}
	m.mu.Lock()
	asked := m.asked
	m.asked = 0
	m.mu.Unlock()
	rev := m.Revision()
	if due := m.due(st); len(due) > 0 {
		rev = due[0].ModRevision - 1
	}
	if rev = max(rev-lag, st.reported); asked == 0 {
		return false
	}
	st.reported = rev
	st.feed <- driver.Batch{Through: rev}
	return true
}

var errNoLeader = errors.New("etcdserver: no leader")

// answer executes and answers the n-th waiting request. It reports whether there was one.
func (m *member) answer(n int) bool {
	m.mu.Lock()
	if len(m.waiting) == 0 {
		m.mu.Unlock()
		return false
	}
	n %= len(m.waiting)
	c := m.waiting[n]
	m.waiting = append(m.waiting[:n:n], m.waiting[n+1:]...)
	failing := m.failing
	m.mu.Unlock()
	if failing {
		c.answer <- errNoLeader
	} else {
		c.answer <- c.execute()
	}
	return true
}

// cut ends the watch, as a lost connection does.
func (m *member) cut() {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.stream != nil {
		m.stream.ended <- memory.ErrBroken
		m.stream = nil
	}
}
