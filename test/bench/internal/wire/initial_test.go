package wire

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"strings"
	"testing"
	"testing/iotest"
)

const (
	bookmarkJSON     = `{"type":"BOOKMARK","object":{"metadata":{"resourceVersion":"9","annotations":{"k8s.io/initial-events-end":"true"}}}}` + "\n"
	bookmarkProtobuf = "k8s\x00 BOOKMARK k8s.io/initial-events-end true"
	laterJSON        = `{"type":"MODIFIED","object":{}}` + "\n"
)

// initialJSON returns n ADDED events whose data looks like the marker, a bookmark, and an event
// behind it.
func initialJSON(n int) (stream string, wantBytes int64) {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, `{"type":"ADDED","object":{"data":{"a":"-events-end\":\"true\" \n %s"}}}`+"\n", strings.Repeat("x", i*50))
	}
	b.WriteString(bookmarkJSON)
	wantBytes = int64(b.Len())
	return b.String() + laterJSON, wantBytes
}

func frameOf(payload string) string {
	return string(binary.BigEndian.AppendUint32(nil, uint32(len(payload)))) + payload
}

// initialProtobuf is initialJSON with frames behind their lengths.
func initialProtobuf(n int) (stream string, wantBytes int64) {
	var b strings.Builder
	for i := range n {
		b.WriteString(frameOf(strings.Repeat("x", i*i)))
	}
	b.WriteString(frameOf(bookmarkProtobuf))
	wantBytes = int64(b.Len())
	return b.String() + frameOf("later"), wantBytes
}

func TestReadInitialEvents_EndsAtBookmark(t *testing.T) {
	formats := map[string]struct {
		stream func(int) (string, int64)
		read   func(io.Reader) (List, error)
	}{
		"JSON":     {initialJSON, ReadInitialJSONEvents},
		"protobuf": {initialProtobuf, ReadInitialProtobufEvents},
	}
	readers := map[string]func(io.Reader) io.Reader{
		"whole":      func(r io.Reader) io.Reader { return r },
		"bytewise":   iotest.OneByteReader,
		"halves":     iotest.HalfReader,
		"data+error": iotest.DataErrReader,
	}
	for format, f := range formats {
		for arrival, reader := range readers {
			t.Run(format+"/"+arrival, func(t *testing.T) {
				for _, n := range []int{0, 1, 50, 800} {
					if n == 800 && arrival == "bytewise" {
						continue // hundreds of megabytes, a byte at a time
					}
					stream, wantBytes := f.stream(n)
					list, err := f.read(reader(strings.NewReader(stream)))
					if err != nil || list.Objects != n || list.Bytes != wantBytes {
						t.Errorf("got %+v, %v; want %d events in %d bytes", list, err, n, wantBytes)
					}
					if _, err := f.read(reader(strings.NewReader(stream[:wantBytes-1]))); !errors.Is(err, io.ErrUnexpectedEOF) {
						t.Errorf("without the end of the bookmark: %v", err)
					}
				}
			})
		}
	}
}
