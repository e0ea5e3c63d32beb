package kubestorage

import (
	"context"
	"iter"
	"math"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/mirror"
)

// Objects are entries in key order: those of a snapshot, or its part that a shard selector selects.
// They are immutable.
type Objects interface {
	// Runs yields the entries with start <= key < end, leaf by leaf.
	Runs(start, end string) iter.Seq[mirror.Run]
	// All yields the entries with start <= key < end.
	All(start, end string) iter.Seq[*mirror.Entry]
	// Count returns the number of entries with start <= key < end, and their stored bytes.
	Count(start, end string) (entries int, bytes int64)
	// Last returns the last entry with start <= key < end. Cost is O(log n).
	Last(start, end string) (e *mirror.Entry, ok bool)
	// Measure is mirror.Snapshot.Measure.
	Measure(start, end string, of any, measure func(mirror.Run) (int64, bool)) (int64, bool)
}

// ListRead is a resolved LIST: a revision of the resource and the requested range of it. It serves
// bytes without decoding objects:
//
//	r, err := store.Read(ctx, key, opts)
//	defer r.Close()
//	for run := range r.Runs() {
//		spans.Reset()
//		err = rep.AppendRun(ctx, &spans, run) // made once
//		...
//	}
//	err = r.Err()
//
// It keeps its revision alive until it is closed. A list from memory may be used concurrently,
// except for EstimatedBytes; one FromEtcd may not.
type ListRead struct {
	// Rev is the revision that is read.
	Rev mirror.Revision
	// Snapshot is the cached state at the revision; empty if the list is FromEtcd. See Objects.
	Snapshot mirror.Snapshot
	// Prefix is the etcd key prefix of the request, to which continue tokens are relative; Start <=
	// key < End is the range of the rest of the list.
	Prefix, Start, End string
	// Limit is the requested number of selected objects, 0 for all.
	Limit int64

	store    *Store
	request  listRequest
	selector objects.Selector
	// nil: the request is not for a whole shard, or its shard has no tree
	shard *index.ShardVersion
	plan  *index.Plan // nil: all objects of the range are candidates
	// candidates of the plan that an estimate has found; nil before the first one
	known        *index.Known
	declared     *index.Declared // nil: upstream uses no index
	etcdRange    *etcdread.Range // nil: memory has the revision
	inconsistent bool            // memory has the revision too, and may be wrong
	err          error           // see Err
	release      func()          // nil: no place is held
	span         *readSpan       // until Served or Close
}

// FromEtcd reports whether the revision is read from etcd during the walk: it is older than memory,
// or the history in memory is inconsistent (Resource.Inconsistent). Runs can then fail (see Err),
// entries that memory does not have are new objects, and a second walk may read etcd again.
func (r *ListRead) FromEtcd() bool { return r.etcdRange != nil }

// Runs yields the entries of the range in key order, leaf by leaf, before selection. For a request
// with a selector see Candidates.
func (r *ListRead) Runs() iter.Seq[mirror.Run] {
	if r.etcdRange != nil {
		return r.etcdRange.Runs()
	}
	return r.Objects().Runs(r.Start, r.End)
}

// Objects returns the cached objects at the revision: the snapshot, or the selected part of it if a
// shard selector is the only selector. It is not limited to the range of the list, and empty if
// the list is FromEtcd.
func (r *ListRead) Objects() Objects {
	if r.shard != nil {
		return r.shard
	}
	return r.Snapshot
}

// Close ends the list. It must not be used afterwards.
func (r *ListRead) Close() {
	r.endSpan()
	if r.release != nil {
		r.release()
		r.release = nil
	}
}

func (r *ListRead) endSpan() {
	r.span.end()
	r.span = nil
}

// Candidates yields, in key order, a superset of the selected entries: those that the selector's
// indexes select if there are any, else all of Runs.
func (r *ListRead) Candidates() iter.Seq[*mirror.Entry] {
	switch {
	case r.etcdRange != nil:
		return func(yield func(*mirror.Entry) bool) {
			for run := range r.etcdRange.Runs() {
				for _, e := range run.Items() {
					if !yield(e) {
						return
					}
				}
			}
		}
	case r.known != nil:
		return r.known.Candidates(r.plan, r.Snapshot, r.End)
	case r.plan != nil:
		return r.plan.Candidates(r.Snapshot, r.Start, r.End)
	}
	return r.Objects().All(r.Start, r.End)
}

// Selecting is Candidates for a loop that selects and does not wait for a client. It yields the
// processor to short requests periodically while other lists are in flight.
func (r *ListRead) Selecting() iter.Seq[*mirror.Entry] {
	if r.etcdRange != nil {
		return r.Candidates() // waits for etcd
	}
	return listadmission.Interruptible(r.Candidates())
}

// Count returns the number of entries of Runs, which is that of the objects if the request is not
// Selective. Cost is O(log n).
func (r *ListRead) Count() int {
	if r.etcdRange != nil {
		return r.etcdRange.Count()
	}
	n, _ := r.Objects().Count(r.Start, r.End)
	return n
}

// ShardSelector returns the request's shard selector in the form that list metadata has, "" if
// there is none.
func (r *ListRead) ShardSelector() string {
	if r.selector.Shard == nil && !r.selector.NeedsObject {
		return ""
	}
	return r.selector.Predicate.ShardSelector.String()
}

// MoreAfter reports whether a full page, the last object of which has the key, is followed by
// another. As upstream does, it counts entries that the request does not select: all of the range
// or, where upstream uses a declared index, those of the index. Not for a list FromEtcd. Cost is
// O(log n), with a declared index that of finding its next entry.
func (r *ListRead) MoreAfter(ctx context.Context, key string) bool {
	start := key + "\x00"
	if r.declared != nil {
		return r.declared.Any(ctx, r.plan, r.selector.Generation, r.Snapshot, start, r.End)
	}
	n, _ := r.Snapshot.Count(start, r.End)
	return n > 0
}

// CountsMore reports whether the caller has to call MoreAfter after a full page: not each entry of
// the range is a candidate.
func (r *ListRead) CountsMore() bool { return r.shard != nil || r.plan != nil || r.declared != nil }

// estimate returns an upper bound of the number of objects up to most; it may return more.
// Candidates that it finds are not searched again.
func (r *ListRead) estimate(most int) int {
	n := r.Count()
	if r.plan == nil {
		return n
	}
	if r.known == nil {
		r.known = r.plan.Known(r.Snapshot, r.Start, r.End, most)
	}
	return min(n, r.known.N)
}

// Selective reports whether the caller has to filter candidates with Matches.
func (r *ListRead) Selective() bool { return !r.selector.All && r.shard == nil }

// Matches reports whether the request selects the object of a candidate. The object is decoded if
// its labels and fields are not cached; the error is a decoding error.
func (r *ListRead) Matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	if r.plan != nil && r.plan.Exact() {
		return true, nil
	}
	return r.selector.Matches(ctx, e)
}

// NextPage returns the continue token for the page after the key last, which is the last object of
// the current page, and the number of remaining objects if it is known, or "" and nil on the last
// page. more reports whether there are candidates after last; count is Count. Error: 429 if the
// token cannot be sealed.
func (r *ListRead) NextPage(ctx context.Context, last string, count int, more bool) (token string, remaining *int64, err error) {
	if r.shard != nil {
		count, _ = r.Snapshot.Count(r.Start, r.End) // as upstream, count the entries read
	}
	token, remaining, err = storage.PrepareContinueToken(last, r.Prefix, r.Rev, int64(count), more, r.request.opts)
	if err == nil && token != "" {
		token, err = r.store.pages.Seal(ctx, r.Prefix, token)
	}
	return token, remaining, err
}

// listRequest is a validated LIST.
type listRequest struct {
	key  string
	opts storage.ListOptions // the token, if there is one, in upstream's plain form
	// prefix is the etcd key prefix, scope the prefix that tokens are relative to.
	prefix, scope string
	start         string          // key, after a token
	exact         mirror.Revision // above 0: exactly at this revision
}

// newListRequest validates a LIST of the store. Errors are for the client: 400, and those of
// opening a token.
func newListRequest(ctx context.Context, s *Store, key string, opts storage.ListOptions) (q listRequest, err error) {
	q = listRequest{key: key, opts: opts}
	if q.prefix, err = s.keys.Prepare(key, opts.Recursive); err != nil {
		return q, err
	}
	if q.opts, err = s.pages.Open(ctx, q.prefix, opts); err != nil {
		return q, err
	}
	// upstream takes a negative limit for no limit
	q.opts.Predicate.Limit = max(q.opts.Predicate.Limit, 0)
	if q.exact, q.start, err = storage.ValidateListOptions(q.prefix, s.versioner, q.opts); err != nil {
		return q, err
	}
	if q.exact < 0 { // beyond the highest possible revision
		q.exact = math.MaxInt64
	}
	q.scope = s.keys.Scope(ctx, q.prefix, q.opts)
	if !strings.HasSuffix(key, "/") {
		// Upstream's cacher makes tokens relative to the requested key, its etcd3 store relative to
		// one that ends with a slash. Both accept either; ours are the cacher's.
		q.scope = strings.TrimSuffix(q.scope, "/")
	}
	return q, nil
}

// after returns the smallest key above every key that begins with prefix, which ends with a slash
// or, for a single key, is a key.
func after(prefix string) string {
	return prefix[:len(prefix)-1] + string(prefix[len(prefix)-1]+1)
}

// bounds returns the key range of the list.
func (q *listRequest) bounds() (start, end string) {
	switch {
	case !q.opts.Recursive:
		return q.prefix, q.prefix + "\x00"
	case q.start != "":
		return q.start, after(q.prefix)
	}
	return q.prefix, after(q.prefix)
}

// fromMemory reports whether the gates allow memory to answer the list.
func (q *listRequest) fromMemory(s *Store) bool {
	switch {
	case q.exact > 0:
		// Above the published revision only a consistent read shows whether the revision exists.
		return s.listsAtRevision && (s.latestReads.lists || q.exact <= s.mirror.PublishedRevision())
	case q.opts.Predicate.Continue != "": // a token for the latest state
		return s.listsAtRevision && s.latestReads.lists
	case q.opts.ResourceVersion == "":
		return s.latestReads.lists
	}
	return true
}

// limit returns the requested number of selected objects, 0 for all.
func (q *listRequest) limit() int64 {
	if q.opts.ResourceVersion == "0" && q.exact == 0 && q.opts.Predicate.Continue == "" {
		return 0 // KEP-2340: resource version 0 ignores the limit
	}
	return q.opts.Predicate.Limit
}

// reason returns the metric label for the revision of the list.
func (q *listRequest) reason() string {
	continued := q.opts.Predicate.Continue != "" && q.opts.Recursive
	switch {
	case continued && q.exact > 0:
		return metrics.ReasonContinue
	case continued:
		return metrics.ReasonInconsistent
	case q.exact > 0 && q.opts.ResourceVersionMatch == metav1.ResourceVersionMatchExact:
		return metrics.ReasonExact
	case q.exact > 0:
		return metrics.ReasonLegacy
	case q.opts.ResourceVersion == "":
		return metrics.ReasonConsistent
	case q.opts.ResourceVersion == "0":
		return metrics.ReasonAny
	}
	return metrics.ReasonNotOlder
}
