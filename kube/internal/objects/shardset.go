package objects

import (
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"

	"k8s.io/apimachinery/pkg/sharding"
)

// ShardKey is the field of an object whose hash selects its shard (KEP-5866).
type ShardKey uint8

const (
	byUID ShardKey = iota
	byNamespace

	ShardKeys // the number of keys
)

// hashRange is a range of hashes, both ends included.
type hashRange struct{ first, last uint64 }

// ShardSet is the set of objects that a shard selector matches: those with a hash in one of its
// ranges. Immutable.
type ShardSet struct {
	Key    ShardKey
	ranges []hashRange // ascending, disjoint
	// Name is the same for selectors that match the same objects: the ranges, 16 bytes each.
	Name string
}

// parseShardSet returns the set of a selector, or false if the selector has another key than
// metadata.uid or metadata.namespace, both of them, or a malformed hash: it then has to be
// evaluated on objects.
func parseShardSet(sel sharding.Selector) (*ShardSet, bool) {
	s := &ShardSet{}
	for i, req := range sel.Requirements() {
		key := byUID
		switch req.Key {
		case "object.metadata.uid":
		case "object.metadata.namespace":
			key = byNamespace
		default:
			return nil, false
		}
		if i > 0 && key != s.Key {
			return nil, false
		}
		s.Key = key
		first, ok := parseHash(req.Start)
		if !ok {
			return nil, false
		}
		last := ^uint64(0)
		if req.End != endOfHashes {
			end, ok := parseHash(req.End)
			if !ok {
				return nil, false
			}
			if end <= first {
				continue // an empty range
			}
			last = end - 1
		}
		s.ranges = append(s.ranges, hashRange{first, last})
	}
	slices.SortFunc(s.ranges, func(a, b hashRange) int {
		if a.first < b.first {
			return -1
		}
		return 1
	})
	merged := s.ranges[:0]
	for _, r := range s.ranges {
		if n := len(merged); n > 0 && (merged[n-1].last == ^uint64(0) || r.first <= merged[n-1].last+1) {
			merged[n-1].last = max(merged[n-1].last, r.last)
		} else {
			merged = append(merged, r)
		}
	}
	s.ranges = merged
	var name []byte
	for _, r := range s.ranges {
		name = binary.BigEndian.AppendUint64(binary.BigEndian.AppendUint64(name, r.first), r.last)
	}
	s.Name = string(name)
	return s, true
}

// endOfHashes is the end of a range that has no upper bound: 2^64.
const endOfHashes = "0x10000000000000000"

// parseHash parses a hash as selectors write it: 0x and 16 digits in lower case.
func parseHash(s string) (uint64, bool) {
	if len(s) != len("0x")+16 {
		return 0, false
	}
	n, err := strconv.ParseUint(s[2:], 16, 64)
	return n, err == nil && s == fmt.Sprintf("0x%016x", n)
}

// contains reports whether the set has objects with the hash.
func (s *ShardSet) contains(hash uint64) bool {
	for _, r := range s.ranges {
		if r.first <= hash && hash <= r.last {
			return true
		}
	}
	return false
}

// Selects reports whether the set has an object with the attributes.
func (s *ShardSet) Selects(a *Attributes) bool { return s.contains(a.hashes[s.Key]) }

// HashValue is a hash as a value of a mirror.WatchIndex.
func HashValue(hash uint64) string {
	var b [8]byte
	binary.BigEndian.PutUint64(b[:], hash)
	return string(b[:])
}

// CoversHash reports whether the set with the name contains the hash.
func CoversHash(set, hash string) bool {
	for ; set != ""; set = set[16:] {
		if set[:8] <= hash && hash <= set[8:16] {
			return true
		}
	}
	return false
}

// hashField returns the hash of a field's value: FNV-1a with 64 bits, as in KEP-5866.
func hashField(value string) uint64 {
	h := uint64(14695981039346656037)
	for i := range len(value) {
		h = (h ^ uint64(value[i])) * 1099511628211
	}
	return h
}
