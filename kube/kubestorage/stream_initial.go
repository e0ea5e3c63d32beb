package kubestorage

import (
	"context"
	"fmt"
	"iter"
	"weak"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
)

// initialRead is the state of the initial events of a watch with a selector: of their selection
// with indexes, and for the metrics of plans and the trace. nil is that of a watch without a
// selector; its methods do nothing.
type initialRead struct {
	plan               string          // in the metrics
	exact              bool            // the watch selects all of Stream.found, and no others
	sifting            bool            // the entries after Stream.found are selected with indexes
	part               []*mirror.Entry // the last part of them
	examined, returned int
	span               *readSpan
}

// more reports whether entries after Stream.found are selected with indexes.
func (i *initialRead) more() bool { return i != nil && i.sifting }

// add counts entries that were compared with the selector, and those that it selects.
func (i *initialRead) add(examined, returned int) {
	if i != nil {
		i.examined += examined
		i.returned += returned
	}
}

// maxFound bounds the entries that a stream holds until they are delivered. It sifts the rest of
// its range later, some at a time.
const maxFound = 4096

// beginInitial begins the initial events of a stream with a selector. A watch that counts the
// entries of other shards examines all objects of its range.
func (st *Stream) beginInitial(ctx context.Context, r *ListRead) {
	if st.selector.All {
		return
	}
	i := &initialRead{plan: r.planName()}
	st.initial = i
	_, i.span = traceGroup(ctx, spanInitial, st.store.group)
	switch {
	case r.plan == nil:
		return
	case st.selector.Shard != nil:
		i.plan = metrics.PlanScan
		return
	case r.plan.DemandsValue():
		st.found, i.sifting = few(ctx, r.Candidates())
		i.exact = r.plan.Exact() && !i.sifting
	default:
		i.sifting = true
	}
	if n := len(st.found); n > 0 {
		st.from = st.found[n-1].Key() + "\x00"
	}
	st.listing = len(st.found) > 0 || i.sifting
}

// endInitial reports the plan of the initial events and the number of objects, once: they were
// delivered, or the stream ends before.
func (st *Stream) endInitial() {
	i := st.initial
	if i == nil {
		return
	}
	st.initial = nil
	st.store.listMetrics.Selected(i.plan, i.examined, i.returned)
	i.span.filtered(i.returned, true, i.plan, i.examined)
	i.span.end()
}

// few returns the first candidates, up to maxFound, and whether there may be more. It ends early
// with ctx.
func few(ctx context.Context, candidates iter.Seq[*mirror.Entry]) (found []*mirror.Entry, more bool) {
	for e := range candidates {
		if found = append(found, e); len(found) == maxFound || len(found)%64 == 0 && ctx.Err() != nil {
			return found, true
		}
	}
	return found, false
}

// sift returns the next candidates of the initial events, false if the rest of the range has no
// usable index, because it is small or the index was dropped. Each part makes a plan of its own:
// the keys that decrypt values may have been replaced since the last one.
func (st *Stream) sift(snap mirror.Snapshot) (delivery, bool) {
	plan := st.store.selections.Plan(st.ctx, &st.selector, snap, st.from, st.end)
	if plan == nil {
		return delivery{}, false
	}
	i := st.initial
	i.part = i.part[:0]
	for e := range plan.Candidates(snap, st.from, st.end) {
		if i.part = append(i.part, e); len(i.part) == initialAtOnce {
			break
		}
	}
	st.store.watchMetrics.Started(len(i.part), 0)
	if len(i.part) == initialAtOnce {
		st.from = i.part[initialAtOnce-1].Key() + "\x00"
	} else {
		st.listing = false
	}
	return delivery{entries: i.part}, true
}

// nextInitial returns the next part of the initial events, an empty batch after the last or when
// the stream has failed.
func (st *Stream) nextInitial() delivery {
	if len(st.found) > 0 {
		n := min(len(st.found), initialAtOnce)
		b := delivery{entries: st.found[:n]}
		st.store.watchMetrics.Started(n, 0)
		if st.found = st.found[n:]; len(st.found) == 0 {
			st.found, st.listing = nil, st.initial.more()
		}
		return b
	}
	clear(st.runs)
	st.runs = st.runs[:0]
	snap, err := st.snapshot()
	if err != nil {
		st.failed = st.ending(err)
		return delivery{}
	}
	if st.initial.more() {
		if b, ok := st.sift(*snap); ok {
			return b
		}
	}
	n := 0
	defer func() { st.store.watchMetrics.Started(n, 0) }()
	objects, selected := Objects(*snap), st.selector.All
	if shard := st.shard.Value(); shard != nil {
		objects, selected = shard, true
	}
	for run := range objects.Runs(st.from, st.end) {
		st.runs = append(st.runs, run)
		items := run.Items()
		if n += len(items); n >= initialAtOnce {
			st.from = items[len(items)-1].Key() + "\x00"
			return delivery{runs: st.runs, selected: selected}
		}
	}
	b := delivery{runs: st.runs, selected: selected}
	st.listing, st.runs = false, nil
	return b
}

// snapshot returns the version of the initial events. The stream does not keep it alive between two
// calls, so versions that leave the window are freed. A client that reads in time nearly always
// finds the version still cached, without another materialization.
func (st *Stream) snapshot() (*mirror.Snapshot, error) {
	// After a relist, the history that includes the version may still be being restored.
	if err := st.store.resource.WaitHistory(st.ctx, st.at); err != nil {
		return nil, err
	}
	oldest, _, err := st.store.resource.Oldest()
	if err == nil && oldest > st.at {
		err = fmt.Errorf("%w: initial events are at %d, oldest available %d", mirror.ErrCompacted, st.at, oldest)
	}
	if err != nil {
		return nil, err
	}
	if snap := st.version.Value(); snap != nil {
		return snap, nil
	}
	snap, err := st.store.resource.At(st.at)
	if err != nil {
		return nil, err
	}
	st.version = weak.Make(&snap)
	return &snap, nil
}

// initialAtOnce is the number of initial entries per batch, which the stream holds while its client
// reads slowly; up to a leaf of the tree more.
const initialAtOnce = 256
