package watch

import (
	"context"
	"fmt"
	"iter"
	"weak"

	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/trace"
	"github.com/stratakube/strata/mirror"
)

// initial is the initial events of a watch that begins at the latest state. The zero value is none.
type initial struct {
	found   []*mirror.Entry                  // the first ones: from an index, or all from etcd
	read    *initialRead                     // nil without a selector, and after the last one
	shard   weak.Pointer[index.ShardVersion] // the selected part, while it is cached
	counted bool                             // entries of other shards are counted
	from    string                           // the key to continue at
	at      mirror.Revision
	version weak.Pointer[mirror.Snapshot] // at that revision, until it is collected
	runs    []mirror.Run
	marked  bool // a bookmark closes them
}

// initialRead is the state of the initial events of a watch with a selector: of their selection
// with indexes, and for the metrics of plans and the trace. nil is that of a watch without a
// selector; its methods do nothing.
type initialRead struct {
	plan               string          // in the metrics
	exact              bool            // the watch selects all of initial.found, and no others
	sifting            bool            // the entries after initial.found are selected with indexes
	part               []*mirror.Entry // the last part of them
	examined, returned int
	span               *trace.Span
}

// more reports whether entries after initial.found are selected with indexes.
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

// beginSelected begins the initial events of a stream with a selector. A watch that counts the
// entries of other shards examines all objects of its range.
func (st *Stream) beginSelected(r *list.Read) {
	if st.scope.selector.All {
		return
	}
	ctx, plan := st.life.ctx, r.Plan()
	i := &initialRead{plan: r.PlanName()}
	st.initial.read = i
	_, i.span = trace.Start(ctx, trace.InitialEvents, st.env.Lists.View.Kind().GroupResource)
	switch {
	case plan == nil:
		return
	case st.scope.selector.Shard != nil:
		i.plan = metrics.PlanScan
		return
	case plan.DemandsValue():
		st.initial.found, i.sifting = few(ctx, r.Candidates())
		i.exact = plan.Exact() && !i.sifting
	default:
		i.sifting = true
	}
	if n := len(st.initial.found); n > 0 {
		st.initial.from = st.initial.found[n-1].Key() + "\x00"
	}
	if len(st.initial.found) == 0 && !i.sifting {
		st.phase = announcing
	}
}

// endInitial reports the plan of the initial events and the number of objects, once: they were
// delivered, or the stream ends before.
func (st *Stream) endInitial() {
	i := st.initial.read
	if i == nil {
		return
	}
	st.initial.read = nil
	st.env.Lists.Metrics.Selected(i.plan, i.examined, i.returned)
	i.span.Filtered(i.returned, true, i.plan, i.examined)
	i.span.End()
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
	plan := st.env.Lists.Selections.Plan(st.life.ctx, &st.scope.selector, snap, st.initial.from, st.scope.end)
	if plan == nil {
		return delivery{}, false
	}
	i := st.initial.read
	i.part = i.part[:0]
	for e := range plan.Candidates(snap, st.initial.from, st.scope.end) {
		if i.part = append(i.part, e); len(i.part) == initialAtOnce {
			break
		}
	}
	st.env.Metrics.Started(len(i.part), 0)
	if len(i.part) == initialAtOnce {
		st.initial.from = i.part[initialAtOnce-1].Key() + "\x00"
	} else {
		st.phase = announcing
	}
	return delivery{entries: i.part}, true
}

// nextInitial returns the next part of the initial events, an empty batch if there is none. With
// the last one it ends the phase.
func (st *Stream) nextInitial() (delivery, error) {
	if err := st.oneLineage(); err != nil {
		return delivery{}, err
	}
	if st.leaving() { // a bookmark would claim that the list is complete
		return delivery{}, st.drained()
	}
	in := &st.initial
	if len(in.found) > 0 {
		n := min(len(in.found), initialAtOnce)
		b := delivery{entries: in.found[:n]}
		st.env.Metrics.Started(n, 0)
		if in.found = in.found[n:]; len(in.found) == 0 {
			in.found = nil
			if !in.read.more() {
				st.phase = announcing
			}
		}
		return b, nil
	}
	snap, err := st.snapshot()
	if err != nil {
		return delivery{}, st.fail(err)
	}
	if in.read.more() {
		if b, ok := st.sift(*snap); ok {
			return b, nil
		}
	}
	return st.nextRuns(*snap), nil
}

// nextRuns returns the next leaves of the initial events.
func (st *Stream) nextRuns(snap mirror.Snapshot) delivery {
	in := &st.initial
	clear(in.runs)
	in.runs = in.runs[:0]
	n := 0
	defer func() { st.env.Metrics.Started(n, 0) }()
	objects, selected := list.Objects(snap), st.scope.selector.All
	if shard := in.shard.Value(); shard != nil {
		objects, selected = shard, true
	}
	for run := range objects.Runs(in.from, st.scope.end) {
		in.runs = append(in.runs, run)
		items := run.Items()
		if n += len(items); n >= initialAtOnce {
			in.from = items[len(items)-1].Key() + "\x00"
			return delivery{runs: in.runs, selected: selected}
		}
	}
	b := delivery{runs: in.runs, selected: selected}
	in.runs, st.phase = nil, announcing
	return b
}

// snapshot returns the version of the initial events. The stream does not keep it alive between two
// calls, so versions that leave the window are freed. A client that reads in time nearly always
// finds the version still cached, without another materialization.
func (st *Stream) snapshot() (*mirror.Snapshot, error) {
	// After a relist, the history that includes the version may still be being restored.
	if err := st.env.Lists.Memory.WaitHistory(st.life.ctx, st.initial.at); err != nil {
		return nil, err
	}
	oldest, _, err := st.env.Lists.Memory.Oldest()
	if err == nil && oldest > st.initial.at {
		err = fmt.Errorf("%w: initial events are at %d, oldest available %d", mirror.ErrCompacted, st.initial.at, oldest)
	}
	if err != nil {
		return nil, err
	}
	if snap := st.initial.version.Value(); snap != nil {
		return snap, nil
	}
	snap, err := st.env.Lists.Memory.At(st.initial.at)
	if err != nil {
		return nil, err
	}
	st.initial.version = weak.Make(&snap)
	return &snap, nil
}

// initialAtOnce is the number of initial entries per batch, which the stream holds while its client
// reads slowly; up to a leaf of the tree more.
const initialAtOnce = 256
