package mirror

import (
	"encoding/binary"
	"sync/atomic"
	"unsafe"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/compress"
	"github.com/stratakube/strata/mirror/memo"
)

// Entry is one key with its stored value at one revision. Entries are immutable except for the
// memos of readers and the form in which the value is stored (I2). All versions and events that
// contain an entry share it, and it may be read concurrently.
type Entry struct {
	// block is the key and the value, in one allocation without pointers, which is cheap for the
	// garbage collector; see the block functions. Only the writer replaces it, with a compressed
	// one.
	block  atomic.Pointer[byte]
	mod    Revision
	create Revision
	keyLen uint32
	writes uint32 // etcd's Version modulo 2^32, enough to see a gap; 0: the store counts none
	size   uint32 // of the value as stored in etcd
	marks  atomic.Uint32
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

// Flags in marks.
const (
	wasRead        = 1 << iota // the value was read since the flag was cleared; set for a new entry
	incompressible             // compression has not made the value smaller
)

// A block is the number of the dictionary with which the value is compressed (a byte, 0 if it is
// not), the key, and the value. The bytes of a compressed value follow their number, 4 bytes.
const (
	blockKey      = 1 // offset of the key
	packedLenSize = 4
)

// newBlock returns the block of a key and its value.
func newBlock(key, value []byte) *byte {
	block := make([]byte, blockKey+len(key)+len(value))
	copy(block[blockKey:], key)
	copy(block[blockKey+len(key):], value)
	return unsafe.SliceData(block)
}

// packedBlock returns the block of a key and its compressed value.
func packedBlock(key string, dictionary byte, packed []byte) *byte {
	block := make([]byte, blockKey+len(key), blockKey+len(key)+packedLenSize+len(packed))
	block[0] = dictionary
	copy(block[blockKey:], key)
	block = binary.NativeEndian.AppendUint32(block, uint32(len(packed)))
	return unsafe.SliceData(append(block, packed...))
}

func newEntry(kv *driver.KV, keep bool) *Entry {
	e := &Entry{mod: kv.ModRevision, create: kv.CreateRevision, keyLen: uint32(len(kv.Key)), writes: uint32(kv.Version)}
	e.marks.Store(wasRead)
	if !keep {
		e.keyLen |= noValue
		e.block.Store(newBlock(kv.Key, nil))
		return e
	}
	e.size = uint32(len(kv.Value))
	e.block.Store(newBlock(kv.Key, kv.Value))
	return e
}

// withoutValue returns the entry with key and revisions only.
func (e *Entry) withoutValue() *Entry {
	key := e.Key()
	none := &Entry{mod: e.mod, create: e.create, keyLen: uint32(len(key)) | noValue, writes: e.writes}
	none.block.Store(newBlock([]byte(key), nil))
	return none
}

// Key returns the etcd key. It keeps the memory of the entry's value alive.
func (e *Entry) Key() string {
	return unsafe.String(e.block.Load(), blockKey+e.keyLen&keyLenMask)[blockKey:]
}

// Value returns the stored value. Do not write to it. A compressed value is decompressed into new
// memory, about 0.2 microseconds for a KB.
func (e *Entry) Value() []byte { return e.ValueIn(nil) }

// ValueIn is Value for a caller that needs the value briefly: a compressed value is decompressed
// into buf, which grows if needed and is reused by the caller. A nil buf means new memory.
func (e *Entry) ValueIn(buf *[]byte) []byte {
	if e.marks.Load()&wasRead == 0 {
		e.marks.Or(wasRead)
	}
	return e.stored(buf)
}

// PeekIn is ValueIn for a reader of many values, which does not count as a read: values that have
// no other readers are still compressed.
func (e *Entry) PeekIn(buf *[]byte) []byte { return e.stored(buf) }

// stored is ValueIn without a mark.
func (e *Entry) stored(buf *[]byte) []byte {
	block := e.block.Load()
	if dictionary, packed := e.packedIn(block); dictionary != 0 {
		if buf == nil {
			return compress.Decompress(nil, dictionary, packed)
		}
		*buf = compress.Decompress(*buf, dictionary, packed)
		return *buf
	}
	value := blockKey + e.keyLen&keyLenMask
	return unsafe.Slice(block, value+e.size)[value:]
}

// packedIn returns the number of the dictionary and the compressed value of a block of the entry; 0
// if the value is not compressed.
func (e *Entry) packedIn(block *byte) (dictionary byte, packed []byte) {
	if *block == 0 {
		return 0, nil
	}
	from := blockKey + e.keyLen&keyLenMask + packedLenSize
	n := binary.NativeEndian.Uint32(unsafe.Slice(block, from)[from-packedLenSize:])
	return *block, unsafe.Slice(block, from+n)[from:]
}

// isCompressed reports whether the value is compressed.
func (e *Entry) isCompressed() bool { return *e.block.Load() != 0 }

// saves returns the bytes of memory that the compression of the value saves.
func (e *Entry) saves() int64 {
	if dictionary, packed := e.packedIn(e.block.Load()); dictionary != 0 {
		return int64(e.size) - packedLenSize - int64(len(packed))
	}
	return 0
}

// HasValue reports whether the stored value is in memory. It is, except for keys without a claim
// beyond Options.UnclaimedBytes.
func (e *Entry) HasValue() bool { return e.hasValue() }

// hasValue is false for an entry of an unclaimed resource beyond Options.UnclaimedBytes.
func (e *Entry) hasValue() bool { return e.keyLen&noValue == 0 }

// Detached reports whether the entry is in no version of the resource. Later readers cannot find
// it, so its memos are useful to its own reader only.
func (e *Entry) Detached() bool { return e.keyLen&isDetached != 0 }

// ModRevision returns the revision that wrote this value.
func (e *Entry) ModRevision() Revision { return e.mod }

// CreateRevision returns the revision that created the key.
func (e *Entry) CreateRevision() Revision { return e.create }

// WriteCount returns etcd's version of the key modulo 2^32: the writes since its creation, 1 for
// the first.
func (e *Entry) WriteCount() uint32 { return e.writes }

// Size returns the bytes of the value as stored, 0 if the value was not stored.
func (e *Entry) Size() int64 { return int64(e.size) }

// footprint is the memory that a reference to the entry keeps alive. It shrinks when the writer
// compresses the value.
func (e *Entry) footprint() int64 {
	return blockKey + int64(e.keyLen&keyLenMask) + int64(e.size) - e.saves() + entryOverhead
}

// Event is a change of one key: the entry before and after it.
type Event struct {
	Rev   Revision
	Entry *Entry // nil if the key was deleted
	Prev  *Entry // nil if the key was created
	// Arrived is when the event arrived from etcd, in nanoseconds as driver.Now counts them; 0 if
	// it was restored or listed.
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

// Memos returns the memos of the entry.
func (e *Entry) Memos() *memo.List { return &e.memos }

// Memos returns the memos of the event.
func (e *Event) Memos() *memo.List { return &e.memos }

// prefixEnd returns the smallest string above every string with the prefix, which
// ends with a slash.
func prefixEnd(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}
