package kubestorage

import (
	"encoding/binary"
	"maps"
	"slices"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
)

// attrs are the labels and fields of one object, and the hashes by which it belongs to shards: what
// selectors look at, kept in one block without pointers because there is one for each object that a
// selector has looked at (a map of three labels takes 450 bytes, this about 80).
type attrs struct {
	labels set
	fields set
	hashes [shardKeys]uint64
}

func newAttrs(l labels.Set, f fields.Set, m metav1.Object) *attrs {
	a := &attrs{labels: newSet(l), fields: newSet(f)}
	a.hashes[shardByUID] = hashField(string(m.GetUID()))
	a.hashes[shardByNamespace] = hashField(m.GetNamespace())
	return a
}

// set is a string map in ascending key order: per pair the lengths of key and
// value as varints, then both. It implements labels.Labels and fields.Fields.
type set string

func newSet(m map[string]string) set {
	if len(m) == 0 {
		return ""
	}
	var b []byte
	for _, k := range slices.Sorted(maps.Keys(m)) {
		b = binary.AppendUvarint(b, uint64(len(k)))
		b = binary.AppendUvarint(b, uint64(len(m[k])))
		b = append(append(b, k...), m[k]...)
	}
	return set(b)
}

// Lookup returns the value of the key and whether it is there.
func (s set) Lookup(key string) (value string, ok bool) {
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

// Has returns whether the key is there.
func (s set) Has(key string) bool {
	_, ok := s.Lookup(key)
	return ok
}

// Get returns the value of the key, "" if it is not there.
func (s set) Get(key string) string {
	v, _ := s.Lookup(key)
	return v
}

var (
	_ labels.Labels = set("")
	_ fields.Fields = set("")
)
