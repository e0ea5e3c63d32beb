package transcode

import (
	"encoding/binary"
	"math/bits"
)

// Wire types of protobuf.
const (
	wireVarint = 0
	wireFixed8 = 1
	wireLen    = 2
	wireFixed4 = 5
)

// reader reads a range of a protobuf message.
type reader struct {
	data     []byte
	pos, end int
}

func (r *reader) more() bool { return r.pos < r.end }

func (r *reader) bytes() []byte { return r.data[r.pos:r.end] }

// uvarint reads a varint.
func (r *reader) uvarint() (uint64, bool) {
	if r.pos < r.end && r.data[r.pos] < 0x80 {
		r.pos++
		return uint64(r.data[r.pos-1]), true
	}
	if r.end-r.pos >= 2 && r.data[r.pos+1] < 0x80 {
		r.pos += 2
		return uint64(r.data[r.pos-2]&0x7f) | uint64(r.data[r.pos-1])<<7, true
	}
	v, n := binary.Uvarint(r.data[r.pos:r.end])
	if n <= 0 {
		return 0, false
	}
	r.pos += n
	return v, true
}

// tag reads the number and the wire type of a field.
func (r *reader) tag() (number int, wire uint8, ok bool) {
	v, ok := r.uvarint()
	if !ok || v>>3 == 0 || v>>3 > 1<<29-1 {
		return 0, 0, false
	}
	return int(v >> 3), uint8(v & 7), true
}

// field reads the tag of a field and, if it is length-delimited, its content; other values are
// skipped.
func (r *reader) field() (number int, wire uint8, content reader, ok bool) {
	if r.end-r.pos >= 2 { // the usual case: a tag and a length of one byte each
		tag, n := r.data[r.pos], r.data[r.pos+1]
		if from := r.pos + 2; tag&7 == wireLen && tag < 0x80 && tag > 7 && n < 0x80 && int(n) <= r.end-from {
			r.pos = from + int(n)
			return int(tag >> 3), wireLen, reader{r.data, from, r.pos}, true
		}
	}
	if number, wire, ok = r.tag(); !ok {
		return 0, 0, content, false
	}
	if wire == wireLen {
		content, ok = r.delimited()
	} else {
		ok = r.skip(wire)
	}
	return number, wire, content, ok
}

// delimited reads a length and returns the range of that length.
func (r *reader) delimited() (reader, bool) {
	n, ok := r.uvarint()
	if !ok || n > uint64(r.end-r.pos) {
		return reader{}, false
	}
	content := reader{r.data, r.pos, r.pos + int(n)}
	r.pos = content.end
	return content, true
}

// element reads the tag and the content of an element of a list of length-delimited values.
func (r *reader) element() (reader, bool) {
	if _, ok := r.uvarint(); !ok {
		return reader{}, false
	}
	return r.delimited()
}

// entry reads an entry of a map with string keys. A missing value is an empty range.
func (r *reader) entry() (key, value reader, ok bool) {
	e, ok := r.element()
	if !ok {
		return key, value, false
	}
	for e.more() {
		number, wire, ok := e.tag()
		if !ok || wire != wireLen {
			return key, value, false
		}
		content, ok := e.delimited()
		switch {
		case !ok:
			return key, value, false
		case number == 1 && key.data == nil:
			key = content
		case number == 2 && value.data == nil:
			value = content
		default: // an unknown field, or one twice
			return key, value, false
		}
	}
	return key, value, key.data != nil
}

// uvarintLen returns the number of bytes of the shortest varint of v.
func uvarintLen(v uint64) int { return (bits.Len64(v|1) + 6) / 7 }

// skip skips the value of a field.
func (r *reader) skip(wire uint8) bool {
	switch wire {
	case wireVarint:
		_, ok := r.uvarint()
		return ok
	case wireLen:
		_, ok := r.delimited()
		return ok
	case wireFixed8:
		r.pos += 8
	case wireFixed4:
		r.pos += 4
	default:
		return false
	}
	return r.pos <= r.end
}
