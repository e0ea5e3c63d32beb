package representation

import (
	"bytes"
	"encoding/binary"
	"errors"
	"math/bits"
	"strconv"
	"sync"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/mirror"
)

// protobufPreamble begins every protobuf message that Kubernetes sends.
var protobufPreamble = []byte("k8s\x00")

// UnknownRaw is the tag of runtime.Unknown.Raw.
const UnknownRaw = 2<<3 | 2

// ItemsTag is the tag of the items in the protobuf lists of all kinds but PartialObjectMetadataList
// of v1beta1.
const ItemsTag = 2<<3 | 2

// OpenUnknown splits an encoded runtime.Unknown into the bytes of its Raw field, the bytes before
// that field's tag, and the bytes after the field.
func OpenUnknown(data []byte) (raw, before, after []byte, err error) {
	rest, ok := bytes.CutPrefix(data, protobufPreamble)
	for ok && len(rest) > 0 {
		tag, n := binary.Uvarint(rest)
		if n <= 0 || tag&7 != 2 { // all its fields are delimited by a length
			break
		}
		length, m := binary.Uvarint(rest[n:])
		if m <= 0 || uint64(len(rest)-n-m) < length {
			break
		}
		field := rest[n+m:][:length]
		if tag == UnknownRaw {
			return field, data[:len(data)-len(rest)], rest[n+m+len(field):], nil
		}
		rest = rest[n+m+len(field):]
	}
	// data omitted: may be a Secret
	return nil, nil, nil, errors.New("not a Kubernetes protobuf message")
}

// Tags of the fields that contain the resource version, in the messages of all kinds.
const (
	objectMetadata  = 1<<3 | 2
	resourceVersion = 6<<3 | 2
)

// SpliceItem is the Splicer of whole objects in protobuf. Stored and sent objects differ only in
// the resource version, which is stored empty.
func SpliceItem(dst, stored []byte, rev mirror.Revision) ([]byte, bool) {
	raw, _, _, err := OpenUnknown(stored)
	if err != nil || len(raw) < 2 || raw[0] != objectMetadata {
		return dst, false
	}
	length, n := binary.Uvarint(raw[1:])
	if n <= 0 || uint64(len(raw)-1-n) < length {
		return dst, false
	}
	meta, rest := raw[1+n:][:length], raw[1+n+int(length):]
	at, ok := emptyField(meta, resourceVersion)
	if !ok {
		return dst, false
	}
	var digits [20]byte
	version := strconv.AppendInt(digits[:0], rev, 10)
	length += uint64(len(version))
	dst = append(dst, ItemsTag)
	dst = binary.AppendUvarint(dst, 1+uint64(uvarintLen(length))+length+uint64(len(rest)))
	dst = append(dst, objectMetadata)
	dst = binary.AppendUvarint(dst, length)
	dst = append(dst, meta[:at]...)
	dst = append(dst, resourceVersion, byte(len(version)))
	dst = append(dst, version...)
	dst = append(dst, meta[at+2:]...)
	return append(dst, rest...), true
}

// emptyField returns the offset of the field with the tag in message, if that field is empty and
// all fields before it are length-delimited.
func emptyField(message []byte, tag byte) (at int, ok bool) {
	for at+1 < len(message) {
		if message[at] == tag {
			return at, message[at+1] == 0
		}
		if message[at]&7 != 2 || message[at] >= 0x80 {
			return 0, false
		}
		length, n := binary.Uvarint(message[at+1:])
		if n <= 0 || uint64(len(message)-at-1-n) < length {
			return 0, false
		}
		at += 1 + n + int(length)
	}
	return 0, false
}

// envelopes caches the bytes around the raw bytes of a kind's protobuf messages.
var envelopes sync.Map // of [2][]byte, by kind

// Envelope returns the bytes before and after the raw bytes of an object of the kind, in protobuf.
func Envelope(gvk schema.GroupVersionKind) (before, after []byte) {
	if e, ok := envelopes.Load(gvk); ok {
		return e.([2][]byte)[0], e.([2][]byte)[1]
	}
	u := runtime.Unknown{Raw: []byte("x")}
	u.APIVersion, u.Kind = gvk.ToAPIVersionAndKind()
	data, err := u.Marshal()
	if err != nil {
		panic(err) // cannot happen: no field of u can fail to marshal
	}
	_, before, after, err = OpenUnknown(append(bytes.Clone(protobufPreamble), data...))
	if err != nil {
		panic(err)
	}
	envelopes.Store(gvk, [2][]byte{before, after})
	return before, after
}

// uvarintLen returns the number of bytes of n as a varint. n is at least 0.
func uvarintLen[N int | uint64](n N) int { return (bits.Len64(uint64(n)|1) + 6) / 7 }

// ItemLen returns the length of the first of several protobuf items: a tag, a length, and the
// bytes.
func ItemLen(items []byte) int {
	length, n := binary.Uvarint(items[1:])
	return 1 + n + int(length)
}
