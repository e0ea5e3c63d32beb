package index

import (
	"cmp"
	"context"
	"iter"
	"math/bits"
	"slices"

	"k8s.io/apimachinery/pkg/labels"
	operators "k8s.io/apimachinery/pkg/selection"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Plan selects the candidates of a selector with indexes: the intersection of requirements. Its
// methods may be called concurrently. Those of mirror.Sieve are for Candidates: they write to a
// plan with more terms than one, and to one with known, which is therefore a copy.
type Plan struct {
	ctx   context.Context
	found *found // candidates that keys have found; there are no terms then
	terms []term
	known bool // see Known: nothing is read, and no digest is made
	// with known: the last leaf lacks a digest, or a value to compare
	lacks bool
	read  func(stored, decoded int) // Config.Read
}

// term is a requirement of a selector, on one label or field.
type term struct {
	index *Index
	// scans: the index is a description without digests, and leaves are scanned for the values (see
	// scan).
	scans  bool
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
	// smallRange is the number of objects up to which a list examines all of them: those of one
	// leaf.
	smallRange = 64
	// maxValues bounds the values of a term, maxTerms the terms of a plan.
	maxValues = 64
	maxTerms  = 8
)

// Plan returns a plan for the selector on the entries of a snapshot with start <= key < end. It is
// nil if examining all of them costs less, or if no requirement has an index or demands a value
// that can be found in stored values. It uses the keys of a field, if the snapshot is the newest
// one or nearly so. Otherwise requirements that demand a value are used together. Only without any
// are others used, which usually select most objects.
func (s *Selections) Plan(ctx context.Context, sel *objects.Selector, snap mirror.Snapshot, start, end string) *Plan {
	n, bytes := snap.Count(start, end)
	if n <= smallRange {
		return nil
	}
	if found := s.find(ctx, sel, snap, start, end); found != nil {
		return &Plan{ctx: ctx, found: found, read: s.cfg.Read}
	}
	return s.planDigests(ctx, sel, snap, n, bytes)
}

// planDigests is Plan without keys, of n entries whose stored values have the bytes.
func (s *Selections) planDigests(ctx context.Context, sel *objects.Selector, snap mirror.Snapshot, n int, bytes int64) *Plan {
	var terms [missing + 1][]term
	for _, t := range termsOf(&sel.Predicate) {
		if len(t.values) <= maxValues {
			terms[t.test] = append(terms[t.test], t)
		}
	}
	var again []string // fields whose index was used before
	large := bytes/int64(n) >= largeValue
	for _, usable := range terms {
		p := &Plan{ctx: ctx, read: s.cfg.Read}
		slices.SortStableFunc(usable, func(a, b term) int { return cmp.Compare(b.declared(&sel.Predicate), a.declared(&sel.Predicate)) })
		for _, t := range usable[:min(len(usable), maxTerms)] {
			declared := t.index.declared(&sel.Predicate)
			if !t.index.label && t.single() && s.eager(t.index) && s.indexes.has(t.index.name) {
				again = append(again, t.index.key)
			}
			if x := s.indexes.get(s, sel.Generation, t.index, declared || s.eager(t.index), large); x != nil {
				t.index = x
			} else if t.index.useValues(sel.Generation); t.test > exists || t.index.finder == nil {
				continue
			} else {
				t.scans = true
			}
			for _, v := range t.values {
				t.hashes = append(t.hashes, hashOf(v))
			}
			p.terms = append(p.terms, t)
		}
		if len(p.terms) > 0 {
			slices.SortStableFunc(p.terms, func(a, b term) int { return a.cost() - b.cost() })
			s.keepOne(ctx, sel.Generation, snap, again)
			return p
		}
	}
	return nil
}

// eager reports whether the first use of a label or field makes its index, though no registry has
// declared it.
func (s *Selections) eager(x *Index) bool { return !x.label && s.cfg.Eager[x.key] }

// termsOf returns the requirements of a selector, with indexes that are only descriptions.
// Requirements on namespace and name are among them: a list of one namespace or object is a range,
// but a list of everything may have such fields too.
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

// cost returns 1 for a term that scans leaves, which is tested where the others have left
// candidates, otherwise 0.
func (t *term) cost() int {
	if t.scans {
		return 1
	}
	return 0
}

// declared returns 1 if a registry has declared the label or field, otherwise 0.
func (t *term) declared(pred *storage.SelectionPredicate) int {
	if t.index.declared(pred) {
		return 1
	}
	return 0
}

// single reports whether the term demands one value, as upstream's indexes do; no label has the
// value "" there.
func (t *term) single() bool {
	return t.test == oneOf && len(t.values) == 1 && !(t.index.label && t.values[0] == "")
}

// Declared describes the declared index that upstream uses for a selector.
type Declared struct {
	Name   string // in upstream's metrics
	field  string // "" for a label
	lookup lookup
	value  string
}

// DeclaredIndex returns the declared index of which the selector demands one value; nil if there is
// none.
func DeclaredIndex(pred *storage.SelectionPredicate) *Declared {
	for _, t := range termsOf(pred) {
		if t.single() && t.index.name != storage.FieldIndex("metadata.name") && t.index.name != namespaceField && t.index.declared(pred) {
			d := &Declared{Name: t.index.name, lookup: t.index.lookup, value: t.values[0]}
			if !t.index.label {
				d.field = t.index.key
			}
			return d
		}
	}
	return nil
}

// Any reports whether the declared index has an entry with start <= key < end. It uses the plan,
// unless that is nil or has another index, and examines the objects of the range otherwise. An
// object that cannot be decoded counts.
func (d *Declared) Any(ctx context.Context, p *Plan, gen *objects.Generation, snap mirror.Snapshot, start, end string) bool {
	all := snap.All(start, end)
	switch {
	case p == nil:
	case p.found != nil && p.found.field == d.field:
		all = p.Candidates(snap, start, end)
	default:
		if i := slices.IndexFunc(p.terms, d.is); i >= 0 {
			all = (&Plan{ctx: ctx, terms: p.terms[i : i+1], read: p.read}).Candidates(snap, start, end)
		}
	}
	for e := range all {
		a, err := gen.Attributes(ctx, e)
		if err != nil {
			return true
		}
		if v, _ := d.lookup(a); v == d.value {
			return true
		}
	}
	return false
}

// is reports whether the term demands the value of the declared index.
func (d *Declared) is(t term) bool {
	return t.index.name == d.Name && t.single() && t.values[0] == d.value
}

// Keyed reports whether the plan has its candidates from the keys of a field.
func (p *Plan) Keyed() bool { return p.found != nil }

// Exact reports whether the selector selects all candidates.
func (p *Plan) Exact() bool { return p.found != nil && p.found.exact }

// Indexed reports whether the plan has an index. Without one, it finds candidates in stored values.
func (p *Plan) Indexed() bool { return p.Keyed() || !p.terms[0].scans }

// DemandsValue reports whether the plan selects by values that objects have. Others usually select
// most objects.
func (p *Plan) DemandsValue() bool { return p.Keyed() || p.terms[0].test == oneOf }

// Candidates yields the candidates with start <= key < end of the plan's snapshot and range, in key
// order: at least the selected entries. Objects whose labels and fields are not known are read leaf
// by leaf. Those whose value is not found and that cannot be decoded are candidates; an object
// whose value is found may be one that cannot be decoded.
func (p *Plan) Candidates(snap mirror.Snapshot, start, end string) iter.Seq[*mirror.Entry] {
	if p.found != nil {
		return slices.Values(p.found.in(start, end))
	}
	if len(p.terms) > 1 {
		p = &Plan{ctx: p.ctx, terms: slices.Clone(p.terms), read: p.read} // see advance
	}
	return snap.Sift(start, end, p)
}

// advance moves the term i, which has excluded a node, one place forward, so that terms with few
// candidates are tested first. Other terms are then not tested in most leaves, and need no digests
// there. Each walk begins with the order of the plan.
func (p *Plan) advance(i int) {
	if i > 0 && p.terms[i-1].scans == p.terms[i].scans {
		p.terms[i-1], p.terms[i] = p.terms[i], p.terms[i-1]
	}
}

// Leaf implements mirror.Sieve.
func (p *Plan) Leaf(items []*mirror.Entry, d *memo.List) uint64 {
	chosen := ^uint64(0)
	for i := range p.terms {
		t := &p.terms[i]
		if t.scans {
			chosen = t.scan(p, items, chosen)
		} else {
			chosen &= t.leaf(p, items, d)
		}
		if chosen == 0 {
			p.advance(i)
			return 0
		}
	}
	return chosen
}

// leaf returns the bits of the items that meet the term, or may.
func (t *term) leaf(p *Plan, items []*mirror.Entry, in *memo.List) uint64 {
	d, _ := in.Get(t.index.of).(*digest)
	unknown := uint64(0)
	if d == nil {
		if p.known {
			p.lacks = true
			return ^uint64(0)
		}
		if d, unknown = t.index.newLeaf(p, items, in); d == nil {
			return ^uint64(0)
		}
	}
	switch t.test {
	case exists:
		return d.present | unknown
	case missing:
		return d.absent | unknown
	case oneOf:
		return t.having(p, d, items) | unknown
	default:
		if d.shared {
			return ^uint64(0)
		}
		return ^t.having(p, d, items) | unknown
	}
}

// having returns the bits of the items of a leaf that have one of the term's values. For a term
// that demands them, they may have another value with the same hash, which the caller excludes.
func (t *term) having(p *Plan, d *digest, items []*mirror.Entry) (found uint64) {
	for i, hash := range t.hashes {
		b := d.bitsOf(hash)
		// Otherwise all items of the bits have one value, which may be another one with the same
		// hash.
		if t.test == noneOf && b != 0 && !d.shared && !t.index.has(p, items[bits.TrailingZeros64(b)], t.values[i]) {
			continue
		}
		found |= b
	}
	return found
}

// Parent implements mirror.Sieve.
func (p *Plan) Parent(leaves btree.MemosOfLeaves, in *memo.List) uint64 {
	chosen := ^uint64(0)
	for i := range p.terms {
		t := &p.terms[i]
		if t.test == noneOf || t.scans {
			continue
		}
		d := t.index.parent(leaves, in, p.known)
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
			p.advance(i)
			return 0
		}
	}
	return chosen
}
