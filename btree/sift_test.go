package btree

import (
	"fmt"
	"math/rand/v2"
	"slices"
	"testing"

	"github.com/stratakube/strata/mirror/memo"
)

// bySize is a sieve that selects the items of one size. Its digests are the bits of items, and of
// leaves, by size.
type bySize struct {
	size        int64
	of          *memo.Key
	leaves, mid int // calls
}

type sizes map[int64]uint64

func (s *bySize) Leaf(items []*item, d *memo.List) uint64 {
	s.leaves++
	if kept, ok := d.Get(s.of).(*sizes); ok {
		return (*kept)[s.size]
	}
	made := sizes{}
	for i, it := range items {
		made[it.size] |= 1 << i
	}
	d.Swap(s.of, nil, &made)
	return made[s.size]
}

func (s *bySize) Parent(leaves MemosOfLeaves, d *memo.List) uint64 {
	s.mid++
	if kept, ok := d.Get(s.of).(*sizes); ok {
		return (*kept)[s.size]
	}
	made := sizes{}
	for i := range leaves.Len() {
		leaf, ok := leaves.At(i).Get(s.of).(*sizes)
		if !ok {
			return ^uint64(0) // not known yet
		}
		for size := range *leaf {
			made[size] |= 1 << i
		}
	}
	d.Swap(s.of, nil, &made)
	return made[s.size]
}

// TestSift_RandomEdits_EqualsWalk compares a sieve with a walk over random ranges of trees after
// random edits; versions share digests.
func TestSift_RandomEdits_EqualsWalk(t *testing.T) {
	rnd := rand.New(rand.NewPCG(1, 2))
	key := func() string { return fmt.Sprintf("%05d", rnd.IntN(20000)) }
	tree := Tree[*item]{}
	versions := []Tree[*item]{tree}
	of := &memo.Key{}
	for range 60 {
		edit := tree.Edit()
		for range rnd.IntN(400) {
			if rnd.IntN(3) == 0 {
				edit.Delete(key())
			} else {
				edit.Set(&item{key: key(), size: int64(rnd.IntN(200))})
			}
		}
		tree = edit.Tree()
		versions = append(versions, tree)
		for range 20 {
			v := versions[rnd.IntN(len(versions))]
			start, end := "", ""
			if rnd.IntN(2) == 0 {
				start = key()
			}
			if rnd.IntN(2) == 0 {
				end = key()
			}
			s := &bySize{size: int64(rnd.IntN(210)), of: of}
			var want []*item
			for it := range v.All(start, end) {
				if it.size == s.size {
					want = append(want, it)
				}
			}
			if got := slices.Collect(v.Sift(start, end, s)); !slices.Equal(got, want) {
				t.Fatalf("size %d in [%q, %q): %d items, want %d", s.size, start, end, len(got), len(want))
			}
		}
		if err := tree.Check(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestSift_CachedDigests_ReadsSelectedLeavesOnly: with digests, only leaves with selected items are
// read; an edit costs the digests of its path.
func TestSift_CachedDigests_ReadsSelectedLeavesOnly(t *testing.T) {
	var items []*item
	for i := range 30000 {
		items = append(items, &item{key: fmt.Sprintf("%05d", i), size: 0})
	}
	items[20000].size = 1
	tree, of := Build(items), &memo.Key{}
	collect := func(tree Tree[*item]) *bySize {
		s := &bySize{size: 1, of: of}
		if got := slices.Collect(tree.Sift("", "", s)); len(got) != 1 || got[0].key != "20000" {
			t.Fatalf("got %v", got)
		}
		return s
	}
	collect(tree)
	collect(tree) // makes the digests of parents
	if s := collect(tree); s.leaves != 1 || s.mid > 30 {
		t.Errorf("%d leaves and %d parents were read", s.leaves, s.mid)
	}
	edit := tree.Edit()
	edit.Set(&item{key: "00000", size: 2})
	next := edit.Tree()
	collect(next)
	if s := collect(next); s.leaves != 1 {
		t.Errorf("after an edit %d leaves were read", s.leaves)
	}
	count := func() (n int) {
		for d := range next.Memos() {
			for range d.All() {
				n++
			}
		}
		return n
	}
	if n := count(); n < 30000/maxItems {
		t.Errorf("%d digests", n)
	}
	of.Close()
	for d := range next.Memos() {
		d.DropClosed()
	}
	if n := count(); n != 0 {
		t.Errorf("%d digests of a closed key", n)
	}
}
