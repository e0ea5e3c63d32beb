package transcode

import (
	"bytes"
	"fmt"
	"reflect"
	"slices"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Find finds the value of one label, or of one string field, in a stored object without decoding
// it. The value shares memory with stored; present is false if the object has no such label. Not
// ok: the value cannot be told without decoding the object. Safe for concurrent use; allocates
// nothing.
type Find func(stored []byte) (value []byte, present, ok bool)

// Finders make functions that find values in objects of some kinds, stored as protobuf. They are
// complete after the last Add; Label and Field may then be called concurrently.
type Finders struct {
	kinds []places
}

// places are the places of values in the objects of a kind.
type places struct {
	head   []byte           // see headOf
	labels []int            // the numbers of the fields on the way to the labels
	fields map[string]place // by name
}

type place struct {
	numbers []int // of the fields on the way to a string, outermost first
	// nonEmpty: defaulting or conversion may give an empty string a value.
	nonEmpty bool
}

// Add adds objects that are stored as gvk, whose Go type is the struct t. The paths of copied name
// string fields by their JSON names, as in "spec.nodeName"; a selectable field of the same name
// always has the string that is stored, or is empty. So have those of filled, unless the string is
// empty. Upstream must leave labels as they are stored. Errors are those of paths that name no such
// field.
func (f *Finders) Add(gvk schema.GroupVersionKind, t reflect.Type, copied, filled []string) error {
	head, err := headOf(gvk)
	if err != nil {
		return err
	}
	p := places{head: head, fields: map[string]place{}}
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
	f.kinds = append(f.kinds, p)
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

// wanted is the place of one value in the objects of a kind.
type wanted struct {
	head []byte
	place
}

// openOneOf returns a stored object of one of the kinds, and the place of the value in it.
func openOneOf(kinds []wanted, stored []byte) (w *wanted, r reader, ok bool) {
	for i := range kinds {
		if w = &kinds[i]; bytes.HasPrefix(stored, w.head) {
			r, ok = openRaw(stored, len(w.head))
			return w, r, ok
		}
	}
	return nil, r, false
}

// Label returns a function that finds the label with the key.
func (f *Finders) Label(key string) Find {
	var kinds []wanted
	for _, p := range f.kinds {
		kinds = append(kinds, wanted{p.head, place{numbers: p.labels}})
	}
	return func(stored []byte) (value []byte, present, ok bool) {
		w, r, ok := openOneOf(kinds, stored)
		if !ok {
			return nil, false, false
		}
		return r.label(w.numbers, key)
	}
}

// Field returns a function that finds the field; nil if no kind has it. A field is always present.
func (f *Finders) Field(name string) Find {
	var kinds []wanted
	for _, p := range f.kinds {
		if at, ok := p.fields[name]; ok {
			kinds = append(kinds, wanted{p.head, at})
		}
	}
	if len(kinds) == 0 {
		return nil
	}
	return func(stored []byte) (value []byte, present, ok bool) {
		w, r, ok := openOneOf(kinds, stored)
		if !ok {
			return nil, false, false
		}
		value, ok = r.text(w.numbers)
		return value, true, ok && (len(value) > 0 || !w.nonEmpty)
	}
}

// text returns the string at the end of the way, empty if a field on it is absent; not ok if one
// occurs twice, or if a message on it is malformed.
func (r reader) text(numbers []int) (value []byte, ok bool) {
	seen := false
	for r.more() {
		number, wire, content, ok := r.field()
		if !ok {
			return nil, false
		}
		if number != numbers[0] {
			continue
		}
		if seen || wire != wireLen {
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

// label returns the value of the key in the map at the end of the way. Not ok as text, and if the
// map has the key twice.
func (r reader) label(numbers []int, key string) (value []byte, present, ok bool) {
	seen := false
	for r.more() {
		start := r.pos
		number, wire, content, ok := r.field()
		if !ok {
			return nil, false, false
		}
		if number != numbers[0] {
			continue
		}
		if wire != wireLen {
			return nil, false, false
		}
		if len(numbers) > 1 {
			if value, present, ok = content.label(numbers[1:], key); !ok || seen {
				return nil, false, false
			}
			seen = true
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
