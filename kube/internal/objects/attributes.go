package objects

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// Attributes are the labels and fields of an object, and the hashes that determine its shards: the
// data that selectors evaluate. They are small, because each object that a selector was evaluated
// on has them: a map of three labels takes 450 bytes, these about 80, and the thirteen fields of an
// event 240.
type Attributes struct {
	Labels Set
	Fields FieldSet
	hashes [ShardKeys]uint64
}

// Hash returns the hash of the field of a shard key.
func (a *Attributes) Hash(key ShardKey) uint64 { return a.hashes[key] }

// KnownAttributes returns the entry's attributes if they are cached, nil otherwise.
func (g *Generation) KnownAttributes(e *mirror.Entry) *Attributes {
	a, _ := e.Memos().Get(g.memoKey).(*Attributes)
	return a
}

// Attributes returns the entry's attributes, decoding it once for all readers. After a failure the
// next reader tries again. Errors are those of Decode; of a value that is cut down first, malformed
// fields besides these attributes may be no error.
func (g *Generation) Attributes(ctx context.Context, e *mirror.Entry) (*Attributes, error) {
	if a := g.KnownAttributes(e); a != nil {
		return a, nil
	}
	if a := g.abridgedAttributes(ctx, e); a != nil {
		return a, nil
	}
	obj, err := g.Decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	return g.keepAttributes(e, obj)
}

// AttributesAfter is Attributes of the object after an event. If the whole object is decoded, all
// watchers of the event share it.
func (g *Generation) AttributesAfter(ctx context.Context, ev *mirror.Event) (*Attributes, error) {
	if g.KnownAttributes(ev.Entry) == nil && g.abridgedAttributes(ctx, ev.Entry) == nil {
		if _, err := g.ObjectAfter(ctx, ev); err != nil {
			return nil, err
		}
	}
	return g.Attributes(ctx, ev.Entry)
}

// abridgment holds the buffers of one decoding.
type abridgment struct{ value, short []byte }

// maxUnabridged is the number of values that could not be cut down after which no further one is
// tried: the resource is stored in another form, and each attempt decrypts a value once more.
const maxUnabridged = 100

// abridgmentBytes bounds the buffers that are reused.
const abridgmentBytes = 64 << 10

var abridgments = sync.Pool{New: func() any { return &abridgment{} }}

// abridgedAttributes returns the entry's attributes from its value without other fields, and caches
// them; nil if the value cannot be cut down, or not be decoded within DecodeTimeout.
func (g *Generation) abridgedAttributes(ctx context.Context, e *mirror.Entry) *Attributes {
	if g.view.cfg.Abridge == nil || g.view.unabridged.Load() >= maxUnabridged {
		return nil
	}
	ctx, cancel := context.WithTimeout(ctx, DecodeTimeout)
	defer cancel()
	buf := abridgments.Get().(*abridgment)
	defer func() {
		if cap(buf.value)+cap(buf.short) <= abridgmentBytes {
			abridgments.Put(buf)
		}
	}()
	data, err := g.view.data(ctx, e, &buf.value)
	if err != nil {
		return nil
	}
	var ok bool
	if buf.short, ok = g.view.cfg.Abridge(buf.short[:0], data); !ok {
		g.view.unabridged.Add(1)
		return nil
	}
	obj, err := g.view.cfg.Decoder.DecodeListItem(ctx, buf.short, uint64(e.ModRevision()), g.view.cfg.NewFunc)
	if err != nil {
		return nil
	}
	a, err := g.keepAttributes(e, obj)
	if err != nil {
		return nil
	}
	return a
}

// keepAttributes caches the attributes of an entry that was decoded.
func (g *Generation) keepAttributes(e *mirror.Entry, obj runtime.Object) (*Attributes, error) {
	if a := g.KnownAttributes(e); a != nil {
		return a, nil
	}
	l, f, err := g.view.cfg.GetAttrs(obj)
	if err != nil {
		return nil, err
	}
	m, err := meta.Accessor(obj)
	if err != nil {
		return nil, err
	}
	a := newAttributes(l, g.view.newFieldSet(f), m)
	if e.Memos().Swap(g.memoKey, nil, a) {
		g.DropIfEnded(e)
	}
	return a, nil
}

func newAttributes(l labels.Set, f FieldSet, m metav1.Object) *Attributes {
	a := &Attributes{Labels: newSet(l), Fields: f}
	a.hashes[byUID] = hashField(string(m.GetUID()))
	a.hashes[byNamespace] = hashField(m.GetNamespace())
	return a
}

// Set is a string map in ascending key order: per pair the lengths of key and
// value as varints, then both. It implements labels.Labels.
type Set string

func newSet(m map[string]string) Set {
	if len(m) == 0 {
		return ""
	}
	var b []byte
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = binary.AppendUvarint(b, uint64(len(k)))
		b = binary.AppendUvarint(b, uint64(len(m[k])))
		b = append(append(b, k...), m[k]...)
	}
	return Set(b)
}

// Lookup returns the value of the key and whether it is present.
func (s Set) Lookup(key string) (value string, ok bool) {
	for rest := string(s); rest != ""; {
		var k, v int
		k, rest = cutUvarint(rest)
		v, rest = cutUvarint(rest)
		if name := rest[:k]; name == key {
			return rest[k : k+v], true
		} else if name > key {
			break
		}
		rest = rest[k+v:]
	}
	return "", false
}

// cutUvarint returns the varint at the start of s, and the rest of s.
func cutUvarint(s string) (n int, rest string) {
	for i, shift := 0, 0; ; i, shift = i+1, shift+7 {
		n |= int(s[i]&0x7f) << shift
		if s[i] < 0x80 {
			return n, s[i+1:]
		}
	}
}

// Has reports whether the key is present.
func (s Set) Has(key string) bool {
	_, ok := s.Lookup(key)
	return ok
}

// Get returns the value of the key, "" if it is not present.
func (s Set) Get(key string) string {
	v, _ := s.Lookup(key)
	return v
}

// FieldSet has the fields of an object. The objects of a resource usually share the names.
type FieldSet struct {
	names  *[]string // ascending; nil: none
	values string    // per name the length of the value as varint, and the value
}

// newFieldSet returns the fields of m. It uses the names of the set before, if they are the same.
func (v *View) newFieldSet(m fields.Set) FieldSet {
	if len(m) == 0 {
		return FieldSet{}
	}
	names := v.fieldNames.Load()
	if names == nil || !sameNames(*names, m) {
		sorted := slices.Sorted(maps.Keys(m))
		names = &sorted
		v.fieldNames.Store(names)
	}
	var b []byte
	for _, name := range *names {
		value := m[name]
		b = append(binary.AppendUvarint(b, uint64(len(value))), value...)
	}
	return FieldSet{names, string(b)}
}

func sameNames(names []string, m fields.Set) bool {
	if len(names) != len(m) {
		return false
	}
	for _, name := range names {
		if _, ok := m[name]; !ok {
			return false
		}
	}
	return true
}

// lookup returns the value of the field and whether it is present.
func (s FieldSet) lookup(name string) (value string, ok bool) {
	if s.names == nil {
		return "", false
	}
	at, ok := slices.BinarySearch(*s.names, name)
	if !ok {
		return "", false
	}
	rest := s.values
	for ; ; at-- {
		var n int
		n, rest = cutUvarint(rest)
		if at == 0 {
			return rest[:n], true
		}
		rest = rest[n:]
	}
}

// Has implements fields.Fields.
func (s FieldSet) Has(name string) bool {
	_, ok := s.lookup(name)
	return ok
}

// Get implements fields.Fields: it returns the value of the field, "" if it is not present.
func (s FieldSet) Get(name string) string {
	value, _ := s.lookup(name)
	return value
}

var (
	_ labels.Labels = Set("")
	_ fields.Fields = FieldSet{}
)
