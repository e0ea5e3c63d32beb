package objects

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/storage/etcd3"
	etcdmetrics "k8s.io/apiserver/pkg/storage/etcd3/metrics"

	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/mirror"
)

// maxAbandoned bounds the conversions of one storage that all of their readers have left. A guess:
// enough that a webhook that is slower than its clients are patient is still called concurrently,
// and few enough that the objects of one that hangs take a few MB.
const maxAbandoned = 32

// Conversions are the conversions of a storage of custom resources that may block: upstream calls
// the webhook of a definition without a context, for up to 30 s. Each runs detached from the
// requests that wait for it (flight.Detached), so a request ends in time, and its seat is free
// again. nil is those of a storage whose conversions do not block. Methods may be called
// concurrently.
type Conversions struct {
	served  servedVersion
	running flight.Detached[any, runtime.Object] // by conversionKey, or by a pointer of the caller
}

// conversionKey is the key of a conversion that readers of an entry share.
type conversionKey struct {
	gen *Generation
	e   *mirror.Entry
}

// NewConversions returns the conversions of a storage with objects like those of newFunc. changed,
// unless nil, is called with each change of the numbers of conversions in progress, and must not
// block.
func NewConversions(newFunc func() runtime.Object, changed func(awaited, abandoned int)) *Conversions {
	c := &Conversions{served: versionOf(newFunc)}
	c.running.Limit, c.running.Changed = maxAbandoned, changed
	return c
}

// MayBlock reports whether a decrypted value is converted when it is decoded. Cost is a comparison
// of some bytes, if upstream has written the value in the served version.
func (c *Conversions) MayBlock(stored []byte) bool {
	if c == nil || c.served.apiVersion == "" {
		return false
	}
	same, _ := versionIs(stored, c.served, c.served.apiVersion)
	return !same
}

// answerTime is the part of a reader's time that is reserved for its answer. At its deadline
// upstream's timeout filter cuts off an answer that has begun.
const answerTime = 250 * time.Millisecond

// Detach returns the result of decode, which may block. decode is as in flight.Detached, and may
// panic. Errors: that of decode, that of ctx, and 504 shortly before its deadline.
func (c *Conversions) Detach(ctx context.Context, decode func() (runtime.Object, error)) (runtime.Object, error) {
	return c.do(ctx, new(byte), decode)
}

func (c *Conversions) do(ctx context.Context, key any, decode func() (runtime.Object, error)) (runtime.Object, error) {
	if deadline, ok := ctx.Deadline(); ok {
		left := time.Until(deadline)
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, max(left-answerTime, left/2))
		defer cancel()
	}
	obj, err := c.running.Do(ctx, key, func() (obj runtime.Object, err error) {
		err = flight.RecoverPanic(func() error {
			obj, err = decode()
			return err
		})
		return obj, err
	})
	if err == context.DeadlineExceeded {
		// as upstream's filter
		err = apierrors.NewTimeoutError("request did not complete within the allotted timeout", 0)
	}
	return obj, err
}

// Decoder returns a decoder for upstream's store that detaches the conversions of a LIST.
func (c *Conversions) Decoder(d etcd3.Decoder) etcd3.Decoder {
	if c == nil {
		return d
	}
	return detachingDecoder{d, c}
}

type detachingDecoder struct {
	etcd3.Decoder
	conversions *Conversions
}

// DecodeListItem implements etcd3.Decoder.
func (d detachingDecoder) DecodeListItem(ctx context.Context, data []byte, rev uint64, newItem func() runtime.Object) (runtime.Object, error) {
	if !d.conversions.MayBlock(data) {
		return d.Decoder.DecodeListItem(ctx, data, rev, newItem)
	}
	return d.conversions.Detach(ctx, func() (runtime.Object, error) {
		return d.Decoder.DecodeListItem(context.Background(), data, rev, newItem)
	})
}

// convert decodes and converts the decrypted value of an entry, once for all concurrent readers. It
// is as DecodeStored, with the errors of Detach. The result is cached even if all readers have
// left.
func (g *Generation) convert(ctx context.Context, e *mirror.Entry, data []byte, rev mirror.Revision) (runtime.Object, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	began := time.Now()
	defer func() { request.TrackDecodeLatency(ctx, time.Since(began)) }()
	data = bytes.Clone(data) // the caller may reuse it before the conversion has ended
	obj, err := g.view.cfg.Conversions.do(ctx, conversionKey{g, e}, func() (runtime.Object, error) {
		if u := g.converted(e, e.ModRevision()); u != nil { // since the caller looked
			return u, nil
		}
		obj, err := g.view.cfg.Decoder.DecodeListItem(context.Background(), data, uint64(e.ModRevision()), g.view.cfg.NewFunc)
		if err != nil {
			etcdmetrics.RecordDecodeError(g.view.cfg.GroupResource)
			return nil, err
		}
		g.keepConverted(e, data, obj)
		return obj, nil
	})
	if err != nil {
		return nil, err
	}
	own, ok := obj.DeepCopyObject().(*unstructured.Unstructured) // obj is shared
	if !ok {
		return nil, fmt.Errorf("the value of %s was converted to a %T", e.Key(), obj)
	}
	own.SetResourceVersion(strconv.FormatInt(rev, 10))
	return own, nil
}

// servedVersion is the version that a view decodes custom resources to. The zero value is that of
// other resources.
type servedVersion struct {
	apiVersion string
	prefix     []byte // of values that upstream has stored in this version
}

// versionOf returns the version of a storage's objects.
func versionOf(newFunc func() runtime.Object) (v servedVersion) {
	if u, ok := newFunc().(*unstructured.Unstructured); ok && u.GetAPIVersion() != "" {
		v.apiVersion = u.GetAPIVersion()
		v.prefix = []byte(`{"apiVersion":"` + v.apiVersion + `",`)
	}
	return v
}

// versionIs reports whether a custom resource is stored in a version. Not known: the value is not
// JSON.
func versionIs(stored []byte, served servedVersion, apiVersion string) (same, known bool) {
	if apiVersion == served.apiVersion && served.apiVersion != "" && bytes.HasPrefix(stored, served.prefix) {
		return true, true
	}
	var was struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(stored, &was); err != nil {
		return false, false
	}
	return was.APIVersion == apiVersion, true
}
