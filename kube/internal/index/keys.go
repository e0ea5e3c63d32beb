package index

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"k8s.io/apimachinery/pkg/fields"
	operators "k8s.io/apimachinery/pkg/selection"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

const (
	// maxKeyed is the number of entries of a value up to which a list takes them from the keys:
	// beyond, digests cost little beside the objects.
	maxKeyed = maxKnown
	// maxBehind is the number of due events up to which a list follows them, and maxAhead the
	// number of events that the keys may be ahead of a snapshot. An event costs a microsecond or
	// two: its values are searched for, or its object is compared with the selector.
	maxBehind = 256
	maxAhead  = 64
	// keysPace is how long the keys let events arrive before they follow them, so that a write does
	// not cost a wake-up. Lists follow the events in between.
	keysPace = 10 * time.Millisecond
	// keysPatience is how long a list waits for another one that follows events, and buildPatience
	// for a build, which costs no more than the digests that the list would make. Guesses.
	keysPatience  = 10 * time.Millisecond
	buildPatience = time.Second
	// keysRetry is the pause after a failure.
	keysRetry = 10 * time.Second
	// maxUnknown bounds the objects without a known value, which are candidates of every list.
	maxUnknown = 64
	// keysSample is the number of objects from which the field with the most values is chosen.
	keysSample = 256
)

// Errors that end keys. After errStale they are built again at once, after others later.
var (
	errStale       = errors.New("the resource was relisted, or the keys that decrypt its values were replaced")
	errUndecodable = errors.New("too many objects cannot be decoded")
	errNoRoom      = errors.New("the budget has no room")
	// errBehind ends nothing: a list cannot use the keys now.
	errBehind = errors.New("too many events are due")
)

// keys are the entries of the newest version of a resource by the values of one field. One
// goroutine builds them and follows the log; lists follow the last events themselves. The entries
// of a snapshot that is some events older or newer are found with the events in between, so neither
// waits for the other. Safe for concurrent use.
type keys struct {
	of       *Selections
	field    string
	declared bool          // they stay without readers, and lists wait for a build
	used     atomic.Int64  // time of the last list, in nanoseconds since Selections.start
	wake     chan struct{} // interrupts a pause of the goroutine

	// following, of capacity 1, is taken by the list or the goroutine that follows events or
	// replaces the keys; before mu. It may be held while objects are decoded.
	following chan struct{}
	// Written with both held, read with either.
	index  *Index // how values are read, with their generation; nil while there are no keys
	cursor mirror.Cursor

	mu  sync.RWMutex // leaf but for the locks of the block cache
	set keySet       // by the hashes of values
	// shared has the hashes that entries of different values have, or had.
	shared  map[uint32]bool
	unknown keySet        // with the hash 0: objects that cannot be decoded
	built   chan struct{} // closed when a build has ended; nil if none is due
	failed  error         // ends the keys; the goroutine has not seen it yet
	charged int64         // bytes in the budget
}

// keyed are the keys of a resource by field. The zero value is empty.
type keyed struct {
	published atomic.Pointer[map[string]*keys] // is replaced, never written again
	mu        sync.Mutex                       // leaf; held by writers
}

func (t *keyed) load() map[string]*keys {
	if m := t.published.Load(); m != nil {
		return *m
	}
	return nil
}

// change publishes a copy of the keys that f has changed.
func (t *keyed) changeLocked(f func(map[string]*keys)) {
	next := maps.Clone(t.load())
	if next == nil {
		next = map[string]*keys{}
	}
	f(next)
	t.published.Store(&next)
}

// keep begins keys of a field, unless there are some.
func (s *Selections) keep(field string, declared bool) {
	s.keyed.mu.Lock()
	defer s.keyed.mu.Unlock()
	if s.keyed.load()[field] != nil {
		return
	}
	k := &keys{of: s, field: field, declared: declared, wake: make(chan struct{}, 1), following: make(chan struct{}, 1), built: make(chan struct{})}
	k.used.Store(int64(time.Since(s.start)))
	if s.cfg.Start(k.run) {
		s.keyed.changeLocked(func(m map[string]*keys) { m[field] = k })
	}
}

// keepOne begins keys of one of the fields of a list that was not the first to use their indexes:
// of that with the most values among some objects.
func (s *Selections) keepOne(ctx context.Context, gen *objects.Generation, snap mirror.Snapshot, names []string) {
	all := s.keyed.load()
	names = slices.DeleteFunc(names, func(name string) bool { return all[name] != nil })
	switch len(names) {
	case 0:
	case 1:
		s.keep(names[0], false)
	default:
		s.keep(slices.MaxFunc(names, func(a, b string) int {
			return cmp.Compare(s.distinct(ctx, gen, snap, a), s.distinct(ctx, gen, snap, b))
		}), false)
	}
}

// distinct returns the number of values of a field among some objects, one of each of some leaves.
func (s *Selections) distinct(ctx context.Context, gen *objects.Generation, snap mirror.Snapshot, field string) int {
	x := fieldIndex(field)
	x.useValues(gen)
	r := s.hashes(ctx, x)
	defer r.end()
	n, _ := snap.Count("", "")
	values, every, i := map[uint32]bool{}, n/(btreeLeaf*keysSample)+1, 0
	for run := range snap.Runs("", "") {
		if i++; i%every == 0 {
			if hash, ok := r.hash(run.Items()[0]); ok {
				values[hash] = true
			}
		}
	}
	return len(values)
}

// btreeLeaf is about the number of entries of a leaf.
const btreeLeaf = 48

// run builds the keys and follows the log, until the storage has ended or the keys had no readers
// for indexIdle.
func (k *keys) run() {
	ctx := k.of.cfg.Context
	defer func() {
		k.release(nil)
		k.of.keyed.mu.Lock()
		defer k.of.keyed.mu.Unlock()
		k.of.keyed.changeLocked(func(m map[string]*keys) { delete(m, k.field) })
	}()
	for k.of.cfg.Resource.WaitReady(ctx) == nil && !k.ended() {
		err := k.build(ctx)
		for err == nil && !k.ended() {
			err = k.follow(ctx)
		}
		k.release(err)
		if err != nil && !errors.Is(err, errStale) {
			k.of.cfg.Logger.Debug("Failed to keep keys of a field; using digests", "prefix", k.of.cfg.Resource.Prefix(), "field", k.field, "err", err)
			k.pause(ctx, keysRetry)
		}
	}
}

// ended reports whether the storage has ended, or the keys have no readers any more.
func (k *keys) ended() bool {
	s := k.of
	return s.cfg.Context.Err() != nil || !k.declared && time.Since(s.start)-time.Duration(k.used.Load()) >= indexIdle
}

// pause waits for d, for a call of interrupt, or for the end of ctx.
func (k *keys) pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-k.wake:
	case <-ctx.Done():
	}
}

func (k *keys) interrupt() {
	select {
	case k.wake <- struct{}{}:
	default:
	}
}

// lock takes following; false if ctx has ended.
func (k *keys) lock(ctx context.Context) bool {
	select {
	case k.following <- struct{}{}:
		return true
	case <-ctx.Done():
		return false
	}
}

func (k *keys) unlock() { <-k.following }

// release drops the keys for a reason; nil: they end. If they are built again at once, lists wait
// for that.
func (k *keys) release(why error) {
	k.lock(context.Background())
	defer k.unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.dropLocked()
	k.failed = nil
	if k.dueLocked(why); !errors.Is(why, errStale) {
		k.builtLocked()
	}
}

// dueLocked lets lists wait if the keys are built again at once.
func (k *keys) dueLocked(why error) {
	if errors.Is(why, errStale) && k.built == nil {
		k.built = make(chan struct{})
	}
}

func (k *keys) dropLocked() {
	k.index, k.set, k.unknown, k.shared, k.cursor = nil, keySet{}, keySet{}, nil, mirror.Cursor{}
	k.chargeLocked()
}

// builtLocked lets lists go on that wait for a build.
func (k *keys) builtLocked() {
	if k.built != nil {
		close(k.built)
		k.built = nil
	}
}

// chargeLocked counts the bytes of the keys in the budget.
func (k *keys) chargeLocked() {
	bytes := k.set.bytes() + k.unknown.bytes()
	if bytes == k.charged {
		return
	}
	indexes := int64(0)
	switch {
	case k.charged == 0:
		indexes = 1
	case bytes == 0:
		indexes = -1
	}
	k.of.cfg.Blocks.Charge(bytes - k.charged)
	k.of.cfg.Measured(indexes, bytes-k.charged)
	k.charged = bytes
}

// fits reports whether there is room for bytes of keys, of which some are charged, as Index.fits
// does.
func (k *keys) fits(bytes, charged int64) bool {
	limit := k.of.cfg.Blocks.Stats().Limit
	return bytes <= limit/indexShare && k.of.cfg.Blocks.Charged()-charged+bytes <= limit/4*3
}

// build makes the keys of the newest version. It costs a search in each stored value, as the
// digests of all leaves do.
func (k *keys) build(ctx context.Context) error {
	s := k.of
	snap, err := s.cfg.Resource.Latest()
	if err != nil {
		return errStale
	}
	n, _ := snap.Count("", "")
	if !k.fits(int64(n)*chunkBytes/builtKeys, 0) {
		s.cfg.Refused()
		return errNoRoom
	}
	x := fieldIndex(k.field)
	x.useValues(s.cfg.View.CurrentGeneration())
	known, unknown := make([]hashed, 0, n), []hashed(nil)
	values, shared := map[uint32]string{}, map[uint32]bool{}
	for run := range snap.Runs("", "") {
		r := s.hashes(ctx, x)
		for _, e := range run.Items() {
			hash, ok := r.hash(e)
			if !ok {
				unknown = append(unknown, hashed{0, e})
				continue
			}
			known = append(known, hashed{hash, e})
			if value, ok := values[hash]; !ok {
				values[hash] = string(r.text)
			} else if value != string(r.text) {
				shared[hash] = true
			}
		}
		if r.end(); len(unknown) > maxUnknown || ctx.Err() != nil {
			return errUndecodable
		}
	}
	set := buildKeys(known)
	if !k.lock(ctx) {
		return ctx.Err()
	}
	defer k.unlock()
	k.mu.Lock()
	defer k.mu.Unlock()
	k.index, k.set, k.unknown, k.shared, k.cursor = x, set, buildKeys(unknown), shared, *snap.Cursor("", "")
	k.chargeLocked()
	k.builtLocked()
	return nil
}

// follow follows the due events, and returns when there may be others.
func (k *keys) follow(ctx context.Context) error {
	if !k.lock(ctx) {
		return nil
	}
	var changed <-chan struct{}
	if k.index != nil {
		changed = k.cursor.Changed()
	}
	err := k.advance(ctx, 0)
	k.unlock()
	if err != nil {
		return err
	}
	timer := time.NewTimer(indexIdle) // to end without readers
	defer timer.Stop()
	select {
	case <-changed:
		k.pause(ctx, keysPace)
	case <-k.wake:
	case <-timer.C:
	case <-ctx.Done():
	}
	return nil
}

// move is an event with the hashes of its values.
type move struct {
	ev              *mirror.Event
	before, now     uint32
	wasKnown, known bool
	same            bool // both are known, and are one value
	shares          bool // another value has the hash now
}

// advance follows the events that are due: all, or with most none if there are that many. The
// caller holds following. Errors: errBehind; after others the keys are not used until they are
// built again.
func (k *keys) advance(ctx context.Context, most int) (err error) {
	defer func() {
		if err != nil && !errors.Is(err, errBehind) {
			k.mu.Lock()
			defer k.mu.Unlock()
			k.dropLocked()
			k.failed = err
			k.dueLocked(err)
			k.interrupt()
		}
	}()
	if k.index == nil {
		k.mu.Lock()
		defer k.mu.Unlock()
		return cmp.Or(k.failed, errBehind)
	}
	if k.index.gen.Ended() {
		return errStale
	}
	next := k.cursor
	var events []*mirror.Event
	for had := -1; len(events)-had >= maxBehind || had < 0; {
		had = len(events)
		if most > 0 && had >= most {
			return errBehind
		}
		if events, err = next.Next(events, maxBehind); err != nil || !next.SameLineage(&k.cursor) {
			return errStale
		}
	}
	moves := k.moves(ctx, events)
	if ctx.Err() != nil {
		return errBehind // values may be unknown for this reason only
	}
	k.mu.Lock()
	applied := k.applyLocked(moves)
	k.cursor = next
	k.chargeLocked()
	charged := k.charged
	k.mu.Unlock()
	switch {
	case !applied:
		return errUndecodable
	case len(moves) > 0 && !k.fits(charged, charged):
		k.of.cfg.Refused()
		return errNoRoom
	}
	return nil
}

// moves reads the values of events.
func (k *keys) moves(ctx context.Context, events []*mirror.Event) []move {
	if len(events) == 0 {
		return nil
	}
	r := k.of.hashes(ctx, k.index)
	defer r.end()
	moves, values := make([]move, len(events)), map[uint32]string{} // of moved entries
	var before []byte
	for i, ev := range events {
		m := &moves[i]
		m.ev = ev
		if ev.Prev != nil {
			m.before, m.wasKnown = r.hash(ev.Prev)
			before = append(before[:0], r.text...)
		}
		if ev.Entry == nil {
			continue
		}
		m.now, m.known = r.hash(ev.Entry)
		if m.same = m.wasKnown && m.known && bytes.Equal(before, r.text); m.known && !m.same {
			m.shares = k.shares(r, m.now, values)
		}
	}
	return moves
}

// shares reports whether entries of the hash have another value than that which was just read.
// values has the values of the hashes before. The caller holds following.
func (k *keys) shares(r *hashReader, hash uint32, values map[uint32]string) bool {
	value, ok := values[hash]
	if !ok {
		value = string(r.text)
		for e := range k.set.of(hash, "", "") {
			if _, ok := r.hash(e); !ok || string(r.text) != value {
				return true
			}
			break
		}
		values[hash] = value
		return false
	}
	return value != string(r.text)
}

// applyLocked applies events. It reports false if an entry was not found, because its value was
// known before and is not any more, or if too many values are unknown.
func (k *keys) applyLocked(moves []move) bool {
	for i := range moves {
		m := &moves[i]
		prev, e := m.ev.Prev, m.ev.Entry
		stays := m.same && k.unknown.n == 0 // set replaces the entry
		if prev != nil && !stays && !(m.wasKnown && k.set.remove(m.before, prev.Key())) && !k.unknown.remove(0, prev.Key()) {
			return false
		}
		switch {
		case e == nil:
		case m.known:
			k.set.set(hashed{m.now, e})
			if m.shares {
				k.shared[m.now] = true
			}
		default:
			k.unknown.set(hashed{0, e})
		}
	}
	return k.unknown.n <= maxUnknown
}

// found are the candidates that keys have found in a range of a snapshot, in key order.
type found struct {
	field   string
	entries []*mirror.Entry
	exact   bool // all of them are known to be selected
}

// find finds the candidates of a selector in the snapshot with start <= key < end, at most
// maxKeyed, with the keys of the field that leave the fewest; nil if there are none that can be
// used.
func (s *Selections) find(ctx context.Context, sel *objects.Selector, snap mirror.Snapshot, start, end string) (best *found) {
	all, field := s.keyed.load(), sel.Predicate.Field
	if len(all) == 0 || field == nil || field.Empty() {
		return nil
	}
	for _, r := range field.Requirements() {
		k := all[r.Field]
		if k == nil || !demandsOne(&r) {
			continue
		}
		w := wanted{gen: sel.Generation, value: r.Value, hash: hashOf(r.Value), start: start, end: end, most: maxKeyed}
		if best != nil {
			w.most = len(best.entries)
		}
		if entries, exact, ok := k.find(ctx, snap, &w); ok {
			best = &found{r.Field, entries, exact}
		}
	}
	if best != nil && !single(sel) {
		best.exact = false
	}
	return best
}

// single reports whether a selector has one requirement on a field, and no other.
func single(sel *objects.Selector) bool {
	pred := &sel.Predicate
	return sel.Shard == nil && !sel.NeedsObject && (pred.Label == nil || pred.Label.Empty()) && len(pred.Field.Requirements()) == 1
}

// demandsOne reports whether the requirement demands one value.
func demandsOne(r *fields.Requirement) bool {
	return r.Operator == operators.Equals || r.Operator == operators.DoubleEquals
}

// in returns the candidates with start <= key < end; an empty end means no upper bound.
func (f *found) in(start, end string) []*mirror.Entry {
	from, _ := slices.BinarySearchFunc(f.entries, start, compareKey)
	to := len(f.entries)
	if end != "" {
		to, _ = slices.BinarySearchFunc(f.entries, end, compareKey)
	}
	return f.entries[from:max(from, to)]
}

func compareKey(e *mirror.Entry, key string) int { return strings.Compare(e.Key(), key) }

// wanted is what a list wants of keys.
type wanted struct {
	gen        *objects.Generation // of its selector
	value      string
	hash       uint32
	start, end string
	most       int // entries
}

// find returns the entries of a snapshot that have the wanted value, in key order; unless exact,
// there may be others among them. It reports false if they are more than wanted, or if the keys
// cannot be used. It follows the due events, if they are few. It waits for a list that does so, and
// for a build of declared keys, within bounds.
func (k *keys) find(ctx context.Context, snap mirror.Snapshot, w *wanted) (entries []*mirror.Entry, exact, ok bool) {
	k.used.Store(int64(time.Since(k.of.start)))
	a := k.at(snap, w)
	if a.built != nil && k.declared {
		if !k.waitBuilt(ctx, a.built) {
			return nil, false, false
		}
		a = k.at(snap, w)
	}
	if errors.Is(a.err, errBehind) && k.catchUp(ctx) {
		a = k.at(snap, w)
	}
	if a.err != nil {
		return nil, false, false
	}
	if a.oneValue && len(a.entries) > 0 {
		r := k.of.hashes(ctx, a.index)
		_, read := r.hash(a.entries[0])
		exact = read && string(r.text) == w.value
		r.end()
	}
	return a.entries, exact, true
}

// waitBuilt waits for a build.
func (k *keys) waitBuilt(ctx context.Context, built chan struct{}) bool {
	timer := time.NewTimer(buildPatience)
	defer timer.Stop()
	select {
	case <-built:
		return true
	case <-timer.C:
	case <-ctx.Done():
	}
	return false
}

// catchUp follows the due events for a list, if they are few.
func (k *keys) catchUp(ctx context.Context) bool {
	select {
	case k.following <- struct{}{}:
	default:
		waiting, cancel := context.WithTimeout(ctx, keysPatience)
		defer cancel()
		if !k.lock(waiting) {
			return false
		}
	}
	defer k.unlock()
	return k.advance(ctx, maxBehind) == nil
}

// errOther: the keys have too many entries of the value, or none of its generation.
var errOther = errors.New("digests are used")

// answer is an answer of keys to a list. Its error is errBehind if they have not reached the
// snapshot, or are too far ahead of it.
type answer struct {
	err      error
	entries  []*mirror.Entry
	oneValue bool          // all entries have one value, which may be another one with the hash
	index    *Index        // of the keys
	built    chan struct{} // closed when a build has ended; nil if there is none
}

// at returns the wanted entries of a snapshot without following events.
func (k *keys) at(snap mirror.Snapshot, w *wanted) answer {
	k.mu.RLock()
	defer k.mu.RUnlock()
	if k.index == nil {
		return answer{err: errOther, built: k.built}
	}
	since, ok := k.cursor.Since(snap, nil, maxAhead)
	switch {
	case !ok:
		return answer{err: errBehind}
	case k.index.gen != w.gen:
		return answer{err: errOther}
	}
	var entries []*mirror.Entry
	add := func(e *mirror.Entry) bool {
		if e.ModRevision() <= snap.Rev { // the snapshot has a newer entry's predecessor, see below
			entries = append(entries, e)
		}
		return len(entries) <= w.most
	}
	k.set.of(w.hash, w.start, w.end)(add)
	sorted := len(entries)
	k.unknown.of(0, w.start, w.end)(add)
	for _, ev := range since {
		if e := ev.Prev; e != nil && e.Key() >= w.start && (w.end == "" || e.Key() < w.end) {
			add(e)
		}
	}
	if len(entries) > w.most {
		return answer{err: errOther}
	}
	if len(entries) > sorted {
		slices.SortFunc(entries, func(a, b *mirror.Entry) int { return strings.Compare(a.Key(), b.Key()) })
	}
	return answer{entries: entries, index: k.index, oneValue: len(entries) == sorted && !k.shared[w.hash]}
}

// hashReader hashes the values of entries.
type hashReader struct {
	reading
	plan Plan // whose context it reads with
	text []byte
}

// hashes returns a reader of the values that an index describes. The caller ends it.
func (s *Selections) hashes(ctx context.Context, x *Index) *hashReader {
	return &hashReader{reading: reading{index: x}, plan: Plan{ctx: ctx, read: func(int, int) {}}}
}

func (r *hashReader) end() { r.reading.end(&r.plan) }

// hash returns the hash of an entry's value; false if the object cannot be decoded.
func (r *hashReader) hash(e *mirror.Entry) (hash uint32, ok bool) {
	r.text, _, ok = r.value(&r.plan, e, r.text[:0])
	return hashOfBytes(r.text), ok
}
