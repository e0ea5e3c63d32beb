package list

import (
	"context"
	"errors"
	"fmt"
	"net/http"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/mirror"
)

// Read resolves a LIST: it waits until memory has reached the revision that the options require,
// and returns the list at a revision. The combinations of resource version, match, limit and
// continue are those of KEP-2340's table and KEP-4988; see freshness.Waiter.Snapshot. The caller
// closes the Read. Cost without a wait is that of mirror.Resource.At and of the choice of indexes.
// Errors: etcdread.ErrNeeded, and API errors for the client (400, 410, 429, 504, those of
// WithAdmission).
func (env *Env) Read(ctx context.Context, key string, opts storage.ListOptions) (*Read, error) {
	q, err := env.request(ctx, key, opts)
	if err != nil {
		return nil, env.Metrics.Failed(err)
	}
	return q.read(ctx, env)
}

// read resolves the request; see Env.Read.
func (q request) read(ctx context.Context, env *Env) (*Read, error) {
	pred := &q.opts.Predicate
	if !env.Memory.Ready() && pred.Limit > 0 && pred.Empty() && (q.exact == 0 || !env.Mirror.Loading()) {
		return nil, etcdread.NotLoaded // a small page is cheap for etcd (KEP-4568)
	}
	if err := env.Fresh.Ready(ctx); err != nil {
		return nil, err
	}
	if !q.fromMemory(env) {
		return nil, etcdread.GateOff
	}
	ctx, span := trace.Start(ctx, trace.List, env.View.Kind().GroupResource)
	span.Event(trace.Ready)
	r := &Read{env: env, request: q, span: span, Rev: q.exact, Limit: q.limit()}
	r.selector = env.View.CurrentGeneration().Selector(*pred)
	r.Start, r.End = q.bounds()
	snap, err := env.Fresh.Snapshot(ctx, q.opts, q.exact, span)
	reached := err == nil || errors.Is(err, mirror.ErrCompacted)
	if r.past.inconsistent = q.exact > 0 && reached && env.Memory.Inconsistent(); r.past.inconsistent {
		err = mirror.ErrCompacted // D11: this history in memory has not been compared with etcd yet
	}
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		err = r.readFromEtcd(ctx) // etcd has the revision, or reports it compacted
	case errors.Is(err, mirror.ErrNotReady):
		err = env.Fresh.NotReady()
	case err == nil:
		r.Snapshot, r.Rev = snap, snap.Rev
		r.useIndex(ctx)
		r.traceListed()
		if !snap.IsLatest() || r.Limit == 0 && r.Count() > longReading {
			r.release = env.Memory.TrackReader(r.Snapshot)
		}
	}
	if err != nil {
		span.End()
		return nil, env.Metrics.Failed(err)
	}
	r.count()
	return r, nil
}

// traceListed adds the events of a list whose objects memory has.
func (r *Read) traceListed() {
	if r.span == nil {
		return
	}
	switch {
	case r.request.exact > 0:
		r.span.Event(trace.Exact)
	case r.narrowed.plan != nil && r.narrowed.plan.Indexed():
		r.span.Event(trace.ByIndex)
	default:
		r.span.Event(trace.Latest)
	}
	r.span.Counted(trace.Listed, r.Count())
}

// longReading is the number of objects from which a list may take so long that its snapshot leaves
// the latest state meanwhile.
const longReading = 1000

// readFromEtcd opens the list at its revision in etcd, after its admission.
func (r *Read) readFromEtcd(ctx context.Context) error {
	env := r.env
	if r.Rev < env.Mirror.CompactRevision() {
		// Reading one object shows whether the revision is compacted, and is too cheap to queue for
		// a place.
		if err := r.compactedError(ctx); err != nil {
			return err
		}
	}
	if err := admitPast(ctx, env, r); err != nil {
		return err
	}
	most := r.Limit
	if r.Selective() {
		most = 0
	}
	latest, err := env.Memory.Latest()
	if err != nil {
		return r.etcdError(ctx, env.Fresh.NotReady())
	}
	if r.past.entries, err = env.Past.Open(ctx, latest, r.Start, r.End, r.Rev, most); err != nil {
		return r.etcdError(ctx, err)
	}
	return nil
}

// etcdError translates an error of etcd at a past revision for the client. If the revision is
// compacted, it returns the error of upstream's store, with the token that continues at the
// present.
func (r *Read) etcdError(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		if expired := r.compactedError(ctx); expired != nil {
			return expired
		}
		return apierrors.NewResourceExpired(fmt.Sprintf("resource version %d is compacted", r.request.exact))
	case errors.Is(err, mirror.ErrRestored):
		return r.env.Fresh.NotReady()
	case apierrors.IsTimeout(err):
		return err
	case ctx.Err() != nil:
		return storage.NewTimeoutError(r.request.key, "request did not complete within requested timeout")
	}
	return etcdread.ForClient(ctx, err)
}

// compactedError reads one object at the revision through upstream's store, regardless of the
// list's selector, and returns the error.
func (r *Read) compactedError(ctx context.Context) error {
	env, q := r.env, r.request
	token := q.opts.Predicate.Continue
	q.opts.Predicate = storage.Everything
	q.opts.Predicate.Limit, q.opts.Predicate.Continue = 1, token
	if err := env.Etcd.GetList(ctx, q.key, q.opts, env.View.Kind().NewListFunc()); err != nil {
		return env.Pages.SealError(ctx, q.scope, etcdread.ForClient(ctx, err))
	}
	return nil
}

// Err returns the error that ended Runs or Candidates early, nil if there was none. The error is
// for the client.
func (r *Read) Err() error {
	if r.past.entries == nil || r.past.entries.Err() == nil {
		return nil
	}
	if r.past.err == nil {
		r.past.err = r.env.Metrics.Failed(r.etcdError(r.past.entries.Context(), r.past.entries.Err()))
	}
	return r.past.err
}

// Unreadable returns the error of a LIST that failed with err. With the gate
// AllowUnsafeMalformedObjectDeletion the error names the unreadable objects, as upstream's store
// does; Unreadable finds them by walking and decoding the candidates again. Otherwise it is err.
func (r *Read) Unreadable(ctx context.Context, err error) error {
	gen := r.selector.Generation
	var status apierrors.APIStatus
	refused := errors.As(err, &status) && status.Status().Code < http.StatusInternalServerError
	if !r.env.Gates.UnsafeDelete || ctx.Err() != nil || apierrors.IsTimeout(err) || refused {
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
	return corrupt.orElse(r.env.View.Kind().GroupResource, err)
}

// count counts a list from memory, or of a revision older than memory, in the metrics.
func (r *Read) count() {
	source, reason := metrics.SourcePresent, r.request.reason()
	switch {
	case r.past.inconsistent:
		source, reason = metrics.SourceEtcd, metrics.ReasonDifference
	case r.FromEtcd():
		source, reason = metrics.SourceEtcd, metrics.ReasonPast
	case !r.Snapshot.IsLatest():
		source = metrics.SourcePast
	}
	r.env.Metrics.Count(r.request.opts, source, reason)
}

// PlanName returns the plan of the list, a value of the label plan of the metrics.
func (r *Read) PlanName() string {
	switch {
	case r.narrowed.plan != nil && r.narrowed.plan.Keyed():
		return metrics.PlanKeys
	case r.narrowed.plan != nil && r.narrowed.plan.Indexed():
		return metrics.PlanIndex
	case r.narrowed.plan != nil:
		return metrics.PlanStored
	case r.narrowed.shard != nil:
		return metrics.PlanShard
	}
	return metrics.PlanScan
}

// Served ends the span of the list, and records in the metrics the number of candidates that it has
// read, and of objects in the answer. Upstream's releases differ in how they count lists from etcd,
// so those are not recorded.
func (r *Read) Served(walked, returned int) {
	defer r.endSpan()
	if r.FromEtcd() {
		return
	}
	name, plan := "", r.PlanName()
	if r.narrowed.declared != nil {
		name = r.narrowed.declared.Name
	}
	r.env.Metrics.Served(name, walked, returned)
	if !r.selector.All {
		r.env.Metrics.Selected(plan, walked, returned)
	}
	if returned > 0 && !r.request.opts.Predicate.Empty() {
		r.span.Event(trace.Resized)
	}
	r.span.Filtered(returned, !r.selector.All, plan, walked)
}
