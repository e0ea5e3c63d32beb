package mirror

import (
	"strings"
	"unsafe"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/memo"
)

// Entry is one key with its stored value at one revision. Entries are immutable except for the
// memos of readers (I2). All versions and events that contain an entry share it, and it may be read
// concurrently.
type Entry struct {
	// data is the key followed by the value: one block without pointers, which is cheap for the
	// garbage collector. It is a string because it never changes.
	data   string
	mod    Revision
	create Revision
	keyLen uint32
	writes uint32 // etcd's Version modulo 2^32, enough to see a gap; 0: the store counts none
	memos  memo.List
}

// entryOverhead is the memory of an entry in addition to its bytes: the struct (48 bytes), and an
// estimate of the allocator's rounding.
const entryOverhead = 80

// Flags in keyLen.
const (
	noValue    = 1 << 31 // the value was not stored
	isDetached = 1 << 30 // it was read from the source for one reader, see Snapshot.DetachedRun

	keyLenMask = isDetached - 1
)

func newEntry(kv *driver.KV, keep bool) *Entry {
	n := len(kv.Key)
	e := &Entry{mod: kv.ModRevision, create: kv.CreateRevision, keyLen: uint32(n), writes: uint32(kv.Version)}
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
	return &Entry{data: key, mod: e.mod, create: e.create, keyLen: uint32(len(key)) | noValue, writes: e.writes}
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

// Detached reports whether the entry is in no version of the resource. Later readers cannot find it,
// so its memos are useful to its own reader only.
func (e *Entry) Detached() bool { return e.keyLen&isDetached != 0 }

// ModRevision returns the revision that wrote this value.
func (e *Entry) ModRevision() Revision { return e.mod }

// CreateRevision returns the revision that created the key.
func (e *Entry) CreateRevision() Revision { return e.create }

// WriteCount returns etcd's WriteCount of the key modulo 2^32: the writes since its creation, 1 for the first.
func (e *Entry) WriteCount() uint32 { return e.writes }

// Size returns the bytes of the value as stored, 0 if the value was not stored.
func (e *Entry) Size() int64 { return int64(len(e.data)) - int64(e.keyLen&keyLenMask) }

// footprint is the memory that a reference to the entry keeps alive.
func (e *Entry) footprint() int64 { return int64(len(e.data)) + entryOverhead }

// Event is a change of one key: the entry before and after it.
type Event struct {
	Rev   Revision
	Entry *Entry // nil if the key was deleted
	Prev  *Entry // nil if the key was created
	// Arrived is when the event arrived from etcd, in nanoseconds as driver.Now counts them; 0 if it was
	// restored or listed.
	Arrived int64
	memos   memo.List
}

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

// Memo returns the memo of k on the entry, nil if there is none.
func (e *Entry) Memo(k *memo.Key) any { return e.memos.Get(k) }

// SwapMemo stores value, a pointer, under k if the current memo is old, and reports whether it did.
// A nil old means no memo, a nil value removes the memo.
func (e *Entry) SwapMemo(k *memo.Key, old, value any) bool { return e.memos.Swap(k, old, value) }

// DropClosed drops the memos of closed keys.
func (e *Entry) DropClosed() { e.memos.DropClosed() }

// Memo returns the memo of k on the event, nil if there is none.
func (e *Event) Memo(k *memo.Key) any { return e.memos.Get(k) }

// SwapMemo is Entry.SwapMemo for the event.
func (e *Event) SwapMemo(k *memo.Key, old, value any) bool { return e.memos.Swap(k, old, value) }

// DropClosed is Entry.DropClosed for the event.
func (e *Event) DropClosed() { e.memos.DropClosed() }

// prefixEnd returns the smallest string above every string with the prefix, which
// ends with a slash.
func prefixEnd(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}
