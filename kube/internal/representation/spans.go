package representation

import (
	"context"
	"iter"
	"slices"

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
func (s *Spans) splice(p *Representation, entries []*mirror.Entry) {
	from := len(s.buf)
	for _, e := range entries {
		s.buf = p.appendSpliced(s.buf, e)
	}
	s.All = append(s.All, s.buf[from:])
}

// AppendRun adds the items of a run to spans. They are shared: do not write to them. Cost is a few
// loads for a whole leaf that was read before. Errors are those of Item.
func (p *Representation) AppendRun(ctx context.Context, spans *Spans, r mirror.Run) error {
	if !r.Whole() {
		for i, e := range r.Items() {
			it, _ := e.Memos().Get(p.memoKey).(*item)
			if data := it.load(p.blocks.Now()); data != nil {
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

// AppendOnce is AppendRun for a run that is in no version of the resource
// (list.Read.FromEtcd). Its items are cached only if all of its entries are those of a
// version.
func (p *Representation) AppendOnce(ctx context.Context, spans *Spans, r mirror.Run) error {
	return p.build(ctx, spans, r, !slices.ContainsFunc(r.Items(), (*mirror.Entry).Detached))
}

// MeasureOnce is Prepare for runs that are in no version: it makes their items and returns their
// size in bytes.
func (p *Representation) MeasureOnce(ctx context.Context, all iter.Seq[mirror.Run]) (int64, error) {
	return p.prepare(ctx, all, false, p.AppendOnce)
}
