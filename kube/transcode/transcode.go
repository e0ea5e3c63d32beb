package transcode

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"sync"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Transcoder writes the JSON of stored objects of one kind. It is immutable; methods may be called
// concurrently.
type Transcoder struct {
	root *message
	head []byte // see headOf
}

// New returns a transcoder of objects that are stored as gvk, whose Go type is the struct t with an
// embedded metav1.ObjectMeta. Errors are those of a type that cannot be described, and of rules
// that name unknown fields.
func New(gvk schema.GroupVersionKind, t reflect.Type, rules Rules) (*Transcoder, error) {
	if t.Kind() != reflect.Struct {
		return nil, fmt.Errorf("transcode: %s is not a struct", t)
	}
	c := compiler{rules: rules, messages: map[reflect.Type]*message{}}
	m, err := c.message(t)
	if err != nil {
		return nil, fmt.Errorf("transcode: %w", err)
	}
	root := *m
	root.fields = append([]field(nil), m.fields...)
	if err := root.setVersioned(); err != nil {
		return nil, fmt.Errorf("transcode: %s: %w", t, err)
	}
	head, err := headOf(gvk)
	if err != nil {
		return nil, err
	}
	return &Transcoder{root: &root, head: head}, nil
}

// headOf returns what precedes an object in its stored form: the prefix of Kubernetes, and the
// TypeMeta of runtime.Unknown.
func headOf(gvk schema.GroupVersionKind) ([]byte, error) {
	typeMeta := runtime.TypeMeta{}
	typeMeta.APIVersion, typeMeta.Kind = gvk.ToAPIVersionAndKind()
	data, err := typeMeta.Marshal()
	if err != nil {
		return nil, err
	}
	// field 1 of runtime.Unknown
	head := binary.AppendUvarint([]byte("k8s\x00\x0a"), uint64(len(data)))
	return append(head, data...), nil
}

// setVersioned makes the object's own metadata take the resource version of the caller; objects are
// stored without one.
func (m *message) setVersioned() error {
	for i := range m.fields {
		f := &m.fields[i]
		if f.goName != "ObjectMeta" || f.kind != kindMessage || f.pointer || f.repeated {
			continue
		}
		meta := *f.elem
		meta.fields = append([]field(nil), f.elem.fields...)
		for j := range meta.fields {
			if meta.fields[j].goName == "ResourceVersion" {
				meta.fields[j].kind = kindResourceVersion
				f.elem = &meta
				return nil
			}
		}
	}
	return fmt.Errorf("no %s", reflect.TypeFor[metav1.ObjectMeta]())
}

// walk is the state of one call.
type walk struct {
	data       []byte
	rev        int64
	slots      []slot            // of the messages around the current one, and of it
	quantities map[string]string // canonical forms, in quotes
}

var walks = sync.Pool{New: func() any { return &walk{quantities: map[string]string{}} }}

// slot is the position of a field in the data: the content of a length-delimited one, the varint,
// or all elements with their tags. Zero: the field is absent.
type slot struct{ from, to uint32 }

func (s slot) present() bool { return s.to != 0 }

// AppendItem appends the JSON of a stored object with the resource version rev to dst, as an item
// of a list: without kind and version, followed by a comma. Not ok: the object is declined, and dst
// is as before. Cost is about 3 ns per byte, and no allocation beyond dst.
func (t *Transcoder) AppendItem(dst, stored []byte, rev int64) (_ []byte, ok bool) {
	raw, ok := openStored(stored, t.head)
	if !ok {
		return dst, false
	}
	w := walks.Get().(*walk)
	defer walks.Put(w)
	w.data, w.rev, w.slots = stored, rev, w.slots[:0]
	item, ok := w.appendObject(dst, t.root, raw)
	w.data = nil
	if !ok {
		return dst, false
	}
	return append(item, ','), true
}

// openStored returns the object in a stored runtime.Unknown with the head (see headOf): the field
// raw, followed by empty fields only.
func openStored(stored, head []byte) (raw reader, ok bool) {
	if !bytes.HasPrefix(stored, head) || uint64(len(stored)) > 1<<31 {
		return raw, false
	}
	r := reader{stored, len(head), len(stored)}
	for r.more() {
		number, wire, content, ok := r.field()
		switch {
		case !ok || wire != wireLen:
			return raw, false
		case number == 2 && raw.data == nil:
			raw = content
		case number == 2 || number == 1 || content.more(): // an encoding or content type
			return raw, false
		}
	}
	return raw, raw.data != nil
}

// appendObject appends a message as a JSON object.
func (w *walk) appendObject(dst []byte, m *message, r reader) ([]byte, bool) {
	dst, ok := w.appendFields(append(dst, '{'), m, r)
	if !ok {
		return dst, false
	}
	if dst[len(dst)-1] == ',' {
		dst[len(dst)-1] = '}'
		return dst, true
	}
	return append(dst, '}'), true
}

// appendFields appends the fields of a message, each followed by a comma.
func (w *walk) appendFields(dst []byte, m *message, r reader) (_ []byte, ok bool) {
	base := len(w.slots)
	slots := w.push(len(m.fields))
	if !scan(m, r, slots) || m.check != nil && !w.holds(m, slots) {
		return dst, false
	}
	for i := range m.fields {
		f, s := &m.fields[i], slots[i]
		switch {
		case f.kind == kindInline:
			dst, ok = w.appendFields(dst, f.elem, w.reader(s))
		case f.kind == kindResourceVersion:
			dst = append(append(dst, f.name...), '"')
			dst, ok = append(strconv.AppendInt(dst, w.rev, 10), `",`...), true
		case !s.present():
			dst, ok = w.appendAbsent(dst, f)
		case (f.omit && !f.pointer || f.omitZero) && w.omitted(f, s):
			ok = true
		default:
			if dst, ok = w.appendValue(append(dst, f.name...), f, s); ok {
				dst = append(dst, ',')
			}
		}
		if !ok {
			return dst, false
		}
	}
	w.slots = w.slots[:base]
	return dst, true
}

// push returns n slots of absent fields, on top of those of the messages around. The caller removes
// them, unless it declines the object.
func (w *walk) push(n int) []slot {
	base := len(w.slots)
	w.slots = slices.Grow(w.slots, n)[:base+n]
	slots := w.slots[base:]
	clear(slots)
	return slots
}

// scan finds the fields of a message. Not ok: it is malformed, or has a form that upstream's
// encoder does not write.
func scan(m *message, r reader, slots []slot) bool {
	for r.more() {
		from := r.pos
		number, wire := int(r.data[from]>>3), r.data[from]&7
		if r.data[from] < 0x80 && number > 0 {
			r.pos++
		} else {
			var ok bool
			if number, wire, ok = r.tag(); !ok {
				return false
			}
		}
		if number >= len(m.index) || m.index[number] < 0 {
			if !r.skip(wire) { // a field of a newer release, which upstream drops too
				return false
			}
			continue
		}
		i := m.index[number]
		f, s := &m.fields[i], &slots[i]
		if wire != f.wire || f.kind == kindUnsupported {
			return false
		}
		value := r.pos
		switch {
		case wire != wireLen:
			if !r.skip(wire) {
				return false
			}
		case r.more() && int(r.data[value]) < min(0x80, r.end-value): // a short length
			value++
			r.pos = value + int(r.data[value-1])
		default:
			content, ok := r.delimited()
			if !ok {
				return false
			}
			value = content.pos
		}
		switch {
		case !f.repeated && s.present() || f.repeated && s.present() && int(s.to) != from:
			return false // twice, or its elements are not adjacent
		case !f.repeated:
			s.from = uint32(value)
		case !s.present():
			s.from = uint32(from)
		}
		s.to = uint32(r.pos)
	}
	return true
}

func (w *walk) reader(s slot) reader { return reader{w.data, int(s.from), int(s.to)} }

func (w *walk) content(s slot) []byte { return w.data[s.from:s.to] }

// varint returns a value that scan has found.
func (w *walk) varint(s slot) uint64 {
	r := w.reader(s)
	v, _ := r.uvarint()
	return v
}

// zero reports whether the value of a present field is the zero value. Of a pointer and a message
// it is not.
func (w *walk) zero(f *field, s slot) bool {
	if f.pointer || f.repeated {
		return false
	}
	switch f.kind {
	case kindString, kindBytes:
		return s.from == s.to
	case kindInt32:
		return int32(w.varint(s)) == 0
	case kindBool, kindInt64:
		return w.varint(s) == 0
	default:
		return false
	}
}

// omitted reports whether JSON omits the value of a present field with omitempty, or of a time with
// omitzero.
func (w *walk) omitted(f *field, s slot) bool {
	if f.omitZero {
		t, ok := w.time(f.kind, s)
		return ok && t.IsZero()
	}
	return w.zero(f, s)
}
