package representation

import (
	"context"

	"github.com/stratakube/strata/mirror"
)

// Spans are the bytes of items, in key order: most of them in their blocks, the others in a buffer.
// They are valid until Reset. The zero value is empty.
type Spans struct {
	All [][]byte
	buf []byte
}

// Reset empties the spans for reuse.
func (s *Spans) Reset() {
	clear(s.All)
	s.All, s.buf = s.All[:0], s.buf[:0]
}

// splice adds the spliced items of entries.
func (s *Spans) splice(p *items, entries []*mirror.Entry) {
	from := len(s.buf)
	for _, e := range entries {
		s.buf = p.appendSpliced(s.buf, e)
	}
	s.All = append(s.All, s.buf[from:])
}

// appendRun adds the items of a run to spans. They are shared: do not write to them. Cost is a few
// loads for a whole leaf that was read before. Errors are those of Item.
func (p *leaves) appendRun(ctx context.Context, spans *Spans, r mirror.Run) error {
	if !r.Whole() {
		for i, e := range r.Items() {
			it, _ := e.Memos().Get(p.memoKey).(*item)
			if data := it.load(p.blocks.Now()); data != nil {
				spans.All = append(spans.All, data)
				continue
			}
			if it.canSplice() {
				spans.splice(&p.items, r.Items()[i:i+1])
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
		if kept := p.itemsOf(r.Leaf); kept != nil {
			var ok bool
			if spans.All, ok = kept.load(spans.All, p.blocks.Now()); ok {
				return nil
			}
		}
		// One reader builds the leaf; the others wait and load it, or build it themselves if it was
		// not cached.
		_, mine, err := p.building.Do(ctx, r.Leaf, func() (struct{}, error) {
			return struct{}{}, p.build(ctx, spans, r, true)
		})
		if mine || err != nil {
			return err
		}
	}
}

// AppendLeaf is appendRun for a reader that needs single items. Not ok: the run is a part of a
// leaf, or has too many bytes to be held together, or its items are cached in longer spans, in
// which only items that have their lengths (delimited) can be told apart.
func (p *leaves) AppendLeaf(ctx context.Context, spans *Spans, r mirror.Run, delimited bool) (ok bool, err error) {
	n, known := p.estimate(r)
	if !r.Whole() || n > largeRun || known && !delimited {
		return false, nil
	}
	return true, p.appendRun(ctx, spans, r)
}
