package readpath

import (
	"context"
	"fmt"
	"strconv"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/validation"
	metainternalversion "k8s.io/apimachinery/pkg/apis/meta/internalversion"
	metainternalversionscheme "k8s.io/apimachinery/pkg/apis/meta/internalversion/scheme"
	metainternalversionvalidation "k8s.io/apimachinery/pkg/apis/meta/internalversion/validation"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apisharding "k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/sharding"
	"k8s.io/apiserver/pkg/storage"
	storeerr "k8s.io/apiserver/pkg/storage/errors"
	utilfeature "k8s.io/apiserver/pkg/util/feature"

	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/mirror"
)

// listOrWatch answers a LIST or a WATCH, or returns the reason to pass it on.
func (r *readRequest) listOrWatch() reason {
	opts, err := r.listOptions()
	if err != nil {
		r.instrument(func() { r.fail(err) })
		return ""
	}
	if opts.Watch != (r.info.Verb == "watch") {
		return reasonOptions
	}
	key, storageOpts, err := r.storageOptions(opts)
	if err != nil {
		r.instrument(func() { r.fail(err) })
		return ""
	}
	if opts.Watch {
		return r.watch(opts, key, storageOpts)
	}
	span := r.trace("List")
	defer span.End(slowRead)
	p, err := r.prepare(key, storageOpts)
	if passOnError(err) {
		return reasonEtcd
	}
	if err == nil {
		defer p.list.Close()
		defer func() { p.share.Leave() }()
	}
	if !r.traced() { // otherwise the body has its own span
		span.AddEvent("About to write a response")
	}
	r.instrument(func() {
		if err != nil {
			r.fail(storeerr.InterpretListError(err, r.groupResource()))
			return
		}
		request.TrackSerializeResponseObjectLatency(r.req.Context(), func() {
			whileThere(func() { r.traceBody(func() { r.writePage(p) }) })
		})
	})
	return ""
}

// preparedList is a list, or one page of it, ready to be written: its objects are known to be
// readable, and its size is known.
type preparedList struct {
	list       *list.Read
	level      listadmission.Level
	share      *listadmission.Share
	start, end string // the key range walked
	meta       listMeta
	count      int   // number of objects
	bytes      int64 // of their items
	items      representation.List

	// selected are the objects of a list with a selector. It is nil if there are too many; then
	// writing the page evaluates the selector again.
	selected []*mirror.Entry
}

// prepare reads and measures the requested list. It encodes objects that are not encoded yet, so
// that an encoding failure is still reported to the client. The caller closes the page's list and
// leaves its share.
func (r *readRequest) prepare(key string, opts storage.ListOptions) (p *preparedList, err error) {
	p = &preparedList{level: r.server.levels.Of(r.w, r.req)}
	admitted := false
	defer func() {
		if !admitted { // an error, or a panic in a decoder or a conversion
			p.share.Leave()
			if p.list != nil {
				p.list.Close()
			}
			p = nil
		}
	}()
	ctx, lists := r.req.Context(), r.server.lists
	p.list, err = r.resource.Store.Read(list.WithAdmission(ctx, func(bytes int64) (err error) {
		p.share, err = lists.Enter(ctx, p.level, bytes)
		return err
	}), key, opts)
	if err != nil {
		return p, err
	}
	p.start, p.end = p.list.Start, p.list.End
	past := p.list.FromEtcd() // admitted by Read
	p.items.Rep, p.items.Once = r.enc.rep, past
	if !past {
		if p.share, err = lists.Enter(ctx, p.level, r.estimatedBytes(p.list)); err != nil {
			return p, err
		}
	}
	if err := r.measure(p); err != nil {
		return p, p.list.Unreadable(ctx, err)
	}
	if !past {
		if p.share, err = p.share.Fit(ctx, lists, p.level, p.bytes); err != nil {
			return p, err
		}
	}
	admitted = true
	return p, nil
}

// lookingShare is the cost of encoding and sending an object, relative to evaluating a selector on
// it. A guess; selector results that are cached cost less.
const lookingShare = 8

// estimatedBytes estimates the size of the list in bytes.
func (r *readRequest) estimatedBytes(list *list.Read) int64 {
	stored := list.EstimatedBytes()
	if list.Selective() {
		return stored / lookingShare
	}
	if list.Limit > 0 {
		return stored
	}
	if encoded, ok := r.enc.rep.Measure(list.Objects(), list.Start, list.End); ok {
		return encoded
	}
	return stored
}

// measure determines the objects of the page, their size, and the list metadata.
func (r *readRequest) measure(p *preparedList) (err error) {
	list := p.list
	total := list.Count()
	var last string
	var more bool
	walked := -1
	switch {
	case list.Selective():
		walked, last, more, err = r.selectPage(p)
	case list.FromEtcd():
		last, err = r.encodeOnce(p)
		more = p.count < total
	default:
		last, more = cutPage(r.req.Context(), p, total)
		p.bytes, err = r.size(p)
	}
	if err == nil {
		err = list.Err()
	}
	if err != nil {
		return err
	}
	if r.table != nil {
		p.bytes += int64(p.count) * rowCells
	}
	p.meta.resourceVersion = strconv.FormatInt(list.Rev, 10)
	p.meta.shard = list.ShardSelector()
	if p.meta.token, p.meta.remaining, err = list.NextPage(r.req.Context(), last, total, more); err != nil {
		return err
	}
	if walked < 0 {
		walked = p.count
	}
	list.Served(walked, p.count)
	return nil
}

// encodeOnce measures the objects of a list that is read from etcd, and returns the last key.
func (r *readRequest) encodeOnce(p *preparedList) (last string, err error) {
	p.bytes, err = p.items.Prepare(r.req.Context(), func(yield func(mirror.Run) bool) {
		for run := range p.list.Runs() {
			items := run.Items()
			last = items[len(items)-1].Key()
			p.count += len(items)
			if !yield(run) {
				return
			}
		}
	})
	return last, err
}

// cutPage ends the page at its limit, and returns its last key and whether more objects follow.
func cutPage(ctx context.Context, p *preparedList, total int) (last string, more bool) {
	p.count = total
	limit := p.list.Limit
	if limit <= 0 || int64(total) < limit {
		return "", false
	}
	n := int64(0)
	for run := range p.list.Runs() {
		items := run.Items()
		if n+int64(len(items)) < limit {
			n += int64(len(items))
			continue
		}
		last = items[limit-n-1].Key()
		break
	}
	p.count, p.end = int(limit), last+"\x00"
	return last, p.list.MoreAfter(ctx, last)
}

// size returns the size of all items of the page; items without a cached encoding are encoded
// first.
func (r *readRequest) size(p *preparedList) (int64, error) {
	objects := p.list.Objects()
	if n, ok := r.enc.rep.Measure(objects, p.start, p.end); ok {
		return n, nil
	}
	_, stored := objects.Count(p.start, p.end)
	p.items.Compressed = stored > 2*gzipThreshold && negotiateGzip(r.req)
	return p.items.Prepare(r.req.Context(), objects.Runs(p.start, p.end))
}

// Bounds of the selected objects that a request references: a cached object costs one pointer, an
// object read from etcd costs all of its bytes.
const (
	maxSelected      = 4096
	maxSelectedBytes = 16 << 20
)

// selectPage walks the objects until the limit is reached. It returns the number of objects
// visited, the key of the last selected one, and whether unvisited objects remain.
func (r *readRequest) selectPage(p *preparedList) (walked int, last string, more bool, err error) {
	ctx := r.req.Context()
	p.selected = []*mirror.Entry{}
	var buf []byte
	for e := range p.list.Selecting() {
		if limit := p.list.Limit; limit > 0 && int64(p.count) >= limit {
			more = true
			break
		}
		if walked%1024 == 0 && ctx.Err() != nil {
			return 0, "", false, ctx.Err()
		}
		walked++
		if ok, err := p.list.Matches(ctx, e); err != nil {
			return 0, "", false, err
		} else if !ok {
			continue
		}
		size, err := r.enc.rep.ItemSize(ctx, e, &buf)
		if err != nil {
			return 0, "", false, err
		}
		p.count++
		p.bytes += int64(size)
		last = e.Key()
		if len(p.selected) < maxSelected && (p.bytes <= maxSelectedBytes || !p.list.FromEtcd()) {
			p.selected = append(p.selected, e)
		}
	}
	if p.count > len(p.selected) {
		p.selected = nil
	}
	if limit := p.list.Limit; limit > 0 && int64(p.count) >= limit && p.list.CountsMore() {
		more = p.list.MoreAfter(ctx, last)
	}
	return walked, last, more, nil
}

// last returns the key of the last object of a page without a selector, "" if there is none. Cost
// is O(log n).
func (p *preparedList) last() string {
	if e, ok := p.list.Objects().Last(p.start, p.end); ok {
		return e.Key()
	}
	return ""
}

// listOptions decodes and validates the query as upstream's handlers do.
func (r *readRequest) listOptions() (metainternalversion.ListOptions, error) {
	opts := metainternalversion.ListOptions{}
	if err := metainternalversionscheme.ParameterCodec.DecodeParameters(r.req.URL.Query(), metav1.SchemeGroupVersion, &opts); err != nil {
		return opts, apierrors.NewBadRequest(err.Error())
	}
	watchList := utilfeature.DefaultFeatureGate.Enabled(features.WatchList)
	metainternalversion.SetListOptionsDefaults(&opts, watchList)
	if errs := metainternalversionvalidation.ValidateListOptions(&opts, watchList); len(errs) > 0 {
		return opts, apierrors.NewInvalid(schema.GroupKind{Group: metav1.GroupName, Kind: "ListOptions"}, "", errs)
	}
	if opts.FieldSelector != nil {
		selector, err := opts.FieldSelector.Transform(r.resource.FieldLabel)
		if err != nil {
			return opts, apierrors.NewBadRequest(err.Error())
		}
		opts.FieldSelector = selector
	}
	if name := r.info.Name; name != "" {
		// The name was authorized; the selector must not select another one.
		if opts.FieldSelector == nil || opts.FieldSelector.Empty() {
			opts.FieldSelector = fields.OneTermEqualSelector("metadata.name", name)
		} else if selected, ok := opts.FieldSelector.RequiresExactMatch("metadata.name"); !ok || selected != name {
			return opts, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
		}
	}
	return opts, nil
}

// parseShardSelector returns the shard selector of the request, or nil if there is none or the
// feature gate is off.
func parseShardSelector(opts metainternalversion.ListOptions) (apisharding.Selector, error) {
	if opts.ShardSelector == "" || !utilfeature.DefaultFeatureGate.Enabled(features.ShardedListAndWatch) {
		return nil, nil
	}
	selector, err := sharding.Parse(opts.ShardSelector)
	if err != nil {
		return nil, fmt.Errorf("invalid shard selector: %w", err)
	}
	return selector, nil
}

// storageOptions returns the key and options that a registry would pass to its storage. The error
// is that of parsing a shard selector.
func (r *readRequest) storageOptions(opts metainternalversion.ListOptions) (key string, o storage.ListOptions, err error) {
	pred := storage.SelectionPredicate{
		Label:               labels.Everything(),
		Field:               fields.Everything(),
		Limit:               opts.Limit,
		Continue:            opts.Continue,
		IndexFields:         r.resource.IndexFields,
		IndexLabels:         r.resource.IndexLabels,
		AllowWatchBookmarks: opts.AllowWatchBookmarks,
	}
	if pred.ShardSelector, err = parseShardSelector(opts); err != nil {
		return "", o, err
	}
	if opts.LabelSelector != nil {
		pred.Label = opts.LabelSelector
	}
	if opts.FieldSelector != nil {
		pred.Field = opts.FieldSelector
	}
	o = storage.ListOptions{
		ResourceVersion:      opts.ResourceVersion,
		ResourceVersionMatch: opts.ResourceVersionMatch,
		Predicate:            pred,
		Recursive:            true,
		SendInitialEvents:    opts.SendInitialEvents,
	}
	ns := r.info.Namespace
	if ns == "" {
		// A selector for one namespace narrows the key range, but continue tokens stay relative to
		// the resource.
		if selected, ok := pred.MatchesSingleNamespace(); ok && len(validation.ValidateNamespaceName(selected, false)) == 0 {
			ns = selected
		}
	}
	if name, ok := pred.MatchesSingle(); ok {
		if key, err := r.key(ns, name); err == nil {
			o.Recursive = false
			return key, o, nil
		}
	}
	return r.rootKey(ns), o, nil
}
