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
