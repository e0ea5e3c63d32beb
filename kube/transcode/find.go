package transcode

import (
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Find finds the value of one label, or of one string field, in a stored object without decoding it. The value shares memory with stored; present
// is false if the object has no such label. Not ok: the value cannot be told without decoding the object. Safe for concurrent use; allocates nothing.
type Find func(stored []byte) (value []byte, present, ok bool)

// Finders make functions that find values in objects of some kinds, stored as protobuf. They are complete after the last Add; Label and Field may
// then be called concurrently.
type Finders struct {
	byHead map[string]*places // by the head of a stored object (see headOf)
}

// places are the places of values in the objects of a kind.
type places struct {
	labels []int            // the numbers of the fields on the way to the labels
	fields map[string]place // by name
}

type place struct {
	numbers []int // of the fields on the way to a string, outermost first
	// nonEmpty: defaulting or conversion may give an empty string a value.
	nonEmpty bool
}

// Add adds objects that are stored as gvk, whose Go type is the struct t. The paths of copied name string fields by their JSON names, as in
// "spec.nodeName"; a selectable field of the same name always has the string that is stored, or is empty. So have those of filled, unless the string
// is empty. Upstream must leave labels as they are stored. Errors are those of paths that name no such field.
func (f *Finders) Add(gvk schema.GroupVersionKind, t reflect.Type, copied, filled []string) error {
	head, err := headOf(gvk)
	if err != nil {
		return err
	}
	p := &places{fields: map[string]place{}}
	if p.labels, _, err = numbersOf(t, "metadata.labels"); err != nil {
		return fmt.Errorf("transcode: labels of %s: %w", t, err)
	}
	for i, path := range slices.Concat(copied, filled) {
		numbers, of, err := numbersOf(t, path)
		if err != nil {
			return fmt.Errorf("transcode: %s of %s: %w", path, t, err)
		}
		if of.Kind() != reflect.String {
			return fmt.Errorf("transcode: %s of %s is not a string", path, t)
		}
		p.fields[path] = place{numbers, i >= len(copied)}
	}
	if f.byHead == nil {
		f.byHead = map[string]*places{}
	}
	f.byHead[string(head)] = p
	return nil
}

// numbersOf returns the protobuf numbers of the fields of a path, and the type of the last one.
func numbersOf(t reflect.Type, path string) (numbers []int, of reflect.Type, err error) {
	for name := range strings.SplitSeq(path, ".") {
		number, next, err := fieldOf(t, name)
		if err != nil {
			return nil, nil, err
		}
		numbers, t = append(numbers, number), next
	}
	return numbers, t, nil
}

// Label returns a function that finds the label with the key.
func (f *Finders) Label(key string) Find {
	return func(stored []byte) (value []byte, present, ok bool) {
		p, r, ok := f.open(stored)
		if !ok {
			return nil, false, false
		}
		return r.label(p.labels, key)
	}
}

// Field returns a function that finds the field; nil if no kind has it. A field is always present.
func (f *Finders) Field(name string) Find {
	byHead := map[string]place{}
	for head, p := range f.byHead {
		if at, ok := p.fields[name]; ok {
			byHead[head] = at
		}
	}
	if len(byHead) == 0 {
		return nil
	}
	return func(stored []byte) (value []byte, present, ok bool) {
		n := headLen(stored)
		at, ok := byHead[string(stored[:n])]
		if !ok {
			return nil, false, false
		}
		r, ok := openRaw(stored, n)
		if !ok {
			return nil, false, false
		}
		value, ok = r.text(at.numbers)
		return value, true, ok && (len(value) > 0 || !at.nonEmpty)
	}
}

// open returns the places of values in a stored object, and the object.
func (f *Finders) open(stored []byte) (p *places, r reader, ok bool) {
	n := headLen(stored)
	if p = f.byHead[string(stored[:n])]; p == nil {
		return nil, r, false
	}
	r, ok = openRaw(stored, n)
	return p, r, ok
}

// headLen returns the length of the head of a stored object, 0 if it has none.
func headLen(stored []byte) int {
	if len(stored) <= headPrefix || stored[headPrefix] >= 0x80 {
		return 0
	}
	n := headPrefix + 1 + int(stored[headPrefix])
	if n > len(stored) {
		return 0
	}
	return n
}

// text returns the string at the end of the way, empty if a field on it is absent; not ok if one occurs twice, or if a message on it is malformed.
func (r reader) text(numbers []int) (value []byte, ok bool) {
	seen := false
	for r.more() {
		number, wire, ok := r.tag()
		if !ok {
			return nil, false
		}
		if number != numbers[0] {
			if !r.skip(wire) {
				return nil, false
			}
			continue
		}
		content, ok := r.delimited()
		if !ok || seen || wire != wireLen {
			return nil, false
		}
		seen = true
		if len(numbers) == 1 {
			value = content.bytes()
		} else if value, ok = content.text(numbers[1:]); !ok {
			return nil, false
		}
	}
	return value, true
}

// label returns the value of the key in the map at the end of the way. Not ok as text, and if the map has the key twice.
func (r reader) label(numbers []int, key string) (value []byte, present, ok bool) {
	seen := false
	for r.more() {
		start := r.pos
		number, wire, ok := r.tag()
		if !ok {
			return nil, false, false
		}
		if number != numbers[0] {
			if !r.skip(wire) {
				return nil, false, false
			}
			continue
		}
		if wire != wireLen {
			return nil, false, false
		}
		if len(numbers) > 1 {
			content, ok := r.delimited()
			if !ok || seen {
				return nil, false, false
			}
			seen = true
			if value, present, ok = content.label(numbers[1:], key); !ok {
				return nil, false, false
			}
			continue
		}
		r.pos = start
		k, v, ok := r.entry()
		if !ok {
			return nil, false, false
		}
		if string(k.bytes()) != key {
			continue
		}
		if present {
			return nil, false, false
		}
		value, present = v.bytes(), true
	}
	return value, present, true
}
