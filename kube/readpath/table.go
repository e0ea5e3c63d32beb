package readpath

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"iter"
	"slices"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1beta1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	apihelpers "k8s.io/apiserver/pkg/util/apihelpers"

	"github.com/stratakube/strata/mirror"
)

// table is a requested list in the form of a table, as kubectl prints it. Rows are written one by
// one: the cells of an object come from upstream's convertor, and are not kept, because ages depend
// on the time; the object of a row is the item of a list of metadata, or of whole objects.
type table struct {
	version   schema.GroupVersion
	include   metav1.IncludeObjectPolicy
	convertor rest.TableConvertor
}

// rowCells estimates the bytes of the cells of a row.
const rowCells = 256

// rowsOnly are the options for the rows after the head of a table.
var rowsOnly = &metav1.TableOptions{NoHeaders: true}

// tableOf returns the requested table in a version of the meta group. It reports false if handlers
// of upstream have to answer, because the options are invalid.
func (r *readRequest) tableOf(version schema.GroupVersion) (*table, bool) {
	opts := &metav1.TableOptions{}
	err := metainternalversionscheme.ParameterCodec.DecodeParameters(r.req.URL.Query(), metav1.SchemeGroupVersion, opts)
	if err != nil || len(validation.ValidateTableOptions(opts)) > 0 {
		return nil, false
	}
	return &table{version, opts.IncludeObject, r.resource.Table()}, true
}

// items returns the format of the objects of rows.
func (t *table) items() format {
	f := format{media: mediaJSON}
	if t.include != metav1.IncludeObject {
		f.target = t.version
	}
	return f
}

// envelope returns the bytes before and after the rows of a table with the metadata of a list. All
// of a table without rows is before them.
func (t *table) envelope(e *encoding, m listMeta, rows bool) (head, tail []byte, err error) {
	list := e.resource.Store.Kind().NewListFunc()
	if err := meta.SetList(list, []runtime.Object{}); err != nil {
		return nil, nil, err
	}
	if err := setListMeta(list, m); err != nil {
		return nil, nil, err
	}
	empty, err := t.convertor.ConvertToTable(context.Background(), list, &metav1.TableOptions{})
	if err != nil {
		return nil, nil, err
	}
	if rows {
		empty.Rows = []metav1.TableRow{}
	}
	codecs := apihelpers.GetMetaInternalVersionCodecs()
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), runtime.ContentTypeJSON)
	if !ok {
		return nil, nil, fmt.Errorf("tables cannot be encoded as JSON")
	}
	var buf bytes.Buffer
	if err := codecs.EncoderForVersion(info.Serializer, t.version).Encode(empty, &buf); err != nil {
		return nil, nil, err
	}
	data := buf.Bytes()
	if !rows {
		return data, nil, nil
	}
	const begin = `"rows":[`
	i := bytes.LastIndex(data, []byte(begin+"]"))
	if i < 0 {
		return nil, nil, fmt.Errorf("unexpected encoding of a table of %s: %.200q", e.resource.Kind, data)
	}
	return data[:i+len(begin)], data[i+len(begin):], nil
}

// writeTable writes the list to the client as a table.
func (r *readRequest) writeTable(p *preparedList) {
	head, tail, err := r.table.envelope(r.enc, p.meta, p.count > 0)
	if err != nil {
		r.fail(err)
		return
	}
	b := newBodyAbout(r, int64(len(head))+p.bytes+int64(len(tail)))
	defer b.free()
	if p.share != nil {
		defer b.pace(r, p)()
	}
	b.write(head)
	w := &itemWriter{read: r, body: b}
	// Objects of short lists are kept for the next one. Decorators write to them.
	object := r.enc.rep.Unmanaged(p.count <= maxSelected && r.resource.Decorate == nil)
	ctx := r.req.Context()
	var rows []byte
	separator := len(",") // omitted before the first row
	for e := range w.entries(p) {
		item, err := r.enc.rep.ItemIn(ctx, e, &w.buf)
		var obj any
		if err == nil {
			obj, err = object(ctx, e)
		}
		if err == nil {
			rows, err = r.table.appendRows(ctx, rows[:0], r.enc, obj.(runtime.Object), item)
		}
		switch {
		case err != nil && b.begun != nil:
			r.fail(storeerr.InterpretListError(err, r.groupResource())) // the header is not sent
			return
		case err != nil:
			w.fail(err)
		case len(rows) > 0:
			b.write(rows[separator:])
			separator = 0
		}
	}
	if err := p.list.Err(); err != nil {
		w.fail(err)
	}
	b.write(tail)
	b.close()
}

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

// appendRows appends the row of an object, after a comma; if the convertor makes more or less than
// one, as many. The item is the object's in the format of items.
func (t *table) appendRows(ctx context.Context, dst []byte, enc *encoding, obj runtime.Object, item []byte) ([]byte, error) {
	if enc.resource.Decorate != nil {
		enc.resource.Decorate(obj)
	}
	converted, err := t.convertor.ConvertToTable(ctx, obj, rowsOnly)
	if err != nil {
		return dst, err
	}
	for i := range converted.Rows {
		row := &converted.Rows[i]
		cells, err := json.Marshal(row.Cells)
		if err != nil {
			return dst, err
		}
		dst = append(append(dst, `,{"cells":`...), cells...)
		if len(row.Conditions) > 0 {
			conditions, err := json.Marshal(row.Conditions)
			if err != nil {
				return dst, err
			}
			dst = append(append(dst, `,"conditions":`...), conditions...)
		}
		dst = append(dst, `,"object":`...)
		item := item[:len(item)-1] // without the comma
		switch {
		case t.include == metav1.IncludeNone:
			dst = append(dst, "null"...)
		case len(enc.head) > 0:
			dst = append(append(dst, enc.head...), item[1:]...)
		default:
			dst = append(dst, item...)
		}
		dst = append(dst, '}')
	}
	return dst, nil
}
