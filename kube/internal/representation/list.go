package representation

import (
	"context"
	"iter"
	"runtime"
	"slices"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// List delivers the items of one list, or of a page of one: it decides once for each leaf how the
// bytes come, and makes missing ones. It is for one reader at a time.
type List struct {
	Rep *Representation
	// Once: the runs are in no version of the resource (list.Read.FromEtcd). Their items are cached
	// only if all entries are those of a version.
	Once bool
	// Compressed: the response is compressed. Whole leaves are then compressed on their own, except
	// short ones, and the leaf that ends with the key Last.
	Compressed bool
	Last       string

	part  Part // with own, unless parts are made concurrently
	own   Spans
	how   []delivery
	first [128]delivery // how of most lists
}

// Part is a leaf, or a part of one, that is ready to be written. It is valid until the next one.
type Part struct {
	Run mirror.Run
	// Deflated are the items compressed, if Len is not 0.
	Deflated gzipjoin.Segment
	// Spans are the items, in key order. There are none if the part is compressed, or if its items
	// are too many bytes to be held together; the reader then makes them one by one.
	Spans [][]byte

	spans *Spans
	bytes int64 // share of readyBytes that it occupies
	err   error
}

// delivery is how the bytes of a run come. Without a flag they are spans of blocks, where parts
// that are not cached are spliced.
type delivery uint8

const (
	deflated delivery = 1 << iota // compressed on their own
	large                         // item by item
	missing                       // some must be made first
)

// decide decides how a run comes.
func (l *List) decide(r mirror.Run) (how delivery) {
	p := l.Rep
	n, _ := p.estimate(r)
	switch {
	case l.Compressed && !l.Once && r.Whole() && gzipjoin.WorthApart(n) && r.Items()[len(r.Items())-1].Key() != l.Last:
		if how = deflated; !p.keepsDeflated(r) {
			how |= missing
		}
	case n > largeRun:
		how = large
	case l.Once || !p.keeps(r):
		how = missing
	}
	return how
}

// Parts yields the parts of the runs in order, or an error, which ends them. If many runs have no
// cached encoding, several leaves are made concurrently while the reader writes earlier ones.
func (l *List) Parts(ctx context.Context, all iter.Seq[mirror.Run]) iter.Seq2[*Part, error] {
	return func(yield func(*Part, error) bool) {
		l.how = l.first[:0]
		n := 0
		if !l.Once {
			for r := range all {
				how := l.decide(r)
				if l.how = append(l.how, how); how&missing != 0 {
					n++
				}
			}
		}
		if n > cap(readying) {
			l.concurrently(ctx, all, yield)
			return
		}
		i := 0
		for r := range all {
			var how delivery
			if l.Once {
				how = l.decide(r)
			} else {
				how = l.how[i]
			}
			i++
			p := &l.part
			*p = Part{Run: r, spans: &l.own}
			if l.ready(ctx, p, how); !yield(p, p.err) || p.err != nil {
				return
			}
		}
	}
}

var (
	// readying bounds the number of leaves that are made concurrently, over all lists.
	readying  = make(chan struct{}, 2*runtime.GOMAXPROCS(0))
	spansPool = sync.Pool{New: func() any { return new(Spans) }}
)

// readyBytes bounds the prepared but unwritten bytes of one list, independent of the number of
// processors. They are part of the bytes that the list was admitted with, because they are still to
// be sent.
const readyBytes = 2 << 20

// concurrently is Parts with several leaves at a time, as decided.
func (l *List) concurrently(ctx context.Context, all iter.Seq[mirror.Run], yield func(*Part, error) bool) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	queue := make(chan chan *Part, cap(readying))
	room := semaphore.NewWeighted(readyBytes)
	go func() {
		defer close(queue)
		i := 0
		for r := range all {
			how := l.how[i]
			i++
			next, p := make(chan *Part, 1), &Part{Run: r}
			if how&large == 0 {
				n, _ := l.Rep.estimate(r)
				p.bytes = min(n, readyBytes)
			}
			if room.Acquire(ctx, p.bytes) != nil {
				return
			}
			select {
			case queue <- next:
			case <-ctx.Done():
				return
			}
			produce := func() {
				p.spans = spansPool.Get().(*Spans)
				if err := flight.RecoverPanic(func() error { l.ready(ctx, p, how); return nil }); err != nil {
					p.err = err
				}
				next <- p
			}
			select {
			case readying <- struct{}{}:
				go func() {
					defer func() { <-readying }()
					produce()
				}()
			default:
				produce() // other lists use all slots, perhaps for long (I9)
			}
		}
	}()
	for next := range queue {
		p := <-next
		if !yield(p, p.err) || p.err != nil {
			return
		}
		p.spans.Reset()
		spansPool.Put(p.spans)
		room.Release(p.bytes)
	}
	if err := ctx.Err(); err != nil {
		yield(nil, err)
	}
}

// ready makes a part as decided. It may be called concurrently.
func (l *List) ready(ctx context.Context, p *Part, how delivery) {
	switch {
	case how&deflated != 0:
		p.Deflated, p.err = l.Rep.deflatedItems(ctx, p.Run)
	case how&large == 0:
		p.spans.Reset()
		p.err = l.append(ctx, p.spans, p.Run)
		p.Spans = p.spans.All
	}
}

// append adds the items of a run to spans.
func (l *List) append(ctx context.Context, spans *Spans, r mirror.Run) error {
	if l.Once {
		return l.Rep.build(ctx, spans, r, !slices.ContainsFunc(r.Items(), (*mirror.Entry).Detached))
	}
	return l.Rep.appendRun(ctx, spans, r)
}
