package objects

import (
	"context"
	"encoding/binary"
	"maps"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// Attributes are the labels and fields of an object, and the hashes that determine its shards: the data that selectors
// evaluate. They are free of pointers, because each object that a selector was evaluated on has them (a map of three labels
// takes 450 bytes, this about 80).
type Attributes struct {
	Labels, Fields Set
	hashes         [ShardKeys]uint64
}

// Hash returns the hash of the field of a shard key.
func (a *Attributes) Hash(key ShardKey) uint64 { return a.hashes[key] }

// KnownAttributes returns the entry's attributes if they are cached, nil otherwise.
func (g *Generation) KnownAttributes(e *mirror.Entry) *Attributes {
	a, _ := e.Memo(g.memoKey).(*Attributes)
	return a
}

// Attributes returns the entry's attributes, decoding it once for all readers. After a failure the next reader tries
// again. Errors are those of Decode.
func (g *Generation) Attributes(ctx context.Context, e *mirror.Entry) (*Attributes, error) {
	if a := g.KnownAttributes(e); a != nil {
		return a, nil
	}
	obj, err := g.Decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	return g.keepAttributes(e, obj)
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
	a := newAttributes(l, f, m)
	if e.SwapMemo(g.memoKey, nil, a) {
		g.DropIfEnded(e)
	}
	return a, nil
}

func newAttributes(l labels.Set, f fields.Set, m metav1.Object) *Attributes {
	a := &Attributes{Labels: newSet(l), Fields: newSet(f)}
	a.hashes[ByUID] = hashField(string(m.GetUID()))
	a.hashes[ByNamespace] = hashField(m.GetNamespace())
	return a
}

// Set is a string map in ascending key order: per pair the lengths of key and
// value as varints, then both. It implements labels.Labels and fields.Fields.
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
		var n [2]int
		for i := range n {
			shift := 0
			for {
				c := rest[0]
				rest = rest[1:]
				n[i] |= int(c&0x7f) << shift
				if c < 0x80 {
					break
				}
				shift += 7
			}
		}
		k, v := rest[:n[0]], rest[n[0]:n[0]+n[1]]
		if k == key {
			return v, true
		}
		if k > key {
			break
		}
		rest = rest[n[0]+n[1]:]
	}
	return "", false
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

var (
	_ labels.Labels = Set("")
	_ fields.Fields = Set("")
)
