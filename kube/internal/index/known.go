package index

import (
	"iter"
	"math/bits"
	"slices"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Known are the candidates of a plan in a range that were found by digests alone. Immutable.
type Known struct {
	// N is the number of candidates. Entries of leaves without digests count as candidates, and so
	// may entries of such leaves that are out of the range and entries that have a value which a
	// negation excludes.
	N int

	first []*mirror.Entry // candidates, in key order
	next  string          // key from which others may follow; "" if none do
}

// maxKnown bounds the candidates that a list holds before it reads them.
const maxKnown = 4096

// Known finds candidates without reading stored values, and counts them to most or a little more.
// Cost is O(parents of leaves + leaves with candidates).
func (p *Plan) Known(snap mirror.Snapshot, start, end string, most int) *Known {
	if p.found != nil {
		first := p.found.in(start, end)
		return &Known{N: len(first), first: first}
	}
	s := knownSieve{plan: &Plan{ctx: p.ctx, terms: slices.Clone(p.terms), known: true, read: p.read}, start: start, most: most, known: &Known{}}
	k := s.known
	for e := range snap.Sift(start, end, &s) {
		switch k.N++; {
		case k.next != "": // behind it
		case k.N > most || len(k.first) == maxKnown:
			k.next = e.Key()
		default:
			k.first = append(k.first, e)
		}
	}
	return k
}

// Candidates yields all candidates of the range, which ends before end: those that were found, and
// those that the plan finds after them.
func (k *Known) Candidates(p *Plan, snap mirror.Snapshot, end string) iter.Seq[*mirror.Entry] {
	return func(yield func(*mirror.Entry) bool) {
		for _, e := range k.first {
			if !yield(e) {
				return
			}
		}
		if k.next == "" {
			return
		}
		for e := range p.Candidates(snap, k.next, end) {
			if !yield(e) {
				return
			}
		}
	}
}

// knownSieve is a mirror.Sieve that selects candidates up to the first leaf that lacks a digest or
// a value, or up to the bounds, and then counts them.
type knownSieve struct {
	plan  *Plan
	start string
	most  int
	known *Known
}

// Leaf implements mirror.Sieve.
func (s *knownSieve) Leaf(items []*mirror.Entry, d *memo.List) uint64 {
	k := s.known
	if s.enough(items) {
		return 0
	}
	s.plan.lacks = false
	chosen := s.plan.Leaf(items, d) & (^uint64(0) >> (64 - len(items)))
	if s.plan.lacks && chosen != 0 && k.next == "" {
		k.next = max(s.start, items[0].Key())
	}
	if k.next == "" {
		return chosen
	}
	k.N += bits.OnesCount64(chosen)
	return 0
}

// enough reports whether the candidates were counted to most; items, of a leaf, are not examined.
func (s *knownSieve) enough(items []*mirror.Entry) bool {
	if s.known.N < s.most {
		return false
	}
	if s.known.next == "" {
		s.known.next = max(s.start, items[0].Key())
	}
	return true
}

// Parent implements mirror.Sieve.
func (s *knownSieve) Parent(leaves btree.MemosOfLeaves, d *memo.List) uint64 {
	if s.known.N >= s.most && s.known.next != "" {
		return 0
	}
	return s.plan.Parent(leaves, d)
}
