package readpath

import (
	"context"
	"iter"
	"net/http"
	goruntime "runtime"
	"sync"

	"golang.org/x/sync/semaphore"

	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/mirror"
)

// writePage writes the list to the client.
func (r *readRequest) writePage(p *preparedList) {
	if r.table != nil {
		r.writeTable(p)
		return
	}
	head, tail, err := r.enc.envelope(p.meta, p.count, p.bytes)
	if err != nil {
		r.fail(err)
		return
	}
	trailing := 0
	if p.count > 0 {
		trailing = r.enc.trailing()
	}
	b := newBody(r, int64(len(head))+p.bytes-int64(trailing)+int64(len(tail)))
	defer b.free()
	if p.share != nil {
		defer b.pace(r, p)()
	}
	b.write(head)
	w := &itemWriter{read: r, body: b, remaining: p.count, trailing: trailing, once: p.list.FromEtcd()}
	switch {
	case p.count == 0:
	case p.selected != nil:
		for _, e := range p.selected {
			w.entry(e)
		}
	case p.list.Selective():
		for e := range w.matching(p) {
			w.entry(e)
		}
	case w.once:
		w.each(p.list.Runs())
	default:
		if trailing > 0 {
			w.last = p.last()
		}
		w.runs(p.list.Objects().Runs(p.start, p.end))
	}
	if err := p.list.Err(); err != nil {
		w.fail(err)
	}
	b.write(tail)
	b.close()
}

// itemWriter writes items, without the trailing bytes of the last one.
type itemWriter struct {
	read      *readRequest
	body      *body
	remaining int    // items
	last      string // the key of the last item, if its trailing bytes are omitted
	trailing  int
	once      bool // encodings are not cached: the items are read from etcd
	spans     representation.Spans
	buf       []byte // for single items
}

// span writes the bytes of whole items; last marks the end of the list, whose trailing bytes are
// omitted.
func (w *itemWriter) span(data []byte, last bool) {
	if last {
		data = data[:len(data)-w.trailing]
	}
	w.body.write(data)
}

func (w *itemWriter) entry(e *mirror.Entry) {
	data, err := w.read.enc.rep.ItemIn(w.read.req.Context(), e, &w.buf)
	if err != nil {
		w.fail(err)
	}
	w.remaining--
	w.span(data, w.remaining == 0)
}

// fail aborts the response on an error that cannot be reported to the client, because the header
// was sent.
func (w *itemWriter) fail(err error) {
	if w.read.req.Context().Err() == context.Canceled {
		breakOff(err)
	}
	panic(http.ErrAbortHandler)
}

// matching walks the candidates again and yields the selected ones of the page.
func (w *itemWriter) matching(p *preparedList) iter.Seq[*mirror.Entry] {
	ctx := w.read.req.Context()
	return func(yield func(*mirror.Entry) bool) {
		remaining := p.count
		for e := range p.list.Candidates() {
			ok, err := p.list.Matches(ctx, e)
			if err != nil {
				w.fail(err)
			}
			if !ok {
				continue
			}
			if remaining--; !yield(e) || remaining == 0 {
				return
			}
		}
	}
}

// runs writes the items of all runs, whole leaves as independently compressed blocks if the
// response is compressed. If many runs have no cached encoding, several leaves are prepared
// concurrently while earlier ones are written.
func (w *itemWriter) runs(all iter.Seq[mirror.Run]) {
	missing := 0
	for run := range all {
		if !w.kept(run) {
			missing++
		}
	}
	slots := readying
	if missing <= cap(slots) {
		w.each(all)
		return
	}
	ctx, cancel := context.WithCancel(w.read.req.Context())
	defer cancel()
	queue := make(chan chan chunk, cap(slots))
	room := semaphore.NewWeighted(readyBytes)
	go func() {
		defer close(queue)
		for run := range all {
			next, bytes := make(chan chunk, 1), min(w.size(run), readyBytes)
			if room.Acquire(ctx, bytes) != nil {
				return
			}
			select {
			case queue <- next:
			case <-ctx.Done():
				return
			}
			produce := func() {
				p := chunk{run: run, bytes: bytes}
				p.err = flight.RecoverPanic(func() error {
					p = w.ready(run, spansPool.Get().(*representation.Spans))
					p.bytes = bytes
					return p.err
				})
				next <- p
			}
			select {
			case slots <- struct{}{}:
				go func() {
					defer func() { <-slots }()
					produce()
				}()
			default:
				produce() // other requests use all slots, perhaps for long (I9)
			}
		}
	}()
	for next := range queue {
		p := <-next
		w.chunk(&p)
		if p.spans != nil {
			p.spans.Reset()
			spansPool.Put(p.spans)
		}
		room.Release(p.bytes)
	}
	if err := ctx.Err(); err != nil {
		w.fail(err)
	}
}

// each prepares and writes one run after the other.
func (w *itemWriter) each(all iter.Seq[mirror.Run]) {
	for run := range all {
		p := w.ready(run, &w.spans)
		w.chunk(&p)
	}
}

var (
	// readying bounds the number of leaves that are prepared concurrently, over all requests.
	readying  = make(chan struct{}, 2*goruntime.GOMAXPROCS(0))
	spansPool = sync.Pool{New: func() any { return new(representation.Spans) }}
)

// chunk is a run prepared for the body: compressed, as spans of items, or, if it is too large to be
// buffered as a whole, as its entries.
type chunk struct {
	run      mirror.Run
	large    bool
	deflated gzipjoin.Segment
	spans    *representation.Spans // nil if compressed or large
	bytes    int64                 // share of readyBytes that it occupies
	err      error
}

// readyBytes bounds the prepared but unwritten bytes of one list, independent of the number of
// processors. They are part of the bytes that the list was admitted with, because they are still to
// be sent.
const readyBytes = 2 << 20

// size estimates the bytes that a prepared run occupies.
func (w *itemWriter) size(run mirror.Run) int64 {
	rep := w.read.enc.rep
	if rep.Large(run) {
		return 0 // its entries are encoded one by one
	}
	if n, ok := rep.Size(run); ok {
		return n
	}
	var n int64
	for _, e := range run.Items() {
		n += e.Size()
	}
	return n
}

// kept reports whether the run needs no preparation.
func (w *itemWriter) kept(run mirror.Run) bool {
	rep := w.read.enc.rep
	if w.compresses(run) {
		return rep.KeepsDeflated(run)
	}
	return rep.Large(run) || rep.Keeps(run)
}

// compresses reports whether the run is sent as an independently compressed block: not if the list
// contains only part of it, or if it is too short.
func (w *itemWriter) compresses(run mirror.Run) bool {
	if w.once || w.body.gz == nil || !run.Whole() || run.Items()[len(run.Items())-1].Key() == w.last {
		return false
	}
	n, ok := w.read.enc.rep.Size(run)
	return ok && gzipjoin.WorthApart(n)
}

// ready prepares a run for writing, in spans if it is not compressed. It may be called
// concurrently.
func (w *itemWriter) ready(run mirror.Run, spans *representation.Spans) chunk {
	p := chunk{run: run}
	ctx, rep := w.read.req.Context(), w.read.enc.rep
	if w.compresses(run) {
		p.deflated, p.err = rep.Deflated(ctx, run)
		return p
	}
	if p.large = rep.Large(run); p.large {
		return p
	}
	p.spans = spans
	spans.Reset()
	if w.once {
		p.err = rep.AppendOnce(ctx, spans, run)
	} else {
		p.err = rep.AppendRun(ctx, spans, run)
	}
	return p
}

// chunk writes a prepared run.
func (w *itemWriter) chunk(p *chunk) {
	if p.err != nil {
		w.fail(p.err)
	}
	if p.large {
		for _, e := range p.run.Items() {
			w.entry(e)
		}
		return
	}
	w.remaining -= len(p.run.Items())
	if p.spans == nil {
		w.body.writeRun(p.deflated)
		return
	}
	for i, data := range p.spans.All {
		w.span(data, w.remaining == 0 && i == len(p.spans.All)-1)
	}
}
