package list

import (
	"context"
	"iter"

	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/etcdread"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/kube/listadmission"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
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
	Measure(start, end string, of *memo.Key, measure func(mirror.Run) (int64, bool)) (int64, bool)
}

// Read is a resolved LIST: a revision of the resource and the requested range of it. It serves
// bytes without decoding objects:
//
//	r, err := env.Read(ctx, key, opts)
//	defer r.Close()
//	items := representation.List{Rep: rep, Once: r.FromEtcd()}
//	for part, err := range items.Parts(ctx, r.Runs()) { // made once
//		...
//	}
//	err = r.Err()
//
// It keeps its revision alive until it is closed. A list from memory may be used concurrently,
// except for EstimatedBytes; one FromEtcd may not.
type Read struct {
	// Rev is the revision that is read.
	Rev mirror.Revision
	// Snapshot is the cached state at the revision, before selection; see Objects. It is empty if
	// the list is FromEtcd.
	Snapshot mirror.Snapshot
	// Start <= key < End is the range of the rest of the list.
	Start, End string
	// Limit is the requested number of selected objects, 0 for all.
	Limit int64

	env      *Env
	request  request
	selector objects.Selector
	narrowed narrowed
	past     past
	release  func()      // nil: no place is held
	span     *trace.Span // until Served or Close
}

// narrowed is the part of a list from memory that may be selected. The zero value is all of its
// range.
type narrowed struct {
	// nil: the request is not for a whole shard, or its shard has no tree
	shard *index.ShardVersion
	plan  *index.Plan // nil: all objects of the range are candidates
	// candidates of the plan that an estimate has found; nil before the first one
	known    *index.Known
	declared *index.Declared // nil: upstream uses no index
}

// past is a list that is read from etcd. The zero value is one from memory.
type past struct {
	entries      *etcdread.Range
	inconsistent bool  // memory has the revision too, and may be wrong
	err          error // see Read.Err
}

// Plan returns the indexes that find the candidates, nil if all objects of the range are such.
func (r *Read) Plan() *index.Plan { return r.narrowed.plan }

// Shard returns the selected part of the objects, nil if the request is not for a whole shard.
func (r *Read) Shard() *index.ShardVersion { return r.narrowed.shard }

// FromEtcd reports whether the revision is read from etcd during the walk: it is older than memory,
// or the history in memory is inconsistent (Resource.Inconsistent). Runs can then fail (see Err),
// entries that memory does not have are new objects, and a second walk may read etcd again.
func (r *Read) FromEtcd() bool { return r.past.entries != nil }

// Runs yields the entries of the range in key order, leaf by leaf, before selection. For a request
// with a selector see Candidates.
func (r *Read) Runs() iter.Seq[mirror.Run] {
	if r.past.entries != nil {
		return r.past.entries.Runs()
	}
	return r.Objects().Runs(r.Start, r.End)
}

// Objects returns the cached objects at the revision: the snapshot, or the selected part of it if a
// shard selector is the only selector. It is not limited to the range of the list, and empty if
// the list is FromEtcd.
func (r *Read) Objects() Objects {
	if r.narrowed.shard != nil {
		return r.narrowed.shard
	}
	return r.Snapshot
}

// Close ends the list. It must not be used afterwards.
func (r *Read) Close() {
	r.endSpan()
	if r.release != nil {
		r.release()
		r.release = nil
	}
}

func (r *Read) endSpan() {
	r.span.End()
	r.span = nil
}

// Candidates yields, in key order, a superset of the selected entries: those that the selector's
// indexes select if there are any, else all of Runs.
func (r *Read) Candidates() iter.Seq[*mirror.Entry] {
	switch {
	case r.past.entries != nil:
		return func(yield func(*mirror.Entry) bool) {
			for run := range r.past.entries.Runs() {
				for _, e := range run.Items() {
					if !yield(e) {
						return
					}
				}
			}
		}
	case r.narrowed.known != nil:
		return r.narrowed.known.Candidates(r.narrowed.plan, r.Snapshot, r.End)
	case r.narrowed.plan != nil:
		return r.narrowed.plan.Candidates(r.Snapshot, r.Start, r.End)
	}
	return r.Objects().All(r.Start, r.End)
}

// Selecting is Candidates for a loop that selects and does not wait for a client. It yields the
// processor to short requests periodically while other lists are in flight.
func (r *Read) Selecting() iter.Seq[*mirror.Entry] {
	if r.past.entries != nil {
		return r.Candidates() // waits for etcd
	}
	return listadmission.Interruptible(r.Candidates())
}

// Count returns the number of entries of Runs, which is that of the objects if the request is not
// Selective. Cost is O(log n).
func (r *Read) Count() int {
	if r.past.entries != nil {
		return r.past.entries.Count()
	}
	n, _ := r.Objects().Count(r.Start, r.End)
	return n
}

// ShardSelector returns the request's shard selector in the form that list metadata has, "" if
// there is none.
func (r *Read) ShardSelector() string {
	if r.selector.Shard == nil && !r.selector.NeedsObject {
		return ""
	}
	return r.selector.Predicate.ShardSelector.String()
}

// MoreAfter reports whether a full page, the last object of which has the key, is followed by
// another. As upstream does, it counts entries that the request does not select: all of the range
// or, where upstream uses a declared index, those of the index. Not for a list FromEtcd. Cost is
// O(log n), with a declared index that of finding its next entry.
func (r *Read) MoreAfter(ctx context.Context, key string) bool {
	start := key + "\x00"
	if r.narrowed.declared != nil {
		return r.narrowed.declared.Any(ctx, r.narrowed.plan, r.selector.Generation, r.Snapshot, start, r.End)
	}
	n, _ := r.Snapshot.Count(start, r.End)
	return n > 0
}

// CountsMore reports whether the caller has to call MoreAfter after a full page: not each entry of
// the range is a candidate.
func (r *Read) CountsMore() bool {
	return r.narrowed.shard != nil || r.narrowed.plan != nil || r.narrowed.declared != nil
}

// estimate returns an upper bound of the number of objects up to most; it may return more.
// Candidates that it finds are not searched again.
func (r *Read) estimate(most int) int {
	n := r.Count()
	if r.narrowed.plan == nil {
		return n
	}
	if r.narrowed.known == nil {
		r.narrowed.known = r.narrowed.plan.Known(r.Snapshot, r.Start, r.End, most)
	}
	return min(n, r.narrowed.known.N)
}

// Selective reports whether the caller has to filter candidates with Matches.
func (r *Read) Selective() bool { return !r.selector.All && r.narrowed.shard == nil }

// Matches reports whether the request selects the object of a candidate. The object is decoded if
// its labels and fields are not cached; the error is a decoding error.
func (r *Read) Matches(ctx context.Context, e *mirror.Entry) (bool, error) {
	if r.narrowed.plan != nil && r.narrowed.plan.Exact() {
		return true, nil
	}
	return r.selector.Matches(ctx, e)
}

// NextPage returns the continue token for the page after the key last, which is the last object of
// the current page, and the number of remaining objects if it is known, or "" and nil on the last
// page. more reports whether there are candidates after last; count is Count. Error: 429 if the
// token cannot be sealed.
func (r *Read) NextPage(ctx context.Context, last string, count int, more bool) (token string, remaining *int64, err error) {
	if r.narrowed.shard != nil {
		count, _ = r.Snapshot.Count(r.Start, r.End) // as upstream, count the entries read
	}
	token, remaining, err = storage.PrepareContinueToken(last, r.request.scope, r.Rev, int64(count), more, r.request.opts)
	if err == nil && token != "" {
		token, err = r.env.Pages.Seal(ctx, r.request.scope, token)
	}
	return token, remaining, err
}
