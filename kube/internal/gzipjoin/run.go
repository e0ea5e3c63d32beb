package gzipjoin

import (
	"hash/crc32"
	"slices"
	"sync"
)

// Segment is a stretch of bytes, compressed so that it can be anywhere in a member (J1, J2). The
// zero value is the empty run. A Segment may be kept and written any number of times, by several
// goroutines concurrently: it is never modified.
type Segment struct {
	Deflated []byte // blocks as in RFC 1951
	CRC      uint32 // CRC-32 (IEEE) of the bytes before compression
	Len      int64  // their number
}

const (
	// minApart: a shorter run would be up to 10% larger on its own than among its neighbours
	// (measured with TestCompress_JoinedLeaves_AreNearStandardSize).
	minApart = 12 << 10
	// maxApart: the compression of a run takes up to three times its size, that of a Writer 130 KB.
	// A leaf of 64 objects may have 64 KB each.
	maxApart = 4 << 20
)

// WorthApart reports whether a run of n bytes, before compression, is worth being compressed on its
// own. Give other runs to Writer.Write: short ones, for example a leaf of a list of small objects,
// and those that are too large to be held as a whole.
func WorthApart(n int64) bool { return minApart <= n && n <= maxApart }

// Compress compresses the concatenation of data. Deflated is appended to dst and does not include
// the previous contents of dst; with a nil dst it gets a new array without spare capacity. dst must
// not overlap data.
//
// At most GOMAXPROCS calls, and writes of loose bytes, compress at the same time; others wait. That
// bounds the memory of compressors, 3 MB each while they are in use; the garbage collector frees
// idle ones.
func Compress(dst []byte, data ...[]byte) Segment {
	var run Segment
	for _, piece := range data {
		run.CRC = crc32.Update(run.CRC, crc32.IEEETable, piece)
		run.Len += int64(len(piece))
	}
	if run.Len == 0 {
		return run
	}
	if dst != nil {
		run.Deflated = slices.Clip(appendDeflated(dst, data...)[len(dst):])
		return run
	}
	scratch := scratches.Get().(*[]byte)
	defer scratches.Put(scratch)
	deflated := appendDeflated((*scratch)[:0], data...)
	run.Deflated = append(make([]byte, 0, len(deflated)), deflated...)
	if cap(deflated) <= maxScratch {
		*scratch = deflated
	}
	return run
}

// maxScratch is the largest buffer that is reused between calls of Compress: enough for a run of 64
// objects of 4 KB that do not compress.
const maxScratch = 256 << 10

var scratches = sync.Pool{New: func() any { return new([]byte) }}
