package index

import (
	"iter"
	"slices"
	"sort"

	"github.com/stratakube/strata/mirror"
)

// keySet contains the entries of a resource by the hash of one value, and those of a hash in key
// order. It has no part for each value, so that a million values with one entry each cost as much
// as one value with a million: 12 bytes for each entry, in chunks that are four fifths full when
// they are built and two thirds full after random changes. A value with all entries changes as
// cheaply as one with few. The zero value is empty. Not safe for concurrent use.
type keySet struct {
	chunks []*keyChunk // none is empty; ascending, as are the entries of each
	n      int
}

// keyChunk contains neighbouring entries and their hashes. It has 1,536 bytes, a size class of the
// allocator.
type keyChunk struct {
	n       int
	entries [keysInChunk]*mirror.Entry
	hashes  [keysInChunk]uint32
}

const (
	keysInChunk = 127
	// builtKeys is the number of entries of a chunk of a new set.
	builtKeys = keysInChunk * 4 / 5
	// chunkBytes is the memory of a chunk and its place in the set.
	chunkBytes = 1536 + 16
)

// hashed is an entry with the hash of its value.
type hashed struct {
	hash  uint32
	entry *mirror.Entry
}

// buildKeys returns the set of entries that are in key order.
func buildKeys(all []hashed) keySet {
	// The sort of numbers is several times faster than one that calls a function, and unlike
	// slices.SortStableFunc keeps the key order by itself.
	order := make([]uint64, len(all))
	for i, h := range all {
		order[i] = uint64(h.hash)<<32 | uint64(i)
	}
	slices.Sort(order)
	s := keySet{n: len(all), chunks: make([]*keyChunk, 0, (len(all)+builtKeys-1)/builtKeys)}
	for part := range slices.Chunk(order, builtKeys) {
		c := &keyChunk{n: len(part)}
		for i, o := range part {
			h := all[uint32(o)]
			c.entries[i], c.hashes[i] = h.entry, h.hash
		}
		s.chunks = append(s.chunks, c)
	}
	return s
}

// bytes returns the memory of the set.
func (s *keySet) bytes() int64 { return int64(len(s.chunks)) * chunkBytes }

// below reports whether the entry at i is before the place of a hash and a key.
func (c *keyChunk) below(i int, hash uint32, key string) bool {
	return c.hashes[i] < hash || c.hashes[i] == hash && c.entries[i].Key() < key
}

// place returns where the hash and key are, or would be: at is len(s.chunks) behind the last entry.
func (s *keySet) place(hash uint32, key string) (at, i int, found bool) {
	at = sort.Search(len(s.chunks), func(at int) bool {
		c := s.chunks[at]
		return !c.below(c.n-1, hash, key)
	})
	if at == len(s.chunks) {
		return at, 0, false
	}
	c := s.chunks[at]
	i = sort.Search(c.n, func(i int) bool { return !c.below(i, hash, key) })
	return at, i, c.hashes[i] == hash && c.entries[i].Key() == key
}

// set adds an entry, or replaces the one with its hash and key.
func (s *keySet) set(h hashed) {
	at, i, found := s.place(h.hash, h.entry.Key())
	if found {
		s.chunks[at].entries[i] = h.entry
		return
	}
	s.n++
	switch {
	case len(s.chunks) == 0:
		s.chunks = []*keyChunk{{}}
	case at == len(s.chunks):
		at--
		i = s.chunks[at].n
	}
	c := s.chunks[at]
	if c.n == keysInChunk {
		half := &keyChunk{}
		c.moveTo(half, keysInChunk/2)
		s.chunks = slices.Insert(s.chunks, at+1, half)
		if i > c.n {
			c, i = half, i-c.n
		}
	}
	copy(c.entries[i+1:c.n+1], c.entries[i:c.n])
	copy(c.hashes[i+1:c.n+1], c.hashes[i:c.n])
	c.entries[i], c.hashes[i] = h.entry, h.hash
	c.n++
}

// moveTo appends the entries from the number from on to another chunk.
func (c *keyChunk) moveTo(to *keyChunk, from int) {
	copy(to.entries[to.n:], c.entries[from:c.n])
	copy(to.hashes[to.n:], c.hashes[from:c.n])
	to.n += c.n - from
	clear(c.entries[from:c.n])
	c.n = from
}

// remove removes the entry with the hash and key, and reports whether there was one.
func (s *keySet) remove(hash uint32, key string) bool {
	at, i, found := s.place(hash, key)
	if !found {
		return false
	}
	s.n--
	c := s.chunks[at]
	copy(c.entries[i:], c.entries[i+1:c.n])
	copy(c.hashes[i:], c.hashes[i+1:c.n])
	c.n--
	c.entries[c.n] = nil
	// A chunk joins its neighbour if both leave room, so that two neighbours have more entries than
	// half a chunk.
	switch {
	case c.n == 0:
		s.chunks = slices.Delete(s.chunks, at, at+1)
	case at+1 < len(s.chunks) && c.n+s.chunks[at+1].n <= keysInChunk*2/3:
		s.chunks[at+1].moveTo(c, 0)
		s.chunks = slices.Delete(s.chunks, at+1, at+2)
	case at > 0 && c.n+s.chunks[at-1].n <= keysInChunk*2/3:
		c.moveTo(s.chunks[at-1], 0)
		s.chunks = slices.Delete(s.chunks, at, at+1)
	}
	return true
}

// of yields the entries of a hash with start <= key < end in key order; an empty end means no upper
// bound.
func (s *keySet) of(hash uint32, start, end string) iter.Seq[*mirror.Entry] {
	return func(yield func(*mirror.Entry) bool) {
		at, i, _ := s.place(hash, start)
		for ; at < len(s.chunks); at, i = at+1, 0 {
			c := s.chunks[at]
			for ; i < c.n; i++ {
				e := c.entries[i]
				if c.hashes[i] != hash || end != "" && e.Key() >= end || !yield(e) {
					return
				}
			}
		}
	}
}
