package index

import (
	"bytes"
	"math/bits"
	"sync"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// useValues makes the index read the values of a generation.
func (x *Index) useValues(gen *objects.Generation) {
	x.gen, x.finder = gen, gen.Finder(x.label, x.key)
}

// leafValues are the values of the items of a leaf, for the time in which its digest is made.
type leafValues struct {
	text     []byte
	from, to [64]int // in text, by item
	found    [64]pair
	n        int // of found
}

// maxValuesText bounds the text that is reused.
const maxValuesText = 64 << 10

var leafValuesPool = sync.Pool{New: func() any { return new(leafValues) }}

func (v *leafValues) of(i int) []byte { return v.text[v.from[i]:v.to[i]] }

// newLeaf makes and caches the digest of a leaf. It takes the values from cached attributes, else
// from the stored values, and decodes the objects of which neither is known: the attributes of the
// others are not cached. The entries of unknown cannot be decoded now; the digest is then not
// cached, and the caller reports the errors. It is nil if the context of the plan has ended.
func (x *Index) newLeaf(p *Plan, items []*mirror.Entry, in *memo.List) (d *digest, unknown uint64) {
	if p.ctx.Err() != nil {
		return nil, 0
	}
	v := leafValuesPool.Get().(*leafValues)
	defer func() {
		if cap(v.text) <= maxValuesText {
			leafValuesPool.Put(v)
		}
	}()
	present, unknown, ok := x.readLeaf(p, items, v)
	if !ok {
		return nil, 0
	}
	all := ^uint64(0) >> (64 - len(items))
	found := v.found[:v.n]
	d = newDigest(found, present, all&^present&^unknown)
	for i := 1; i < len(found); i++ { // sorted now
		if a, b := found[i-1], found[i]; a.hash() == b.hash() && !bytes.Equal(v.of(a.bit()), v.of(b.bit())) {
			d.shared = true
		}
	}
	if unknown == 0 {
		x.cache(in, nil, d)
	}
	return d, unknown
}

// readLeaf reads the values of a leaf, and returns the bits of the items that have one. Not ok: the
// context has ended.
func (x *Index) readLeaf(p *Plan, items []*mirror.Entry, v *leafValues) (present, unknown uint64, ok bool) {
	v.text, v.n = v.text[:0], 0
	read := reading{index: x}
	defer read.end(p)
	for i, e := range items {
		from := len(v.text)
		found, has, ok := read.value(p, e, v.text)
		if !ok {
			if p.ctx.Err() != nil {
				return 0, 0, false
			}
			unknown = ^uint64(0) << i // the caller meets the error, and ends or goes on
			break
		}
		if !has {
			continue
		}
		v.text = found
		v.from[i], v.to[i] = from, len(found)
		present |= 1 << i
		v.found[v.n] = newPair(hashOfBytes(found[from:]), i)
		v.n++
	}
	return present, unknown, true
}

// reading reads the values of some items.
type reading struct {
	index           *Index
	pass            *objects.Finding // nil before the first stored value
	stored, decoded int
}

// end ends the reading and counts it.
func (r *reading) end(p *Plan) {
	if r.pass != nil {
		r.pass.End()
	}
	if r.stored+r.decoded > 0 {
		p.read(r.stored, r.decoded)
	}
}

// find finds the value in the stored one. See objects.Finding.
func (r *reading) find(p *Plan, e *mirror.Entry) (value []byte, has, ok bool) {
	if r.index.finder == nil {
		return nil, false, false
	}
	if r.pass == nil {
		r.pass = r.index.finder.Begin(p.ctx)
	}
	if value, has, ok = r.pass.Find(e); ok {
		r.stored++
	}
	return value, has, ok
}

// value appends the value of an item to dst; it has none without the label. Not ok: the object
// cannot be decoded.
func (r *reading) value(p *Plan, e *mirror.Entry, dst []byte) (_ []byte, has, ok bool) {
	a := r.index.gen.KnownAttributes(e)
	if a == nil {
		if value, has, ok := r.find(p, e); ok {
			return append(dst, value...), has, true
		}
		var err error
		if a, err = r.index.gen.Attributes(p.ctx, e); err != nil {
			return dst, false, false
		}
		r.decoded++
	}
	value, has := r.index.lookup(a)
	return append(dst, value...), has, true
}

// has reports whether an item has the value; not if it cannot be decoded, or if the plan must not
// read it (then it lacks the value).
func (x *Index) has(p *Plan, e *mirror.Entry, want string) bool {
	a := x.gen.KnownAttributes(e)
	if a == nil {
		if p.known {
			p.lacks = true
			return false
		}
		read := reading{index: x}
		defer read.end(p)
		if value, has, ok := read.find(p, e); ok {
			return has && string(value) == want
		}
		var err error
		if a, err = x.gen.Attributes(p.ctx, e); err != nil {
			return false
		}
		read.decoded++
	}
	value, has := x.lookup(a)
	return has && value == want
}

// scan returns the chosen items that meet a term without digests, or may: those whose value is only
// known to a decoder.
func (t *term) scan(p *Plan, items []*mirror.Entry, chosen uint64) (found uint64) {
	if p.known {
		p.lacks = true
		return chosen
	}
	if p.ctx.Err() != nil {
		return chosen
	}
	read := reading{index: t.index}
	defer read.end(p)
	for chosen &= ^uint64(0) >> (64 - len(items)); chosen != 0; chosen &= chosen - 1 {
		i := bits.TrailingZeros64(chosen)
		var meets bool
		if a := t.index.gen.KnownAttributes(items[i]); a != nil {
			value, has := t.index.lookup(a)
			meets = demands(t, value, has)
		} else {
			value, has, ok := read.find(p, items[i])
			if !ok {
				read.decoded++ // by the caller
			}
			meets = !ok || demands(t, value, has)
		}
		if meets {
			found |= 1 << i
		}
	}
	return found
}

// demands reports whether a value meets a term that demands one.
func demands[T string | []byte](t *term, value T, has bool) bool {
	if t.test == exists || !has {
		return has
	}
	for _, want := range t.values {
		if string(value) == want {
			return true
		}
	}
	return false
}
