package btree

import "strings"

// Edit builds a new tree from an old one, which it does not change. It is not safe for concurrent
// use.
type Edit[T Item] struct {
	id       uint64
	root     *node[T]
	replaced []*Leaf[T]
}

// Edit starts an edit of t.
func (t Tree[T]) Edit() *Edit[T] {
	return &Edit[T]{id: edits.Add(1), root: t.root}
}

// Tree ends the edit and returns its result. The edit must not be used again.
func (e *Edit[T]) Tree() Tree[T] {
	t := Tree[T]{root: e.root}
	e.id, e.root = 0, nil
	return t
}

// Replaced returns the leaves of the old tree that have memos and are not in the result.
func (e *Edit[T]) Replaced() []*Leaf[T] { return e.replaced }

// replace records a leaf that will not be in the result.
func (e *Edit[T]) replace(n *node[T]) {
	if n.edit != e.id && n.leaf != nil && !n.leaf.memos.Empty() {
		e.replaced = append(e.replaced, n.leaf)
	}
}

// own returns n, or a copy of it, that this edit may write.
func (e *Edit[T]) own(n *node[T]) *node[T] {
	if n.edit == e.id {
		return n
	}
	e.replace(n)
	c := &node[T]{edit: e.id, count: n.count, bytes: n.bytes}
	if n.kids == nil {
		// One spare element: most edits of a leaf insert or replace one item.
		items := make([]T, len(n.leaf.items), min(len(n.leaf.items)+1, maxItems+1))
		copy(items, n.leaf.items)
		c.leaf = &Leaf[T]{items: items}
		return c
	}
	c.kids = append(make([]*node[T], 0, len(n.kids)+1), n.kids...)
	c.seps = append(make([]string, 0, len(n.seps)+1), n.seps...)
	return c
}

// Set adds item, or replaces the item with the same key and returns that one.
func (e *Edit[T]) Set(item T) (prev T, replaced bool) {
	if e.root == nil {
		e.root = &node[T]{edit: e.id, count: 1, bytes: item.Size(), leaf: &Leaf[T]{items: []T{item}}}
		return prev, false
	}
	e.root = e.own(e.root)
	prev, replaced = e.set(e.root, item)
	if right, sep := e.split(e.root); right != nil {
		up := &node[T]{edit: e.id, kids: []*node[T]{e.root, right}, seps: []string{sep}}
		up.recount()
		e.root = up
	}
	return prev, replaced
}

// set sets an item below a node that the edit owns.
func (e *Edit[T]) set(n *node[T], item T) (prev T, replaced bool) {
	key := item.Key()
	if n.kids == nil {
		i := search(n.leaf.items, key)
		if i < len(n.leaf.items) && n.leaf.items[i].Key() == key {
			prev = n.leaf.items[i]
			n.leaf.items[i] = item
			n.bytes += item.Size() - prev.Size()
			return prev, true
		}
		n.leaf.items = append(n.leaf.items, item)
		copy(n.leaf.items[i+1:], n.leaf.items[i:])
		n.leaf.items[i] = item
		n.count++
		n.bytes += item.Size()
		return prev, false
	}
	i := childIndex(n.seps, key)
	kid := e.own(n.kids[i])
	n.kids[i] = kid
	prev, replaced = e.set(kid, item)
	n.bytes += item.Size()
	if replaced {
		n.bytes -= prev.Size()
	} else {
		n.count++
	}
	if right, sep := e.split(kid); right != nil {
		n.kids = append(n.kids, nil)
		copy(n.kids[i+2:], n.kids[i+1:])
		n.kids[i+1] = right
		n.seps = append(n.seps, "")
		copy(n.seps[i+1:], n.seps[i:])
		n.seps[i] = sep
	}
	return prev, replaced
}

// split splits an overfull node that the edit owns and returns its right part and the separator of
// the two, or nil if the node is not overfull.
func (e *Edit[T]) split(n *node[T]) (right *node[T], sep string) {
	if n.kids == nil {
		if len(n.leaf.items) <= maxItems {
			return nil, ""
		}
		// Keys often arrive in ascending order; then the left part stays fuller.
		mid := len(n.leaf.items) / 2
		right = &node[T]{edit: e.id, leaf: &Leaf[T]{items: append([]T(nil), n.leaf.items[mid:]...)}}
		clear(n.leaf.items[mid:])
		n.leaf.items = n.leaf.items[:mid]
		// the item may be removed before the separator
		sep = strings.Clone(right.leaf.items[0].Key())
	} else {
		if len(n.kids) <= maxItems {
			return nil, ""
		}
		mid := len(n.kids) / 2
		right = &node[T]{
			edit: e.id,
			kids: append([]*node[T](nil), n.kids[mid:]...),
			seps: append([]string(nil), n.seps[mid:]...),
		}
		sep = n.seps[mid-1]
		clear(n.kids[mid:])
		clear(n.seps[mid-1:])
		n.kids = n.kids[:mid]
		n.seps = n.seps[:mid-1]
	}
	right.recount()
	n.count -= right.count
	n.bytes -= right.bytes
	return right, sep
}

// Get returns the item with the key in the current state of the edit.
func (e *Edit[T]) Get(key string) (T, bool) { return Tree[T]{root: e.root}.Get(key) }

// Len returns the number of items in the current state of the edit.
func (e *Edit[T]) Len() int { return Tree[T]{root: e.root}.Len() }

// Delete removes the item with the key and returns it. For an absent key it changes and copies
// nothing.
func (e *Edit[T]) Delete(key string) (prev T, ok bool) {
	if _, ok := e.Get(key); !ok {
		return prev, false
	}
	e.root = e.own(e.root)
	prev = e.del(e.root, key)
	for len(e.root.kids) == 1 {
		e.root = e.root.kids[0]
	}
	if e.root.count == 0 {
		e.root = nil
	}
	return prev, true
}

// del removes a key that is present below n, a node that the edit owns.
func (e *Edit[T]) del(n *node[T], key string) (prev T) {
	if n.kids == nil {
		i := search(n.leaf.items, key)
		prev = n.leaf.items[i]
		copy(n.leaf.items[i:], n.leaf.items[i+1:])
		var zero T
		n.leaf.items[len(n.leaf.items)-1] = zero
		n.leaf.items = n.leaf.items[:len(n.leaf.items)-1]
		n.count--
		n.bytes -= prev.Size()
		return prev
	}
	i := childIndex(n.seps, key)
	kid := e.own(n.kids[i])
	n.kids[i] = kid
	prev = e.del(kid, key)
	n.count--
	n.bytes -= prev.Size()
	if kid.width() < minItems {
		e.refill(n, i)
	}
	return prev
}

func (n *node[T]) width() int {
	if n.kids == nil {
		return len(n.leaf.items)
	}
	return len(n.kids)
}

// refill joins child i, which has become too small, with a neighbour; if the result exceeds one
// node, it is split into two halves again.
func (e *Edit[T]) refill(n *node[T], i int) {
	if i == len(n.kids)-1 {
		i--
	}
	left, right := e.own(n.kids[i]), n.kids[i+1]
	e.replace(right)
	n.kids[i] = left
	if left.kids == nil {
		left.leaf.items = append(left.leaf.items, right.leaf.items...)
	} else {
		left.seps = append(append(left.seps, n.seps[i]), right.seps...)
		left.kids = append(left.kids, right.kids...)
	}
	left.count += right.count
	left.bytes += right.bytes
	if again, sep := e.split(left); again != nil {
		n.kids[i+1] = again
		n.seps[i] = sep
		return
	}
	n.kids = append(n.kids[:i+1], n.kids[i+2:]...)
	n.seps = append(n.seps[:i], n.seps[i+1:]...)
}
