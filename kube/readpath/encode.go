package readpath

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	metav1beta1 "k8s.io/apimachinery/pkg/apis/meta/v1beta1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apihelpers "k8s.io/apiserver/pkg/util/apihelpers"

	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/mirror"
)

// media is an encoding that the byte path writes.
type media string

const (
	mediaJSON     media = media(runtime.ContentTypeJSON)
	mediaProtobuf media = media(runtime.ContentTypeProtobuf)
)

// format is a wire format of a resource's objects.
type format struct {
	media media
	// target is the requested version of PartialObjectMetadata; empty for whole objects.
	target schema.GroupVersion
	// noManagedFields: without metadata.managedFields.
	noManagedFields bool
}

// representationName identifies a representation of a store. A store of a built-in resource serves
// several versions.
type representationName struct {
	version schema.GroupVersion
	format
}

// encoding encodes a resource in one format. It assembles responses from the output of upstream's
// encoders: an item is cut out of the encoding of its object, and the envelope of a list out of the
// encoding of an empty list. Safe for concurrent use.
type encoding struct {
	resource *boundResource
	format
	rep     *representation.Representation
	encoder runtime.Encoder
	// head is the prefix of the encoding of a single object that its list item does not have: kind
	// and version, in JSON, of whole objects that are Go types. Empty for others.
	head []byte

	lastBookmark atomic.Pointer[encodedBookmark] // of any watch; nil at first
}

// encodings caches the encodings of a resource by format. An encoding is created on first use, and
// again after the decryption keys of the resource have changed.
type encodings struct {
	byFormat sync.Map // of *encoding
}

func (e *encodings) get(r *boundResource, f format) (*encoding, error) {
	made, ok := e.byFormat.Load(f)
	if ok && made.(*encoding).rep.Fresh() {
		return made.(*encoding), nil
	}
	enc, err := newEncoding(r, f)
	if err != nil {
		return nil, err
	}
	if ok {
		e.byFormat.CompareAndSwap(f, made, enc)
	} else {
		e.byFormat.LoadOrStore(f, enc)
	}
	return enc, nil
}

func newEncoding(r *boundResource, f format) (*encoding, error) {
	codecs, gvk := r.Serializer, r.Kind
	if !f.target.Empty() {
		codecs, gvk = apihelpers.GetMetaInternalVersionCodecs(), f.target.WithKind("PartialObjectMetadata")
	}
	info, ok := runtime.SerializerInfoForMediaType(codecs.SupportedMediaTypes(), string(f.media))
	if !ok {
		return nil, fmt.Errorf("%s cannot be encoded as %s", r.GVR, f.media)
	}
	e := &encoding{resource: r, format: f, encoder: codecs.EncoderForVersion(info.Serializer, gvk.GroupVersion())}
	if f.media == mediaJSON && f.target.Empty() && !r.Custom {
		e.head = fmt.Appendf(nil, `{"kind":%s,"apiVersion":%s,`, strconv.Quote(gvk.Kind), strconv.Quote(gvk.GroupVersion().String()))
	}
	items := representation.Format{Encode: e.appendItem}
	if f.target.Empty() {
		if f.media == mediaProtobuf {
			items.Splice = representation.SpliceItem
		}
		if r.Transcoder != nil && r.Decorate == nil {
			items.Transcode = r.Transcoder.AppendItem
			if f.media == mediaProtobuf {
				items.Transcode = r.spliceCanonical
			}
		}
		if f.media == mediaJSON && r.CustomTranscoder != nil {
			items.Transcode = r.CustomTranscoder.AppendItem
		}
	}
	if f.media == mediaJSON && !f.target.Empty() && r.Transcoder != nil && r.Decorate == nil {
		if err := e.cutMetadata(&items); err != nil {
			return nil, err
		}
	}
	if f.noManagedFields {
		if err := e.cutManagedFields(&items); err != nil {
			return nil, err
		}
	}
	e.rep = r.Store.Representation(representationName{r.GVR.GroupVersion(), f}, items)
	return e, nil
}

// cutMetadata makes the format, of metadata in JSON, cut it out of whole objects. Kinds without a
// transcoder may differ: some conversions put fields of other versions into annotations, which are
// not in the metadata that upstream's handlers return.
func (e *encoding) cutMetadata(items *representation.Format) error {
	whole, err := e.resource.encodings.get(e.resource, format{media: mediaJSON})
	if err != nil {
		return err
	}
	head := fmt.Appendf(nil, `{"kind":"PartialObjectMetadata","apiVersion":%s,`, strconv.Quote(e.target.String()))
	items.Whole, items.Cut = whole.rep, representation.CutJSONMetadata(head)
	items.Transcode = representation.Cutting(e.resource.Transcoder.AppendItem, items.Cut)
	return nil
}

// cutManagedFields makes the format cut managed fields out of stored objects, and out of items that
// include them.
func (e *encoding) cutManagedFields(items *representation.Format) error {
	f := e.format
	f.noManagedFields = false
	whole, err := e.resource.encodings.get(e.resource, f)
	if err != nil {
		return err
	}
	items.Whole, items.Cut = whole.rep, representation.CutJSONItem
	if f.media == mediaProtobuf {
		items.Cut = representation.CutProtobufItem
	}
	if items.Splice != nil {
		items.Splice = representation.WithoutManagedFields(items.Splice)
	}
	switch {
	case e.resource.Custom && items.Transcode != nil:
		items.Transcode = representation.Cutting(items.Transcode, items.Cut)
	case items.Transcode != nil:
		items.Transcode = representation.WithoutManagedFields(items.Transcode)
	}
	return nil
}

// buffers pools the output buffers of upstream's encoders.
var buffers = sync.Pool{New: func() any { return new(bytes.Buffer) }}

// appendItem is the ItemEncoder of the format: JSON objects are followed by a comma, protobuf
// objects are preceded by the tag and length of the list's items field.
func (e *encoding) appendItem(dst []byte, obj runtime.Object) ([]byte, error) {
	if e.resource.Decorate != nil {
		e.resource.Decorate(obj)
	}
	if e.noManagedFields {
		m, err := meta.Accessor(obj)
		if err != nil {
			return dst, err
		}
		m.SetManagedFields(nil)
	}
	if !e.target.Empty() {
		m, err := meta.Accessor(obj)
		if err != nil {
			return dst, err
		}
		partial := meta.AsPartialObjectMetadata(m)
		partial.SetGroupVersionKind(e.target.WithKind("PartialObjectMetadata"))
		obj = partial
	}
	buf := buffers.Get().(*bytes.Buffer)
	defer buffers.Put(buf)
	buf.Reset()
	if err := e.encoder.Encode(obj, buf); err != nil {
		return dst, err
	}
	if e.media == mediaProtobuf {
		raw, _, _, err := representation.OpenUnknown(buf.Bytes())
		if err != nil {
			return dst, err
		}
		dst = slices.Grow(dst, len(raw)+binary.MaxVarintLen64)
		dst = append(dst, e.itemsTag())
		dst = binary.AppendUvarint(dst, uint64(len(raw)))
		return append(dst, raw...), nil
	}
	data := bytes.TrimSuffix(buf.Bytes(), newline)
	dst = slices.Grow(dst, len(data)+len(","))
	if len(e.head) > 0 {
		rest, ok := bytes.CutPrefix(data, e.head)
		if !ok {
			// data omitted: may be a Secret
			return dst, fmt.Errorf("unexpected encoding of %s", e.resource.Kind)
		}
		dst = append(dst, '{')
		data = rest
	}
	return append(append(dst, data...), ','), nil
}

// spliceCanonical splices a stored object that upstream's encoder would write as it is stored.
func (r *boundResource) spliceCanonical(dst, stored []byte, rev mirror.Revision) ([]byte, bool) {
	if !r.Transcoder.Canonical(stored) {
		return dst, false
	}
	return representation.SpliceItem(dst, stored, rev)
}

// itemsFirst reports whether the items of a list are its first field, before its metadata. That is
// so only for v1beta1 metadata in protobuf; in all other lists of Kubernetes the items follow the
// metadata.
func (e *encoding) itemsFirst() bool {
	return e.media == mediaProtobuf && e.target == metav1beta1.SchemeGroupVersion
}

// itemsTag is the tag of an item in a protobuf list.
func (e *encoding) itemsTag() byte {
	if e.itemsFirst() {
		return 1<<3 | 2
	}
	return representation.ItemsTag
}

// framer returns the encoder of a watch's frames.
func (e *encoding) framer() representation.FrameEncoder {
	if e.media == mediaProtobuf {
		return representation.ProtobufFrames(e.unknown())
	}
	return representation.JSONFrames(e.head)
}

// object returns the response body of a GET, built from the object's item, in pieces.
func (e *encoding) object(item []byte) [][]byte {
	if e.media == mediaProtobuf {
		_, n := binary.Uvarint(item[1:])
		raw := item[1+n:]
		before, after := e.unknown()
		return [][]byte{binary.AppendUvarint(append(bytes.Clone(before), representation.UnknownRaw), uint64(len(raw))), raw, after}
	}
	body := item[:len(item)-1] // without the comma
	if len(e.head) == 0 {
		return [][]byte{body, newline}
	}
	return [][]byte{e.head, body[1:], newline}
}

var newline = []byte("\n")

// unknown returns the bytes before and after the raw bytes of a single object.
func (e *encoding) unknown() (before, after []byte) {
	gvk := e.resource.Kind
	if !e.target.Empty() {
		gvk = e.target.WithKind("PartialObjectMetadata")
	}
	return representation.Envelope(gvk)
}

// listMeta is the metadata of a list.
type listMeta struct {
	resourceVersion string
	token           string
	remaining       *int64
	shard           string // the shard selector; "" if there is none
}

// emptyList returns an empty list of the format, with the same metadata as in upstream's handlers.
func (e *encoding) emptyList(m listMeta, items bool) (runtime.Object, error) {
	var list runtime.Object
	switch e.target {
	case schema.GroupVersion{}:
		list = e.resource.Store.Kind().NewListFunc()
		if err := meta.SetList(list, []runtime.Object{}); err != nil {
			return nil, err
		}
		// Lists of custom resources and of metadata do not have this field.
		if setter, ok := list.(metav1.ShardedListInterface); ok && m.shard != "" {
			setter.SetShardInfo(&metav1.ShardInfo{Selector: m.shard})
		}
	case metav1beta1.SchemeGroupVersion:
		l := &metav1beta1.PartialObjectMetadataList{}
		if items {
			l.Items = []metav1.PartialObjectMetadata{}
		}
		list = l
	default:
		l := &metav1.PartialObjectMetadataList{}
		if items {
			l.Items = []metav1.PartialObjectMetadata{}
		}
		list = l
	}
	return list, setListMeta(list, m)
}

func setListMeta(list runtime.Object, m listMeta) error {
	acc, err := meta.ListAccessor(list)
	if err != nil {
		return err
	}
	acc.SetResourceVersion(m.resourceVersion)
	acc.SetContinue(m.token)
	acc.SetRemainingItemCount(m.remaining)
	return nil
}

// envelope returns the bytes before and after the items of a list. The items take itemsBytes,
// including the comma of the last one, and have no bytes between them.
func (e *encoding) envelope(m listMeta, count int, itemsBytes int64) (head, tail []byte, err error) {
	list, err := e.emptyList(m, count > 0)
	if err != nil {
		return nil, nil, err
	}
	var buf bytes.Buffer
	if err := e.encoder.Encode(list, &buf); err != nil {
		return nil, nil, err
	}
	data := buf.Bytes()
	if count == 0 {
		return data, nil, nil
	}
	if e.media == mediaProtobuf {
		raw, before, after, err := representation.OpenUnknown(data)
		if err != nil {
			return nil, nil, err
		}
		head = binary.AppendUvarint(append(bytes.Clone(before), representation.UnknownRaw), uint64(len(raw))+uint64(itemsBytes))
		if e.itemsFirst() {
			return head, append(bytes.Clone(raw), after...), nil
		}
		return append(head, raw...), after, nil
	}
	const items = `"items":[`
	i := bytes.Index(data, []byte(items+"]"))
	if i < 0 {
		return nil, nil, fmt.Errorf("unexpected encoding of a list of %s: %.200q", e.resource.Kind, data)
	}
	return data[:i+len(items)], data[i+len(items):], nil
}

// trailing is the number of bytes that a list omits at the end of its last item.
func (e *encoding) trailing() int {
	if e.media == mediaJSON {
		return 1 // the comma
	}
	return 0
}
