package index

import (
	"hash/maphash"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/memo"
)

// digest is the part of an index that belongs to one leaf, or to one parent of leaves: for each
// value the items that have it, or the leaves below that have such items, as bits. Immutable.
//
// Values are hashed, so two values may share their bits. In a leaf that is known (shared); a parent
// may then select a leaf without a selected item.
type digest struct {
	// items with and without the label or field; of a parent, leaves that have such items
	present, absent uint64
	shared          bool // two values in the leaf have the same hash
	n               int  // values
	words           []uint64
	// words are n words of bits, in ascending order of their hashes, and then the hashes, two in a
	// word.
}

var hashSeed = maphash.MakeSeed()

// hashMask has the bits of hashes; tests use fewer, so that values collide.
var hashMask = ^uint32(0)

func hashOf(value string) uint32 { return uint32(maphash.String(hashSeed, value)) & hashMask }

// hashOfBytes is hashOf of a value in bytes.
func hashOfBytes(value []byte) uint32 { return uint32(maphash.Bytes(hashSeed, value)) & hashMask }

// digestOverhead is the memory of a digest beside its words: its struct, its place on the node, and
// the rounding of the allocator.
const digestOverhead = 112

// Size implements memo.Sizer: digests of old versions count as memory of these versions, which the
// window bounds.
func (d *digest) Size() int64 { return digestOverhead + int64(8*len(d.words)) }

// bitsOf returns the bits of the values with the hash. Hashes are evenly distributed, so the search
// begins where the hash is expected: nearly always one or two cache lines are read.
func (d *digest) bitsOf(hash uint32) uint64 {
	i := int(uint64(hash) * uint64(d.n) >> 32)
	for i > 0 && d.hash(i-1) >= hash {
		i--
	}
	for i < d.n && d.hash(i) < hash {
		i++
	}
	if i < d.n && d.hash(i) == hash {
		return d.words[i]
	}
	return 0
}

func (d *digest) hash(i int) uint32 { return uint32(d.words[d.n+i/2] >> (32 * (i & 1))) }

// newDigest returns a digest of pairs of a hash and a bit, which it sorts.
func newDigest(pairs []pair, present, absent uint64) *digest {
	slices.Sort(pairs)
	n := 0
	for i, p := range pairs {
		if i == 0 || p.hash() != pairs[i-1].hash() {
			n++
		}
	}
	d := &digest{present: present, absent: absent, n: n, words: make([]uint64, n+(n+1)/2)}
	at := -1
	for i, p := range pairs {
		if i == 0 || p.hash() != pairs[i-1].hash() {
			at++
			d.words[n+at/2] |= uint64(p.hash()) << (32 * (at & 1))
		}
		d.words[at] |= 1 << p.bit()
	}
	return d
}

// pair is a hash, and the number of a bit.
type pair uint64

func newPair(hash uint32, bit int) pair { return pair(hash)<<8 | pair(bit) }
func (p pair) hash() uint32             { return uint32(p >> 8) }
func (p pair) bit() int                 { return int(p & 0xff) }

var pairs = sync.Pool{New: func() any { return new([]pair) }}

// visits counts the reads of a parent that has no digest. Making one costs about as much as
// parentVisits reads without it, and a parent of a leaf that is written all the time would not need
// it for longer.
type visits struct{ n atomic.Int32 }

const parentVisits = 8

// joinDigests returns the digest of the parent of leaves, nil if a leaf has none under the name.
func joinDigests(leaves btree.MemosOfLeaves, of *memo.Key) *digest {
	buf := pairs.Get().(*[]pair)
	defer pairs.Put(buf)
	all := (*buf)[:0]
	var present, absent uint64
	for i := range leaves.Len() {
		d, ok := leaves.At(i).Get(of).(*digest)
		if !ok {
			return nil
		}
		for v := range d.n {
			all = append(all, newPair(d.hash(v), i))
		}
		if d.present != 0 {
			present |= 1 << i
		}
		if d.absent != 0 {
			absent |= 1 << i
		}
	}
	*buf = all
	return newDigest(all, present, absent)
}
