package representation

import (
	"bytes"
	"encoding/binary"

	"k8s.io/apimachinery/pkg/watch"
)

// FrameEncoder encodes objects as the frames of a watch, like upstream's framers:
//
//	JSON      {"type":"ADDED","object":{...}} and a newline
//	protobuf  4 bytes of length, most significant first, and a WatchEvent
//
// It is immutable.
type FrameEncoder struct {
	protobuf bool
	// head is the prefix of an object that its item does not have, in JSON; see JSONFrames.
	head []byte
	// before and after enclose the length and bytes of an object in its runtime.Unknown, in
	// protobuf.
	before, after []byte
}

// JSONFrames returns the encoder of JSON frames. head is the prefix of each object, with its brace,
// that items do not have; it may be empty.
func JSONFrames(head []byte) FrameEncoder { return FrameEncoder{head: head} }

// ProtobufFrames returns the encoder of protobuf frames. before and after enclose the raw bytes of
// an object in its runtime.Unknown; see Envelope.
func ProtobufFrames(before, after []byte) FrameEncoder {
	return FrameEncoder{protobuf: true, before: append(bytes.Clone(before), UnknownRaw), after: after}
}

// Fields of meta/v1's WatchEvent and of the RawExtension in it.
const (
	watchEventType   = 1<<3 | 2
	watchEventObject = 2<<3 | 2
	rawExtensionRaw  = 1<<3 | 2
)

// Protobuf reports whether the frames are protobuf.
func (f *FrameEncoder) Protobuf() bool { return f.protobuf }

// Begin appends the part of a frame before the bytes of an item to dst, and returns those bytes as
// body; end completes the frame. size is the size of the event as apiserver_watch_events_sizes
// counts it: without the length prefix of a protobuf frame.
func (f *FrameEncoder) Begin(dst []byte, t watch.EventType, item []byte) (begun, body []byte, size int) {
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

// End appends the part of a frame after the bytes of an item to dst.
func (f *FrameEncoder) End(dst []byte) []byte {
	if f.protobuf {
		return append(dst, f.after...)
	}
	return append(dst, endOfJSON...)
}

// Frame is a Framer.
func (f *FrameEncoder) Frame(dst []byte, t watch.EventType, item []byte) (framed []byte, size int) {
	dst, body, size := f.Begin(dst, t, item)
	return f.End(append(dst, body...)), size
}

// Whole appends a frame of an object that is already encoded.
func (f *FrameEncoder) Whole(dst []byte, t watch.EventType, object []byte) (framed []byte, size int) {
	if f.protobuf {
		dst, size = beginProtobuf(dst, t, len(object))
		return append(dst, object...), size
	}
	n := len(dst)
	dst = append(beginJSON(dst, t), bytes.TrimSuffix(object, []byte("\n"))...)
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
