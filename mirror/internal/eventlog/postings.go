package eventlog

import (
	"slices"
	"sync/atomic"
)

// Postings are the sequence numbers of the events of a log that one reader, or a group
// of them, is interested in: ascending, 8 bytes each. The zero value is empty. Append and
// Trim belong to one writer; From may be called concurrently and waits for nobody.
type Postings struct {
	cur atomic.Pointer[postings]
}

// postings are a part of a list. seqs[:n] is never written again; the rest is the
// writer's. When there is no room left, or too much, another one takes its place.
type postings struct {
	lost uint64 // numbers below it were in the list once, or may have been
	n    atomic.Int64
	seqs []uint64
}

// firstPostings is the room that a list begins with: most lists stay short.
const firstPostings = 4

// Append adds seq, which must be above all that were added before. first is the number of
// the oldest event that the log holds: what lies below it may be forgotten.
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

// Trim forgets the numbers below first if that frees most of what the list takes.
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

// From returns the numbers from seq on. The slice is shared: do not write to it. It
// reports false if one of them was forgotten.
func (p *Postings) From(seq uint64) ([]uint64, bool) {
	cur := p.cur.Load()
	if cur == nil {
		return nil, true
	}
	return cur.seqs[cur.index(seq):cur.n.Load()], seq >= cur.lost
}

// index returns the place of the first number that is not below seq.
func (l *postings) index(seq uint64) int {
	i, _ := slices.BinarySearch(l.seqs[:l.n.Load()], seq)
	return i
}

// from returns the list without what lies below first, with room for more numbers.
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
