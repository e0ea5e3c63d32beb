package transcode

import (
	"encoding"
	"encoding/json"
	"fmt"
	"reflect"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/intstr"
)

// kind says how a value is read and written.
type kind uint8

const (
	// kindUnsupported is any other type: an object with such a field is declined.
	kindUnsupported kind = iota
	kindString
	kindBool
	kindInt32
	kindInt64
	kindBytes
	kindMessage
	kindInline // an embedded struct: its fields are those of the outer object
	kindMap
	kindTime
	kindMicroTime
	kindDuration
	kindQuantity
	kindIntOrString
	kindFields
	kindResourceVersion
)

// message describes a Go struct with protobuf and JSON tags. It is immutable.
type message struct {
	fields []field // in the order of JSON
	index  []int8  // of fields by their number; -1: unknown
	check  *check  // nil: no rule
}

// field is a field of a message.
type field struct {
	goName   string
	name     string // with quotes and colon; "" for kindInline
	number   int
	wire     uint8
	kind     kind
	repeated bool
	pointer  bool
	omit     bool     // omitted if it is zero, as a field with omitempty
	omitZero bool     // a time that is omitted if it is zero
	elem     *message // of kindMessage and kindInline
	value    *field   // of kindMap
}

// maxFields bounds the fields of one message.
const maxFields = 127

// compiler makes messages of types.
type compiler struct {
	rules    Rules
	messages map[reflect.Type]*message // nil while being made
}

// scalars are the types with a form of their own, in protobuf and in JSON.
var scalars = map[reflect.Type]kind{
	reflect.TypeFor[metav1.Time]():        kindTime,
	reflect.TypeFor[metav1.MicroTime]():   kindMicroTime,
	reflect.TypeFor[metav1.Duration]():    kindDuration,
	reflect.TypeFor[resource.Quantity]():  kindQuantity,
	reflect.TypeFor[intstr.IntOrString](): kindIntOrString,
	reflect.TypeFor[metav1.FieldsV1]():    kindFields,
}

var (
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
)

func (c *compiler) message(t reflect.Type) (*message, error) {
	if m, ok := c.messages[t]; ok {
		return m, nil
	}
	c.messages[t] = nil
	m := &message{}
	for i := range t.NumField() {
		f, ok, err := c.field(t.Field(i))
		if err != nil {
			return nil, fmt.Errorf("%s.%s: %w", t, t.Field(i).Name, err)
		}
		if ok {
			m.fields = append(m.fields, f)
		}
	}
	if err := m.number(); err != nil {
		return nil, fmt.Errorf("%s: %w", t, err)
	}
	for _, r := range c.rules[t] {
		if err := m.compileRule(t, r); err != nil {
			return nil, err
		}
	}
	c.messages[t] = m
	return m, nil
}

// number fills the index, and checks that no two fields have the same number or name.
func (m *message) number() error {
	if len(m.fields) > maxFields {
		return fmt.Errorf("more than %d fields", maxFields)
	}
	for i, f := range m.fields {
		for len(m.index) <= f.number {
			m.index = append(m.index, -1)
		}
		if m.index[f.number] >= 0 {
			return fmt.Errorf("two fields have the number %d", f.number)
		}
		m.index[f.number] = int8(i)
	}
	names := map[string]bool{}
	for _, name := range m.names(nil) {
		if names[name] {
			return fmt.Errorf("two fields have the name %s", name)
		}
		names[name] = true
	}
	return nil
}

// names appends the names of the fields, with those of embedded structs.
func (m *message) names(names []string) []string {
	for i := range m.fields {
		if f := &m.fields[i]; f.kind == kindInline {
			names = f.elem.names(names)
		} else {
			names = append(names, f.name)
		}
	}
	return names
}

// field describes a field of a struct; not ok: it is in no encoding.
func (c *compiler) field(sf reflect.StructField) (f field, ok bool, err error) {
	tag, stored := sf.Tag.Lookup("protobuf")
	name, options, _ := strings.Cut(sf.Tag.Get("json"), ",")
	opts := strings.Split(options, ",")
	if !stored {
		// Kind and version of an object, which its decoded form does not have.
		if sf.Type == reflect.TypeFor[metav1.TypeMeta]() || name == "-" {
			return f, false, nil
		}
		return f, false, fmt.Errorf("no protobuf tag")
	}
	f = field{goName: sf.Name, omit: slices.Contains(opts, "omitempty"), omitZero: slices.Contains(opts, "omitzero")}
	parts := strings.Split(tag, ",")
	if len(parts) < 3 || !sf.IsExported() || slices.Contains(opts, "string") {
		return f, false, fmt.Errorf("unexpected tags %q", sf.Tag)
	}
	if f.number, err = fieldNumber(sf); err != nil {
		return f, false, err
	}
	f.wire = wireLen
	if slices.Contains(opts, "inline") || name == "" && sf.Anonymous {
		if sf.Type.Kind() != reflect.Struct {
			return f, false, fmt.Errorf("an embedded %s", sf.Type)
		}
		f.kind = kindInline
		f.elem, err = c.message(sf.Type)
		return f, true, err
	}
	if name == "" || name == "-" {
		return f, false, fmt.Errorf("no JSON name")
	}
	f.name = strconv.Quote(name) + ":"
	if err := c.setType(&f, sf.Type); err != nil {
		return f, false, err
	}
	if f.omitZero && (f.pointer || f.kind != kindTime && f.kind != kindMicroTime) {
		return f, false, fmt.Errorf("omitzero of a %s", sf.Type)
	}
	return f, true, nil
}

// setType sets how values of the Go type are read and written.
func (c *compiler) setType(f *field, t reflect.Type) (err error) {
	switch {
	case t.Kind() == reflect.Pointer:
		f.pointer = true
		t = t.Elem()
	case t.Kind() == reflect.Map && t.Key().Kind() == reflect.String && !marshals(t.Key()):
		f.kind, f.repeated = kindMap, true
		f.value = &field{wire: wireLen}
		if err := c.setType(f.value, t.Elem()); err != nil {
			return err
		}
		if v := f.value; v.pointer || v.repeated || v.kind != kindString && v.kind != kindBytes && v.kind != kindQuantity {
			f.kind = kindUnsupported
		}
		return nil
	case t.Kind() == reflect.Slice && t.Elem().Kind() != reflect.Uint8:
		f.repeated = true
		if t = t.Elem(); t.Kind() == reflect.Pointer || t.Kind() == reflect.Slice || t.Kind() == reflect.Map {
			return nil // kindUnsupported
		}
	}
	if k, ok := scalars[t]; ok {
		f.kind = k
		return nil
	}
	if marshals(t) {
		return nil // kindUnsupported
	}
	// The wire type and the label in the tag are not reliable: some name bytes for integers, or rep
	// for messages.
	switch {
	case t.Kind() == reflect.String:
		f.kind = kindString
	case t.Kind() == reflect.Bool:
		f.kind, f.wire = kindBool, wireVarint
	case t.Kind() == reflect.Int32:
		f.kind, f.wire = kindInt32, wireVarint
	case t.Kind() == reflect.Int64:
		f.kind, f.wire = kindInt64, wireVarint
	case t.Kind() == reflect.Slice && t.Elem().Kind() == reflect.Uint8 && !f.repeated && !f.pointer:
		f.kind = kindBytes
	case t.Kind() == reflect.Struct:
		f.elem, err = c.message(t)
		if f.elem != nil { // nil for a type that contains itself
			f.kind = kindMessage
		}
	}
	return err
}

// marshals reports whether values of the type write their own JSON.
func marshals(t reflect.Type) bool {
	for _, i := range []reflect.Type{jsonMarshaler, textMarshaler} {
		if t.Implements(i) || reflect.PointerTo(t).Implements(i) {
			return true
		}
	}
	return false
}
