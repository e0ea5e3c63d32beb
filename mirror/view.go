package mirror

import (
	"container/heap"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
)

// View is all keys of a mirror at one revision, over its resources and the keys without a claim, or one of the keys. It is immutable, may be
// read concurrently, and keeps its entries alive.
type View struct {
	// Rev is the revision of the view. Published is the published revision when the view was made.
	Rev, Published Revision
	parts          []viewPart // ordered by prefix
	key            string     // the only key of the view, unless it is empty
}

// viewPart is the keys of one table.
type viewPart struct {
	prefix string
	tree   tree
	absent bool // memory does not have the state at the revision
}

// captured is a table's state on the writer's goroutine.
type captured struct {
	prefix   string
	lin      *lineage // nil: the table is being loaded, or is not cached
	head     *version
	absorbed Revision
}

// capture returns the state of the table.
func (t *table) capture() captured {
	c := captured{prefix: t.prefix, absorbed: t.absorbed}
	if lin := t.lineage.Load(); lin != nil && !t.excluded && !t.loading {
		c.lin, c.head = lin, lin.head.Load()
	}
	return c
}

// part returns the keys of the table at a published revision.
func (c *captured) part(rev Revision) viewPart {
	p := viewPart{prefix: c.prefix, absent: true}
	switch {
	case c.lin == nil || c.head == nil || rev < c.absorbed || rev < c.lin.oldest():
	case rev >= c.head.rev:
		p.tree, p.absent = c.head.tree, false
	default:
		if at, ok := c.lin.at(rev); ok {
			p.tree, p.absent = at.tree, false
		}
	}
	return p
}

// View returns the state of all keys at rev, or at the published revision if rev is 0. Parts that memory does not have at that revision, such as
// resources that are loading or are not cached, are excluded from the view: see Covers. Cost is a command of the writer, O(resources), and for an
// older revision that of Resource.At for each resource. Errors: ErrFutureRevision, ErrNotReady before the first list, ErrClosed, ctx's error.
func (m *Mirror) View(ctx context.Context, rev Revision) (View, error) {
	v, parts, err := m.captureTables(ctx, rev, func(w *writer) []captured {
		all := make([]captured, 0, len(w.tables))
		for _, t := range w.tables {
			all = append(all, t.capture())
		}
		return all
	})
	if err != nil {
		return View{}, err
	}
	for i := range parts {
		v.parts = append(v.parts, parts[i].part(v.Rev))
	}
	slices.SortFunc(v.parts, func(a, b viewPart) int { return strings.Compare(a.prefix, b.prefix) })
	return v, nil
}

// ViewKey returns View of one key, which is below the prefix of the mirror: Covers is false for all other ranges. Cost is a command of the writer
// and, for an older revision, that of Resource.At for one resource. Errors: those of View.
func (m *Mirror) ViewKey(ctx context.Context, key string, rev Revision) (View, error) {
	v, parts, err := m.captureTables(ctx, rev, func(w *writer) []captured { return []captured{w.route(key).capture()} })
	if err != nil {
		return View{}, err
	}
	v.key, v.parts = key, []viewPart{parts[0].part(v.Rev)}
	return v, nil
}

// captureTables returns a view at the revision, still without parts, and tables that are captured on the writer's goroutine.
func (m *Mirror) captureTables(ctx context.Context, rev Revision, tables func(*writer) []captured) (View, []captured, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	var parts []captured
	var now Revision
	err := m.command(ctx, func(w *writer) { now, parts = w.published.Revision(), tables(w) })
	if err != nil {
		if m.ctx.Err() != nil {
			err = ErrClosed
		}
		return View{}, nil, err
	}
	if rev == 0 {
		rev = now
	}
	switch {
	case now == 0:
		return View{}, nil, fmt.Errorf("%w: %s", ErrNotReady, m.opts.Prefix)
	case rev > now:
		return View{}, nil, fmt.Errorf("%w: requested %d, latest published %d", ErrFutureRevision, rev, now)
	}
	return View{Rev: rev, Published: now}, parts, nil
}

// overlapping yields the parts that may have keys with start <= key < end; an empty end means no
// upper bound.
func (v View) overlapping(start, end string) iter.Seq[viewPart] {
	return func(yield func(viewPart) bool) {
		if end == start+"\x00" { // one key, in the part with the longest prefix
			for i := len(v.parts) - 1; i >= 0; i-- {
				if strings.HasPrefix(start, v.parts[i].prefix) {
					yield(v.parts[i])
					return
				}
			}
			return
		}
		for _, p := range v.parts {
			if (end == "" || p.prefix < end) && prefixEnd(p.prefix) > start && !yield(p) {
				return
			}
		}
	}
}

// Covers reports whether memory has all keys with start <= key < end at the view's revision; an
// empty end means no upper bound. Some may be without a value, see Entry.HasValue.
func (v View) Covers(start, end string) bool {
	if v.key != "" && (start != v.key || end != v.key+"\x00") {
		return false
	}
	for p := range v.overlapping(start, end) {
		if p.absent {
			return false
		}
	}
	return true
}

// Count returns the number of keys with start <= key < end; an empty end means no upper bound. Cost
// is O(log n) for each resource.
func (v View) Count(start, end string) (n int64) {
	for p := range v.overlapping(start, end) {
		entries, _ := p.tree.Count(start, end)
		n += int64(entries)
	}
	return n
}

// All yields the entries with start <= key < end in key order; an empty end means no upper bound.
func (v View) All(start, end string) iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		var merge entryHeap
		for p := range v.overlapping(start, end) {
			next, stop := iter.Pull(p.tree.All(start, end))
			defer stop()
			if e, ok := next(); ok {
				merge = append(merge, pulled{e, next})
			}
		}
		heap.Init(&merge)
		for len(merge) > 0 {
			top := &merge[0]
			if !yield(top.entry) {
				return
			}
			if e, ok := top.next(); ok {
				top.entry = e
				heap.Fix(&merge, 0)
			} else {
				heap.Pop(&merge)
			}
		}
	}
}

// pulled is the next entry of one part.
type pulled struct {
	entry *Entry
	next  func() (*Entry, bool)
}

// entryHeap has the part with the lowest key first.
type entryHeap []pulled

func (h entryHeap) Len() int           { return len(h) }
func (h entryHeap) Less(i, j int) bool { return h[i].entry.Key() < h[j].entry.Key() }
func (h entryHeap) Swap(i, j int)      { h[i], h[j] = h[j], h[i] }
func (h *entryHeap) Push(x any)        { *h = append(*h, x.(pulled)) }
func (h *entryHeap) Pop() any {
	last := len(*h) - 1
	p := (*h)[last]
	(*h)[last] = pulled{}
	*h = (*h)[:last]
	return p
}
