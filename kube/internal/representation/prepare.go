package representation

import (
	"context"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// encoders bounds the concurrent helpers of all readers that decode and encode.
var encoders = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))

// Prepare makes the missing items of all runs, on several processors, and returns their size in
// bytes, or their compressed size if deflated. Afterwards the runs can be written without an error,
// unless the block cache is full. Errors are those of Item.
func (p *Representation) Prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool) (int64, error) {
	return p.prepare(ctx, all, deflated, p.AppendRun)
}

func (p *Representation) prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool, appendRun func(context.Context, *Spans, mirror.Run) error) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	x := &preparation{rep: p, ctx: ctx, cancel: cancel, deflated: deflated, appendRun: appendRun}
	x.runs(all)
	x.helpers.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return x.total.Load(), nil
}

// preparation makes the missing items of the runs of one list, on the goroutine of the reader and
// on helpers.
type preparation struct {
	rep       *Representation
	ctx       context.Context
	cancel    context.CancelCauseFunc // ends the preparation with an error
	deflated  bool                    // compressed runs will be written
	appendRun func(context.Context, *Spans, mirror.Run) error

	total   atomic.Int64 // bytes
	full    atomic.Bool  // the block cache has no room for more compressed runs
	helpers sync.WaitGroup
}

// runs prepares the runs until the first error. It returns when there are no more runs; helpers may
// still be running.
func (x *preparation) runs(runs iter.Seq[mirror.Run]) {
	var work chan mirror.Run // to helpers, once there are items to make
	defer func() {           // after a panic as well
		if work != nil {
			close(work)
		}
	}()
	var own Spans
	for r := range runs {
		if x.ctx.Err() != nil {
			break
		}
		if n, ok := x.rep.prepared(r, x.deflated); ok {
			x.total.Add(n)
			continue
		}
		if work == nil {
			work = make(chan mirror.Run)
			x.startHelpers(work)
		}
		select {
		case work <- r:
		default:
			x.prepareRun(r, &own)
		}
	}
}

// startHelpers starts a helper for each other processor, as far as encoders allows. They end when
// runs is closed.
func (x *preparation) startHelpers(runs <-chan mirror.Run) {
	for range runtime.GOMAXPROCS(0) - 1 {
		select {
		case encoders <- struct{}{}:
		default:
			// other readers use all of them, perhaps for long: this reader works alone (I9)
			continue
		}
		x.helpers.Go(func() {
			defer func() { <-encoders }()
			var spans Spans
			for r := range runs {
				if err := flight.RecoverPanic(func() error { x.prepareRun(r, &spans); return nil }); err != nil {
					x.cancel(err)
				}
			}
		})
	}
}

// prepareRun prepares one run. An error ends the preparation. It may be called concurrently.
func (x *preparation) prepareRun(r mirror.Run, spans *Spans) {
	n, err := x.encodeRun(r, spans)
	if err != nil {
		x.cancel(err)
	}
	x.total.Add(n)
}

// encodeRun makes the missing items of a run, compressed or not, and returns their size.
func (x *preparation) encodeRun(r mirror.Run, spans *Spans) (n int64, err error) {
	p := x.rep
	if x.deflated && p.worthApart(r) && !x.full.Load() {
		run, err := p.Deflated(x.ctx, r)
		if err != nil {
			return 0, err
		}
		if !p.KeepsDeflated(r) {
			x.full.Store(true)
		}
		return run.Len, nil
	}
	spans.Reset()
	if p.Large(r) {
		return p.prepareLarge(x.ctx, r, spans)
	}
	if err := x.appendRun(x.ctx, spans, r); err != nil {
		return 0, err
	}
	for _, s := range spans.All {
		n += int64(len(s))
	}
	return n, nil
}

// prepareLarge makes the missing items of a run one by one, and returns the size of all items.
func (p *Representation) prepareLarge(ctx context.Context, r mirror.Run, spans *Spans) (n int64, err error) {
	for _, e := range r.Items() {
		item, err := p.ItemIn(ctx, e, &spans.buf)
		if err != nil {
			return 0, err
		}
		n += int64(len(item))
	}
	if r.Whole() {
		p.setLeafItems(r.Leaf, &leafItems{bytes: n})
	}
	return n, nil
}

// worthApart estimates whether a run is worth being compressed on its own.
func (p *Representation) worthApart(r mirror.Run) bool {
	return r.Whole() && gzipjoin.WorthApart(p.estimate(r))
}

// Keeps reports whether all items of the run are cached, so that AppendRun only loads them.
func (p *Representation) Keeps(r mirror.Run) bool {
	if !r.Whole() {
		for _, e := range r.Items() {
			if it, _ := e.Memos().Get(p.memoKey).(*item); it.load(blockcache.Unread) == nil && !it.canSplice() {
				return false
			}
		}
		return true
	}
	kept := p.itemsOf(r.Leaf)
	if kept == nil || len(kept.parts) == 0 {
		return false
	}
	for i := range kept.parts {
		if kept.parts[i].block.Load(blockcache.Unread) == nil {
			return false
		}
	}
	return true
}

// KeepsDeflated reports whether the compressed run is cached.
func (p *Representation) KeepsDeflated(r mirror.Run) bool {
	_, ok := p.keptDeflated(r.Leaf, asItems)
	return ok
}

// prepared returns the size of a run if it is completely cached.
func (p *Representation) prepared(r mirror.Run, deflated bool) (int64, bool) {
	if p.varies.Load() && !p.Keeps(r) {
		return 0, false
	}
	if deflated && p.worthApart(r) {
		run, ok := p.keptDeflated(r.Leaf, asItems)
		return run.Len, ok
	}
	return p.Size(r)
}
