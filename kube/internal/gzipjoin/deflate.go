package gzipjoin

import (
	"fmt"
	"runtime"
	"sync"

	"github.com/klauspost/compress/flate"
)

const (
	// blockBytes is the number of bytes that package flate collects for a block, at the levels used
	// here.
	blockBytes = 65535

	// fastLevel is the fastest level that finds all the repetitions that compress/gzip finds at
	// level 1. Levels 1 and 2 take 10 to 20% less time, but miss repetitions in objects with 1 to 2
	// KB of data that does not repeat: 10% larger on a list of secrets.
	fastLevel = 3
	// denseLevel compensates for the fresh window of a run below denseBelow bytes: by 2 to 5% of
	// its size, in 1.3 to 1.5 times the time.
	denseLevel = 5
	denseBelow = 32 << 10
)

// slots bounds the number of deflaters in use.
var slots = make(chan struct{}, runtime.GOMAXPROCS(0))

var deflaters = sync.Pool{New: func() any { return new(deflater) }}

// appendDeflated appends data to dst, compressed according to J1 and J2. It is safe for concurrent
// use.
func appendDeflated(dst []byte, data ...[]byte) []byte {
	slots <- struct{}{}
	defer func() { <-slots }()
	d := deflaters.Get().(*deflater)
	defer deflaters.Put(d)
	return d.deflate(dst, data)
}

// deflater holds the compressors for runs, each made on its first use. It is not safe for
// concurrent use.
type deflater struct {
	fast, dense, literal *flate.Writer

	out   sink
	block [][]byte // the pieces of one block
}

// deflate appends data to dst; see appendDeflated.
func (d *deflater) deflate(dst []byte, data [][]byte) []byte {
	var n int64
	for _, piece := range data {
		n += int64(len(piece))
	}
	w, level := &d.fast, fastLevel
	if n < denseBelow {
		w, level = &d.dense, denseLevel
	}
	d.out = dst
	d.reset(w, level)
	rest := pieces{all: data}
	for n > 0 {
		size := int(min(n, blockBytes))
		d.block = rest.next(d.block[:0], size)
		n -= int64(size)

		start := len(d.out)
		d.writeBlock(*w)
		if end := len(d.out); end-start > size {
			// The compressor stores a block without any repetition, even if it has few different
			// bytes, as in base64. Such a block is Huffman-coded without a search for repetitions;
			// the compressor has read its bytes, and may still refer to them later.
			d.reset(&d.literal, flate.HuffmanOnly)
			d.writeBlock(d.literal)
			if len(d.out)-end < end-start {
				d.out = d.out[:start+copy(d.out[start:], d.out[end:])]
			} else {
				d.out = d.out[:end]
			}
		}
	}
	dst, d.out = d.out, nil
	clear(d.block[:cap(d.block)])
	return dst
}

func (d *deflater) reset(w **flate.Writer, level int) {
	if *w != nil {
		(*w).Reset(&d.out)
		return
	}
	var err error
	if *w, err = flate.NewWriter(&d.out, level); err != nil {
		panic(fmt.Sprintf("gzipjoin: level %d: %v", level, err)) // the levels are constants
	}
}

// writeBlock writes d.block with w and ends it with a sync flush.
func (d *deflater) writeBlock(w *flate.Writer) {
	for _, piece := range d.block {
		if _, err := w.Write(piece); err != nil {
			panic(fmt.Sprintf("gzipjoin: deflate: %v", err)) // a sink accepts all bytes
		}
	}
	if err := w.Flush(); err != nil {
		panic(fmt.Sprintf("gzipjoin: deflate: %v", err))
	}
}

// pieces are bytes that do not lie in one slice.
type pieces struct {
	all  [][]byte
	from int // the bytes of all[0] that were taken
}

// next appends the slices of the next n bytes to dst. There must be as many.
func (p *pieces) next(dst [][]byte, n int) [][]byte {
	for n > 0 {
		piece := p.all[0][p.from:]
		if len(piece) > n {
			p.from += n
			return append(dst, piece[:n])
		}
		dst = append(dst, piece)
		n -= len(piece)
		p.all, p.from = p.all[1:], 0
	}
	return dst
}

// sink collects the output of a compressor.
type sink []byte

func (s *sink) Write(p []byte) (int, error) {
	*s = append(*s, p...)
	return len(p), nil
}
