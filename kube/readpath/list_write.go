package readpath

import (
	"context"
	"iter"
	"net/http"

	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/mirror"
)

// writePage writes the list to the client.
func (r *readRequest) writePage(p *preparedList) {
	if r.table != nil || r.text != nil {
		r.writeElements(p)
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
	w := &itemWriter{read: r, body: b, remaining: p.count, trailing: trailing}
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
	case p.list.FromEtcd():
		w.runs(&p.items, p.list.Runs())
	default:
		p.items.Compressed, p.items.Last = b.gz != nil, ""
		if trailing > 0 {
			p.items.Last = p.last()
		}
		w.runs(&p.items, p.list.Objects().Runs(p.start, p.end))
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
	remaining int // items
	trailing  int
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
// response is compressed.
func (w *itemWriter) runs(l *representation.List, all iter.Seq[mirror.Run]) {
	for p, err := range l.Parts(w.read.req.Context(), all) {
		if err != nil {
			w.fail(err)
		}
		switch items := p.Run.Items(); {
		case p.Deflated.Len > 0:
			w.remaining -= len(items)
			w.body.writeRun(p.Deflated)
		case len(p.Spans) > 0:
			w.remaining -= len(items)
			for i, data := range p.Spans {
				w.span(data, w.remaining == 0 && i == len(p.Spans)-1)
			}
		default:
			for _, e := range items {
				w.entry(e)
			}
		}
	}
}
