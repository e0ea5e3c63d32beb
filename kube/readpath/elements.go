package readpath

import (
	"context"
	"encoding/json"
	"iter"
	"net/http"
	"slices"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/handlers/responsewriters"
	storeerr "k8s.io/apiserver/pkg/storage/errors"

	"github.com/stratakube/strata/mirror"
)

// elementWork is the CPU of making an element, relative to that of sending cached bytes, for the
// turns of lists (listadmission.Admission.Turn). A guess: 10 us for a row, 100 us for the YAML of a
// pod.
const elementWork = 8

// writeElements writes a list whose elements are made for the response, one by one: rows of a
// table, or items in another form than the cached one.
func (r *readRequest) writeElements(p *preparedList) {
	ctx := r.req.Context()
	turn, err := r.server.lists.Turn(ctx, p.level, p.bytes*elementWork)
	if err != nil {
		r.fail(err)
		return
	}
	defer turn.End()
	head, tail, err := r.around(p)
	if err != nil {
		r.fail(err)
		return
	}
	w := &itemWriter{read: r}
	each := r.elements(p, &w.buf)
	if r.text != nil && r.text.Check != nil {
		// An error can be reported only before the first bytes are sent.
		for e := range w.entries(p) {
			if err := each(ctx, e, r.checkElement); err != nil {
				r.fail(storeerr.InterpretListError(err, r.groupResource()))
				return
			}
		}
	}
	b := newBodyAbout(r, int64(len(head))+p.bytes+int64(len(tail)))
	b.turn, w.body = turn, b
	defer b.free()
	if p.share != nil {
		defer b.pace(r, p)()
	}
	b.write(head)
	write := r.writeElement(b)
	for e := range w.entries(p) {
		switch err := each(ctx, e, write); {
		case err != nil && b.begun != nil:
			r.fail(storeerr.InterpretListError(err, r.groupResource())) // the header is not sent
			return
		case err != nil:
			w.fail(err)
		}
	}
	if err := p.list.Err(); err != nil {
		w.fail(err)
	}
	b.write(tail)
	b.close()
}

func (r *readRequest) checkElement(element []byte) error {
	if err := r.text.Check(element); err != nil {
		return textError{err}
	}
	return nil
}

// around returns the bytes before and after the elements of the list. All of a list without
// elements is before them.
func (r *readRequest) around(p *preparedList) (head, tail []byte, err error) {
	field := "items"
	if r.table != nil {
		field = "rows"
		head, tail, err = r.table.envelope(r.enc, p.meta, p.count > 0)
	} else {
		head, tail, err = r.enc.envelope(p.meta, p.count, p.bytes)
	}
	switch {
	case err != nil || r.text == nil:
		return head, tail, err
	case p.count == 0:
		head, err = r.object(head)
		return head, nil, err
	}
	return r.text.Around(head, tail, field)
}

// object returns a document in the form of the response.
func (r *readRequest) object(object []byte) ([]byte, error) {
	text, err := r.text.Object(nil, object)
	if err != nil {
		return nil, textError{err}
	}
	return text, nil
}

// textError is the error of a form that cannot represent a value: YAML has no control characters.
type textError struct{ error }

// failText writes the error in the form, as upstream's handlers do when an encoder fails.
func (r *readRequest) failText(err error) {
	status := responsewriters.ErrorToAPIStatus(err)
	text, err := json.Marshal(status)
	if err == nil {
		text, err = r.text.Object(nil, text)
	}
	if err != nil {
		http.Error(r.w, err.Error(), int(status.Code))
		return
	}
	r.w.Header().Set("Content-Type", r.contentType())
	r.w.WriteHeader(int(status.Code))
	_, _ = r.w.Write(text) // the client may have disconnected
}

// elements returns a function that calls f with each element of an entry, in JSON.
func (r *readRequest) elements(p *preparedList, buf *[]byte) func(ctx context.Context, e *mirror.Entry, f func([]byte) error) error {
	item := func(ctx context.Context, e *mirror.Entry) ([]byte, error) {
		item, err := r.enc.rep.ItemIn(ctx, e, buf)
		if err != nil {
			return nil, err
		}
		return item[:len(item)-r.enc.trailing()], nil
	}
	if r.table == nil {
		return func(ctx context.Context, e *mirror.Entry, f func([]byte) error) error {
			item, err := item(ctx, e)
			if err != nil {
				return err
			}
			return f(item)
		}
	}
	// Objects of short lists are kept for the next one. Decorators write to them.
	object := r.enc.rep.Unmanaged(p.count <= maxSelected && r.resource.Decorate == nil)
	var row []byte
	return func(ctx context.Context, e *mirror.Entry, f func([]byte) error) error {
		item, err := item(ctx, e)
		if err != nil {
			return err
		}
		obj, err := object(ctx, e)
		if err != nil {
			return err
		}
		return r.table.eachRow(ctx, r.enc, obj.(runtime.Object), item, &row, f)
	}
}

// writeElement returns a function that writes an element, which it gets in JSON, in the form of the
// response, and separates it from the one before.
func (r *readRequest) writeElement(b *body) func(element []byte) error {
	first := true
	if r.text == nil {
		return func(element []byte) error {
			if !first {
				b.write(comma)
			}
			first = false
			b.write(element)
			return nil
		}
	}
	var text []byte
	return func(element []byte) (err error) {
		if text, err = r.text.Element(text[:0], element, first); err != nil {
			return textError{err}
		}
		first = false
		b.write(text)
		return nil
	}
}

var comma = []byte(",")

// entries yields the objects of a page.
func (w *itemWriter) entries(p *preparedList) iter.Seq[*mirror.Entry] {
	switch {
	case p.count == 0 || p.selected != nil:
		return slices.Values(p.selected)
	case p.list.Selective():
		return w.matching(p)
	case p.list.FromEtcd():
		return p.list.Candidates()
	}
	return p.list.Objects().All(p.start, p.end)
}
