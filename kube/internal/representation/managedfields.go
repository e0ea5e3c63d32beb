package representation

import (
	"bytes"
	"encoding/binary"

	"github.com/stratakube/strata/mirror"
)

// Managed fields, which most clients do not read, are half of many objects. These functions cut
// them out of encoded objects, so that no object is decoded for clients that request it without
// them (KEP-5958).

// CutItem copies an item without a field of its object; see Format.Cut.
type CutItem func(dst, item []byte) ([]byte, bool)

// managedFields is the number of the field in ObjectMeta.
const managedFields = 17

// CutProtobufItem is the CutItem that omits metadata.managedFields in protobuf. It reports false
// for an item that is not an object with metadata.
func CutProtobufItem(dst, item []byte) ([]byte, bool) {
	if len(item) == 0 {
		return dst, false
	}
	raw, rest, ok := cutLength(item[1:])
	if !ok || len(rest) > 0 {
		return dst, false
	}
	return appendCut(dst, item[0], raw)
}

// appendCut appends a field with the tag, whose content is the object raw without managed fields.
func appendCut(dst []byte, tag byte, raw []byte) ([]byte, bool) {
	if len(raw) == 0 || raw[0] != objectMetadata {
		return dst, false
	}
	meta, rest, ok := cutLength(raw[1:])
	if !ok {
		return dst, false
	}
	length, ok := withoutManagedFields(nil, meta)
	if !ok {
		return dst, false
	}
	dst = append(dst, tag)
	dst = binary.AppendUvarint(dst, uint64(1+uvarintLen(length)+length+len(rest)))
	dst = append(dst, objectMetadata)
	dst = binary.AppendUvarint(dst, uint64(length))
	withoutManagedFields(&dst, meta)
	return append(dst, rest...), true
}

// withoutManagedFields returns the length of an ObjectMeta without managed fields, and appends it
// to dst unless that is nil.
func withoutManagedFields(dst *[]byte, meta []byte) (length int, ok bool) {
	for rest := meta; len(rest) > 0; {
		tag, n := binary.Uvarint(rest)
		if n <= 0 {
			return 0, false
		}
		field := rest
		switch tag & 7 {
		case 0:
			_, m := binary.Uvarint(rest[n:])
			if m <= 0 {
				return 0, false
			}
			rest = rest[n+m:]
		case 2:
			if _, rest, ok = cutLength(rest[n:]); !ok {
				return 0, false
			}
		default: // ObjectMeta has no other fields
			return 0, false
		}
		if tag>>3 == managedFields {
			continue
		}
		field = field[:len(field)-len(rest)]
		length += len(field)
		if dst != nil {
			*dst = append(*dst, field...)
		}
	}
	return length, true
}

// cutLength returns the content of a length-delimited field, whose tag precedes data, and the bytes
// behind it.
func cutLength(data []byte) (content, rest []byte, ok bool) {
	length, n := binary.Uvarint(data)
	if n <= 0 || uint64(len(data)-n) < length {
		return nil, nil, false
	}
	return data[n:][:length], data[n:][length:], true
}

// WithoutManagedFields returns a Splicer that passes stored values to inner without their managed
// fields.
func WithoutManagedFields(inner Splicer) Splicer {
	return func(dst, stored []byte, rev mirror.Revision) ([]byte, bool) {
		buf := scratch.Get().(*[]byte)
		defer scratch.Put(buf)
		cut, ok := cutStored((*buf)[:0], stored)
		if !ok {
			return dst, false
		}
		*buf = cut[:0]
		return inner(dst, cut, rev)
	}
}

// Cutting returns a Splicer that cuts the items of inner.
func Cutting(inner Splicer, cut CutItem) Splicer {
	return func(dst, stored []byte, rev mirror.Revision) ([]byte, bool) {
		buf := scratch.Get().(*[]byte)
		defer scratch.Put(buf)
		whole, ok := inner((*buf)[:0], stored, rev)
		*buf = whole[:0]
		if !ok {
			return dst, false
		}
		return cut(dst, whole)
	}
}

// cutStored appends a value without managed fields. It reports false for one that is not stored in
// protobuf.
func cutStored(dst, stored []byte) ([]byte, bool) {
	raw, before, after, err := OpenUnknown(stored)
	if err != nil {
		return dst, false
	}
	cut, ok := appendCut(append(dst, before...), UnknownRaw, raw)
	return append(cut, after...), ok
}

// CutJSONItem is the CutItem that omits metadata.managedFields in JSON without insignificant
// spaces. It reports false for JSON that is not an object with metadata.
func CutJSONItem(dst, item []byte) ([]byte, bool) {
	meta, _, ok := jsonMember(item, 0, "metadata")
	if !ok || item[meta.value] != '{' {
		return dst, false
	}
	fields, found, ok := jsonMember(item, meta.value, "managedFields")
	if !found {
		return append(dst, item...), ok
	}
	from, to := fields.key, fields.end
	switch {
	case item[to] == ',':
		to++
	case item[from-1] == ',':
		from--
	}
	return append(append(dst, item[:from]...), item[to:]...), true
}

// CutJSONMetadata returns the CutItem that makes items of metadata out of whole objects, in JSON
// without insignificant spaces. The head precedes the metadata of each.
func CutJSONMetadata(head []byte) CutItem {
	return func(dst, item []byte) ([]byte, bool) {
		meta, found, _ := jsonMember(item, 0, "metadata")
		if !found {
			return dst, false
		}
		dst = append(append(dst, head...), item[meta.key:meta.end]...)
		return append(dst, "},"...), true
	}
}

// member is the position of a member of a JSON object: of its key, of its value, and behind that.
type member struct{ key, value, end int }

// jsonMember finds a member of the object that begins at data[at]. ok is false if it is not an
// object, as far as that was read.
func jsonMember(data []byte, at int, name string) (m member, found, ok bool) {
	if at >= len(data) || data[at] != '{' {
		return m, false, false
	}
	for at++; at < len(data) && data[at] == '"'; at++ {
		colon := skipString(data, at)
		if colon < 0 || colon+1 >= len(data) || data[colon] != ':' {
			return m, false, false
		}
		end := skipValue(data, colon+1)
		if end < 0 || end >= len(data) {
			return m, false, false
		}
		if string(data[at+1:colon-1]) == name {
			return member{at, colon + 1, end}, true, true
		}
		if at = end; data[at] != ',' {
			break
		}
	}
	return m, false, at < len(data) && data[at] == '}'
}

// skipString returns the position behind the string that begins at data[at], -1 if it does not end.
func skipString(data []byte, at int) int {
	for at++; ; at++ {
		n := bytes.IndexByte(data[at:], '"')
		if n < 0 {
			return -1
		}
		at += n
		escapes := 0
		for data[at-1-escapes] == '\\' {
			escapes++
		}
		if escapes%2 == 0 {
			return at + 1
		}
	}
}

// skipValue returns the position behind the value that begins at data[at], -1 if it does not end.
func skipValue(data []byte, at int) int {
	for depth := 0; at < len(data); {
		switch data[at] {
		case '"':
			if at = skipString(data, at); at < 0 {
				return -1
			}
		case '{', '[':
			depth++
			at++
			continue
		case '}', ']':
			if depth--; depth < 0 {
				return at // behind a number, true, false or null
			}
			at++
		case ',':
			if depth == 0 {
				return at
			}
			at++
			continue
		default:
			at++
			continue
		}
		if depth == 0 {
			return at
		}
	}
	return -1
}
