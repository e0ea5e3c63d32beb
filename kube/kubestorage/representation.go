package kubestorage

import (
	"bytes"
	"context"
	"fmt"
	"iter"
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"sync/atomic"

	apiruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/klog/v2"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// ItemEncoder appends an object to dst as it stands among the items of a list, and
// whatever separates or delimits it there. The object belongs to the encoder.
type ItemEncoder func(dst []byte, obj apiruntime.Object) ([]byte, error)

// Splicer appends an object's item to dst, made from what is stored of it without
// decoding that, or reports that it cannot. Whether the result is what the encoder
// makes of the object is for the representation to find out.
type Splicer func(dst, stored []byte, rev mirror.Revision) ([]byte, bool)

// Representation is one way to encode the objects of a store. Of each entry it keeps
// one thing, its item: the object as it stands in a list, from which single objects
// and watch events are assembled too. An item is made once and found by every later
// reader, of whatever revision; it is a part of a block that the items of a leaf
// share, so that most of a list is a few spans of memory. The bytes of all
// representations of an engine have one budget; what does not fit is encoded at each
// use, or spliced from what is stored if that is known to give the same. Safe for
// concurrent use.
type Representation struct {
	gen    *generation
	encode ItemEncoder
	splice Splicer // nil: never
	budget *budget
	slot   *mirror.Slot // items, of entries and of events after them
	gone   *mirror.Slot // items of what events have deleted
	events eventCache
	// varies: a leaf that was made anew came out in another size than before, as what a webhook
	// has converted may. Sums of sizes are not relied on any more.
	varies atomic.Bool

	mu        sync.Mutex // leaf; guards what follows
	building  map[*mirror.Leaf]chan struct{}
	deflating map[deflatingKey]*deflating
}

// NewRepresentation returns a representation of the store's objects; splice may be nil.
// Close it when it is of no more use.
func (s *Store) NewRepresentation(encode ItemEncoder, splice Splicer) *Representation {
	return s.view.now().newRepresentation(encode, splice)
}

func (g *generation) newRepresentation(encode ItemEncoder, splice Splicer) *Representation {
	return &Representation{
		splice:    splice,
		gen:       g,
		encode:    encode,
		budget:    g.view.budget,
		slot:      &mirror.Slot{},
		gone:      &mirror.Slot{},
		building:  map[*mirror.Leaf]chan struct{}{},
		deflating: map[deflatingKey]*deflating{},
	}
}

// Close lets go of what is kept, as its entries are written to or go.
func (p *Representation) Close() {
	p.events.end()
	p.slot.Close()
	p.gone.Close()
}

// Representation returns the store's representation of the name, which must be
// comparable. It is made with encode and splice when it is first asked for, and closed
// with the store.
func (s *Store) Representation(name any, encode ItemEncoder, splice Splicer) *Representation {
	g := s.view.now()
	if p, ok := g.representations.Load(name); ok {
		return p.(*Representation)
	}
	kept, _ := g.representations.LoadOrStore(name, g.newRepresentation(encode, splice))
	p := kept.(*Representation)
	if g.ended.Load() { // end may have come too early
		p.Close()
	}
	return p
}

// Fresh reports whether the values of the store are still decrypted with the keys with which
// those of the representation are. If not, Store.Representation returns its successor. Cost is
// a few loads.
func (p *Representation) Fresh() bool { return p.gen == p.gen.view.now() }

// item is what is kept on an entry: a part of a block, while there is room for it, and
// whether the item can be spliced when it is gone.
type item struct {
	block    *block // nil: there was no room
	from, to uint32
	splices  bool
}

// load returns the item's bytes, nil if they are gone.
func (i *item) load(now uint32) []byte {
	if i == nil || i.block == nil {
		return nil
	}
	if k := i.block.load(now); k != nil {
		return k.data[i.from:i.to]
	}
	return nil
}

// canSplice reports whether the item is known to splice.
func (i *item) canSplice() bool { return i != nil && i.splices }

// unref is called when the entry refers to the item no longer.
func (i *item) unref() {
	if i != nil && i.block != nil {
		i.block.unref()
	}
}

// Retired implements mirror.Retirer: the entry was replaced.
func (i *item) Retired() { i.unref() }

// Item returns the entry's object as it stands in a list. The bytes are shared: do
// not write to them. Cost is a few loads if they are kept, a copy if they can be
// spliced, else decoding and encoding the object. Errors are those of decoding it, and of the
// encoder.
func (p *Representation) Item(ctx context.Context, e *mirror.Entry) ([]byte, error) {
	var own []byte
	return p.ItemIn(ctx, e, &own)
}

// ItemIn is Item for a caller who is done with it soon: an item that is spliced is put
// into buf, which the caller uses again.
func (p *Representation) ItemIn(ctx context.Context, e *mirror.Entry, buf *[]byte) ([]byte, error) {
	old, _ := e.Memo(p.slot).(*item)
	if data := old.load(p.budget.now()); data != nil {
		return data, nil
	}
	if old.canSplice() {
		*buf = p.appendSpliced(slices.Grow((*buf)[:0], int(old.to-old.from)), e)
		return *buf, nil
	}
	data, err := p.appendItem(ctx, nil, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	if p.splices(e, data) {
		p.keep(e, old, &item{to: uint32(len(data)), splices: true})
		return data, nil
	}
	data = slices.Clip(data)
	if e.Foreign() {
		return data, nil
	}
	if k := p.budget.add(payload{data: data}, int64(cap(data)), p.slot); k != nil {
		p.keep(e, old, &item{block: k, to: uint32(len(data))})
		k.unref()
	}
	return data, nil
}

// keep makes the entry refer to a part of a block, unless another reader has been faster.
func (p *Representation) keep(e *mirror.Entry, old, it *item) {
	if it.block != nil {
		it.block.ref()
	}
	var before any // nil if nothing was kept
	if old != nil {
		before = old
	}
	if e.SwapMemo(p.slot, before, it) {
		old.unref()
	} else {
		it.unref()
	}
	if p.gen.ended.Load() {
		e.DropClosed() // dropClosed may have been here before
	}
}

// splices reports whether what is stored of the entry gives the item as it was encoded.
// It does not if the object is stored in another version, by a release that knew
// other fields or defaults, or encrypted.
func (p *Representation) splices(e *mirror.Entry, encoded []byte) bool {
	if p.splice == nil {
		return false
	}
	buf := scratch.Get().(*[]byte)
	defer scratch.Put(buf)
	data, ok := p.splice((*buf)[:0], e.Value(), e.ModRevision())
	*buf = data[:0]
	return ok && bytes.Equal(data, encoded)
}

// appendSpliced appends the item of an entry that is known to splice.
func (p *Representation) appendSpliced(dst []byte, e *mirror.Entry) []byte {
	dst, _ = p.splice(dst, e.Value(), e.ModRevision())
	return dst
}

func (p *Representation) appendItem(ctx context.Context, dst []byte, e *mirror.Entry, rev mirror.Revision) ([]byte, error) {
	obj, err := p.gen.decode(ctx, e, rev)
	if err != nil {
		return dst, err
	}
	return p.encode(dst, obj)
}

// run is what is kept on a leaf: where the items of all its entries lie.
type run struct {
	slot  *mirror.Slot
	bytes int64 // of all items
	// parts is where the items lie, and empty if there was no room for all of them.
	parts []part
	// deflated is the run compressed, by form, once a reader has asked for it.
	deflated [forms]atomic.Pointer[block]
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
		for i := range run.deflated {
			if k := run.deflated[i].Swap(nil); k != nil {
				k.unref()
			}
		}
	}
}

func leafRuns(l *mirror.Leaf) runs {
	if m := l.Memo.Load(); m != nil {
		return (*m).(runs)
	}
	return nil
}

// setRun keeps r on the leaf in place of an older one of the representation.
func (p *Representation) setRun(l *mirror.Leaf, r *run) {
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
				if replaced.bytes != r.bytes {
					p.varies.Store(true)
				}
				// The leaf's entries are the same, so what was compressed still holds.
				for i := range replaced.deflated {
					if k := replaced.deflated[i].Swap(nil); k != nil && !r.deflated[i].CompareAndSwap(nil, k) {
						k.unref()
					}
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

// Measure returns the bytes of the items with start <= key < end, an empty end meaning no upper
// bound, if all of them have been read before. Cost is O(log n) once it is known.
func (p *Representation) Measure(objects Objects, start, end string) (int64, bool) {
	if p.varies.Load() {
		return 0, false
	}
	return objects.Measure(start, end, p.slot, p.Size)
}

// largeRun is how many bytes of items one reader may hold while it waits for a client, twice
// or so: a leaf of objects of 1 MB has 64 MB of them.
const largeRun = 1 << 20

// Large reports whether the items of a run are too many bytes to be held together. They are to
// be made, and written, one by one.
func (p *Representation) Large(r mirror.Run) bool { return p.estimate(r) > largeRun }

// estimate is Size, or what is stored of a run that has not been read.
func (p *Representation) estimate(r mirror.Run) int64 {
	n, known := p.Size(r)
	if !known {
		n = 0
		for _, e := range r.Items() {
			n += e.Size()
		}
	}
	return n
}

// Spans are the bytes of items, in key order: most of them where they are kept, those
// that are not in a buffer. They are good until Reset. The zero value is empty.
type Spans struct {
	All [][]byte
	buf []byte
}

// Reset empties the spans, to be used again.
func (s *Spans) Reset() {
	clear(s.All)
	s.All, s.buf = s.All[:0], s.buf[:0]
}

// splice adds the spliced items of entries.
func (s *Spans) splice(p *Representation, entries []*mirror.Entry) {
	from := len(s.buf)
	for _, e := range entries {
		s.buf = p.appendSpliced(s.buf, e)
	}
	s.All = append(s.All, s.buf[from:])
}

// AppendRun adds the items of a run to spans. They are shared: do not write to them.
// Cost is a few loads for a whole leaf that was read before. Errors are those of Item.
func (p *Representation) AppendRun(ctx context.Context, spans *Spans, r mirror.Run) error {
	if !r.Whole() {
		for i, e := range r.Items() {
			it, _ := e.Memo(p.slot).(*item)
			if data := it.load(p.budget.now()); data != nil {
				spans.All = append(spans.All, data)
				continue
			}
			if it.canSplice() {
				spans.splice(p, r.Items()[i:i+1])
				continue
			}
			data, err := p.Item(ctx, e)
			if err != nil {
				return err
			}
			spans.All = append(spans.All, data)
		}
		return nil
	}
	for {
		if kept := leafRuns(r.Leaf).find(p.slot); kept != nil {
			var ok bool
			if spans.All, ok = kept.load(spans.All, p.budget.now()); ok {
				return nil
			}
		}
		// One reader puts the leaf together, the others wait for it, and try again in
		// case there was no room to keep what it made.
		built, mine := p.claim(r.Leaf)
		if mine {
			defer p.done(r.Leaf)
			return p.build(ctx, spans, r, true)
		}
		select {
		case <-built:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// AppendOnce is AppendRun for a run that no version of the resource has (Reading.FromEtcd). What
// is made of it is kept only if all of its entries are those of a version.
func (p *Representation) AppendOnce(ctx context.Context, spans *Spans, r mirror.Run) error {
	return p.build(ctx, spans, r, !slices.ContainsFunc(r.Items(), (*mirror.Entry).Foreign))
}

// MeasureOnce is Prepare for runs that no version has: it makes their items and returns their size
// in bytes.
func (p *Representation) MeasureOnce(ctx context.Context, all iter.Seq[mirror.Run]) (int64, error) {
	return p.prepare(ctx, all, false, p.AppendOnce)
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

// build makes the missing items of the leaf of a run, keeps what there is room for if it is to keep
// any, and adds all items to spans.
func (p *Representation) build(ctx context.Context, spans *Spans, r mirror.Run, keep bool) error {
	b, kept, err := p.buildLeaf(ctx, r, keep)
	if err != nil {
		return err
	}
	var ok bool
	if spans.All, ok = kept.load(spans.All, p.budget.now()); !ok {
		b.spans(spans)
	}
	return nil
}

// buildLeaf is build for a caller that wants the items one by one.
func (p *Representation) buildLeaf(ctx context.Context, r mirror.Run, keep bool) (*builder, *run, error) {
	l := r.Leaf
	b := &builder{p: p, keep: keep, entries: l.Items(), items: make([]builtItem, len(l.Items()))}
	now := p.budget.now()
	splices, missing := true, int64(0)
	for i, e := range b.entries {
		it, _ := e.Memo(p.slot).(*item)
		b.items[i].old = it
		if b.items[i].data = it.load(now); b.items[i].data != nil {
			continue
		}
		if splices = splices && it.canSplice(); splices {
			missing += int64(it.to - it.from)
		}
	}
	if splices && missing > 0 && !(keep && p.budget.room(missing)) {
		kept := b.run()
		p.setRun(l, kept)
		return b, kept, nil
	}
	err := b.encode(ctx, func(it *builtItem) bool { return it.data == nil })
	if err != nil {
		return nil, nil, err
	}
	kept := b.run()
	// The items of a leaf of a shard lie where the leaves of the resource's own tree have them.
	if n := len(kept.parts); !r.Selected && n > 8 && kept.bytes/int64(n) < partBytes {
		if err := b.encode(ctx, func(*builtItem) bool { return true }); err != nil {
			return nil, nil, err
		}
		kept = b.run()
	}
	p.setRun(l, kept)
	return b, kept, nil
}

// builder puts the items of one leaf into blocks.
type builder struct {
	p       *Representation
	keep    bool
	entries []*mirror.Entry
	items   []builtItem
}

type builtItem struct {
	splices bool
	old     *item  // what is kept on the entry
	data    []byte // the item, unless it can be spliced and there was no room to keep it
}

// spans adds the items one by one, and those that can only be spliced together with
// their neighbours.
func (b *builder) spans(spans *Spans) {
	for i := 0; i < len(b.items); i++ {
		if data := b.items[i].data; data != nil {
			spans.All = append(spans.All, data)
			continue
		}
		from := i
		for i+1 < len(b.items) && b.items[i+1].data == nil {
			i++
		}
		spans.splice(b.p, b.entries[from:i+1])
	}
}

// each calls f with one item after the other. An item that is spliced is good until f returns.
func (b *builder) each(f func(item []byte)) {
	buf := scratch.Get().(*[]byte)
	defer scratch.Put(buf)
	for i := range b.items {
		item := b.items[i].data
		if item == nil {
			*buf = b.p.appendSpliced((*buf)[:0], b.entries[i])
			item = *buf
		}
		f(item)
	}
}

// encode puts the chosen items into new blocks: those that exist are copied, the
// others made.
func (b *builder) encode(ctx context.Context, chosen func(*builtItem) bool) error {
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
		if len(in) == 0 {
			return
		}
		var k *block
		keep := b.keep && b.p.budget.reserve(int64(len(dst)))
		var data []byte // what the items are parts of, if they are needed any longer
		if keep || !b.splice(in) {
			data = slices.Clip(slices.Clone(dst))
		}
		if keep {
			k = b.p.budget.fill(payload{data: data}, int64(len(data)), b.p.slot)
		}
		from := uint32(0)
		for n, i := range in {
			it := &b.items[i]
			if data != nil {
				it.data = data[from:at[n]:at[n]]
			}
			if k != nil || it.splices {
				b.kept(i, &item{k, from, at[n], it.splices})
			}
			from = at[n]
		}
		if k != nil {
			k.unref()
		}
		dst, in, at = dst[:0], in[:0], at[:0]
	}
	for i, e := range b.entries {
		it := &b.items[i]
		if !chosen(it) {
			continue
		}
		it.splices = it.old.canSplice()
		switch {
		case it.data != nil:
			dst = append(dst, it.data...)
		case it.splices:
			dst = b.p.appendSpliced(dst, e)
		default:
			from := len(dst)
			var err error
			if dst, err = b.p.appendItem(ctx, dst, e, e.ModRevision()); err != nil {
				return err
			}
			it.splices = b.p.splices(e, dst[from:])
		}
		in, at = append(in, i), append(at, uint32(len(dst)))
		if len(dst) >= blockBytes {
			flush()
		}
	}
	flush()
	*buf = dst
	return nil
}

// splice reports whether all of the items can be spliced.
func (b *builder) splice(in []int) bool {
	for _, i := range in {
		if !b.items[i].splices {
			return false
		}
	}
	return true
}

// kept keeps the i-th item on its entry.
func (b *builder) kept(i int, it *item) {
	b.p.keep(b.entries[i], b.items[i].old, it)
	b.items[i].old = it
}

// run describes the leaf: its size, and where it lies if all of it is kept.
func (b *builder) run() *run {
	r := &run{slot: b.p.slot}
	kept := true
	for i := range b.items {
		it := &b.items[i]
		if it.data != nil {
			r.bytes += int64(len(it.data))
		} else {
			r.bytes += int64(it.old.to - it.old.from)
		}
		switch n := len(r.parts); {
		case it.old == nil || it.old.block == nil || it.old.block.payload.Load() == nil:
			kept = false
		case n > 0 && r.parts[n-1].block == it.old.block && r.parts[n-1].to == it.old.from:
			r.parts[n-1].to = it.old.to
		default:
			r.parts = append(r.parts, part{it.old.block, it.old.from, it.old.to})
		}
	}
	if !kept {
		r.parts = nil
	}
	return r
}

// encoders bounds the helpers of all readers that decode and encode at the same time.
var encoders = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))

// Prepare makes what is missing of the items of all runs, on several processors, and
// returns their size in bytes; compressed, if that is what will be written of them.
// Afterwards the runs can be written without an error, unless they exceed the budget.
// Errors are those of Item.
func (p *Representation) Prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool) (int64, error) {
	return p.prepare(ctx, all, deflated, p.AppendRun)
}

func (p *Representation) prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool, appendRun func(context.Context, *Spans, mirror.Run) error) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var total atomic.Int64
	var full atomic.Bool // there is no room for more that is compressed
	var wg sync.WaitGroup
	prepare := func(r mirror.Run, spans *Spans) {
		if deflated && p.worthApart(r) && !full.Load() {
			run, err := p.Deflated(ctx, r)
			if err != nil {
				cancel(err)
				return
			}
			if !p.KeepsDeflated(r) {
				full.Store(true)
			}
			total.Add(run.Len)
			return
		}
		spans.Reset()
		if p.Large(r) {
			n, err := p.prepareLarge(ctx, r, spans)
			if err != nil {
				cancel(err)
			}
			total.Add(n)
			return
		}
		if err := appendRun(ctx, spans, r); err != nil {
			cancel(err)
			return
		}
		for _, s := range spans.All {
			total.Add(int64(len(s)))
		}
	}
	var work chan mirror.Run // to helpers, once there is something to be made
	defer func() {           // after a panic
		if work != nil {
			close(work)
		}
	}()
	var own Spans
	for r := range all {
		if ctx.Err() != nil {
			break
		}
		if n, ok := p.prepared(r, deflated); ok {
			total.Add(n)
			continue
		}
		if work == nil {
			runs := make(chan mirror.Run) // a helper may begin when work is nil again
			work = runs
			for range runtime.GOMAXPROCS(0) - 1 {
				select {
				case encoders <- struct{}{}:
				default:
					continue // others have them all, perhaps for long: this reader works alone (I9)
				}
				wg.Go(func() {
					defer func() { <-encoders }()
					var spans Spans
					for r := range runs {
						if err := Guard(func() error { prepare(r, &spans); return nil }); err != nil {
							cancel(err)
						}
					}
				})
			}
		}
		select {
		case work <- r:
		default:
			prepare(r, &own)
		}
	}
	if work != nil {
		close(work)
		work = nil
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return total.Load(), nil
}

// prepareLarge makes what is missing of a run one by one, and returns the size of all items.
func (p *Representation) prepareLarge(ctx context.Context, r mirror.Run, spans *Spans) (n int64, err error) {
	for _, e := range r.Items() {
		item, err := p.ItemIn(ctx, e, &spans.buf)
		if err != nil {
			return 0, err
		}
		n += int64(len(item))
	}
	if r.Whole() {
		p.setRun(r.Leaf, &run{slot: p.slot, bytes: n})
	}
	return n, nil
}

// worthApart estimates whether a run is worth being compressed on its own.
func (p *Representation) worthApart(r mirror.Run) bool {
	return r.Whole() && gzipjoin.WorthApart(p.estimate(r))
}

// Keeps reports whether AppendRun has nothing to make.
func (p *Representation) Keeps(r mirror.Run) bool {
	if !r.Whole() {
		for _, e := range r.Items() {
			if it, _ := e.Memo(p.slot).(*item); it.load(unread) == nil && !it.canSplice() {
				return false
			}
		}
		return true
	}
	kept := leafRuns(r.Leaf).find(p.slot)
	if kept == nil || len(kept.parts) == 0 {
		return false
	}
	for i := range kept.parts {
		if kept.parts[i].block.payload.Load() == nil {
			return false
		}
	}
	return true
}

// KeepsDeflated reports whether Deflated has nothing to do.
func (p *Representation) KeepsDeflated(r mirror.Run) bool {
	_, ok := p.keptDeflated(r.Leaf, asItems)
	return ok
}

// Guard calls f and returns its error, or one for its panic, which is logged. It is
// for goroutines that work on behalf of a request: a panic of the request's own goroutine
// is recovered by a filter, that of another one would end the process.
func Guard(f func() error) (err error) {
	defer func() {
		if x := recover(); x != nil {
			klog.ErrorS(nil, "Observed a panic", "panic", x, "stacktrace", string(debug.Stack()))
			err = fmt.Errorf("panic: %v", x)
		}
	}()
	return f()
}

// prepared returns the size of a run that has nothing left to be made.
func (p *Representation) prepared(r mirror.Run, deflated bool) (int64, bool) {
	if p.varies.Load() && !p.Keeps(r) {
		return 0, false
	}
	if deflated && p.worthApart(r) {
		run, ok := p.keptDeflated(r.Leaf, asItems)
		return run.Len, ok
	}
	return p.Size(r)
}

// eventItem is kept on an event: an item that is made by whoever asks first; the
// others wait for that. A failure is forgotten, so that a later caller tries again.
type eventItem struct {
	data atomic.Pointer[[]byte]
	// frames are the event's frames compressed, of the type MODIFIED and of the other type that
	// the item is sent as.
	modified, other atomic.Pointer[Frame]
	mu              sync.Mutex // held by who makes one of them
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
		if !p.gen.view.selective.Load() {
			return p.Item(ctx, ev.Entry)
		}
		// Selectors look at the object too: it is decoded once for all of them.
		obj, err := p.gen.added(ev)
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

// DeflatedEvent returns the frame of an event as what it is to a watch, compressed, made once for
// all watchers and kept as its item is. Errors are those of Item.
func (p *Representation) DeflatedEvent(ev *mirror.Event, t watch.EventType, frame Framer) (*Frame, error) {
	slot, e, item := p.slot, ev.Entry, p.Current
	if t == watch.Deleted {
		slot, e, item = p.gone, ev.Prev, p.Deleted
	}
	kept := p.eventItem(slot, ev, e)
	made := &kept.other
	if t == watch.Modified {
		made = &kept.modified
	}
	if f := made.Load(); f != nil {
		return f, nil
	}
	data, err := item(ev)
	if err != nil {
		return nil, err
	}
	kept.mu.Lock()
	defer kept.mu.Unlock()
	if f := made.Load(); f != nil {
		return f, nil
	}
	framed, size := frame(nil, t, data)
	f := &Frame{Run: gzipjoin.Compress(nil, framed), Size: size}
	made.Store(f)
	return f, nil
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
