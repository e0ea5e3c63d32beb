package gzipjoin

import (
	"encoding/binary"
	"errors"
	"hash/crc32"
	"io"
	"sync"
)

const (
	// looseBytes is the number of loose bytes that are gathered and compressed together.
	looseBytes = blockBytes
	// storeBelow is the number of loose bytes below which compression is not worth its time: the
	// head and the tail of a list (a guess).
	storeBelow = 256
)

// header is that of compress/gzip at level 1: deflate, no name, no time, fastest, unknown operating
// system.
const header = "\x1f\x8b\x08\x00\x00\x00\x00\x00\x04\xff"

const (
	// syncBlock is an empty stored block: compress/flate returns all bytes that precede it.
	syncBlock = "\x00\x00\x00\xff\xff"
	// finalBlock is an empty stored block that is the last one.
	finalBlock = "\x01\x00\x00\xff\xff"
)

// ErrClosed: the Writer was closed; the member is complete.
var ErrClosed = errors.New("gzipjoin: writer is closed")

// Writer writes one gzip member of runs and loose bytes, in the order of the calls. It holds at
// most 130 KB, regardless of the length of the member, and no compressor while the underlying
// writer blocks. After an error every call returns it. A Writer is not safe for concurrent use; an
// abandoned one needs no Close.
type Writer struct {
	w       io.Writer
	crc     uint32
	size    int64 // before compression
	started bool  // the header is written
	stored  bool  // the last block is a stored one that is not empty
	err     error
	buf     *buffers // nil until there are loose bytes
}

// buffers are the buffers of a Writer for loose bytes.
type buffers struct {
	loose    []byte // not compressed yet; the capacity is looseBytes
	deflated []byte // compressed, not written yet
}

var bufferPool = sync.Pool{New: func() any {
	return &buffers{loose: make([]byte, 0, looseBytes)}
}}

// NewWriter returns a Writer that writes to w. The header is sent with the first
// bytes, or by Close.
func NewWriter(w io.Writer) *Writer { return &Writer{w: w} }

// WriteRun adds a run. Its bytes are written unchanged to the underlying writer. Errors are those
// of the underlying writer, and ErrClosed.
func (z *Writer) WriteRun(run Segment) error {
	if z.flush(); z.err != nil || run.Len == 0 {
		return z.err
	}
	z.stored = false
	z.crc = combine(z.crc, run.CRC, run.Len)
	z.size += run.Len
	z.send(run.Deflated)
	return z.err
}

// Write adds loose bytes. They are gathered, up to 64 KB, and compressed when a run follows or the
// member ends; p is not retained. Errors are those of the underlying writer, and ErrClosed; after
// one it is unknown how many bytes were written.
func (z *Writer) Write(p []byte) (int, error) {
	if z.err != nil {
		return 0, z.err
	}
	z.crc = crc32.Update(z.crc, crc32.IEEETable, p)
	z.size += int64(len(p))
	if z.buf == nil {
		z.buf = bufferPool.Get().(*buffers)
	}
	for rest := p; len(rest) > 0; {
		n := min(len(rest), looseBytes-len(z.buf.loose))
		z.buf.loose = append(z.buf.loose, rest[:n]...)
		rest = rest[n:]
		if len(z.buf.loose) == looseBytes {
			if z.flush(); z.err != nil {
				return 0, z.err
			}
		}
	}
	return len(p), nil
}

// Close ends the member. It does not close the underlying writer. Errors are those of the
// underlying writer; closing again has no effect.
//
// All bytes of the member precede an empty stored block and the final block. Package compress/gzip
// therefore returns them before it reads beyond the member: without the empty block it returns the
// last bytes only when the header of the next member arrives.
func (z *Writer) Close() error {
	if z.err == ErrClosed {
		return nil
	}
	if z.flush(); z.err != nil {
		return z.err
	}
	tail := make([]byte, 0, len(syncBlock)+len(finalBlock)+8)
	if z.stored {
		tail = append(tail, syncBlock...)
	}
	tail = append(tail, finalBlock...)
	tail = binary.LittleEndian.AppendUint32(tail, z.crc)
	tail = binary.LittleEndian.AppendUint32(tail, uint32(z.size)) // modulo 2^32 (RFC 1952)
	if z.send(tail); z.err != nil {
		return z.err
	}
	z.err = ErrClosed
	if z.buf != nil {
		bufferPool.Put(z.buf)
		z.buf = nil
	}
	return nil
}

// flush writes the loose bytes that were gathered.
func (z *Writer) flush() {
	if z.err != nil || z.buf == nil || len(z.buf.loose) == 0 {
		return
	}
	loose, deflated := z.buf.loose, z.buf.deflated[:0]
	if n := len(loose); n < storeBelow {
		z.stored = true
		deflated = append(deflated, 0) // a stored block that is not the last one
		deflated = binary.LittleEndian.AppendUint16(deflated, uint16(n))
		deflated = binary.LittleEndian.AppendUint16(deflated, ^uint16(n))
		deflated = append(deflated, loose...)
	} else {
		z.stored = false
		deflated = appendDeflated(deflated, loose)
	}
	z.buf.loose, z.buf.deflated = loose[:0], deflated
	z.send(deflated)
}

// send writes deflated bytes, after the header if they are the first.
func (z *Writer) send(deflated []byte) {
	if !z.started {
		z.started = true
		if _, z.err = io.WriteString(z.w, header); z.err != nil {
			return
		}
	}
	_, z.err = z.w.Write(deflated)
}
