package readpath

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"

	"k8s.io/apimachinery/pkg/api/meta"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1beta1/validation"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/registry/rest"
	apihelpers "k8s.io/apiserver/pkg/util/apihelpers"
)

// table is a requested list or object in the form of a table, as kubectl prints it. Rows are
// written one by one: the cells of an object come from upstream's convertor, and are not kept,
// because ages depend on the time; the object of a row is the item of a list of metadata, or of
// whole objects.
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

// items returns the format of the objects of rows, with or without managed fields.
func (t *table) items(noManagedFields bool) format {
	f := format{media: mediaJSON, noManagedFields: noManagedFields}
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
		return t.around(empty)
	}
	head, tail, err = t.around(empty)
	return append(head, tail...), nil, err
}

// around returns the bytes before and after the rows of a table that is empty. All of a table
// without rows (nil) is before them.
func (t *table) around(empty *metav1.Table) (head, tail []byte, err error) {
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
	if empty.Rows == nil {
		return data, nil, nil
	}
	const begin = `"rows":[`
	i := bytes.LastIndex(data, []byte(begin+"]"))
	if i < 0 {
		return nil, nil, fmt.Errorf("unexpected encoding of a table: %.200q", data)
	}
	return data[:i+len(begin)], data[i+len(begin):], nil
}

// eachRow calls f with each row of an object: one, unless the convertor makes more or less. The
// item is the object's in the format of items, without the comma. A row is valid until f returns.
func (t *table) eachRow(ctx context.Context, enc *encoding, obj runtime.Object, item []byte, buf *[]byte, f func(row []byte) error) error {
	converted, err := t.convert(ctx, enc, obj, rowsOnly)
	if err != nil {
		return err
	}
	for i := range converted.Rows {
		if *buf, err = t.appendRow((*buf)[:0], enc, &converted.Rows[i], item); err != nil {
			return err
		}
		if err := f(*buf); err != nil {
			return err
		}
	}
	return nil
}

// convert returns the table of one object. Decorators write to the object.
func (t *table) convert(ctx context.Context, enc *encoding, obj runtime.Object, opts *metav1.TableOptions) (*metav1.Table, error) {
	if enc.resource.Decorate != nil {
		enc.resource.Decorate(obj)
	}
	return t.convertor.ConvertToTable(ctx, obj, opts)
}

// single returns the table of one object, whose item is in the format of items, in pieces.
func (t *table) single(ctx context.Context, enc *encoding, obj runtime.Object, item []byte) (pieces [][]byte, err error) {
	converted, err := t.convert(ctx, enc, obj, &metav1.TableOptions{})
	if err != nil {
		return nil, err
	}
	all := converted.Rows
	if converted.Rows != nil {
		converted.Rows = []metav1.TableRow{}
	}
	head, tail, err := t.around(converted)
	if err != nil {
		return nil, err
	}
	var rows []byte
	for i := range all {
		if i > 0 {
			rows = append(rows, ',')
		}
		if rows, err = t.appendRow(rows, enc, &all[i], item[:len(item)-enc.trailing()]); err != nil {
			return nil, err
		}
	}
	return [][]byte{head, rows, tail}, nil
}

func (t *table) appendRow(dst []byte, enc *encoding, row *metav1.TableRow, item []byte) ([]byte, error) {
	cells, err := json.Marshal(row.Cells)
	if err != nil {
		return dst, err
	}
	dst = append(append(dst, `{"cells":`...), cells...)
	if len(row.Conditions) > 0 {
		conditions, err := json.Marshal(row.Conditions)
		if err != nil {
			return dst, err
		}
		dst = append(append(dst, `,"conditions":`...), conditions...)
	}
	dst = append(dst, `,"object":`...)
	switch {
	case t.include == metav1.IncludeNone:
		dst = append(dst, "null"...)
	case len(enc.head) > 0:
		dst = append(append(dst, enc.head...), item[1:]...)
	default:
		dst = append(dst, item...)
	}
	return append(dst, '}'), nil
}
