package kubestorage

import (
	"context"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"

	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// ItemEncoder appends an object to dst as it stands among the items of a list, and
// whatever separates or delimits it there. The object belongs to the encoder.
type ItemEncoder func(dst []byte, obj apiruntime.Object) ([]byte, error)

// Representation is one way to encode the objects of a store. Of each entry it keeps
// one thing, its item: the object as it stands in a list, from which single objects
// and watch events are assembled too. An item is made once and found by every later
// reader, of whatever revision; it is a part of a block that the items of a leaf
// share, so that most of a list is a few spans of memory. The bytes of all
// representations of an engine have one budget; what does not fit is encoded at each
// use. Safe for concurrent use.
type Representation struct {
	store  *Store
	encode ItemEncoder
	budget *budget
	slot   *mirror.Slot // items, of entries and of events after them
	gone   *mirror.Slot // items of what events have deleted
	events eventCache

	mu        sync.Mutex // leaf; guards what follows
	building  map[*mirror.Leaf]chan struct{}
	deflating map[*mirror.Leaf]*deflating
}

// NewRepresentation returns a representation of the store's objects. Close it when it
// is of no more use.
func (s *Store) NewRepresentation(encode ItemEncoder) *Representation {
	return &Representation{
		store:     s,
		encode:    encode,
		budget:    s.cluster.budget,
		slot:      &mirror.Slot{},
		gone:      &mirror.Slot{},
		building:  map[*mirror.Leaf]chan struct{}{},
		deflating: map[*mirror.Leaf]*deflating{},
	}
}

// Close lets go of what is kept, as its entries are written to or go.
func (p *Representation) Close() {
	p.events.end()
	p.slot.Close()
	p.gone.Close()
}

// Representation returns the store's representation of the name, which must be
// comparable. It is made with the encoder when it is first asked for, and closed with the store.
func (s *Store) Representation(name any, encode ItemEncoder) *Representation {
	if p, ok := s.representations.Load(name); ok {
		return p.(*Representation)
	}
	p, _ := s.representations.LoadOrStore(name, s.NewRepresentation(encode))
	return p.(*Representation)
}

// item is what is kept on an entry: a part of a block.
type item struct {
	block    *block
	from, to uint32
}

// load returns the item's bytes, nil if they are gone.
func (i *item) load(now uint32) []byte {
	if k := i.block.load(now); k != nil {
		return k.data[i.from:i.to]
	}
	return nil
}

// Retired implements mirror.Retirer: the entry was replaced.
func (i *item) Retired() { i.block.unref() }

// Item returns the entry's object as it stands in a list. The bytes are shared: do
// not write to them. Cost is a few loads if they are kept, else decoding and encoding
// the object. Errors are those of decoding it, and of the encoder.
func (p *Representation) Item(ctx context.Context, e *mirror.Entry) ([]byte, error) {
	old, _ := e.Memo(p.slot).(*item)
	if old != nil {
		if data := old.load(p.budget.now()); data != nil {
			return data, nil
		}
	}
	data, err := p.appendItem(ctx, nil, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	data = slices.Clip(data)
	if k := p.budget.add(payload{data: data}, int64(cap(data))); k != nil {
		p.keep(e, old, &item{k, 0, uint32(len(data))})
		k.unref()
	}
	return data, nil
}

// keep makes the entry refer to a part of a block, unless another reader has been faster.
func (p *Representation) keep(e *mirror.Entry, old, it *item) {
	it.block.ref()
	if old == nil && e.SwapMemo(p.slot, nil, it) {
		return
	}
	if old != nil && e.SwapMemo(p.slot, old, it) {
		old.block.unref()
		return
	}
	it.block.unref()
}

func (p *Representation) appendItem(ctx context.Context, dst []byte, e *mirror.Entry, rev mirror.Revision) ([]byte, error) {
	obj, err := p.store.view.decode(ctx, e, rev)
	if err != nil {
		return dst, err
	}
	return p.encode(dst, obj)
}

// run is what is kept on a leaf: where the items of all its entries lie.
type run struct {
	slot  *mirror.Slot
	bytes int64  // of all items
	parts []part // none if there was no room for all items
	// deflated is the run compressed, once somebody has asked for that.
	deflated atomic.Pointer[block]
}

// part is a span of neighbouring items.
type part struct {
	block    *block
	from, to uint32
}

// runs are the runs of a leaf in several representations; immutable.
type runs []*run

func (r runs) find(s *mirror.Slot) *run {
	for _, run := range r {
		if run.slot == s {
			return run
		}
	}
	return nil
}

// Retired implements mirror.Retirer: the leaf is no longer part of the newest version.
func (r runs) Retired() {
	for _, run := range r {
		if k := run.deflated.Swap(nil); k != nil {
			k.unref()
		}
	}
}

func leafRuns(l *mirror.Leaf) runs {
	if m := l.Memo.Load(); m != nil {
		return (*m).(runs)
	}
	return nil
}

// setRun keeps r on the leaf in place of an older one of its representation.
func setRun(l *mirror.Leaf, r *run) {
	for {
		cur := l.Memo.Load()
		var old runs
		if cur != nil {
			old = (*cur).(runs)
		}
		next := make(runs, 0, len(old)+1)
		var replaced *run
		for _, o := range old {
			if o.slot == r.slot {
				replaced = o
			} else if !o.slot.Closed() {
				next = append(next, o)
			}
		}
		var m any = append(next, r)
		if l.Memo.CompareAndSwap(cur, &m) {
			if replaced != nil {
				if k := replaced.deflated.Swap(nil); k != nil {
					k.unref()
				}
			}
			return
		}
	}
}

// load appends the bytes of the run to spans, and reports whether all are there.
func (r *run) load(spans [][]byte, now uint32) ([][]byte, bool) {
	if len(r.parts) == 0 {
		return spans, false // only its size is known
	}
	n := len(spans)
	for i := range r.parts {
		p := &r.parts[i]
		k := p.block.load(now)
		if k == nil {
			return spans[:n], false
		}
		spans = append(spans, k.data[p.from:p.to])
	}
	return spans, true
}

const (
	// blockBytes is how many bytes of items share a block, but for single larger items.
	blockBytes = 64 << 10
	// partBytes is what a run's parts have on average at least; with smaller ones the
	// leaf is put together anew.
	partBytes = 8 << 10
)

// Size returns the bytes of the items of a run if they are known, which they are
// once the run has been read. Cost is a few loads for a whole leaf.
func (p *Representation) Size(r mirror.Run) (int64, bool) {
	if r.Whole() {
		if kept := leafRuns(r.Leaf).find(p.slot); kept != nil {
			return kept.bytes, true
		}
		return 0, false
	}
	var n int64
	for _, e := range r.Items() {
		it, ok := e.Memo(p.slot).(*item)
		if !ok {
			return 0, false
		}
		n += int64(it.to - it.from)
	}
	return n, true
}

// AppendRun appends the items of a run to spans, which are in key order and shared:
// do not write to them. Cost is a few loads for a whole leaf that was read before.
// Errors are those of Item.
func (p *Representation) AppendRun(ctx context.Context, spans [][]byte, r mirror.Run) ([][]byte, error) {
	if !r.Whole() {
		for _, e := range r.Items() {
			data, err := p.Item(ctx, e)
			if err != nil {
				return spans, err
			}
			spans = append(spans, data)
		}
		return spans, nil
	}
	for {
		if kept := leafRuns(r.Leaf).find(p.slot); kept != nil {
			if spans, ok := kept.load(spans, p.budget.now()); ok {
				return spans, nil
			}
		}
		// One reader puts the leaf together, the others wait for it, and try again in
		// case there was no room to keep what it made.
		built, mine := p.claim(r.Leaf)
		if mine {
			spans, err := p.build(ctx, spans, r.Leaf)
			p.done(r.Leaf)
			return spans, err
		}
		select {
		case <-built:
		case <-ctx.Done():
			return spans, ctx.Err()
		}
	}
}

// claim reports whether the caller is to build the leaf; otherwise the channel is
// closed when somebody else has.
func (p *Representation) claim(l *mirror.Leaf) (built <-chan struct{}, mine bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if ch, ok := p.building[l]; ok {
		return ch, false
	}
	p.building[l] = make(chan struct{})
	return nil, true
}

func (p *Representation) done(l *mirror.Leaf) {
	p.mu.Lock()
	defer p.mu.Unlock()
	close(p.building[l])
	delete(p.building, l)
}

// scratch are buffers to encode into before the size of a block is known.
var scratch = sync.Pool{New: func() any { b := make([]byte, 0, 2*blockBytes); return &b }}

// build makes the missing items of a leaf, keeps what there is room for, and appends
// all items to spans.
func (p *Representation) build(ctx context.Context, spans [][]byte, l *mirror.Leaf) ([][]byte, error) {
	b := builder{p: p, entries: l.Items()}
	now := p.budget.now()
	b.items = make([]builtItem, len(b.entries))
	missing := 0
	for i, e := range b.entries {
		it, _ := e.Memo(p.slot).(*item)
		b.items[i].old = it
		if it != nil {
			b.items[i].data = it.load(now)
		}
		if b.items[i].data == nil {
			missing++
		}
	}
	if err := b.encode(ctx, func(i int) bool { return b.items[i].data == nil }); err != nil {
		return spans, err
	}
	kept := &run{slot: p.slot}
	b.parts(kept)
	if len(kept.parts) > 8 && kept.bytes/int64(len(kept.parts)) < partBytes {
		if err := b.encode(ctx, func(int) bool { return true }); err != nil {
			return spans, err
		}
		kept = &run{slot: p.slot}
		b.parts(kept)
	}
	setRun(l, kept)
	if loaded, ok := kept.load(spans, now); ok {
		return loaded, nil
	}
	for i := range b.items {
		spans = append(spans, b.items[i].data)
	}
	return spans, nil
}

// builder puts the items of one leaf into blocks.
type builder struct {
	p       *Representation
	entries []*mirror.Entry
	items   []builtItem
}

type builtItem struct {
	old  *item  // what was kept on the entry
	part part   // where the item lies, if it is kept
	data []byte // the item
}

// encode puts the chosen items into new blocks: those that exist are copied, the
// others made.
func (b *builder) encode(ctx context.Context, chosen func(i int) bool) error {
	buf := scratch.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= 16*blockBytes {
			scratch.Put(buf)
		}
	}()
	dst := (*buf)[:0]
	var in []int    // the items in dst
	var at []uint32 // where they end
	flush := func() {
		data := slices.Clone(dst)
		data = slices.Clip(data)
		k := b.p.budget.add(payload{data: data}, int64(len(data)))
		from := uint32(0)
		for n, i := range in {
			it := &b.items[i]
			it.data = data[from:at[n]:at[n]]
			if k != nil {
				kept := &item{k, from, at[n]}
				b.p.keep(b.entries[i], it.old, kept)
				it.old, it.part = kept, part{k, from, at[n]}
			}
			from = at[n]
		}
		if k != nil {
			k.unref()
		}
		dst, in, at = dst[:0], in[:0], at[:0]
	}
	for i, e := range b.entries {
		if !chosen(i) {
			continue
		}
		if data := b.items[i].data; data != nil {
			dst = append(dst, data...)
		} else {
			var err error
			if dst, err = b.p.appendItem(ctx, dst, e, e.ModRevision()); err != nil {
				return err
			}
		}
		in, at = append(in, i), append(at, uint32(len(dst)))
		if len(dst) >= blockBytes {
			flush()
		}
	}
	if len(in) > 0 {
		flush()
	}
	*buf = dst
	return nil
}

// parts describes the leaf in r: its size, and where it lies if all of it is kept.
func (b *builder) parts(r *run) {
	kept := true
	for i := range b.items {
		it := &b.items[i]
		r.bytes += int64(len(it.data))
		if it.part.block == nil && it.old != nil {
			it.part = part{it.old.block, it.old.from, it.old.to}
		}
		switch n := len(r.parts); {
		case it.part.block == nil:
			kept = false
		case n > 0 && r.parts[n-1].block == it.part.block && r.parts[n-1].to == it.part.from:
			r.parts[n-1].to = it.part.to
		default:
			r.parts = append(r.parts, it.part)
		}
	}
	if !kept {
		r.parts = nil
	}
}

// encoders bounds how many readers' helpers decode and encode at the same time.
var encoders = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))

// Prepare makes what is missing of the items of all runs, on several processors, and
// returns their size in bytes. Afterwards the runs can be written without an error,
// unless they exceed the budget. Errors are those of Item.
func (p *Representation) Prepare(ctx context.Context, all func(yield func(mirror.Run) bool)) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var total atomic.Int64
	var wg sync.WaitGroup
	prepare := func(r mirror.Run) {
		spans, err := p.AppendRun(ctx, nil, r)
		if err != nil {
			cancel(err)
			return
		}
		var n int64
		for _, s := range spans {
			n += int64(len(s))
		}
		total.Add(n)
	}
	var work chan mirror.Run // to helpers, once there is something to be made
	for r := range all {
		if ctx.Err() != nil {
			break
		}
		if n, ok := p.Size(r); ok {
			total.Add(n)
			continue
		}
		if work == nil {
			work = make(chan mirror.Run)
			for range cap(encoders) - 1 {
				wg.Go(func() {
					for r := range work {
						encoders <- struct{}{}
						prepare(r)
						<-encoders
					}
				})
			}
		}
		select {
		case work <- r:
		default:
			prepare(r)
		}
	}
	if work != nil {
		close(work)
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return total.Load(), nil
}

// eventItem is kept on an event: an item that is made by whoever asks first; the
// others wait for that. A failure is forgotten, so that a later caller tries again.
type eventItem struct {
	data atomic.Pointer[[]byte]
	mu   sync.Mutex // held by who makes it
}

func (i *eventItem) get(made func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	if data := i.data.Load(); data != nil {
		return *data, nil
	}
	i.mu.Lock()
	defer i.mu.Unlock()
	if data := i.data.Load(); data != nil {
		return *data, nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), decodeTimeout)
	defer cancel()
	data, err := made(ctx)
	if err != nil {
		return nil, err
	}
	i.data.Store(&data)
	return data, nil
}

// Current returns the item of the object after the event, made once for all
// watchers and kept while the event is among the newest. The bytes are shared: do not
// write to them. Errors are those of Item.
func (p *Representation) Current(ev *mirror.Event) ([]byte, error) {
	return p.eventItem(p.slot, ev, ev.Entry).get(func(ctx context.Context) ([]byte, error) {
		if !p.store.view.selective.Load() {
			return p.Item(ctx, ev.Entry)
		}
		// Selectors look at the object too: it is decoded once for all of them.
		obj, err := p.store.view.added(ev)
		if err != nil {
			return nil, err
		}
		if shared, ok := obj.(*sharedObject); ok {
			obj = shared.GetObject()
		}
		data, err := p.encode(nil, obj)
		return slices.Clip(data), err
	})
}

// Deleted returns the item of the object before the event with the revision of the
// event, as a DELETED carries it. Otherwise it is like Current.
func (p *Representation) Deleted(ev *mirror.Event) ([]byte, error) {
	return p.eventItem(p.gone, ev, ev.Prev).get(func(ctx context.Context) ([]byte, error) {
		data, err := p.appendItem(ctx, nil, ev.Prev, ev.Rev)
		return slices.Clip(data), err
	})
}

func (p *Representation) eventItem(slot *mirror.Slot, ev *mirror.Event, e *mirror.Entry) *eventItem {
	for {
		if i, ok := ev.Memo(slot).(*eventItem); ok {
			return i
		}
		i := &eventItem{}
		if ev.SwapMemo(slot, nil, i) {
			p.events.add(cachedEvent{slot: slot, ev: ev, kept: i, bytes: e.Size() + 256})
			return i
		}
	}
}
