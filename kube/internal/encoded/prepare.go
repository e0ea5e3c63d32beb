package encoded

import (
	"context"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/guard"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// encoders bounds the helpers of all readers that decode and encode at the same time.
var encoders = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))

// Prepare makes what is missing of the items of all runs, on several processors, and
// returns their size in bytes; compressed, if that is what will be written of them.
// Afterwards the runs can be written without an error, unless the block cache is full.
// Errors are those of Item.
func (p *Representation) Prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool) (int64, error) {
	return p.prepare(ctx, all, deflated, p.AppendRun)
}

func (p *Representation) prepare(ctx context.Context, all iter.Seq[mirror.Run], deflated bool, appendRun func(context.Context, *Spans, mirror.Run) error) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var total atomic.Int64
	var full atomic.Bool // there is no room for more that is compressed
	var wg sync.WaitGroup
	prepare := func(r mirror.Run, spans *Spans) {
		if deflated && p.worthApart(r) && !full.Load() {
			run, err := p.Deflated(ctx, r)
			if err != nil {
				cancel(err)
				return
			}
			if !p.KeepsDeflated(r) {
				full.Store(true)
			}
			total.Add(run.Len)
			return
		}
		spans.Reset()
		if p.Large(r) {
			n, err := p.prepareLarge(ctx, r, spans)
			if err != nil {
				cancel(err)
			}
			total.Add(n)
			return
		}
		if err := appendRun(ctx, spans, r); err != nil {
			cancel(err)
			return
		}
		for _, s := range spans.All {
			total.Add(int64(len(s)))
		}
	}
	var work chan mirror.Run // to helpers, once there is something to be made
	defer func() {           // after a panic
		if work != nil {
			close(work)
		}
	}()
	var own Spans
	for r := range all {
		if ctx.Err() != nil {
			break
		}
		if n, ok := p.prepared(r, deflated); ok {
			total.Add(n)
			continue
		}
		if work == nil {
			runs := make(chan mirror.Run) // a helper may begin when work is nil again
			work = runs
			for range runtime.GOMAXPROCS(0) - 1 {
				select {
				case encoders <- struct{}{}:
				default:
					continue // others have them all, perhaps for long: this reader works alone (I9)
				}
				wg.Go(func() {
					defer func() { <-encoders }()
					var spans Spans
					for r := range runs {
						if err := guard.Call(func() error { prepare(r, &spans); return nil }); err != nil {
							cancel(err)
						}
					}
				})
			}
		}
		select {
		case work <- r:
		default:
			prepare(r, &own)
		}
	}
	if work != nil {
		close(work)
		work = nil
	}
	wg.Wait()
	if err := context.Cause(ctx); err != nil {
		return 0, err
	}
	return total.Load(), nil
}

// prepareLarge makes what is missing of a run one by one, and returns the size of all items.
func (p *Representation) prepareLarge(ctx context.Context, r mirror.Run, spans *Spans) (n int64, err error) {
	for _, e := range r.Items() {
		item, err := p.ItemIn(ctx, e, &spans.buf)
		if err != nil {
			return 0, err
		}
		n += int64(len(item))
	}
	if r.Whole() {
		p.setRun(r.Leaf, &run{slot: p.slot, bytes: n})
	}
	return n, nil
}

// worthApart estimates whether a run is worth being compressed on its own.
func (p *Representation) worthApart(r mirror.Run) bool {
	return r.Whole() && gzipjoin.WorthApart(p.estimate(r))
}

// Keeps reports whether AppendRun has nothing to make.
func (p *Representation) Keeps(r mirror.Run) bool {
	if !r.Whole() {
		for _, e := range r.Items() {
			if it, _ := e.Memo(p.slot).(*item); it.load(blockcache.Unread) == nil && !it.canSplice() {
				return false
			}
		}
		return true
	}
	kept := leafRuns(r.Leaf).find(p.slot)
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

// KeepsDeflated reports whether Deflated has nothing to do.
func (p *Representation) KeepsDeflated(r mirror.Run) bool {
	_, ok := p.keptDeflated(r.Leaf, asItems)
	return ok
}

// prepared returns the size of a run that has nothing left to be made.
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
