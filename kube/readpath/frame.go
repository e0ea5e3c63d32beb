package readpath

import (
	"bytes"
	"encoding/binary"
	"math/bits"

	"k8s.io/apimachinery/pkg/watch"
)

// framer encodes objects as the frames of a watch, like upstream's framers:
//
//	JSON      {"type":"ADDED","object":{...}} and a newline
//	protobuf  4 bytes of length, most significant first, and a WatchEvent
//
// It is immutable.
type framer struct {
	protobuf bool
	// head is the prefix of an object that its item does not have, in JSON; see encoding.head.
	head []byte
	// before and after enclose the length and bytes of an object in its runtime.Unknown, in protobuf.
	before, after []byte
}

func (e *encoding) framer() framer {
	f := framer{protobuf: e.media == mediaProtobuf, head: e.head}
	if f.protobuf {
		before, after := e.unknown()
		f.before, f.after = append(bytes.Clone(before), unknownRaw), after
	}
	return f
}

// Fields of meta/v1's WatchEvent and of the RawExtension in it.
const (
	watchEventType   = 1<<3 | 2
	watchEventObject = 2<<3 | 2
	rawExtensionRaw  = 1<<3 | 2
)

// begin appends the part of a frame before the bytes of an item to dst, and returns those bytes as
// body; end completes the frame. size is the size of the event as apiserver_watch_events_sizes
// counts it: without the length prefix of a protobuf frame.
func (f *framer) begin(dst []byte, t watch.EventType, item []byte) (begun, body []byte, size int) {
	if f.protobuf {
		body = item[1:] // without the tag that it has in a list
		dst, size = beginProtobuf(dst, t, len(f.before)+len(body)+len(f.after))
		return append(dst, f.before...), body, size
	}
	n := len(dst)
	dst = beginJSON(dst, t)
	body = item[:len(item)-1] // without the comma
	if len(f.head) > 0 {
		dst = append(dst, f.head...)
		body = body[1:]
	}
	return dst, body, len(dst) - n + len(body) + len(endOfJSON)
}

// end appends the part of a frame after the bytes of an item to dst.
func (f *framer) end(dst []byte) []byte {
	if f.protobuf {
		return append(dst, f.after...)
	}
	return append(dst, endOfJSON...)
}

// frame is an encoded.Framer.
func (f *framer) frame(dst []byte, t watch.EventType, item []byte) (framed []byte, size int) {
	dst, body, size := f.begin(dst, t, item)
	return f.end(append(dst, body...)), size
}

// whole appends a frame of an object that is already encoded.
func (f *framer) whole(dst []byte, t watch.EventType, object []byte) (framed []byte, size int) {
	if f.protobuf {
		dst, size = beginProtobuf(dst, t, len(object))
		return append(dst, object...), size
	}
	n := len(dst)
	dst = append(beginJSON(dst, t), bytes.TrimSuffix(object, newline)...)
	dst = append(dst, endOfJSON...)
	return dst, len(dst) - n
}

const endOfJSON = "}\n"

func beginJSON(dst []byte, t watch.EventType) []byte {
	dst = append(dst, `{"type":"`...)
	dst = append(dst, t...)
	return append(dst, `","object":`...)
}

// beginProtobuf appends the part of a frame before an encoded object of the given length.
func beginProtobuf(dst []byte, t watch.EventType, object int) (begun []byte, size int) {
	extension := 1 + uvarintLen(object) + object
	size = 1 + uvarintLen(len(t)) + len(t) + 1 + uvarintLen(extension) + extension
	dst = binary.BigEndian.AppendUint32(dst, uint32(size))
	dst = append(dst, watchEventType)
	dst = binary.AppendUvarint(dst, uint64(len(t)))
	dst = append(dst, t...)
	dst = append(dst, watchEventObject)
	dst = binary.AppendUvarint(dst, uint64(extension))
	dst = append(dst, rawExtensionRaw)
	return binary.AppendUvarint(dst, uint64(object)), size
}

// uvarintLen returns the number of bytes of n as a varint. n is at least 0.
func uvarintLen[N int | uint64](n N) int { return (bits.Len64(uint64(n)|1) + 6) / 7 }

// protobufItemLen returns the length of the first of several items: a tag, a length, and the bytes.
func protobufItemLen(items []byte) int {
	length, n := binary.Uvarint(items[1:])
	return 1 + n + int(length)
}
