package transcode

import (
	"bytes"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strconv"
	"time"
	"unicode/utf8"

	"k8s.io/apiextensions-apiserver/pkg/apis/apiextensions"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	structuralschema "k8s.io/apiextensions-apiserver/pkg/apiserver/schema"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Custom writes the JSON of custom resources of one kind and version from their stored JSON. It is
// immutable; methods may be called concurrently.
//
// Upstream stores the output of its encoder, so a stored object mostly equals the served one
// without its resource version. Decoding changes an object that is stored in another version, that
// lacks a default of the schema, that has a field or null that the schema does not allow, or whose
// metadata has a form that ObjectMeta does not keep. Such an object, and one that is not exactly as
// encoding/json writes it, is declined.
type Custom struct {
	root *shape
}

// shape describes the values at one place of an object that decoding leaves as they are.
type shape struct {
	begins   byte                   // the first byte of the value, 0 for any
	filled   bool                   // not "", {} or []
	nullable bool                   // may be null
	check    func(text []byte) bool // on the text of the value; nil: none
	// members of an object, by name as encoding/json writes it; without a shape: may not be present
	members  map[string]member
	other    *shape // of members of other names; nil: none may be present
	items    *shape // of an array
	required int    // the number of required members
	// versioned: the resource version precedes the member "uid".
	versioned bool
}

type member struct {
	*shape
	required bool
}

var (
	// anything is the shape of values that have no schema and are preserved.
	anything = &shape{nullable: true}
	// nothing is the shape of values that have no schema and are pruned: objects are empty.
	nothing = &shape{nullable: true}
	// scalar is nothing without null.
	scalar = &shape{items: nothing}

	text       = &shape{begins: '"'}
	filledText = &shape{begins: '"', filled: true}
	texts      = &shape{begins: '[', filled: true, items: text}
	textMap    = &shape{begins: '{', filled: true, other: text}
	boolean    = &shape{check: func(text []byte) bool { return text[0] == 't' || text[0] == 'f' }}
	integer    = &shape{check: isInteger}
	timestamp  = &shape{begins: '"', check: isTimestamp}

	owners = &shape{begins: '[', filled: true, items: &shape{
		begins: '{', required: 4,
		members: map[string]member{
			"apiVersion": {text, true}, "kind": {text, true}, "name": {text, true}, "uid": {text, true},
			"blockOwnerDeletion": {boolean, false}, "controller": {boolean, false},
		},
	}}
	managers = &shape{begins: '[', filled: true, items: &shape{
		begins: '{',
		members: map[string]member{
			"apiVersion": {filledText, false}, "fieldsType": {filledText, false}, "manager": {filledText, false},
			"operation": {filledText, false}, "subresource": {filledText, false}, "time": {timestamp, false},
			"fieldsV1": {&shape{begins: '{', other: anything}, false},
		},
	}}
	// generation is repaired if it is 0.
	generation = &shape{check: func(text []byte) bool { return text[0] != '0' && isInteger(text) }}

	metadata, embeddedMetadata = metadataShape(false), metadataShape(true)
)

func init() { // recursive
	anything.other, anything.items, nothing.items = anything, anything, nothing
}

// metadataShape returns the shape of an ObjectMeta, of a resource or of an object embedded in it.
func metadataShape(embedded bool) *shape {
	m := &shape{begins: '{', members: map[string]member{
		"annotations": {textMap, false}, "labels": {textMap, false}, "finalizers": {texts, false},
		"creationTimestamp": {timestamp, !embedded}, "deletionTimestamp": {timestamp, false},
		"deletionGracePeriodSeconds": {integer, false}, "generation": {generation, !embedded},
		"generateName": {filledText, false}, "name": {filledText, false}, "namespace": {filledText, false},
		"uid": {filledText, !embedded}, "ownerReferences": {owners, false}, "managedFields": {managers, false},
	}}
	if !embedded {
		m.required, m.versioned = 3, true
	}
	return m
}

// NewCustom returns a Custom of the objects of gvk, a version of a definition that has the schema
// and does not preserve unknown fields as a whole. Errors are those of a schema that is not
// structural.
func NewCustom(gvk schema.GroupVersionKind, props *apiextensionsv1.JSONSchemaProps) (*Custom, error) {
	var internal apiextensions.JSONSchemaProps
	if err := apiextensionsv1.Convert_v1_JSONSchemaProps_To_apiextensions_JSONSchemaProps(props, &internal, nil); err != nil {
		return nil, fmt.Errorf("transcode: %w", err)
	}
	s, err := structuralschema.NewStructural(&internal)
	if err != nil {
		return nil, fmt.Errorf("transcode: %w", err)
	}
	s.XEmbeddedResource = true // as far as pruning is concerned
	root := newShape(s, false)
	apiVersion, kind := gvk.ToAPIVersionAndKind()
	for name, of := range map[string]*shape{"apiVersion": exactly(apiVersion), "kind": exactly(kind), "metadata": metadata} {
		m := root.members[name]
		if !m.required {
			root.required++
		}
		if m.required = true; m.shape != nil {
			m.shape = of
		}
		root.members[name] = m
	}
	return &Custom{root}, nil
}

// exactly returns the shape of one string.
func exactly(s string) *shape {
	want := quoted(s)
	return &shape{begins: '"', check: func(text []byte) bool { return string(text) == want }}
}

// quoted returns the text of a string.
func quoted(s string) string {
	data, _ := json.Marshal(s) // never fails
	return string(data)
}

// newShape returns the shape of values with the schema s. preserved: unknown members are preserved.
func newShape(s *structuralschema.Structural, preserved bool) *shape {
	switch {
	case s == nil && preserved:
		return anything
	case s == nil:
		return nothing
	}
	preserved = preserved || s.XPreserveUnknownFields
	if !preserved && !s.Nullable && !s.XEmbeddedResource && s.Items == nil && s.AdditionalProperties == nil && len(s.Properties) == 0 {
		return scalar // most of a schema
	}
	n := &shape{nullable: s.Nullable, members: map[string]member{}, items: newShape(s.Items, preserved)}
	if preserved {
		n.other = anything
	}
	// Whatever the schema names is pruned again.
	if s.AdditionalProperties != nil {
		n.other = newShape(s.AdditionalProperties.Structural, false)
	}
	for name, prop := range s.Properties {
		m := member{newShape(&prop, false), prop.Default.Object != nil}
		if m.required {
			n.required++
		}
		text := quoted(name)
		n.members[text[1:len(text)-1]] = m
	}
	if s.XEmbeddedResource {
		of := map[string]*shape{"apiVersion": text, "kind": text, "metadata": embeddedMetadata}
		if defaulted(s.Properties["metadata"]) {
			of["metadata"] = nil // not supported
		}
		for name, of := range of {
			n.members[name] = member{of, n.members[name].required}
		}
	}
	return n
}

// defaulted reports whether there are defaults in a value with the schema s, or objects with
// metadata.
func defaulted(s structuralschema.Structural) bool {
	if s.XEmbeddedResource || s.Items != nil && (s.Items.Default.Object != nil || defaulted(*s.Items)) {
		return true
	}
	if p := s.AdditionalProperties; p != nil && p.Structural != nil && (p.Structural.Default.Object != nil || defaulted(*p.Structural)) {
		return true
	}
	for _, prop := range s.Properties {
		if prop.Default.Object != nil || defaulted(prop) {
			return true
		}
	}
	return false
}

// AppendItem appends the JSON of a stored object with the resource version rev to dst, as an item
// of a list, followed by a comma. Not ok: the object is declined, and dst is as before. Cost is
// about 1 ns per byte, and no allocation beyond dst.
func (c *Custom) AppendItem(dst, stored []byte, rev int64) (_ []byte, ok bool) {
	t := canonicalText{jsonText: jsonText{data: stored}}
	if t.peek() != '{' || !t.value(c.root, 0) {
		return dst, false
	}
	end := t.pos
	t.byte('\n')
	if t.pos < len(stored) {
		return dst, false
	}
	dst = slices.Grow(dst, end+len(`"resourceVersion":"",,`)+20)
	dst = append(append(dst, stored[:t.uid]...), `"resourceVersion":"`...)
	dst = append(strconv.AppendInt(dst, rev, 10), `",`...)
	return append(append(dst, stored[t.uid:end]...), ','), true
}

// canonicalText reads JSON as encoding/json writes it for maps, with HTML escaped. Its methods
// return false at another form.
type canonicalText struct {
	jsonText
	uid int // where the member of a versioned shape begins
}

// value reads a value of the shape.
func (t *canonicalText) value(s *shape, depth int) bool {
	from, b, ok := t.pos, t.peek(), false
	if s.begins != 0 && b != s.begins {
		return false
	}
	switch {
	case b == '"':
		ok = t.string()
	case b == '{' && depth < maxJSONDepth:
		ok = t.object(s, depth+1)
	case b == '[' && depth < maxJSONDepth:
		ok = t.array(s, depth+1)
	case b == 't':
		ok = t.word("true")
	case b == 'f':
		ok = t.word("false")
	case b == 'n':
		return s.nullable && t.word("null")
	default:
		ok = t.number()
	}
	return ok && (!s.filled || t.pos-from > len(`""`)) && (s.check == nil || s.check(t.data[from:t.pos]))
}

func (t *canonicalText) object(s *shape, depth int) bool {
	t.pos++
	missing := s.required
	if t.byte('}') {
		return missing == 0
	}
	for last := []byte(nil); ; {
		from := t.pos
		if !t.string() || !t.byte(':') {
			return false
		}
		name := t.data[from+1 : t.pos-len(`":`)]
		if last != nil && !precedes(last, name) {
			return false
		}
		last = name
		of := s.other
		if m, ok := s.members[string(name)]; ok {
			of = m.shape
			if m.required {
				missing--
			}
			if s.versioned && string(name) == "uid" {
				t.uid = from
			}
		}
		if of == nil || !t.value(of, depth) {
			return false
		}
		if t.byte('}') {
			return missing == 0
		}
		if !t.byte(',') {
			return false
		}
	}
}

func (t *canonicalText) array(s *shape, depth int) bool {
	t.pos++
	if t.byte(']') {
		return true
	}
	for s.items != nil && t.value(s.items, depth) {
		if t.byte(']') {
			return true
		}
		if !t.byte(',') {
			return false
		}
	}
	return false
}

// string reads a string.
func (t *canonicalText) string() bool {
	if !t.byte('"') {
		return false
	}
	for i := t.pos; i < len(t.data); {
		switch b := t.data[i]; {
		case plain[b]:
			i++
		case b == '"':
			t.pos = i + 1
			return true
		case b == '\\':
			_, n := unescape(t.data[i:])
			if n == 0 {
				return false
			}
			i += n
		case b < utf8.RuneSelf:
			return false
		default:
			r, n := utf8.DecodeRune(t.data[i:])
			if r == utf8.RuneError && n == 1 || r == '\u2028' || r == '\u2029' {
				return false
			}
			i += n
		}
	}
	return false
}

// unescape returns the character of the escape at the begin of data, and the length of the escape,
// 0 if encoding/json does not write it.
func unescape(data []byte) (r rune, n int) {
	if len(data) < 2 {
		return 0, 0
	}
	switch data[1] {
	case '"', '\\':
		return rune(data[1]), 2
	case 'b':
		return '\b', 2
	case 'f':
		return '\f', 2
	case 'n':
		return '\n', 2
	case 'r':
		return '\r', 2
	case 't':
		return '\t', 2
	}
	if data[1] != 'u' || len(data) < 6 {
		return 0, 0
	}
	for _, b := range data[2:6] {
		switch {
		case '0' <= b && b <= '9':
			r = r<<4 | rune(b-'0')
		case 'a' <= b && b <= 'f':
			r = r<<4 | rune(b-'a'+10)
		default:
			return 0, 0
		}
	}
	switch r {
	case '<', '>', '&', '\u2028', '\u2029':
		return r, 6
	case '\b', '\f', '\n', '\r', '\t':
		return 0, 0
	}
	if r < ' ' {
		return r, 6
	}
	return 0, 0
}

// precedes reports whether the name a is before b in the order of encoding/json, which is that of
// their bytes without escapes. It is false, too, for some names with the escape of a character
// beyond ASCII.
func precedes(a, b []byte) bool {
	if bytes.IndexByte(a, '\\') < 0 && bytes.IndexByte(b, '\\') < 0 {
		return bytes.Compare(a, b) < 0
	}
	for len(a) > 0 && len(b) > 0 {
		x, n := rune(a[0]), 1
		if x == '\\' {
			x, n = unescape(a)
		}
		y, m := rune(b[0]), 1
		if y == '\\' {
			y, m = unescape(b)
		}
		if x != y {
			return x < y && y <= math.MaxUint8
		}
		a, b = a[n:], b[m:]
	}
	return len(b) > 0
}

// number reads a number. Some that encoding/json writes are not supported: large ones, and those
// with an exponent.
func (t *canonicalText) number() bool {
	from := t.pos
	negative, zero := t.byte('-'), t.byte('0')
	if !zero && !t.digits() {
		return false
	}
	if !t.byte('.') {
		return !(negative && zero) && t.pos-from < len("9223372036854775807")
	}
	if !t.digits() {
		return false
	}
	f, err := strconv.ParseFloat(string(t.data[from:t.pos]), 64)
	if abs := math.Abs(f); err != nil || abs < 1e-6 || abs >= 1e21 {
		return false
	}
	var buf [32]byte
	return bytes.Equal(strconv.AppendFloat(buf[:0], f, 'f', -1, 64), t.data[from:t.pos])
}

func isInteger(text []byte) bool {
	return (text[0] == '-' || text[0] >= '0' && text[0] <= '9') && bytes.IndexByte(text, '.') < 0
}

// isTimestamp reports whether a string is a time as ObjectMeta has it: in UTC, in whole seconds,
// and not zero.
func isTimestamp(text []byte) bool {
	var at time.Time
	return len(text) == len(`"2006-01-02T15:04:05Z"`) && at.UnmarshalJSON(text) == nil && !at.IsZero()
}
