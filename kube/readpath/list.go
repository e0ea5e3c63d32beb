package readpath

import (
	"context"
	"fmt"
	"iter"
	"net/http"
	goruntime "runtime"
	"strconv"
	"sync"

	"golang.org/x/sync/semaphore"
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

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/mirror"
)

// listOrWatch answers a LIST or a WATCH, or returns why it has to be passed on.
func (r *read) listOrWatch() reason {
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
	p, err := r.page(key, storageOpts)
	if passOnError(err) {
		return reasonEtcd
	}
	if err == nil {
		defer p.reading.Close()
		defer func() { p.share.Leave() }()
	}
	if !r.traced() { // otherwise the body has a span of its own
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

// listOptions decodes and validates the query as upstream's handlers do.
func (r *read) listOptions() (metainternalversion.ListOptions, error) {
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
		// The name was authorized; the selector may not ask for another one.
		if opts.FieldSelector == nil || opts.FieldSelector.Empty() {
			opts.FieldSelector = fields.OneTermEqualSelector("metadata.name", name)
		} else if selected, ok := opts.FieldSelector.RequiresExactMatch("metadata.name"); !ok || selected != name {
			return opts, apierrors.NewBadRequest("fieldSelector metadata.name doesn't match requested name")
		}
	}
	return opts, nil
}

// parseShardSelector returns the request's, nil if there is none or its gate is off.
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

// storageOptions returns what a registry would ask its storage for. The error is that of a shard
// selector.
func (r *read) storageOptions(opts metainternalversion.ListOptions) (key string, o storage.ListOptions, err error) {
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
		// A selector for one namespace narrows the keys, not what tokens are relative to.
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

// page is a list, or a part of one, that is about to be written: it is known to be
// readable, and how large it is.
type page struct {
	reading    *kubestorage.Reading
	level      listadmission.Level
	share      *listadmission.Share
	start, end string // the keys walked
	meta       listMeta
	count      int   // of objects
	bytes      int64 // of their items

	// selected are the objects of a list with a selector; nil if there are many, then
	// writing the page selects anew.
	selected []*mirror.Entry
}

// page finds what the request asks for. What was not encoded before is now, so that an
// object that cannot be is an error that the client is told. Whoever writes the page closes
// its reading, and leaves its share.
func (r *read) page(key string, opts storage.ListOptions) (p *page, err error) {
	p = &page{level: r.server.levels.of(r.w, r.req)}
	admitted := false
	defer func() {
		if !admitted { // an error, or a panic of a decoder or a conversion
			p.share.Leave()
			if p.reading != nil {
				p.reading.Close()
			}
			p = nil
		}
	}()
	ctx, lists := r.req.Context(), r.server.lists
	p.reading, err = r.resource.Store.Read(kubestorage.WithAdmission(ctx, func(bytes int64) (err error) {
		p.share, err = lists.Enter(ctx, p.level, bytes)
		return err
	}), key, opts)
	if err != nil {
		return p, err
	}
	p.start, p.end = p.reading.Start, p.reading.End
	past := p.reading.FromEtcd() // admitted already
	if !past {
		if p.share, err = lists.Enter(ctx, p.level, r.expected(p.reading)); err != nil {
			return p, err
		}
	}
	if err := r.measure(p); err != nil {
		return p, p.reading.Unreadable(ctx, err)
	}
	if !past {
		if p.share, err = p.share.Fit(ctx, lists, p.level, p.bytes); err != nil {
			return p, err
		}
	}
	admitted = true
	return p, nil
}

// lookingShare is how much more it costs to encode and send an object than to look at it. A guess;
// what a selector has been asked before is known, and costs less.
const lookingShare = 8

// expected returns about how many bytes the list will have.
func (r *read) expected(reading *kubestorage.Reading) int64 {
	stored := reading.Expected()
	if reading.Selective() {
		return stored / lookingShare
	}
	if reading.Limit > 0 {
		return stored
	}
	if encoded, ok := r.enc.rep.Measure(reading.Objects(), reading.Start, reading.End); ok {
		return encoded
	}
	return stored
}

// measure finds the page's objects, and what they and its metadata come to.
func (r *read) measure(p *page) (err error) {
	reading := p.reading
	total := reading.Count()
	var last string
	var more bool
	walked := -1
	switch {
	case reading.Selective():
		walked, last, more, err = r.selectPage(p)
	case reading.FromEtcd():
		last, err = r.encodeOnce(p)
		more = p.count < total
	default:
		last, more = cutPage(p, total)
		p.bytes, err = r.size(p)
	}
	if err == nil {
		err = reading.Err()
	}
	if err != nil {
		return err
	}
	p.meta.resourceVersion = strconv.FormatInt(reading.Rev, 10)
	p.meta.shard = reading.ShardSelector()
	if p.meta.token, p.meta.remaining, err = reading.NextPage(r.req.Context(), last, total, more); err != nil {
		return err
	}
	if walked < 0 {
		walked = p.count
	}
	reading.Served(walked, p.count)
	return nil
}

// encodeOnce measures what is read from etcd, and returns the last key.
func (r *read) encodeOnce(p *page) (last string, err error) {
	p.bytes, err = r.enc.rep.MeasureOnce(r.req.Context(), func(yield func(mirror.Run) bool) {
		for run := range p.reading.Runs() {
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

// cutPage ends the page where its limit is, and returns its last key if there is more.
func cutPage(p *page, total int) (last string, more bool) {
	p.count = total
	limit := p.reading.Limit
	if limit <= 0 || int64(total) < limit {
		return "", false
	}
	n := int64(0)
	for run := range p.reading.Runs() {
		items := run.Items()
		if n+int64(len(items)) < limit {
			n += int64(len(items))
			continue
		}
		last = items[limit-n-1].Key()
		break
	}
	p.count, p.end = int(limit), last+"\x00"
	return last, p.reading.MoreAfter(last)
}

// size returns the bytes of all items of the page, made if they have to be.
func (r *read) size(p *page) (int64, error) {
	rep, objects := r.enc.rep, p.reading.Objects()
	if n, ok := rep.Measure(objects, p.start, p.end); ok {
		return n, nil
	}
	_, stored := objects.Count(p.start, p.end)
	return rep.Prepare(r.req.Context(), objects.Runs(p.start, p.end), stored > 2*gzipThreshold && negotiateGzip(r.req))
}

// Bounds of what a request holds of the objects that it selects: those that memory has cost a
// pointer, those that are read from etcd all of their bytes.
const (
	maxSelected      = 4096
	maxSelectedBytes = 16 << 20
)

// selectPage walks the objects until the limit is reached, and returns how many it has looked
// at, the key of the last one selected, and whether there are others to look at.
func (r *read) selectPage(p *page) (walked int, last string, more bool, err error) {
	ctx := r.req.Context()
	p.selected = []*mirror.Entry{}
	var buf []byte
	for e := range p.reading.Selecting() {
		if limit := p.reading.Limit; limit > 0 && int64(p.count) >= limit {
			more = true
			break
		}
		if walked%1024 == 0 && ctx.Err() != nil {
			return 0, "", false, ctx.Err()
		}
		walked++
		if ok, err := p.reading.Matches(ctx, e); err != nil {
			return 0, "", false, err
		} else if !ok {
			continue
		}
		item, err := r.enc.rep.ItemIn(ctx, e, &buf)
		if err != nil {
			return 0, "", false, err
		}
		p.count++
		p.bytes += int64(len(item))
		last = e.Key()
		if len(p.selected) < maxSelected && (p.bytes <= maxSelectedBytes || !p.reading.FromEtcd()) {
			p.selected = append(p.selected, e)
		}
	}
	if p.count > len(p.selected) {
		p.selected = nil
	}
	return walked, last, more, nil
}

// last returns the key of the last object of a page without a selector. Cost is O(log n), of a
// shard O(leaves).
func (p *page) last() string {
	objects := p.reading.Objects()
	if snap, ok := objects.(mirror.Snapshot); ok {
		if e, ok := snap.Last(p.start, p.end); ok {
			return e.Key()
		}
		return ""
	}
	var last string
	for run := range objects.Runs(p.start, p.end) {
		last = run.Items()[len(run.Items())-1].Key()
	}
	return last
}

// writePage sends the list.
func (r *read) writePage(p *page) {
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
	w := &itemWriter{read: r, body: b, left: p.count, trailing: trailing, once: p.reading.FromEtcd()}
	switch {
	case p.count == 0:
	case p.selected != nil:
		for _, e := range p.selected {
			w.entry(e)
		}
	case p.reading.Selective():
		w.selected(p.reading)
	case w.once:
		w.each(p.reading.Runs())
	default:
		if trailing > 0 {
			w.last = p.last()
		}
		w.runs(p.reading.Objects().Runs(p.start, p.end))
	}
	if err := p.reading.Err(); err != nil {
		w.fail(err)
	}
	b.write(tail)
	b.close()
}

// itemWriter writes items, but for the trailing bytes of the last one.
type itemWriter struct {
	read     *read
	body     *body
	left     int    // items
	last     string // the key of the last one, if something of it is not shown
	trailing int
	once     bool // what is made of the items is not kept: they are read from etcd
	spans    encoded.Spans
	buf      []byte // for single items
}

// span writes bytes that end with the n-th next item.
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
	w.left--
	w.span(data, w.left == 0)
}

// fail ends the response for an error that its client can not be told any more: the header is
// out.
func (w *itemWriter) fail(err error) {
	if w.read.req.Context().Err() == context.Canceled {
		breakOff(err)
	}
	panic(http.ErrAbortHandler)
}

// selected walks the objects again.
func (w *itemWriter) selected(reading *kubestorage.Reading) {
	ctx := w.read.req.Context()
	for e := range reading.Candidates() {
		ok, err := reading.Matches(ctx, e)
		if err != nil {
			w.fail(err)
		}
		if !ok {
			continue
		}
		if w.entry(e); w.left == 0 {
			return
		}
	}
}

// runs writes the items of runs, compressed as they are kept if that is what the client
// gets. If much of it is not kept, several leaves are made ready while those before them
// are written.
func (w *itemWriter) runs(all iter.Seq[mirror.Run]) {
	missing := 0
	for run := range all {
		if !w.kept(run) {
			missing++
		}
	}
	if missing <= cap(readying) {
		w.each(all)
		return
	}
	ctx, cancel := context.WithCancel(w.read.req.Context())
	defer cancel()
	queue := make(chan chan piece, cap(readying))
	room := semaphore.NewWeighted(readyBytes)
	go func() {
		defer close(queue)
		for run := range all {
			next, bytes := make(chan piece, 1), min(w.size(run), readyBytes)
			if room.Acquire(ctx, bytes) != nil {
				return
			}
			select {
			case queue <- next:
			case <-ctx.Done():
				return
			}
			produce := func() {
				p := piece{run: run, bytes: bytes}
				p.err = guard.Call(func() error {
					p = w.ready(run, spansPool.Get().(*encoded.Spans))
					p.bytes = bytes
					return p.err
				})
				next <- p
			}
			select {
			case readying <- struct{}{}:
				go func() {
					defer func() { <-readying }()
					produce()
				}()
			default:
				produce() // others have them all, perhaps for long (I9)
			}
		}
	}()
	for next := range queue {
		p := <-next
		w.piece(&p)
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

// each makes one run after the other ready, and writes it.
func (w *itemWriter) each(all iter.Seq[mirror.Run]) {
	for run := range all {
		p := w.ready(run, &w.spans)
		w.piece(&p)
	}
}

var (
	// readying bounds how many leaves are made ready at the same time, for all requests.
	readying  = make(chan struct{}, 2*goruntime.GOMAXPROCS(0))
	spansPool = sync.Pool{New: func() any { return new(encoded.Spans) }}
)

// piece is a run on its way to the body: compressed, as spans of items, or, if they are too
// many bytes to wait for the client together, as its entries.
type piece struct {
	run      mirror.Run
	large    bool
	deflated gzipjoin.Run
	spans    *encoded.Spans // nil: it is compressed, or large
	bytes    int64          // of readyBytes that it takes
	err      error
}

// readyBytes bounds what one list has made ready and not written yet, however many processors there
// are. It is part of what the list was admitted with: those bytes are still to be sent.
const readyBytes = 2 << 20

// size returns about how many bytes a run takes when it is ready.
func (w *itemWriter) size(run mirror.Run) int64 {
	rep := w.read.enc.rep
	if rep.Large(run) {
		return 0 // its entries are made ready one by one
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

// kept reports whether there is nothing to be made ready of the run.
func (w *itemWriter) kept(run mirror.Run) bool {
	rep := w.read.enc.rep
	if w.compresses(run) {
		return rep.KeepsDeflated(run)
	}
	return rep.Large(run) || rep.Keeps(run)
}

// compresses reports whether the run is sent as it is compressed on its own: not if it
// is cut by the borders of the list, or too short for that.
func (w *itemWriter) compresses(run mirror.Run) bool {
	if w.once || w.body.gz == nil || !run.Whole() || run.Items()[len(run.Items())-1].Key() == w.last {
		return false
	}
	n, ok := w.read.enc.rep.Size(run)
	return ok && gzipjoin.WorthApart(n)
}

// ready makes a run ready to be written, in spans if it is not compressed. It may be
// called concurrently.
func (w *itemWriter) ready(run mirror.Run, spans *encoded.Spans) piece {
	p := piece{run: run}
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

// piece writes a run.
func (w *itemWriter) piece(p *piece) {
	if p.err != nil {
		w.fail(p.err)
	}
	if p.large {
		for _, e := range p.run.Items() {
			w.entry(e)
		}
		return
	}
	w.left -= len(p.run.Items())
	if p.spans == nil {
		w.body.writeRun(p.deflated)
		return
	}
	for i, data := range p.spans.All {
		w.span(data, w.left == 0 && i == len(p.spans.All)-1)
	}
}
