package transcode

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"strconv"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

// appendAbsent appends a field that is absent, as the zero value of its Go type.
func (w *walk) appendAbsent(dst []byte, f *field) (_ []byte, ok bool) {
	if f.pointer || f.repeated || f.kind == kindBytes {
		if f.omit {
			return dst, true
		}
		return append(append(dst, f.name...), "null,"...), true
	}
	switch f.kind {
	case kindString, kindBool, kindInt32, kindInt64:
		if f.omit {
			return dst, true
		}
	case kindTime, kindMicroTime:
		if f.omitZero {
			return dst, true
		}
	default: // written as zero
	}
	dst = append(dst, f.name...)
	switch f.kind {
	case kindString:
		dst = append(dst, `""`...)
	case kindBool:
		dst = append(dst, "false"...)
	case kindInt32, kindInt64, kindIntOrString:
		dst = append(dst, '0')
	case kindTime, kindMicroTime:
		dst = append(dst, "null"...)
	case kindDuration:
		dst = append(dst, `"0s"`...)
	case kindQuantity:
		dst = append(dst, `"0"`...)
	case kindMessage:
		if dst, ok = w.appendObject(dst, f.elem, reader{}); !ok {
			return dst, false
		}
	default:
		return dst, false
	}
	return append(dst, ','), true
}

// appendValue appends the value of a present field.
func (w *walk) appendValue(dst []byte, f *field, s slot) (_ []byte, ok bool) {
	if f.kind == kindMap {
		return w.appendMap(dst, f.value, w.reader(s))
	}
	if !f.repeated {
		return w.appendOne(dst, f, s)
	}
	dst = append(dst, '[')
	r := w.reader(s)
	for r.more() {
		if _, ok := r.uvarint(); !ok { // the tag
			return dst, false
		}
		element := slot{from: uint32(r.pos)}
		if f.wire == wireLen {
			content, ok := r.delimited()
			if !ok {
				return dst, false
			}
			element.from = uint32(content.pos)
		} else if !r.skip(f.wire) {
			return dst, false
		}
		element.to = uint32(r.pos)
		if dst, ok = w.appendOne(dst, f, element); !ok {
			return dst, false
		}
		dst = append(dst, ',')
	}
	dst[len(dst)-1] = ']'
	return dst, true
}

// appendMap appends a map. Its keys must ascend, as upstream's encoder writes them.
func (w *walk) appendMap(dst []byte, value *field, r reader) (_ []byte, ok bool) {
	dst = append(dst, '{')
	var last []byte
	for first := true; r.more(); first = false {
		key, val, ok := r.entry()
		if !ok || !first && bytes.Compare(last, key.bytes()) >= 0 {
			return dst, false
		}
		last = key.bytes()
		dst = append(appendString(dst, last), ':')
		if dst, ok = w.appendOne(dst, value, slot{uint32(val.pos), uint32(val.end)}); !ok {
			return dst, false
		}
		dst = append(dst, ',')
	}
	dst[len(dst)-1] = '}'
	return dst, true
}

// appendOne appends one value: a field, an element of a list, or a value of a map.
func (w *walk) appendOne(dst []byte, f *field, s slot) ([]byte, bool) {
	switch f.kind {
	case kindString:
		return appendString(dst, w.content(s)), true
	case kindBool:
		return strconv.AppendBool(dst, w.varint(s) != 0), true
	case kindInt32:
		return strconv.AppendInt(dst, int64(int32(w.varint(s))), 10), true
	case kindInt64:
		return strconv.AppendInt(dst, int64(w.varint(s)), 10), true
	case kindBytes:
		return append(base64.StdEncoding.AppendEncode(append(dst, '"'), w.content(s)), '"'), true
	case kindMessage:
		return w.appendObject(dst, f.elem, w.reader(s))
	case kindTime, kindMicroTime:
		return w.appendTime(dst, f.kind, s)
	case kindDuration:
		return w.appendDuration(dst, s)
	case kindQuantity:
		return w.appendQuantity(dst, s)
	case kindIntOrString:
		return w.appendIntOrString(dst, s)
	case kindFields:
		return w.appendManagedFields(dst, s)
	default:
		return dst, false
	}
}

// scalarFields reads a message of the varints 1 and 2 and the text 3, each of which may be absent.
func (w *walk) scalarFields(s slot) (ints [3]uint64, text []byte, ok bool) {
	r := w.reader(s)
	for r.more() {
		number, wire, ok := r.tag()
		switch {
		case !ok:
			return ints, nil, false
		case wire == wireVarint && number < len(ints):
			if ints[number], ok = r.uvarint(); !ok {
				return ints, nil, false
			}
		case wire == wireLen:
			content, ok := r.delimited()
			if !ok || text != nil || number != 3 {
				return ints, nil, false
			}
			text = content.bytes()
		default:
			return ints, nil, false
		}
	}
	return ints, text, true
}

// time returns the value of a Time or MicroTime.
func (w *walk) time(k kind, s slot) (time.Time, bool) {
	if s.from == s.to {
		return time.Time{}, true
	}
	ints, text, ok := w.scalarFields(s)
	if !ok || text != nil {
		return time.Time{}, false
	}
	var nanos time.Duration
	if k == kindMicroTime {
		nanos = time.Duration(int32(ints[2])).Truncate(time.Microsecond)
	}
	return time.Unix(int64(ints[1]), int64(nanos)).UTC(), true
}

func (w *walk) appendTime(dst []byte, k kind, s slot) ([]byte, bool) {
	t, ok := w.time(k, s)
	if !ok || t.Year() < 0 || t.Year() > 9999 {
		return dst, false
	}
	if t.IsZero() {
		return append(dst, "null"...), true
	}
	layout := time.RFC3339
	if k == kindMicroTime {
		layout = metav1.RFC3339Micro
	}
	return append(t.AppendFormat(append(dst, '"'), layout), '"'), true
}

func (w *walk) appendDuration(dst []byte, s slot) ([]byte, bool) {
	ints, text, ok := w.scalarFields(s)
	if !ok || text != nil || ints[2] != 0 {
		return dst, false
	}
	dst = append(dst, '"')
	dst = append(dst, time.Duration(int64(ints[1])).String()...)
	return append(dst, '"'), true
}

func (w *walk) appendIntOrString(dst []byte, s slot) ([]byte, bool) {
	ints, text, ok := w.scalarFields(s)
	switch {
	case !ok || ints[1] > 1:
		return dst, false
	case ints[1] == 0:
		return strconv.AppendInt(dst, int64(int32(ints[2])), 10), true
	}
	return appendString(dst, text), true
}

// appendQuantity appends the canonical form.
func (w *walk) appendQuantity(dst []byte, s slot) ([]byte, bool) {
	text, ok := onlyText(w.reader(s), 1)
	if !ok {
		return dst, false
	}
	canonical, ok := w.canonicalForm(text)
	return append(dst, canonical...), ok
}

// appendManagedFields appends the JSON in a FieldsV1, compacted and escaped as encoding/json does.
func (w *walk) appendManagedFields(dst []byte, s slot) ([]byte, bool) {
	if s.from == s.to {
		return append(dst, "null"...), true
	}
	text, ok := onlyText(w.reader(s), 1)
	switch {
	case !ok:
		return dst, false
	case len(text) == 0:
		return append(dst, "null"...), true
	case compactFields(text):
		return append(dst, text...), true
	case text[0] != '{': // may be CBOR
		return dst, false
	}
	data, err := json.Marshal(json.RawMessage(text))
	return append(dst, data...), err == nil
}

// compactFields reports whether data is an object whose values are such objects, as FieldsV1 is,
// without spaces and with no characters that encoding/json changes, and at most maxDepth deep:
// encoding/json has a limit.
func compactFields(data []byte) bool {
	depth := 0
	for i := 0; i < len(data) && data[i] == '{'; {
		if depth++; depth > maxDepth {
			return false
		}
		i++
		closed := false
		for i < len(data) && data[i] == '}' {
			depth--
			i++
			if depth == 0 {
				return i == len(data)
			}
			closed = true
		}
		if closed {
			if i == len(data) || data[i] != ',' {
				return false
			}
			i++
		}
		n := plainKey(data[i:])
		if n == 0 {
			return false
		}
		i += n
	}
	return false
}

const maxDepth = 1000

// plainKey returns the length of a key and its colon; 0 if there is none, or it has other
// characters than printable ASCII and escaped quotes and backslashes.
func plainKey(data []byte) int {
	if len(data) == 0 || data[0] != '"' {
		return 0
	}
	for i := 1; i+1 < len(data); i++ {
		switch c := data[i]; {
		case c == '"':
			if data[i+1] != ':' {
				return 0
			}
			return i + 2
		case c == '\\':
			if i++; data[i] != '"' && data[i] != '\\' {
				return 0
			}
		case !plain[c]:
			return 0
		}
	}
	return 0
}
