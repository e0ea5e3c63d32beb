// Package wire reads API server responses as fast as they arrive: it counts their objects without
// decoding them, so that a benchmark does not measure the client, and a short or broken response is
// still an error.
package wire

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"sync"
)

// List contains counts of the body of a LIST, or of initial events.
type List struct {
	Objects int
	Bytes   int64
}

// bufferBytes is the size of one read: many TLS records (16 KiB) at once.
const bufferBytes = 256 << 10

var buffers = sync.Pool{New: func() any { b := make([]byte, bufferBytes); return &b }}

// uidMarker occurs once in the JSON of an object that neither has an owner nor refers to another
// object, and not in the list's own metadata. Quotes are escaped within JSON strings, so data never
// looks like it.
var uidMarker = []byte(`"uid":"`)

// ReadJSONList reads the JSON of a list to its end and counts the objects by their UIDs.
func ReadJSONList(r io.Reader) (List, error) { return readJSONList(r, endsList) }

// ReadCustomJSONList is ReadJSONList for custom resources, whose lists end with their own metadata.
func ReadCustomJSONList(r io.Reader) (List, error) {
	return readJSONList(r, func(tail []byte) bool { return bytes.HasSuffix(tail, []byte("\"}}\n")) })
}

func readJSONList(r io.Reader, ends func(tail []byte) bool) (List, error) {
	buffer := buffers.Get().(*[]byte)
	defer buffers.Put(buffer)
	var list List
	keep := 0 // bytes at the front of the buffer that may begin a marker
	for {
		n, err := r.Read((*buffer)[keep:])
		list.Bytes += int64(n)
		seen := (*buffer)[:keep+n]
		list.Objects += bytes.Count(seen, uidMarker)
		// The kept bytes are shorter than the marker, so no marker is counted twice.
		tail := seen[max(0, len(seen)-len(uidMarker)+1):]
		switch {
		case err == io.EOF && !ends(tail):
			return list, fmt.Errorf("JSON list of %d bytes ends in %q", list.Bytes, tail)
		case err == io.EOF:
			return list, nil
		case err != nil:
			return list, fmt.Errorf("JSON list broke off after %d bytes: %w", list.Bytes, err)
		}
		keep = copy(*buffer, tail)
	}
}

// endsList reports whether JSON with this end can be a whole list: its items come last.
func endsList(tail []byte) bool {
	tail = bytes.TrimSuffix(tail, []byte("\n"))
	return bytes.HasSuffix(tail, []byte("]}")) || bytes.HasSuffix(tail, []byte("null}"))
}

// Protobuf field tags: field number<<3 | wire type. All fields of interest are length-delimited
// (wire type 2).
const (
	tagUnknownRaw  = 2<<3 | 2 // runtime.Unknown.raw
	tagListItems   = 2<<3 | 2 // items of every list type of the API
	wireTypeMask   = 7
	wireTypeVarint = 0
	wireTypeBytes  = 2
)

// ReadProtobufList reads the protobuf of a list ("k8s\0", runtime.Unknown, list) to its end and
// counts the items. It follows the lengths, so items are skipped rather than parsed.
func ReadProtobufList(r io.Reader) (List, error) {
	p := protobufReader{r: bufio.NewReaderSize(r, bufferBytes)}
	var magic [4]byte
	if err := p.read(magic[:]); err != nil {
		return List{}, fmt.Errorf("protobuf list: %w", err)
	}
	if string(magic[:]) != "k8s\x00" {
		return List{}, fmt.Errorf("protobuf list begins with %q, want k8s and a zero byte", magic)
	}
	objects := 0
	err := p.fields(-1, func(tag, length uint64) error {
		if tag != tagUnknownRaw {
			return p.skip(length)
		}
		return p.fields(int64(length), func(tag, length uint64) error {
			if tag == tagListItems {
				objects++
			}
			return p.skip(length)
		})
	})
	if err != nil {
		return List{Objects: objects, Bytes: p.offset}, fmt.Errorf("protobuf list at byte %d, item %d: %w", p.offset, objects, err)
	}
	return List{Objects: objects, Bytes: p.offset}, nil
}

type protobufReader struct {
	r      *bufio.Reader
	offset int64 // bytes read
}

// fields calls each for every length-delimited field of a message of length bytes, -1 for "to the
// end of the body"; each must read the field.
func (p *protobufReader) fields(length int64, each func(tag, length uint64) error) error {
	end := p.offset + length
	for length < 0 || p.offset < end {
		tag, err := binary.ReadUvarint(p)
		if length < 0 && err == io.EOF {
			return nil
		}
		if err != nil {
			return noEOF(err)
		}
		value, err := binary.ReadUvarint(p)
		if err != nil {
			return noEOF(err)
		}
		switch tag & wireTypeMask {
		case wireTypeVarint:
		case wireTypeBytes:
			if err := each(tag, value); err != nil {
				return err
			}
		default:
			return fmt.Errorf("field tag %d has an unexpected wire type", tag)
		}
	}
	if length >= 0 && p.offset != end {
		return fmt.Errorf("fields run %d bytes over the end of their message", p.offset-end)
	}
	return nil
}

func (p *protobufReader) ReadByte() (byte, error) {
	b, err := p.r.ReadByte()
	if err == nil {
		p.offset++
	}
	return b, err
}

func (p *protobufReader) read(b []byte) error {
	n, err := io.ReadFull(p.r, b)
	p.offset += int64(n)
	return noEOF(err)
}

func (p *protobufReader) skip(n uint64) error {
	if n > 1<<40 {
		return fmt.Errorf("a field claims %d bytes", n)
	}
	skipped, err := p.r.Discard(int(n))
	p.offset += int64(skipped)
	return noEOF(err)
}

// noEOF is for places where the body must continue.
func noEOF(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

var continueMarker = []byte(`"continue":"`)

// continueWithin is how far into the JSON of a list its metadata may reach: it comes first, and its
// longest part is the token.
const continueWithin = 8 << 10

// Continue returns the continue token in the JSON of a page, and "" on the last page. It is in the
// list's own metadata, before any object. Tokens need no escapes, neither in JSON nor in a query.
func Continue(page []byte) string {
	_, after, found := bytes.Cut(page[:min(len(page), continueWithin)], continueMarker)
	if !found {
		return ""
	}
	token, _, _ := bytes.Cut(after, []byte(`"`))
	return string(token)
}
