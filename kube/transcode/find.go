package transcode

import (
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

// Finder makes functions that find values in objects of one kind, stored as protobuf. It is
// immutable; methods may be called concurrently.
type Finder struct {
	head   []byte           // see headOf
	labels []int            // the numbers of the fields on the way to the labels
	fields map[string]place // by name
}

type place struct {
	numbers []int // of the fields on the way to a string, outermost first
	// nonEmpty: defaulting or conversion may give an empty string a value.
	nonEmpty bool
}

// NewFinder returns the finder of objects that are stored as gvk, whose Go type is the struct t.
// The paths of copied name string fields by their JSON names, as in "spec.nodeName"; a selectable
// field of the same name always has the string that is stored, or is empty. So have those of
// filled, unless the string is empty. Upstream must leave labels as they are stored. Errors are
// those of paths that name no such field.
func NewFinder(gvk schema.GroupVersionKind, t reflect.Type, copied, filled []string) (*Finder, error) {
	head, err := headOf(gvk)
	if err != nil {
		return nil, err
	}
	f := &Finder{head: head, fields: map[string]place{}}
	if f.labels, _, err = numbersOf(t, "metadata.labels"); err != nil {
		return nil, fmt.Errorf("transcode: labels of %s: %w", t, err)
	}
	for i, path := range slices.Concat(copied, filled) {
		numbers, of, err := numbersOf(t, path)
		if err != nil {
			return nil, fmt.Errorf("transcode: %s of %s: %w", path, t, err)
		}
		if of.Kind() != reflect.String {
			return nil, fmt.Errorf("transcode: %s of %s is not a string", path, t)
		}
		f.fields[path] = place{numbers, i >= len(copied)}
	}
	return f, nil
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

// Find returns a function that finds the label with the key, or the field; nil if the kind has no
// such field. A field is always present.
func (f *Finder) Find(label bool, name string) Find {
	if label {
		return func(stored []byte) (value []byte, present, ok bool) {
			r, ok := openStored(stored, f.head)
			if !ok {
				return nil, false, false
			}
			return r.label(f.labels, name)
		}
	}
	at, ok := f.fields[name]
	if !ok {
		return nil
	}
	return func(stored []byte) (value []byte, present, ok bool) {
		r, ok := openStored(stored, f.head)
		if !ok {
			return nil, false, false
		}
		value, ok = r.text(at.numbers)
		return value, true, ok && (len(value) > 0 || !at.nonEmpty)
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
