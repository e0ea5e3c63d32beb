package readpath

import (
	"bytes"
	"context"
	"fmt"
	"strings"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericregistry "k8s.io/apiserver/pkg/registry/generic/registry"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
)

// get answers a GET, or returns the reason to pass it on.
func (r *readRequest) get() reason {
	span, end := r.traceSlow("Get")
	defer end()
	addEvent(span, "About to Get from storage")
	pieces, err := r.getPieces()
	if passOnError(err) {
		return reasonEtcd
	}
	if err == nil {
		addEvent(span, "About to write a response")
		defer addEvent(span, "Writing http response done")
	}
	r.instrument(func() {
		if err != nil {
			r.fail(err)
			return
		}
		whileThere(func() { r.traceBody(func() { r.writeObject(pieces) }) })
	})
	return ""
}

// getPieces returns the response body, in pieces.
func (r *readRequest) getPieces() ([][]byte, error) {
	opts, err := r.getOptions()
	if err != nil {
		return nil, err
	}
	key, err := r.key(r.info.Namespace, r.info.Name)
	if err != nil {
		return nil, err
	}
	ctx := r.req.Context()
	e, err := r.resource.Store.Entry(ctx, key, opts.ResourceVersion)
	if err == nil {
		var item []byte
		var obj any // of a table
		item, err = r.enc.rep.Item(ctx, e)
		if err == nil && r.table != nil {
			// The object is kept for the next request. Decorators write to it.
			obj, err = r.enc.rep.Unmanaged(r.resource.Decorate == nil)(ctx, e)
		}
		if err == nil {
			return r.pieces(ctx, item, obj)
		}
		err = r.resource.Store.DecodeError(ctx, key, err)
	}
	if passOnError(err) {
		return nil, err
	}
	return nil, storeerr.InterpretGetError(err, r.groupResource(), r.info.Name)
}

// pieces returns an object in the form of the response, in pieces. obj is the object of a table.
func (r *readRequest) pieces(ctx context.Context, item []byte, obj any) (pieces [][]byte, err error) {
	if r.table == nil {
		pieces = r.enc.object(item)
	} else {
		pieces, err = r.table.single(ctx, r.enc, obj.(runtime.Object), item)
	}
	if r.text == nil || err != nil {
		return pieces, err
	}
	whole, err := r.object(bytes.Join(pieces, nil))
	return [][]byte{whole}, err
}

func (r *readRequest) getOptions() (metav1.GetOptions, error) {
	opts := metav1.GetOptions{}
	if r.req.URL.RawQuery == "" {
		return opts, nil
	}
	values := r.req.URL.Query()
	if export := values["export"]; len(export) > 0 {
		wanted := true
		if err := runtime.Convert_Slice_string_To_bool(&export, &wanted, nil); err != nil {
			return opts, apierrors.NewBadRequest(fmt.Sprintf("the export parameter cannot be parsed: %v", err))
		}
		if wanted {
			return opts, apierrors.NewBadRequest("the export parameter, deprecated since v1.14, is no longer supported")
		}
	}
	if err := metainternalversionscheme.ParameterCodec.DecodeParameters(values, metav1.SchemeGroupVersion, &opts); err != nil {
		return opts, apierrors.NewBadRequest(err.Error())
	}
	return opts, nil
}

// key returns the storage key of one object, or the error that a registry returns for it.
func (r *readRequest) key(ns, name string) (string, error) {
	prefix := r.resource.Store.ResourcePrefix()
	if !r.resource.Namespaced {
		return genericregistry.NoNamespaceKeyFunc(r.req.Context(), prefix, name)
	}
	return genericregistry.NamespaceKeyFunc(request.WithNamespace(r.req.Context(), ns), prefix, name)
}

// rootKey returns the key prefix of all objects of a namespace, or of the resource if ns is empty.
func (r *readRequest) rootKey(ns string) string {
	prefix := r.resource.Store.ResourcePrefix()
	if r.resource.Namespaced && ns != "" {
		return strings.Join([]string{prefix, ns}, "/")
	}
	return prefix
}

// writeObject answers with one object.
func (r *readRequest) writeObject(pieces [][]byte) {
	var size int64
	for _, p := range pieces {
		size += int64(len(p))
	}
	b := newBody(r, size)
	defer b.free()
	for _, p := range pieces {
		b.write(p)
	}
	b.close()
}
