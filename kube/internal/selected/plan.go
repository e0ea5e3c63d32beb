package selected

import (
	"context"
	"iter"

	"k8s.io/apimachinery/pkg/labels"
	operators "k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Plan selects the candidates of a selector with indexes: the intersection of requirements. It is a mirror.Sieve for any snapshot of
// the resource. Not safe for concurrent use.
type Plan struct {
	ctx   context.Context
	terms []term
	// declared is the first term that demands one value of a declared field or label, -1 if there is none.
	declared int
	known    bool // see Known
}

// term is a requirement of a selector, on one label or field.
type term struct {
	index  *Index
	test   test
	values []string
	hashes []uint32
}

// test is the way in which a term compares values.
type test uint8

const (
	oneOf   test = iota // has one of the values
	exists              // has any
	noneOf              // has none of the values, or no value
	missing             // has no value
)

const (
	// smallRange is the number of objects up to which a list examines all of them: those of one leaf.
	smallRange = 64
	// maxValues bounds the values of a term.
	maxValues = 64
)

// Plan returns a plan for the selector on n objects, nil if examining all of them costs less, or if no requirement has an index.
// Requirements that demand a value are used together. Only without any are others used, which usually select most objects.
func (s *Selections) Plan(ctx context.Context, sel *objects.Selector, n int) *Plan {
	if n <= smallRange {
		return nil
	}
	var terms [missing + 1][]term
	for _, t := range termsOf(&sel.Predicate) {
		if len(t.values) <= maxValues {
			terms[t.test] = append(terms[t.test], t)
		}
	}
	for _, usable := range terms {
		p := &Plan{ctx: ctx, declared: -1}
		for _, t := range usable {
			if t.index = s.indexes.get(s, sel.Generation, t.index); t.index == nil {
				continue
			}
			for _, v := range t.values {
				t.hashes = append(t.hashes, hashOf(v))
			}
			if p.declared < 0 && t.test == oneOf && len(t.values) == 1 && t.index.declared(&sel.Predicate) {
				p.declared = len(p.terms)
			}
			p.terms = append(p.terms, t)
		}
		if len(p.terms) > 0 {
			return p
		}
	}
	return nil
}

// termsOf returns the requirements of a selector, with indexes that are only descriptions. Requirements on namespace and name are
// among them: a list of one namespace or object is a range, but a list of everything may have such fields too.
func termsOf(pred *storage.SelectionPredicate) (terms []term) {
	if pred.Field != nil && !pred.Field.Empty() {
		for _, r := range pred.Field.Requirements() {
			t := term{index: fieldIndex(r.Field), values: []string{r.Value}}
			switch r.Operator {
			case operators.Equals, operators.DoubleEquals:
			case operators.NotEquals:
				t.test = noneOf
			default:
				continue
			}
			terms = append(terms, t)
		}
	}
	if pred.Label == nil {
		return terms
	}
	requirements, selectable := pred.Label.Requirements()
	if !selectable {
		return nil
	}
	for i := range requirements {
		if t, ok := labelTerm(&requirements[i]); ok {
			terms = append(terms, t)
		}
	}
	return terms
}

func labelTerm(r *labels.Requirement) (t term, ok bool) {
	t = term{index: labelIndex(r.Key())}
	switch r.Operator() {
	case operators.In, operators.Equals, operators.DoubleEquals:
		t.values = r.ValuesUnsorted()
	case operators.NotIn, operators.NotEquals:
		t.test, t.values = noneOf, r.ValuesUnsorted()
	case operators.Exists, operators.GreaterThan, operators.LessThan: // the caller compares numbers
		t.test = exists
	case operators.DoesNotExist:
		t.test = missing
	default:
		return t, false
	}
	return t, true
}

// Name returns the name that upstream's metrics give to a declared index, "" if the plan has none.
func (p *Plan) Name() string {
	if p.declared < 0 {
		return ""
	}
	return p.terms[p.declared].index.name
}

// Declared returns the plan by the declared index alone, which is the one that upstream uses; nil if there is none.
func (p *Plan) Declared() *Plan {
	if p.declared < 0 {
		return nil
	}
	return &Plan{ctx: p.ctx, terms: p.terms[p.declared : p.declared+1]}
}

// Candidates yields the candidates of a snapshot with start <= key < end, in key order: at least the selected entries. Objects whose
// labels and fields are not known are decoded leaf by leaf; those that cannot be decoded are candidates.
func (p *Plan) Candidates(snap mirror.Snapshot, start, end string) iter.Seq[*mirror.Entry] {
	return snap.Sift(start, end, p)
}

// Known counts the candidates without decoding: entries of leaves without digests count as candidates. It costs as much as Candidates.
func (p *Plan) Known(snap mirror.Snapshot, start, end string) (n int) {
	known := *p
	known.known = true
	for range snap.Sift(start, end, &known) {
		n++
	}
	return n
}

// Leaf implements mirror.Sieve.
func (p *Plan) Leaf(items []*mirror.Entry, d *btree.Digests) uint64 {
	chosen := ^uint64(0)
	for i := range p.terms {
		t := &p.terms[i]
		if chosen &= t.leaf(p, items, d); chosen == 0 {
			return 0
		}
	}
	return chosen
}

// leaf returns the bits of the items that meet the term, or may.
func (t *term) leaf(p *Plan, items []*mirror.Entry, in *btree.Digests) uint64 {
	d, _ := in.Get(t.index.of).(*digest)
	unknown := uint64(0)
	if d == nil {
		if p.known {
			return ^uint64(0)
		}
		if d, unknown = t.index.newLeaf(p.ctx, items, in); d == nil {
			return ^uint64(0)
		}
	}
	switch t.test {
	case exists:
		return d.present | unknown
	case missing:
		return d.absent | unknown
	case oneOf:
		return t.index.having(d, items, t) | unknown
	default:
		if d.shared {
			return ^uint64(0)
		}
		return ^t.index.having(d, items, t) | unknown
	}
}

// having returns the bits of the items of a leaf that have one of the term's values.
func (x *Index) having(d *digest, items []*mirror.Entry, t *term) (found uint64) {
	for i, hash := range t.hashes {
		b := d.bitsOf(hash)
		if b == 0 {
			continue
		}
		// All items of the bits have one value, which may be another one with the same hash.
		if a := x.gen.KnownAttributes(items[lowest(b)]); a != nil && !d.shared {
			if v, _ := x.lookup(a); v != t.values[i] {
				continue
			}
		}
		found |= b
	}
	return found
}

// Parent implements mirror.Sieve.
func (p *Plan) Parent(leaves btree.DigestsOfLeaves, in *btree.Digests) uint64 {
	chosen := ^uint64(0)
	for i := range p.terms {
		t := &p.terms[i]
		if t.test == noneOf {
			continue
		}
		d := t.index.parent(leaves, in)
		if d == nil {
			continue
		}
		switch t.test {
		case exists:
			chosen &= d.present
		case missing:
			chosen &= d.absent
		default:
			var found uint64
			for _, hash := range t.hashes {
				found |= d.bitsOf(hash)
			}
			chosen &= found
		}
		if chosen == 0 {
			return 0
		}
	}
	return chosen
}
