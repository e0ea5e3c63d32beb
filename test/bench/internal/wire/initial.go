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
// counts the events before it and the bytes including it, and the bytes of the bookmark. It may
// have read further.
func ReadInitialJSONEvents(r io.Reader) (List, error) {
	buffer := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	var list List
	var line int64 // bytes since the last newline
	keep := 0      // bytes at the front of the buffer that may begin the marker; they are counted
	ended := false // the marker has been seen, but not the end of its line
	for {
		n, err := r.Read((*buffer)[keep:])
		seen := (*buffer)[:keep+n]
		fresh := seen[keep:]
		if at := bytes.Index(seen, initialEndJSON); at >= 0 && !ended {
			ended = true
			before := seen[keep:max(keep, at)]
			line = tail(line, before)
			list.Objects += bytes.Count(before, newline)
			list.Bytes += int64(len(before))
			fresh = fresh[len(before):]
		}
		if ended {
			if end := bytes.IndexByte(fresh, '\n'); end >= 0 {
				list.Bytes += int64(end + 1)
				list.Bookmark = line + int64(end+1)
				return list, nil
			}
			line += int64(len(fresh))
		} else {
			list.Objects += bytes.Count(fresh, newline)
			line = tail(line, fresh)
		}
		list.Bytes += int64(len(fresh))
		if err != nil {
			return list, fmt.Errorf("initial events broke off after %d events, %d bytes: %w", list.Objects, list.Bytes, noEOF(err))
		}
		keep = copy(*buffer, seen[max(0, len(seen)-len(initialEndJSON)+1):])
	}
}

// tail returns the bytes behind the last newline after data was read, if there were n before.
func tail(n int64, data []byte) int64 {
	if at := bytes.LastIndexByte(data, '\n'); at >= 0 {
		return int64(len(data) - at - 1)
	}
	return n + int64(len(data))
}

var newline = []byte{'\n'}

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
			list.Bookmark = int64(len(header) + length)
			return list, nil
		}
		list.Objects++
	}
}

// Tail is a writer that keeps the last bytes that are written to it. The zero value is empty.
type Tail struct{ end []byte }

// Write implements io.Writer.
func (t *Tail) Write(p []byte) (int, error) {
	const kept = 2 * largestBookmark
	t.end = append(t.end, p[max(0, len(p)-kept):]...)
	if n := len(t.end); n > kept {
		t.end = append(t.end[:0], t.end[n-kept:]...)
	}
	return len(p), nil
}

// EndsInitialEvents reports whether the bookmark behind the initial events was among the last
// bytes.
func (t *Tail) EndsInitialEvents() bool { return bytes.Contains(t.end, initialEnd) }
