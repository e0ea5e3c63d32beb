package mirror

import (
	"strings"
	"sync/atomic"
	"time"
	"unsafe"
)

// Entry is one key with its stored value at one revision. Entries are immutable except for the
// memos of readers (I2). All versions and events that contain an entry share it, and it may be read
// concurrently.
type Entry struct {
	// data is the key followed by the value: one block without pointers, which is cheap for the
	// garbage collector. It is a string because it never changes.
	data    string
	mod     Revision
	create  Revision
	keyLen  uint32
	version uint32 // etcd's Version modulo 2^32, enough to see a gap; 0: the store counts none
	memos   atomic.Pointer[memo]
}

// entryOverhead is the memory of an entry in addition to its bytes: the struct (48 bytes), and an
// estimate of the allocator's rounding.
const entryOverhead = 80

// Flags in keyLen.
const (
	noValue   = 1 << 31 // the value was not stored
	isForeign = 1 << 30 // it was read from the source for one reader, see Snapshot.Foreign

	keyLenMask = isForeign - 1
)

func newEntry(kv *KV, keep bool) *Entry {
	n := len(kv.Key)
	e := &Entry{mod: kv.ModRevision, create: kv.CreateRevision, keyLen: uint32(n), version: uint32(kv.Version)}
	if !keep {
		e.keyLen |= noValue
		e.data = string(kv.Key)
		return e
	}
	buf := make([]byte, n+len(kv.Value))
	copy(buf, kv.Key)
	copy(buf[n:], kv.Value)
	e.data = unsafe.String(unsafe.SliceData(buf), len(buf)) // buf is not written again
	return e
}

// withoutValue returns the entry with key and revisions only.
func (e *Entry) withoutValue() *Entry {
	key := strings.Clone(e.Key())
	return &Entry{data: key, mod: e.mod, create: e.create, keyLen: uint32(len(key)) | noValue, version: e.version}
}

// Key returns the etcd key.
func (e *Entry) Key() string { return e.data[:e.keyLen&keyLenMask] }

// Value returns the stored value. Do not write to it.
func (e *Entry) Value() []byte {
	v := e.data[e.keyLen&keyLenMask:]
	return unsafe.Slice(unsafe.StringData(v), len(v))
}

// hasValue is false for an entry of an unclaimed resource beyond Options.UnclaimedBytes.
func (e *Entry) hasValue() bool { return e.keyLen&noValue == 0 }

// Foreign reports whether the entry is in no version of the resource. Later readers cannot find it,
// so its memos are useful to its own reader only.
func (e *Entry) Foreign() bool { return e.keyLen&isForeign != 0 }

// ModRevision returns the revision that wrote this value.
func (e *Entry) ModRevision() Revision { return e.mod }

// CreateRevision returns the revision that created the key.
func (e *Entry) CreateRevision() Revision { return e.create }

// Version returns etcd's Version of the key modulo 2^32: the writes since its creation, 1 for the first.
func (e *Entry) Version() uint32 { return e.version }

// Size returns the bytes of the value as stored, 0 if the value was not stored.
func (e *Entry) Size() int64 { return int64(len(e.data)) - int64(e.keyLen&keyLenMask) }

// footprint is the memory that a reference to the entry keeps alive.
func (e *Entry) footprint() int64 { return int64(len(e.data)) + entryOverhead }

// Event is a change of one key: the entry before and after it.
type Event struct {
	Rev   Revision
	Entry *Entry // nil if the key was deleted
	Prev  *Entry // nil if the key was created
	// Arrived is when the event arrived from etcd, in nanoseconds as Now counts them; 0 if it was
	// restored or listed.
	Arrived int64
	memos   atomic.Pointer[memo]
}

var started = time.Now()

// Now returns the monotonic time in nanoseconds since the process began, on the scale of
// Event.Arrived.
func Now() int64 { return int64(time.Since(started)) }

// Revision returns Rev.
func (e *Event) Revision() int64 { return e.Rev }

// Key returns the key that changed.
func (e *Event) Key() string {
	if e.Entry != nil {
		return e.Entry.Key()
	}
	return e.Prev.Key()
}

// historyBytes is the memory that the log keeps alive for the event: its struct (48 bytes), its
// element of the log, and the previous entry.
func (e *Event) historyBytes() int64 {
	n := int64(64)
	if e.Prev != nil {
		n += e.Prev.footprint()
	}
	return n
}

// Slot is the key of memos: values that readers derive from entries and events and share with other
// readers, such as decoded attributes, encoded bytes, or an error. A slot belongs to one kind of
// reader (in Kubernetes: one served version of one resource). Close frees nothing at once. A memo
// of a closed slot is dropped by DropClosed, when another slot of the same entry is written, or
// with the entry.
type Slot struct {
	closed atomic.Bool
}

// Close closes the slot. Its memos may still be read.
func (s *Slot) Close() { s.closed.Store(true) }

// Closed reports whether the slot is closed.
func (s *Slot) Closed() bool { return s.closed.Load() }

// memo is a linked list of memos, with an element for each view and representation in use: nearly
// always a few. Elements are immutable; the list changes by replacing its head.
type memo struct {
	slot  *Slot
	value any
	next  *memo
}

func (m *memo) find(s *Slot) any {
	for ; m != nil; m = m.next {
		if m.slot == s {
			return m.value
		}
	}
	return nil
}

// swapMemo replaces the memo old of s by value, and reports whether it did: false if the memo is
// not old.
func swapMemo(head *atomic.Pointer[memo], s *Slot, old, value any) bool {
	for {
		cur := head.Load()
		if cur.find(s) != old {
			return false
		}
		var next *memo
		for m := cur; m != nil; m = m.next {
			if m.slot != s && !m.slot.closed.Load() {
				next = &memo{slot: m.slot, value: m.value, next: next}
			}
		}
		if value != nil {
			next = &memo{slot: s, value: value, next: next}
		}
		if head.CompareAndSwap(cur, next) {
			return true
		}
	}
}

func dropClosed(head *atomic.Pointer[memo]) {
	for {
		cur := head.Load()
		var open *memo
		closed := false
		for m := cur; m != nil; m = m.next {
			if m.slot.closed.Load() {
				closed = true
			} else {
				open = &memo{slot: m.slot, value: m.value, next: open}
			}
		}
		if !closed || head.CompareAndSwap(cur, open) {
			return
		}
	}
}

// Memo returns the memo of s on the entry, nil if there is none.
func (e *Entry) Memo(s *Slot) any { return e.memos.Load().find(s) }

// Retirer is implemented by memos that are valid only while their entry or leaf is in the newest
// version. When the entry was replaced or deleted, or the leaf has left the newest version, the
// writer removes the memo and calls Retired exactly once. Retired must not block. A reader of a
// past revision may store such a memo again; that one is removed when history drops the event that
// replaced the entry.
type Retirer interface{ Retired() }

// DeletionRetainer is a Retirer that stays on the entry of a deleted key until history drops the
// event, because readers of the event need it (Event.Prev).
type DeletionRetainer interface {
	Retirer
	OutlivesDeletion()
}

// retires reports whether the memo value is removed from an entry that is replaced, or deleted.
func retires(value any, deleted bool) bool {
	if _, retained := value.(DeletionRetainer); retained && deleted {
		return false
	}
	_, ok := value.(Retirer)
	return ok
}

// retire removes the Retirers from the entry, which has left the newest version, and calls Retired.
func (e *Entry) retire(deleted bool) {
	for {
		cur := e.memos.Load()
		var left *memo
		retired := false
		for m := cur; m != nil; m = m.next {
			if retires(m.value, deleted) {
				retired = true
			} else {
				left = &memo{slot: m.slot, value: m.value, next: left}
			}
		}
		if !retired {
			return
		}
		if !e.memos.CompareAndSwap(cur, left) {
			continue
		}
		for m := cur; m != nil; m = m.next {
			if retires(m.value, deleted) {
				m.value.(Retirer).Retired()
			}
		}
		return
	}
}

// SwapMemo stores value, a pointer, under s if the current memo is old, and reports whether it did.
// A nil old means no memo, a nil value removes the memo.
func (e *Entry) SwapMemo(s *Slot, old, value any) bool { return swapMemo(&e.memos, s, old, value) }

// DropClosed drops the memos of closed slots.
func (e *Entry) DropClosed() { dropClosed(&e.memos) }

// Memo returns the memo of s on the event, nil if there is none.
func (e *Event) Memo(s *Slot) any { return e.memos.Load().find(s) }

// SwapMemo is Entry.SwapMemo for the event.
func (e *Event) SwapMemo(s *Slot, old, value any) bool { return swapMemo(&e.memos, s, old, value) }

// DropClosed is Entry.DropClosed for the event.
func (e *Event) DropClosed() { dropClosed(&e.memos) }

// prefixEnd returns the smallest string above every string with the prefix, which
// ends with a slash.
func prefixEnd(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}
