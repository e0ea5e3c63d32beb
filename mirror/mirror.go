package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/internal/btree"
)

// Mirror is a copy of one key range of one etcd cluster. All methods may be called
// concurrently.
type Mirror struct {
	opts  Options
	clock *clock
	reads revisionReads
	stats counters

	// compacted is the highest revision that etcd is known to be compacted to.
	compacted atomic.Int64

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex // held briefly; nothing is called under it
		resources  map[string]*Resource
		commands   []func() // for the writer, in order
	}
	kick    chan struct{} // there are commands
	restart chan restart  // the feed must not be followed any further
	vigil   vigil
	cluster atomic.Uint64 // that is mirrored, 0 before the first list

	progressDue  chan struct{} // progress is to be asked for now
	wantProgress atomic.Int64  // callers of WantProgress

	// excluded is what no list needs to keep. Written by the writer.
	excluded atomic.Pointer[[]string]
	lists    atomic.Int64 // times the whole prefix was listed and installed
	loading  atomic.Bool  // the whole prefix is being loaded
	since    atomic.Int64 // history before it is not what clients may have been told

	replaying chan struct{} // holds a place for each resource whose history is being read

	// Writer's own.
	byPrefix map[string]*Resource
	touched  []*txn

	weighs     bool // versions are being weighed
	weighAgain time.Time

	doubted       *Resource // the last one that contradicted the feed, since the last list
	doubtedAt     time.Time
	contradiction error // the whole feed contradicts what is held
}

// New returns a mirror and starts it: it lists the prefix, follows it, and lists
// anew whenever it has to, until Close.
func New(opts Options) (*Mirror, error) {
	if !strings.HasSuffix(opts.Prefix, "/") {
		return nil, fmt.Errorf("mirror: prefix %q does not end with a slash", opts.Prefix)
	}
	if opts.Source == nil {
		return nil, errors.New("mirror: no source")
	}
	opts.setDefaults()
	m := &Mirror{opts: opts, clock: newClock(), kick: make(chan struct{}, 1), restart: make(chan restart, 1),
		progressDue: make(chan struct{}, 1), replaying: make(chan struct{}, 1), byPrefix: map[string]*Resource{}}
	m.vigil.silent = make(chan int64, 1)
	m.excluded.Store(&[]string{})
	m.mu.resources = map[string]*Resource{}
	m.ctx, m.cancel = context.WithCancel(context.Background())
	// The root holds every key that nobody has claimed.
	root := &Resource{m: m, prefix: opts.Prefix, loading: true}
	m.mu.resources[root.prefix] = root
	m.byPrefix[root.prefix] = root
	m.loading.Store(true)
	m.wg.Go(func() { m.run(m.ctx) })
	if !opts.EventsOnly && !opts.EveryRevision {
		m.wg.Go(func() { (&asker{m: m}).run(m.ctx) })
	}
	if !opts.EventsOnly && opts.FeedPatience > 0 {
		m.wg.Go(func() { m.watchdog(m.ctx) })
	}
	return m, nil
}

// Close ends the mirror and returns when its goroutines are gone. Snapshots stay
// readable; waits end with an error.
func (m *Mirror) Close() {
	m.cancel()
	m.closeReads()
	m.wg.Wait()
}

// Cluster returns the ID of the etcd cluster that is mirrored, 0 before the first list.
func (m *Mirror) Cluster() uint64 { return m.cluster.Load() }

// ChecksArrival reports whether each write is checked on arrival to follow what is held. It is
// false once the source has delivered a key whose Version is 0: the store does not count writes
// (kine), so that only Resource.Check finds a lost one.
func (m *Mirror) ChecksArrival() bool { return !m.stats.uncounted.Load() }

// Done returns a channel that is closed when the mirror is closed.
func (m *Mirror) Done() <-chan struct{} { return m.ctx.Done() }

// Claim returns the resource with the prefix, which must end with a slash and lie
// inside the mirror's. Claims are counted: each needs its Release. A resource that
// is claimed while the mirror runs takes what is already held for it, history
// included, and asks etcd only for values that were not kept.
func (m *Mirror) Claim(prefix string) (*Resource, error) { return m.claim(prefix, false) }

// Exclude claims the prefix for nobody: its keys are not kept and its events are
// dropped unread until somebody claims it after the last Release. The resource
// never becomes ready.
func (m *Mirror) Exclude(prefix string) (*Resource, error) { return m.claim(prefix, true) }

func (m *Mirror) claim(prefix string, exclude bool) (*Resource, error) {
	if !strings.HasPrefix(prefix, m.opts.Prefix) || !strings.HasSuffix(prefix, "/") || prefix == m.opts.Prefix {
		return nil, fmt.Errorf("mirror: prefix %q is not below %q or does not end with a slash", prefix, m.opts.Prefix)
	}
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.ctx.Err() != nil {
		return nil, ErrClosed
	}
	r := m.mu.resources[prefix]
	if r == nil {
		r = &Resource{m: m, prefix: prefix, loading: true}
		m.mu.resources[prefix] = r
	}
	if r.refs > 0 && r.exclude != exclude {
		return nil, fmt.Errorf("mirror: prefix %q cannot be both claimed and excluded", prefix)
	}
	r.refs++
	if r.refs == 1 {
		r.exclude = exclude
		m.doLocked(func() { m.adopt(r, exclude) })
	}
	return r, nil
}

// Release ends a claim. With the last one the resource's history is dropped, and
// its values count against Options.UnclaimedBytes until somebody claims it again.
func (r *Resource) Release() {
	r.m.mu.Lock()
	defer r.m.mu.Unlock()
	if r.refs == 0 {
		panic("mirror: Release of " + r.prefix + ", which nobody has claimed")
	}
	r.refs--
	if r.refs == 0 {
		r.m.doLocked(func() { r.m.abandon(r) })
	}
}

// do has the writer call f between two batches.
func (m *Mirror) do(f func()) {
	m.mu.Lock()
	defer m.mu.Unlock()
	m.doLocked(f)
}

func (m *Mirror) doLocked(f func()) {
	m.mu.commands = append(m.mu.commands, f)
	select {
	case m.kick <- struct{}{}:
	default:
	}
}

// obey runs the commands that are due.
func (m *Mirror) obey() {
	m.mu.Lock()
	commands := m.mu.commands
	m.mu.commands = nil
	m.mu.Unlock()
	for _, f := range commands {
		f()
	}
}

// run is the writer.
func (m *Mirror) run(ctx context.Context) {
	defer func() {
		for _, r := range m.byPrefix {
			if lin := r.cur.Load(); lin != nil {
				lin.log.Abandon()
			}
			r.changed.wake()
		}
	}()
	why := errStart
	for backoff := retryFirst; ctx.Err() == nil; backoff = min(2*backoff, retryLast) {
		m.loading.Store(true)
		began, lists := time.Now(), m.lists.Load()
		err := m.session(ctx, why)
		if ctx.Err() != nil {
			return
		}
		if m.lists.Load() != lists {
			why = err // it was loaded, and has to be loaded again because of this
		}
		m.stats.relists.Add(1)
		m.opts.Logger.Warn("mirror lists anew", "prefix", m.opts.Prefix, "error", err)
		if time.Since(began) > retryLast {
			backoff = retryFirst
		}
		m.pause(ctx, backoff)
	}
}

// errStart is the reason for the first list.
var errStart = errors.New("start")

// Restoring reports whether the whole prefix is being listed, and its history restored:
// what cannot be read now probably can soon.
func (m *Mirror) Restoring() bool { return m.loading.Load() }

// LoadProgress returns how many keys and changes were read so far, of all lists and of all history, and how often the whole
// prefix had to be relisted or could not be listed. Cost is a few loads.
func (m *Mirror) LoadProgress() (received, failed int64) {
	return m.stats.listedKeys.Load() + m.stats.replayedRecords.Load(), m.stats.relists.Load()
}

const (
	retryFirst = 50 * time.Millisecond
	retryLast  = 5 * time.Second
)

// pause obeys commands for the time given.
func (m *Mirror) pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-m.kick:
			m.obey()
		case <-timer.C:
			return
		}
	}
}

// session loads the whole prefix and follows it until it has to be loaded again, and
// returns why. It is told why it was begun.
func (m *Mirror) session(ctx context.Context, why error) error {
	loads := make(chan *load, 1)
	m.wg.Go(func() { loads <- m.loadAll(ctx, why) })
	var l *load
	for l == nil {
		select {
		case l = <-loads:
		case <-m.kick:
			m.obey()
		}
	}
	if l.err != nil {
		for _, r := range m.byPrefix {
			if r.owned && !r.excluded {
				r.counts.loadFailures.Add(1)
			}
		}
		return l.err
	}
	m.installAll(l)
	m.loading.Store(false)
	l = nil
	for backoff := retryFirst; ; backoff = min(2*backoff, retryLast) {
		before := m.clock.rev.Load()
		err := m.follow(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case errors.Is(err, ErrDiverged):
			m.distrust()
			return err
		case errors.Is(err, ErrCompacted), errors.Is(err, ErrRestored):
			return err
		}
		m.stats.reconnects.Add(1)
		m.opts.Logger.Warn("feed lost, resuming", "prefix", m.opts.Prefix, "revision", m.clock.rev.Load(), "error", err)
		if m.clock.rev.Load() > before {
			backoff = retryFirst
		}
		m.pause(ctx, backoff)
	}
}

// distrust makes every resource unreadable until all is listed anew: the feed has
// contradicted its own order, so what was served as complete may not have been.
func (m *Mirror) distrust() {
	m.stats.divergences.Add(1)
	for _, r := range m.byPrefix {
		if !r.excluded {
			m.drop(r)
			r.await()
			r.loading = true
		}
	}
}

// keeps reports whether the value of a new entry is kept: always if somebody
// claimed the resource, else within Options.UnclaimedBytes.
func (r *Resource) keeps(bytes int64) bool {
	if r.owned {
		return true
	}
	for _, o := range r.m.byPrefix {
		if !o.owned {
			bytes += o.bytes
		}
	}
	return bytes <= r.m.opts.UnclaimedBytes
}

// route returns the resource with the longest prefix of key. The root's prefix
// is a prefix of every key of the feed.
func (m *Mirror) route(key string) *Resource {
	for end := len(key); end > len(m.opts.Prefix); {
		end = strings.LastIndexByte(key[:end], '/')
		if r := m.byPrefix[key[:end+1]]; r != nil {
			return r
		}
	}
	return m.byPrefix[m.opts.Prefix]
}

// restart tells the writer that it follows an etcd which is no more.
type restart struct {
	lists int64 // the value of Mirror.lists that this is about
	err   error
}

// follow applies the feed until it breaks.
func (m *Mirror) follow(ctx context.Context) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	batches := make(chan Batch)
	ended := make(chan error, 1)
	after := Header{ClusterID: m.cluster.Load(), Revision: m.clock.rev.Load()}
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	number := m.vigil.feeds.Add(1)
	wg.Go(func() {
		ended <- m.opts.Source.Watch(ctx, m.opts.Prefix, after, m.vigil.watched(func(b Batch) error {
			select {
			case batches <- b:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		}))
	})
	trim := time.NewTicker(markInterval)
	defer trim.Stop()
	for {
		select {
		case b := <-batches:
			if err := m.apply(b); err != nil {
				return err
			}
		case <-m.kick:
			m.obey()
		case <-trim.C:
			m.age(time.Now())
			m.countUnclaimed()
		case err := <-ended:
			return err
		case n := <-m.vigil.silent:
			if n == number {
				m.stats.silentFeeds.Add(1)
				cancel(ErrFeedSilent)
				return ErrFeedSilent
			}
		case r := <-m.restart:
			if r.lists == m.lists.Load() {
				return r.err
			}
		}
		m.applyCompaction()
	}
}

// txn is what one batch does to one resource.
type txn struct {
	r      *Resource
	lin    *lineage
	edit   *btree.Edit[*Entry]
	events []*Event
	old    []*Leaf // with something that readers kept

	arrived int64 // see Event
}

// apply commits a batch: it builds every touched resource's next version
// privately, appends to the logs, publishes the versions and moves the clock last.
// An error leaves the clock where it was.
func (m *Mirror) apply(b Batch) error {
	now := m.clock.rev.Load()
	if m.opts.EventsOnly {
		if len(b.Changes) == 0 {
			return nil
		}
		b.Through = b.Changes[len(b.Changes)-1].ModRevision
	}
	if len(b.Changes) == 0 && b.Through < now {
		return fmt.Errorf("%w: etcd is at %d, was at %d", ErrRestored, b.Through, now)
	}
	m.touched = m.touched[:0]
	last, arrived := now, Now()
	for i := range b.Changes {
		c := &b.Changes[i]
		if c.ModRevision <= now || c.ModRevision < last || c.ModRevision > b.Through {
			// Progress has overtaken an event (etcd#15220), or an event came twice.
			return fmt.Errorf("%w: event of %d at %q after %d", ErrDiverged, c.ModRevision, c.Key, max(last, now))
		}
		last = c.ModRevision
		r := m.route(string(c.Key))
		switch {
		case r.excluded:
			m.stats.dropped.Add(1)
		case r.loading:
			r.pending = append(r.pending, *c)
			r.counts.received.Add(1)
		default:
			t := m.txn(r, arrived)
			if err := t.change(c); err != nil {
				// Only this resource is in doubt; the others go on.
				m.touched = slices.DeleteFunc(m.touched, func(o *txn) bool { return o == t })
				m.diverged(r, err)
				// What the batch did to it before goes with it: the list may be of the
				// clock as it still stands.
				for j := range b.Changes[:i+1] {
					if m.route(string(b.Changes[j].Key)) == r {
						r.pending = append(r.pending, b.Changes[j])
						r.counts.received.Add(1)
					}
				}
			}
		}
	}
	m.commit(b.Through, len(b.Changes) == 0)
	return m.contradiction
}

// txn returns what the batch in hand does to r.
func (m *Mirror) txn(r *Resource, arrived int64) *txn {
	for _, t := range m.touched {
		if t.r == r {
			return t
		}
	}
	lin := r.cur.Load()
	t := &txn{r: r, lin: lin, edit: lin.head.Load().tree.Edit(), arrived: arrived}
	m.touched = append(m.touched, t)
	return t
}

// commit publishes what the batch in hand did, and moves the clock to through.
func (m *Mirror) commit(through Revision, progress bool) {
	for _, t := range m.touched {
		t.commit()
	}
	if through > m.clock.rev.Load() {
		m.clock.publish(through, progress)
	}
	var took time.Duration
	if len(m.touched) > 0 {
		took = time.Duration(Now() - m.touched[0].arrived)
	}
	for _, t := range m.touched {
		t.lin.head.Load().prev.Store(nil)
		t.r.changed.publish(t.r, t.lin, t.events)
		m.stats.events.Add(int64(len(t.events)))
		t.r.counts.publish(len(t.events), took)
		m.remember(t.r, through, t.events)
		t.retire()
	}
	clear(m.touched)
	m.touched = m.touched[:0]
}

// retire lets go of what readers have kept on replaced entries and leaves: history would keep
// it, of which there is much, for readers of whom there are few.
func (t *txn) retire() {
	for _, ev := range t.events {
		if ev.Prev != nil {
			ev.Prev.retire(ev.Entry == nil)
		}
	}
	for _, leaf := range t.old {
		if m := leaf.Memo.Swap(nil); m != nil {
			if r, ok := (*m).(Retirer); ok {
				r.Retired()
			}
		}
	}
}

// change adds what the feed has told of; see add.
func (t *txn) change(c *Change) error {
	key := string(c.Key)
	if c.Deleted {
		return t.add(key, c.ModRevision, nil)
	}
	return t.add(key, c.ModRevision, newEntry(&c.KV, t.r.keeps(int64(len(c.Key)+len(c.Value)))))
}

// add checks a change against what is held and adds it (D1 of the design: etcd's
// Version is the held one plus 1, and 1 exactly when the key is not held; a store that does not
// count leaves it 0). The entry is nil for a deletion.
func (t *txn) add(key string, rev Revision, e *Entry) error {
	prev, held := t.edit.Get(key)
	switch {
	case e == nil && !held:
		return fmt.Errorf("%w: deletion of %q at %d, which is not held", ErrDiverged, key, rev)
	case e == nil:
		t.edit.Delete(key)
	case e.version != 0 && (held && (e.version != prev.version+1 || e.create != prev.create) || !held && e.version != 1):
		return fmt.Errorf("%w: write %d of %q at %d does not follow what is held", ErrDiverged, e.version, key, rev)
	default:
		if e.version == 0 {
			t.r.m.stats.uncounted.Store(true)
		}
		t.edit.Set(e)
		t.count(e, 1)
	}
	if held {
		t.count(prev, -1)
		if !prev.hasValue() {
			t.r.missing++ // it lives on in the event
		}
	}
	t.events = append(t.events, &Event{Rev: rev, Entry: e, Prev: prev, Arrived: t.arrived})
	return nil
}

func (t *txn) count(e *Entry, sign int) {
	if e.hasValue() {
		t.r.bytes += int64(sign) * e.Size()
	} else {
		t.r.missing += sign
	}
}

// commit publishes the log and the version; the clock follows.
func (t *txn) commit() {
	prev := t.lin.head.Load()
	t.old = t.edit.Replaced()
	t.lin.log.Append(t.events...)
	v := &version{rev: t.events[len(t.events)-1].Rev, tree: t.edit.Tree(), seq: t.lin.log.End()}
	v.prev.Store(prev)
	t.lin.head.Store(v)
	if t.lin.private {
		return // show makes up for it if the past is to be read
	}
	if t.r.sinceCheckpoint += len(t.events); t.r.sinceCheckpoint >= t.r.m.opts.CheckpointEvents {
		t.r.sinceCheckpoint = 0
		t.lin.checkpoint(v, t.r.m.opts.CheckpointEvents)
	}
}

// commitUnpublished is commit for a lineage that no reader has seen: the versions do not lead to
// one another (version.prev), so that those that are dropped later are free.
func (t *txn) commitUnpublished() {
	t.commit()
	t.lin.head.Load().prev.Store(nil)
}
