package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
)

// Initial events are the first events of a watch with sendInitialEvents: every object as an ADDED
// event, then a bookmark with this annotation.
var (
	initialEnd = []byte("k8s.io/initial-events-end")
	// its rare first byte makes it quick to look for; quotes in data are escaped
	initialEndJSON = []byte(`-events-end":"true"`)
)

// ReadInitialJSONEvents reads the JSON of a watch up to the bookmark behind its initial events, and
// counts the events before it and the bytes including it. It may have read further.
func ReadInitialJSONEvents(r io.Reader) (List, error) {
	buffered := bufio.NewReaderSize(r, maxFrameBytes)
	var list List
	for {
		line, err := buffered.ReadSlice('\n')
		list.Bytes += int64(len(line))
		if err != nil {
			return list, fmt.Errorf("initial events broke off after %d events, %d bytes: %w", list.Objects, list.Bytes, noEOF(err))
		}
		if bytes.Contains(line, initialEndJSON) {
			return list, nil
		}
		list.Objects++
	}
}

// largestBookmark bounds the protobuf frame of the bookmark behind the initial events: an object
// without a name, with one annotation.
const largestBookmark = 512

// ReadInitialProtobufEvents is ReadInitialJSONEvents for protobuf: frames behind their length in
// four bytes.
func ReadInitialProtobufEvents(r io.Reader) (List, error) {
	buffered := bufio.NewReaderSize(r, bufferBytes)
	var list List
	var frame [largestBookmark]byte
	for {
		var header [4]byte
		_, err := io.ReadFull(buffered, header[:])
		length := int(binary.BigEndian.Uint32(header[:]))
		small := frame[:min(length, len(frame))]
		if err == nil {
			_, err = io.ReadFull(buffered, small)
		}
		if err == nil {
			_, err = buffered.Discard(length - len(small))
		}
		if err != nil {
			return list, fmt.Errorf("initial events broke off after %d events, %d bytes: %w", list.Objects, list.Bytes, noEOF(err))
		}
		list.Bytes += int64(len(header) + length)
		if length == len(small) && bytes.Contains(small, initialEnd) {
			return list, nil
		}
		list.Objects++
	}
}
