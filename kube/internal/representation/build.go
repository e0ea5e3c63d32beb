package representation

import (
	"context"
	"slices"
	"sync"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
)

// scratch are buffers to encode into before the size of a block is known.
var scratch = sync.Pool{New: func() any { b := make([]byte, 0, 2*blockBytes); return &b }}

// values are buffers into which values are decompressed.
var values = sync.Pool{New: func() any { return new([]byte) }}

// build makes the missing items of the leaf of a run, caches those that fit if keep is set, and
// adds all items to spans.
func (p *leaves) build(ctx context.Context, spans *Spans, r mirror.Run, keep bool) error {
	b, kept, err := p.buildLeaf(ctx, r, keep)
	if err != nil {
		return err
	}
	var ok bool
	if spans.All, ok = kept.load(spans.All, p.blocks.Now()); !ok {
		b.spans(spans)
	}
	return nil
}

// buildLeaf is build for a caller that uses the items one by one.
func (p *leaves) buildLeaf(ctx context.Context, r mirror.Run, keep bool) (*builder, *leafItems, error) {
	l := r.Leaf
	b := &builder{p: p, keep: keep, entries: l.Items(), items: make([]builtItem, len(l.Items()))}
	now := p.blocks.Now()
	splices, missing := true, int64(0)
	for i, e := range b.entries {
		it, _ := e.Memos().Get(p.memoKey).(*item)
		b.items[i].old = it
		if b.items[i].data = it.load(now); b.items[i].data != nil {
			continue
		}
		if splices = splices && it.canSplice(); splices {
			missing += int64(it.to - it.from)
		}
	}
	if splices && missing > 0 && !(keep && p.blocks.HasRoom(missing)) {
		kept := b.leafItems()
		p.setLeafItems(l, kept)
		return b, kept, nil
	}
	err := b.encode(ctx, func(it *builtItem) bool { return it.data == nil })
	if err != nil {
		return nil, nil, err
	}
	kept := b.leafItems()
	// The items of a leaf of a shard stay in the blocks of the leaves of the resource's own tree.
	if n := len(kept.parts); !r.Selected && n > 8 && kept.bytes/int64(n) < partBytes {
		if err := b.encode(ctx, func(*builtItem) bool { return true }); err != nil {
			return nil, nil, err
		}
		kept = b.leafItems()
	}
	p.setLeafItems(l, kept)
	return b, kept, nil
}

// builder puts the items of one leaf into blocks.
type builder struct {
	p       *leaves
	keep    bool
	entries []*mirror.Entry
	items   []builtItem
}

type builtItem struct {
	splices bool
	old     *item  // the memo of the entry
	data    []byte // the item, unless it can be spliced and there was no room for it
}

// spans adds the items one by one, with adjacent items that can only be spliced together.
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
		spans.splice(&b.p.items, b.entries[from:i+1])
	}
}

// each calls f with one item after the other. A spliced item is valid until f returns.
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

// encode puts the chosen items into new blocks: existing ones are copied, the others made.
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
		var k *blockcache.Block
		keep := b.keep && b.p.blocks.Reserve(int64(len(dst)))
		var data []byte // the bytes that the items are parts of, if still needed
		if keep || !b.splice(in) {
			data = slices.Clip(slices.Clone(dst))
		}
		if keep {
			k = b.p.blocks.Fill(blockcache.Payload{Data: data}, int64(len(data)), b.p.memoKey)
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
			k.Unref()
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

// kept sets the i-th item as the memo of its entry.
func (b *builder) kept(i int, it *item) {
	b.p.keep(b.entries[i], b.items[i].old, it)
	b.items[i].old = it
}

// leafItems describes the leaf: its size, and its position if all of it is cached.
func (b *builder) leafItems() *leafItems {
	r := &leafItems{}
	kept := true
	for i := range b.items {
		it := &b.items[i]
		if it.data != nil {
			r.bytes += int64(len(it.data))
		} else {
			r.bytes += int64(it.old.to - it.old.from)
		}
		switch n := len(r.parts); {
		case it.old == nil || it.old.block == nil || it.old.block.Load(blockcache.Unread) == nil:
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
