// Package memo caches values that readers of a mirror derive from its entries and events and from
// the nodes of its trees, such as decoded attributes, encoded bytes, digests, sums, or an error,
// and shares them with other readers. It imports the standard library only.
package memo

import (
	"iter"
	"sync/atomic"
)

// Key is the key of memos. It belongs to one kind of reader (in Kubernetes: one served version of
// one resource). Close frees nothing at once. A memo of a closed key is dropped by List.DropClosed,
// when the memo of another key of the same list is written, or with the list. The zero value is an
// open key. Methods may be called concurrently.
type Key struct {
	closed atomic.Bool
}

// Close closes the key. Its memos may still be read.
func (k *Key) Close() { k.closed.Store(true) }

// Closed reports whether the key is closed.
func (k *Key) Closed() bool { return k.closed.Load() }

// Superseder is implemented by memos that are valid only while their entry or leaf is in the newest
// version. When the entry was replaced or deleted, or the leaf has left the newest version, the
// writer of the mirror removes the memo and calls Superseded exactly once. Superseded must not
// block. A reader of a past revision may store such a memo again; that one is removed when history
// drops the event that replaced the entry.
type Superseder interface{ Superseded() }

// DeletionRetainer is a Superseder that stays on the entry of a deleted key until history drops the
// event, because readers of the event need it (mirror.Event.Prev).
type DeletionRetainer interface {
	Superseder
	OutlivesDeletion()
}

// Sizer is implemented by memos whose memory counts for that of their node (List.Size).
type Sizer interface {
	// Size returns the bytes of memory, with those of its place in the list.
	Size() int64
}

// List holds the memos of one entry, event or node of a tree: nearly always a few. The zero value
// is empty. Methods may be called concurrently and take no lock.
type List struct{ head atomic.Pointer[element] }

// element is an element of a linked list. Elements are immutable; the list changes by replacing its
// head.
type element struct {
	key   *Key
	value any
	next  *element
}

func (l *element) get(k *Key) any {
	for ; l != nil; l = l.next {
		if l.key == k {
			return l.value
		}
	}
	return nil
}

// Get returns the memo of k, nil if there is none.
func (l *List) Get(k *Key) any { return l.head.Load().get(k) }

// Swap replaces the memo old of k by value, and reports whether it did: false if the memo is not
// old. A nil old means no memo, a nil value removes the memo. Values are comparable, nearly always
// pointers. Memos of closed keys are removed too.
func (l *List) Swap(k *Key, old, value any) bool {
	for {
		head := l.head.Load()
		if head.get(k) != old {
			return false
		}
		next := head
		if old != nil || head.anyClosed() {
			next = head.keep(func(m *element) bool { return m.key != k && !m.key.closed.Load() })
		}
		if value != nil {
			next = &element{key: k, value: value, next: next}
		}
		if l.head.CompareAndSwap(head, next) {
			return true
		}
	}
}

// anyClosed reports whether a key is closed.
func (l *element) anyClosed() bool {
	for ; l != nil; l = l.next {
		if l.key.closed.Load() {
			return true
		}
	}
	return false
}

// keep returns the list of the memos for which keep is true.
func (l *element) keep(keep func(*element) bool) (kept *element) {
	for ; l != nil; l = l.next {
		if keep(l) {
			kept = &element{key: l.key, value: l.value, next: kept}
		}
	}
	return kept
}

// remove removes the memos for which drop is true, and returns the list that contains them; nil if
// there are none.
func (l *List) remove(drop func(*element) bool) *element {
	for {
		head := l.head.Load()
		found := false
		for m := head; m != nil; m = m.next {
			found = found || drop(m)
		}
		if !found {
			return nil
		}
		if l.head.CompareAndSwap(head, head.keep(func(m *element) bool { return !drop(m) })) {
			return head
		}
	}
}

// DropClosed removes the memos of closed keys.
func (l *List) DropClosed() { l.remove(func(m *element) bool { return m.key.closed.Load() }) }

// Empty reports whether there is no memo.
func (l *List) Empty() bool { return l.head.Load() == nil }

// All yields the memos.
func (l *List) All() iter.Seq2[*Key, any] {
	return func(yield func(*Key, any) bool) {
		for m := l.head.Load(); m != nil && yield(m.key, m.value); m = m.next {
		}
	}
}

// Size returns the bytes of the memos that are a Sizer.
func (l *List) Size() (bytes int64) {
	for m := l.head.Load(); m != nil; m = m.next {
		if s, ok := m.value.(Sizer); ok {
			bytes += s.Size()
		}
	}
	return bytes
}

// Supersede removes the Superseders of an entry that was replaced, or deleted, or of a leaf that
// has left the newest version, and calls Superseded. The writer of the mirror calls it.
func (l *List) Supersede(deleted bool) {
	drop := func(m *element) bool { return isSuperseded(m.value, deleted) }
	for m := l.remove(drop); m != nil; m = m.next {
		if drop(m) {
			m.value.(Superseder).Superseded()
		}
	}
}

// isSuperseded reports whether the memo value is removed from an entry that is replaced, or
// deleted.
func isSuperseded(value any, deleted bool) bool {
	if _, retained := value.(DeletionRetainer); retained && deleted {
		return false
	}
	_, ok := value.(Superseder)
	return ok
}
