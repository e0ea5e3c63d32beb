package mirror

import (
	"container/heap"
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
)

// View is the keys of a range at one revision, over all resources and the keys without a claim. It
// is immutable, may be read concurrently, and keeps its entries alive.
type View struct {
	// Rev is the revision of the view. Published is the published revision when the view was made.
	Rev, Published Revision
	keys           keyRange
	parts          []viewPart // ordered by prefix
}

// keyRange is the keys with start <= key < end; an empty end means no upper bound.
type keyRange struct{ start, end string }

// within reports whether all keys of the range have the prefix.
func (k keyRange) within(prefix string) bool {
	return strings.HasPrefix(k.start, prefix) && k.end != "" && k.end <= prefixEnd(prefix)
}

// meets reports whether keys of the range may have the prefix.
func (k keyRange) meets(prefix string) bool {
	return (k.end == "" || prefix < k.end) && (prefix >= k.start || strings.HasPrefix(k.start, prefix))
}

// isKey reports whether the range is one key.
func (k keyRange) isKey() bool { return k.end == k.start+"\x00" }

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

// View returns the state at rev, or at the published revision if rev is 0, of the keys with start
// <= key < end; an empty end means no upper bound. Parts that memory does not have at that
// revision, such as resources that are loading or are not cached, are excluded from the view: see
// Covers. Cost is a command of the writer, O(1) for one key and O(resources) otherwise, and for an
// older revision that of Resource.At for each resource that may have such keys. Errors:
// ErrFutureRevision, ErrNotReady before the first list, ErrClosed, ctx's error.
func (m *Mirror) View(ctx context.Context, rev Revision, start, end string) (View, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(m.ctx, cancel)()
	v := View{Rev: rev, keys: keyRange{start, end}}
	var parts []captured
	err := m.command(ctx, func(w *writer) { v.Published, parts = w.published.Revision(), w.capture(v.keys) })
	if err != nil {
		if m.ctx.Err() != nil {
			err = ErrClosed
		}
		return View{}, err
	}
	if rev == 0 {
		v.Rev = v.Published
	}
	switch {
	case v.Published == 0:
		return View{}, fmt.Errorf("%w: %s", ErrNotReady, m.opts.Prefix)
	case rev > v.Published:
		return View{}, fmt.Errorf("%w: requested %d, latest published %d", ErrFutureRevision, rev, v.Published)
	}
	v.parts = make([]viewPart, len(parts))
	for i := range parts {
		v.parts[i] = parts[i].part(v.Rev)
	}
	slices.SortFunc(v.parts, func(a, b viewPart) int { return strings.Compare(a.prefix, b.prefix) })
	return v, nil
}

// capture returns the state of the tables that may have keys of the range: the innermost one around
// it, and those inside that one.
func (w *writer) capture(keys keyRange) []captured {
	around := w.route(keys.start)
	for around.prefix != w.opts.Prefix && !keys.within(around.prefix) {
		around = w.route(strings.TrimSuffix(around.prefix, "/"))
	}
	all := []captured{around.capture()}
	if keys.isKey() {
		return all
	}
	for prefix, t := range w.tables {
		if t != around && strings.HasPrefix(prefix, around.prefix) && keys.meets(prefix) {
			all = append(all, t.capture())
		}
	}
	return all
}

// overlapping yields the parts that may have keys of the range: the innermost one around it, and
// those inside that one, which come after it.
func (v View) overlapping(keys keyRange) iter.Seq[viewPart] {
	return func(yield func(viewPart) bool) {
		around := len(v.parts) - 1
		for around > 0 && !keys.within(v.parts[around].prefix) {
			around--
		}
		for _, p := range v.parts[max(around, 0):] {
			if keys.meets(p.prefix) && !yield(p) {
				return
			}
		}
	}
}

// Covers reports whether memory has all keys with start <= key < end at the view's revision; an
// empty end means no upper bound. It is false outside of the view's range. Some keys may be without
// a value, see Entry.HasValue.
func (v View) Covers(start, end string) bool {
	if start < v.keys.start || v.keys.end != "" && (end == "" || end > v.keys.end) {
		return false
	}
	for p := range v.overlapping(keyRange{start, end}) {
		if p.absent {
			return false
		}
	}
	return true
}

// Count returns the number of keys with start <= key < end, which the view covers; an empty end
// means no upper bound. Cost is O(log n) for each resource.
func (v View) Count(start, end string) (n int64) {
	for p := range v.overlapping(keyRange{start, end}) {
		entries, _ := p.tree.Count(start, end)
		n += int64(entries)
	}
	return n
}

// All yields the entries with start <= key < end, which the view covers, in key order; an empty end
// means no upper bound.
func (v View) All(start, end string) iter.Seq[*Entry] {
	return func(yield func(*Entry) bool) {
		var merge entryHeap
		for p := range v.overlapping(keyRange{start, end}) {
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
