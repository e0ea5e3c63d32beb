package eventlog

import (
	"slices"
	"sync/atomic"
)

// Postings is an ascending list of sequence numbers of a log's events, 8 bytes each, for one reader
// or a group of readers. The zero value is empty. Append and Trim belong to one writer; From may be
// called concurrently and never blocks.
type Postings struct {
	cur atomic.Pointer[postings]
}

// postings is the storage of a list. seqs[:n] is never written again; the writer owns the rest.
// When it is full, or mostly unused, the writer replaces it.
type postings struct {
	lost uint64 // numbers below it were, or may have been, in the list
	n    atomic.Int64
	seqs []uint64
}

// firstPostings is the initial capacity of a list: most lists stay short.
const firstPostings = 4

// Append adds seq, which must be above all numbers in the list. first is the number of the oldest
// event in the log: numbers below it may be dropped.
func (p *Postings) Append(seq, first uint64) {
	cur := p.cur.Load()
	if cur == nil || int(cur.n.Load()) == len(cur.seqs) {
		cur = cur.from(first, 1)
	}
	n := cur.n.Load()
	cur.seqs[n] = seq
	cur.n.Store(n + 1)
	p.cur.Store(cur)
}

// Trim drops the numbers below first if that frees most of the list's memory.
func (p *Postings) Trim(first uint64) {
	cur := p.cur.Load()
	if cur == nil {
		return
	}
	if held := cur.seqs[:cur.n.Load()]; len(held)-cur.index(first) <= len(cur.seqs)/4 {
		p.cur.Store(cur.from(first, 0))
	}
}

// Len returns the number of numbers in the list.
func (p *Postings) Len() int {
	cur := p.cur.Load()
	if cur == nil {
		return 0
	}
	return int(cur.n.Load())
}

// From returns the numbers from seq on. The slice is shared: do not write to it. It reports false
// if one of them was dropped.
func (p *Postings) From(seq uint64) ([]uint64, bool) {
	cur := p.cur.Load()
	if cur == nil {
		return nil, true
	}
	return cur.seqs[cur.index(seq):cur.n.Load()], seq >= cur.lost
}

// index returns the index of the first number that is not below seq.
func (l *postings) index(seq uint64) int {
	i, _ := slices.BinarySearch(l.seqs[:l.n.Load()], seq)
	return i
}

// from returns a copy of the list without the numbers below first, with capacity for more numbers.
func (l *postings) from(first uint64, more int) *postings {
	if l == nil {
		return &postings{seqs: make([]uint64, firstPostings)}
	}
	i := l.index(first)
	held := l.seqs[i:l.n.Load()]
	next := &postings{lost: l.lost}
	if i > 0 {
		next.lost = l.seqs[i-1] + 1
	}
	if n := len(held) + more; n > 0 {
		next.seqs = make([]uint64, max(firstPostings, 2*n))
		next.n.Store(int64(copy(next.seqs, held)))
	}
	return next
}
