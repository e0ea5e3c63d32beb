package transcode

import (
	"fmt"
	"reflect"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Abridger cuts stored objects down to some of their fields, so that a reader of these decodes
// little. It is immutable; methods may be called concurrently.
type Abridger struct {
	head []byte // see headOf
	cut  cut
}

// cut says which fields of a message remain.
type cut struct {
	fields []remaining // by number
}

type remaining struct {
	kept   bool
	within *cut // nil: the field remains as a whole
}

// NewAbridger returns the abridger of objects that are stored as gvk, whose Go type is the struct
// t. Paths name the fields that remain, by their JSON names, as in "spec.nodeName"; all but the
// last one of a path are messages. Errors are those of paths that name no such field.
func NewAbridger(gvk schema.GroupVersionKind, t reflect.Type, paths []string) (*Abridger, error) {
	head, err := headOf(gvk)
	if err != nil {
		return nil, err
	}
	a := &Abridger{head: head}
	for _, path := range paths {
		if err := a.cut.keep(t, strings.Split(path, ".")); err != nil {
			return nil, fmt.Errorf("transcode: %s of %s: %w", path, t, err)
		}
	}
	return a, nil
}

// keep adds the path of a field in a message of the type.
func (c *cut) keep(t reflect.Type, path []string) error {
	number, next, err := fieldOf(t, path[0])
	if err != nil {
		return err
	}
	for len(c.fields) <= number {
		c.fields = append(c.fields, remaining{})
	}
	r := &c.fields[number]
	switch {
	case r.kept && r.within == nil: // as a whole already
		return nil
	case len(path) == 1:
		*r = remaining{kept: true}
		return nil
	case r.within == nil:
		*r = remaining{kept: true, within: &cut{}}
	}
	return r.within.keep(next, path[1:])
}

// fieldOf returns the number and the type of the field with a JSON name, of a message or a pointer
// to one.
func fieldOf(t reflect.Type, name string) (number int, of reflect.Type, err error) {
	if t.Kind() == reflect.Pointer {
		t = t.Elem()
	}
	if t.Kind() != reflect.Struct {
		return 0, nil, fmt.Errorf("%s is not a message", t)
	}
	for i := range t.NumField() {
		f := t.Field(i)
		if is, _, _ := strings.Cut(f.Tag.Get("json"), ","); is == name {
			number, err = fieldNumber(f)
			return number, f.Type, err
		}
	}
	return 0, nil, fmt.Errorf("%s has no field %s", t, name)
}

// fieldNumber returns the number of a field in its protobuf tag.
func fieldNumber(f reflect.StructField) (int, error) {
	parts := strings.Split(f.Tag.Get("protobuf"), ",")
	if len(parts) < 2 {
		return 0, fmt.Errorf("%s has no protobuf tag", f.Name)
	}
	number, err := strconv.Atoi(parts[1])
	if err != nil || number < 1 || number > 1<<10 {
		return 0, fmt.Errorf("%s has the field number %q", f.Name, parts[1])
	}
	return number, nil
}

// rawTag is the tag of the object in runtime.Unknown.
const rawTag = 2<<3 | wireLen

// Append appends a stored object with the remaining fields, in its stored form, to dst. Not ok: it
// is of another kind, is stored in another form, or is malformed, and dst is as before. The values
// of fields are not examined. Cost is a few nanoseconds for each field that is passed over, and no
// allocation beyond dst.
func (a *Abridger) Append(dst, stored []byte) (_ []byte, ok bool) {
	raw, ok := openStored(stored, a.head)
	if !ok {
		return dst, false
	}
	short, ok := a.cut.append(append(append(dst, a.head...), rawTag), raw)
	if !ok {
		return dst, false
	}
	return short, true
}

// lengthBytes is the size of the varints in which append writes lengths; the shortest form is not
// required.
const lengthBytes = 4

// append appends the length and the remaining fields of a message.
func (c *cut) append(dst []byte, r reader) (_ []byte, ok bool) {
	at := len(dst)
	dst = append(dst, 0, 0, 0, 0)
	for r.more() {
		from := r.pos
		number, wire, ok := r.tag()
		if !ok {
			return nil, false
		}
		if number >= len(c.fields) || !c.fields[number].kept {
			if !r.skip(wire) {
				return nil, false
			}
			continue
		}
		within := c.fields[number].within
		if within == nil {
			if !r.skip(wire) {
				return nil, false
			}
			dst = append(dst, r.data[from:r.pos]...)
			continue
		}
		dst = append(dst, r.data[from:r.pos]...)
		content, ok := r.delimited()
		if !ok || wire != wireLen {
			return nil, false
		}
		if dst, ok = within.append(dst, content); !ok {
			return nil, false
		}
	}
	n := len(dst) - at - lengthBytes
	if n >= 1<<(7*lengthBytes) {
		return nil, false
	}
	dst[at], dst[at+1], dst[at+2], dst[at+3] = byte(n)|0x80, byte(n>>7)|0x80, byte(n>>14)|0x80, byte(n>>21)
	return dst, true
}
