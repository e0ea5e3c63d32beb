package transcode

import (
	"regexp"
	"slices"
	"strings"
	"unicode/utf8"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// plainPath is a path that names members of objects by their names alone.
var plainPath = regexp.MustCompile(`^[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*$`)

// FindJSONLabel returns a function that finds the label with the key in custom resources, stored as
// JSON in the version of gvk. They need no conversion, and labels have no defaults. nil for the key
// "", which no label has.
func FindJSONLabel(gvk schema.GroupVersionKind, key string) Find {
	if key == "" {
		return nil
	}
	f := newJSONFinder(gvk, "metadata", "labels")
	f.label = key
	return f.find
}

// FindJSONField returns a function that finds the string at a path such as "spec.color" in custom
// resources, stored as JSON in the version of gvk; nil if the path is another one, or is in
// metadata, of the object or of an object embedded in it: decoding changes some of it. Not ok for
// objects without the field, because their definition may have a default.
func FindJSONField(gvk schema.GroupVersionKind, path string) Find {
	names := strings.Split(path, ".")
	if !plainPath.MatchString(path) || slices.Contains(names, "metadata") {
		return nil
	}
	return newJSONFinder(gvk, names...).find
}

// jsonFinder finds a value in stored JSON. It accepts valid JSON only, with numbers in range and
// metadata that is an object: an object that cannot be decoded for one of these has no value. It
// does not examine the metadata of embedded objects.
//
// It has a parser of its own, because a finder reads every object of a resource at the first LIST
// by a label, which is little else, and github.com/go-json-experiment/json/jsontext costs more than
// a tenth of that LIST. jsontext does not check the range of numbers, so each of its forms reads
// numbers a second time. Medians of six runs on two cores, for a label of a custom resource of 1
// KB, 2.5 KB with three managers, and 20 KB (BenchmarkFindJSON):
//
//	this parser                                    2.8   6.2  50 µs
//	Value.IsValid, then a search in valid JSON     3.5   8.5  77 µs
//	Decoder.ReadValue of each member of the path   3.7   8.3  68 µs
//	Decoder.ReadToken                              3.9   9.1  76 µs
//
// The first LIST by a label of 100,000 objects takes for each object 1.27 µs with this parser, 1.66
// with IsValid and 1.79 with ReadValue if they have 0.5 KB, and 4.84, 6.16 and 5.75 µs if they have
// 2.3 KB.
type jsonFinder struct {
	apiVersion, kind string
	path             []string
	label            string // member of the object at the path, "" for the value at it
}

func newJSONFinder(gvk schema.GroupVersionKind, path ...string) *jsonFinder {
	f := &jsonFinder{path: path}
	f.apiVersion, f.kind = gvk.ToAPIVersionAndKind()
	return f
}

// find implements Find.
func (f *jsonFinder) find(stored []byte) (value []byte, present, ok bool) {
	s := jsonSearch{text: jsonText{data: stored}, finder: f}
	s.text.space()
	if !s.object(0) {
		return nil, false, false
	}
	s.text.space()
	if s.text.pos != len(stored) || !s.apiVersion || !s.kind || !utf8.Valid(s.value) {
		return nil, false, false
	}
	// Without labels an object has no such label.
	return s.value, s.present, s.present || f.label != ""
}

// jsonSearch is the state of one call.
type jsonSearch struct {
	text             jsonText
	finder           *jsonFinder
	apiVersion, kind bool // are the expected ones
	value            []byte
	present          bool
}

// object reads an object on the way, whose member path[depth] is the next one. False: the value
// cannot be told.
func (s *jsonSearch) object(depth int) bool {
	t, f, seen := &s.text, s.finder, false
	return t.object(func(name []byte) bool {
		switch {
		case depth == 0 && string(name) == "apiVersion":
			return !s.apiVersion && s.is(f.apiVersion, &s.apiVersion)
		case depth == 0 && string(name) == "kind":
			return !s.kind && s.is(f.kind, &s.kind)
		case depth == 0 && string(name) == "metadata" && t.peek() != '{' && t.peek() != 'n':
			// cannot be decoded, unless it is null
			return false
		case string(name) != f.path[depth]:
			return t.value(0)
		case seen: // a decoder takes one of them
			return false
		}
		seen = true
		switch {
		case depth+1 < len(f.path):
			return s.object(depth + 1)
		case f.label != "":
			return s.labels()
		}
		value, ok := t.plain()
		s.value, s.present = value, true
		return ok
	})
}

// is reads a string that must be want.
func (s *jsonSearch) is(want string, found *bool) bool {
	value, ok := s.text.plain()
	*found = ok && string(value) == want
	return *found
}

// labels reads labels, all of which must be strings: others are dropped when the object is decoded.
func (s *jsonSearch) labels() bool {
	return s.text.object(func(name []byte) bool {
		if string(name) != s.finder.label {
			return s.text.peek() == '"' && s.text.string()
		}
		value, ok := s.text.plain()
		if !ok || s.present {
			return false
		}
		s.value, s.present = value, true
		return true
	})
}

// maxJSONDepth bounds the nesting of values that are skipped; a deeper object is decoded.
const maxJSONDepth = 100

// jsonText reads JSON (RFC 8259) and is at pos. Its methods return false at another syntax.
type jsonText struct {
	data []byte
	pos  int
}

// peek returns the next byte, 0 at the end.
func (t *jsonText) peek() byte {
	if t.pos < len(t.data) {
		return t.data[t.pos]
	}
	return 0
}

// byte reads a byte.
func (t *jsonText) byte(b byte) bool {
	if t.pos == len(t.data) || t.data[t.pos] != b {
		return false
	}
	t.pos++
	return true
}

func (t *jsonText) space() {
	for t.pos < len(t.data) {
		switch t.data[t.pos] {
		case ' ', '\t', '\n', '\r':
			t.pos++
		default:
			return
		}
	}
}

// object reads an object on the way of a search: member reads the value of each name. Names with
// escapes or bytes beyond ASCII are not supported.
func (t *jsonText) object(member func(name []byte) bool) bool {
	if !t.byte('{') {
		return false
	}
	for first := true; ; first = false {
		t.space()
		if t.byte('}') {
			return first // not after a comma
		}
		name, ok := t.plain()
		if !ok {
			return false
		}
		for _, b := range name {
			if b >= utf8.RuneSelf {
				return false
			}
		}
		if t.space(); !t.byte(':') {
			return false
		}
		if t.space(); !member(name) {
			return false
		}
		t.space()
		if t.byte('}') {
			return true
		}
		if !t.byte(',') {
			return false
		}
	}
}

// plain reads a string without escapes and returns its content.
func (t *jsonText) plain() ([]byte, bool) {
	if !t.byte('"') {
		return nil, false
	}
	for from := t.pos; t.pos < len(t.data); t.pos++ {
		switch b := t.data[t.pos]; {
		case b == '"':
			t.pos++
			return t.data[from : t.pos-1], true
		case b == '\\' || b < ' ':
			return nil, false
		}
	}
	return nil, false
}

// string reads a string.
func (t *jsonText) string() bool {
	if !t.byte('"') {
		return false
	}
	for t.pos < len(t.data) {
		b := t.data[t.pos]
		t.pos++
		switch {
		case b == '"':
			return true
		case b < ' ':
			return false
		case b == '\\' && !t.escape():
			return false
		}
	}
	return false
}

// escape reads the rest of an escape after its backslash.
func (t *jsonText) escape() bool {
	b := t.peek()
	t.pos++
	switch b {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return true
	case 'u':
		for range 4 {
			if b := t.peek(); (b < '0' || b > '9') && (b|0x20 < 'a' || b|0x20 > 'f') {
				return false
			}
			t.pos++
		}
		return true
	}
	return false
}

// value reads any value.
func (t *jsonText) value(depth int) bool {
	switch b := t.peek(); {
	case b == '"':
		return t.string()
	case b == '{' && depth < maxJSONDepth:
		return t.values('}', depth+1)
	case b == '[' && depth < maxJSONDepth:
		return t.values(']', depth+1)
	case b == 't':
		return t.word("true")
	case b == 'f':
		return t.word("false")
	case b == 'n':
		return t.word("null")
	}
	return t.number()
}

// values reads an object or array, which ends with end.
func (t *jsonText) values(end byte, depth int) bool {
	t.pos++
	if t.space(); t.byte(end) {
		return true
	}
	for {
		t.space()
		if end == '}' {
			if !t.string() {
				return false
			}
			if t.space(); !t.byte(':') {
				return false
			}
			t.space()
		}
		if !t.value(depth) {
			return false
		}
		if t.space(); t.byte(end) {
			return true
		}
		if !t.byte(',') {
			return false
		}
	}
}

func (t *jsonText) word(word string) bool {
	if len(t.data)-t.pos < len(word) || string(t.data[t.pos:t.pos+len(word)]) != word {
		return false
	}
	t.pos += len(word)
	return true
}

// maxInteger bounds the digits before the point: a float64, as which a decoder reads numbers that
// are no int64, has up to 309 of them.
const maxInteger = 300

// number reads a number that every decoder accepts. One with an exponent or with more digits may be
// out of range, which fails the decoding of the object.
func (t *jsonText) number() bool {
	t.byte('-')
	from := t.pos
	if !t.byte('0') && !t.digits() || t.pos-from > maxInteger {
		return false
	}
	if t.byte('.') && !t.digits() {
		return false
	}
	b := t.peek()
	return b != 'e' && b != 'E'
}

// digits reads at least one digit.
func (t *jsonText) digits() bool {
	from := t.pos
	for t.pos < len(t.data) && t.data[t.pos] >= '0' && t.data[t.pos] <= '9' {
		t.pos++
	}
	return t.pos > from
}
