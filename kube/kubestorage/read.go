package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// Read resolves a LIST: it waits for the revision of the options and returns it. The combinations
// of resource version, match, limit and continue are those of KEP-2340's table and KEP-4988; see
// revisionWaiter.snapshot. The caller closes the ListRead. Errors: ErrReadEtcd, and API errors for
// the client (400, 410, 429, 504).
func (s *Store) Read(ctx context.Context, key string, opts storage.ListOptions) (*ListRead, error) {
	q, err := newListRequest(ctx, s, key, opts)
	if err != nil {
		return nil, s.listMetrics.Failed(err)
	}
	return q.read(ctx, s)
}

// read resolves the request; see Store.Read.
func (q listRequest) read(ctx context.Context, s *Store) (*ListRead, error) {
	pred := &q.opts.Predicate
	if !s.resource.Ready() && pred.Limit > 0 && pred.Empty() && (q.exact == 0 || !s.mirror.Loading()) {
		return nil, errNotLoaded // a small page is cheap for etcd (KEP-4568)
	}
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	if !q.fromMemory(s) {
		return nil, errGate
	}
	ctx, span := traceGroup(ctx, spanList, s.group)
	span.event(eventReady)
	r := &ListRead{span: span, Rev: q.exact, Prefix: q.scope, Limit: q.limit(), store: s, request: q, selector: s.view.CurrentGeneration().Selector(*pred)}
	r.Start, r.End = q.bounds()
	snap, err := s.snapshot(ctx, q.opts, q.exact, span)
	if r.inconsistent = q.exact > 0 && s.resource.Inconsistent() && (err == nil || errors.Is(err, mirror.ErrCompacted)); r.inconsistent {
		err = mirror.ErrCompacted // D11: this history in memory has not been compared with etcd yet
	}
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		err = r.readFromEtcd(ctx) // etcd has the revision, or reports it compacted
	case errors.Is(err, mirror.ErrNotReady):
		err = s.notReady()
	case err == nil:
		r.Snapshot, r.Rev = snap, snap.Rev
		r.useIndex(ctx)
		r.traceListed()
		if !snap.IsLatest() || r.Limit == 0 && r.Count() > longReading {
			r.release = s.resource.TrackReader(r.Snapshot)
		}
	}
	if err != nil {
		span.end()
		return nil, s.listMetrics.Failed(err)
	}
	r.count()
	return r, nil
}

// traceListed adds the events of a list whose objects memory has.
func (r *ListRead) traceListed() {
	if r.span == nil {
		return
	}
	switch {
	case r.request.exact > 0:
		r.span.event(eventExact)
	case r.plan != nil && r.plan.Indexed():
		r.span.event(eventByIndex)
	default:
		r.span.event(eventLatest)
	}
	r.span.counted(eventListed, r.Count())
}

// longReading is the number of objects from which a list may take so long that its snapshot leaves
// the latest state meanwhile.
const longReading = 1000

// readFromEtcd makes the list one from etcd.
func (r *ListRead) readFromEtcd(ctx context.Context) error {
	s := r.store
	if r.Rev < s.mirror.CompactRevision() {
		// Reading one object shows whether the revision is compacted, and is too cheap to queue for
		// a place.
		if err := r.compactedError(ctx); err != nil {
			return err
		}
	}
	if err := admitFromEtcd(ctx, s, r); err != nil {
		return err
	}
	most := r.Limit
	if r.Selective() {
		most = 0
	}
	latest, err := s.resource.Latest()
	if err != nil {
		return r.etcdError(ctx, s.notReady())
	}
	source := etcdread.Reader{Places: s.cluster.listPlaces, Ranges: s.cluster.ranges, Mirror: s.mirror, Group: s.group, Keep: etcdKeepBytes}
	if r.etcdRange, err = source.Open(ctx, latest, r.Start, r.End, r.Rev, most); err != nil {
		return r.etcdError(ctx, err)
	}
	return nil
}

// etcdError translates an error of etcd at a past revision for the client. If the revision is
// compacted, it returns the error of upstream's store, with the token that continues at the
// present.
func (r *ListRead) etcdError(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		if expired := r.compactedError(ctx); expired != nil {
			return expired
		}
		return apierrors.NewResourceExpired(fmt.Sprintf("resource version %d is compacted", r.request.exact))
	case errors.Is(err, mirror.ErrRestored):
		return r.store.notReady()
	case apierrors.IsTimeout(err):
		return err
	case ctx.Err() != nil:
		return storage.NewTimeoutError(r.request.key, "request did not complete within requested timeout")
	}
	return err
}

// compactedError reads one object at the revision through upstream's store, regardless of the
// list's selector, and returns the error.
func (r *ListRead) compactedError(ctx context.Context) error {
	s, q := r.store, r.request
	token := q.opts.Predicate.Continue
	q.opts.Predicate = storage.Everything
	q.opts.Predicate.Limit, q.opts.Predicate.Continue = 1, token
	if err := s.etcd.GetList(ctx, q.key, q.opts, s.newListFunc()); err != nil {
		return s.pages.SealError(ctx, q.scope, err)
	}
	return nil
}

// Err returns the error that ended Runs or Candidates early, nil if there was none. The error is
// for the client.
func (r *ListRead) Err() error {
	if r.etcdRange == nil || r.etcdRange.Err() == nil {
		return nil
	}
	if r.err == nil {
		r.err = r.store.listMetrics.Failed(r.etcdError(r.etcdRange.Context(), r.etcdRange.Err()))
	}
	return r.err
}

// Unreadable returns the error of a LIST that failed with err. With the gate
// AllowUnsafeMalformedObjectDeletion the error names the unreadable objects, as upstream's store
// does; Unreadable finds them by walking and decoding the candidates again. Otherwise it is err.
func (r *ListRead) Unreadable(ctx context.Context, err error) error {
	gen := r.selector.Generation
	var status apierrors.APIStatus
	if !r.store.unsafeDelete || ctx.Err() != nil || apierrors.IsTimeout(err) || errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError {
		return err
	}
	var corrupt corruptObjects
	found := int64(0)
	for e := range r.Candidates() {
		if r.Limit > 0 && found >= r.Limit || ctx.Err() != nil {
			break
		}
		ok, failed := r.Matches(ctx, e)
		if failed == nil && ok {
			found++
			_, failed = gen.Decode(ctx, e, e.ModRevision())
		}
		if failed != nil && !corrupt.add(e.Key(), failed) {
			break
		}
	}
	if r.Err() != nil {
		return err
	}
	return corrupt.orElse(r.store.group, err)
}

// count counts a list from memory, or of a revision older than memory, in the metrics.
func (r *ListRead) count() {
	source, reason := metrics.SourcePresent, r.request.reason()
	switch {
	case r.inconsistent:
		source, reason = metrics.SourceEtcd, metrics.ReasonDifference
	case r.FromEtcd():
		source, reason = metrics.SourceEtcd, metrics.ReasonPast
	case !r.Snapshot.IsLatest():
		source = metrics.SourcePast
	}
	r.store.listMetrics.Count(r.request.opts, source, reason)
}

// planName returns the plan of the list in the metrics.
func (r *ListRead) planName() string {
	switch {
	case r.plan != nil && r.plan.Keyed():
		return metrics.PlanKeys
	case r.plan != nil && r.plan.Indexed():
		return metrics.PlanIndex
	case r.plan != nil:
		return metrics.PlanStored
	case r.shard != nil:
		return metrics.PlanShard
	}
	return metrics.PlanScan
}

// Served records in the metrics the number of candidates that a list has read, and of objects in
// the answer. Upstream's releases differ in how they count lists from etcd, so those are not
// recorded.
func (r *ListRead) Served(walked, returned int) {
	defer r.endSpan()
	if r.FromEtcd() {
		return
	}
	name, plan := "", r.planName()
	if r.declared != nil {
		name = r.declared.Name
	}
	r.store.listMetrics.Served(name, walked, returned)
	if !r.selector.All {
		r.store.listMetrics.Selected(plan, walked, returned)
	}
	if returned > 0 && !r.request.opts.Predicate.Empty() {
		r.span.event(eventResized)
	}
	r.span.filtered(returned, !r.selector.All, plan, walked)
}
