package representation

import (
	"context"
	"iter"
	"runtime"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/mirror"
)

// encoders bounds the concurrent helpers of all readers that decode and encode.
var encoders = make(chan struct{}, max(1, runtime.GOMAXPROCS(0)))

// Prepare makes the missing items of all runs, compressed or not, on several processors, and
// returns their size in bytes. Afterwards the runs can be written without an error, unless the
// block cache is full. Errors are those of Item.
func (l *List) Prepare(ctx context.Context, all iter.Seq[mirror.Run]) (int64, error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	x := &preparation{list: l, ctx: ctx, cancel: cancel}
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
	list   *List
	ctx    context.Context
	cancel context.CancelCauseFunc // ends the preparation with an error

	total   atomic.Int64 // bytes
	full    atomic.Bool  // the block cache has no room for more compressed runs
	helpers sync.WaitGroup
}

// runs prepares the runs until the first error. It returns when there are no more runs; helpers may
// still be running.
func (x *preparation) runs(runs iter.Seq[mirror.Run]) {
	var work chan decided // to helpers, once there are items to make
	defer func() {        // after a panic as well
		if work != nil {
			close(work)
		}
	}()
	var own Spans
	for r := range runs {
		if x.ctx.Err() != nil {
			break
		}
		how := x.list.decide(r)
		if n, ok := x.list.prepared(r, how); ok {
			x.total.Add(n)
			continue
		}
		if work == nil {
			work = make(chan decided)
			x.startHelpers(work)
		}
		select {
		case work <- decided{r, how}:
		default:
			x.prepareRun(decided{r, how}, &own)
		}
	}
}

// startHelpers starts a helper for each other processor, as far as encoders allows. They end when
// runs is closed.
func (x *preparation) startHelpers(runs <-chan decided) {
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

// decided is a run, and how its bytes come.
type decided struct {
	mirror.Run
	how delivery
}

// prepareRun prepares one run. An error ends the preparation. It may be called concurrently.
func (x *preparation) prepareRun(r decided, spans *Spans) {
	n, err := x.encodeRun(r, spans)
	if err != nil {
		x.cancel(err)
	}
	x.total.Add(n)
}

// encodeRun makes the missing items of a run, compressed or not, and returns their size.
func (x *preparation) encodeRun(r decided, spans *Spans) (n int64, err error) {
	p := x.list.Rep
	if r.how&deflated != 0 && !x.full.Load() {
		run, err := p.deflatedItems(x.ctx, r.Run)
		if err != nil {
			return 0, err
		}
		if !p.keepsDeflated(r.Run) {
			x.full.Store(true)
		}
		return run.Len, nil
	}
	if n, _ := p.estimate(r.Run); n > largeRun {
		return p.prepareLarge(x.ctx, r.Run, spans)
	}
	spans.Reset()
	if err := x.list.append(x.ctx, spans, r.Run); err != nil {
		return 0, err
	}
	for _, s := range spans.All {
		n += int64(len(s))
	}
	return n, nil
}

// prepared returns the size of a run of which nothing must be made before it is measured: its
// compressed form is cached, or the size of its items stays the same when they are made again.
func (l *List) prepared(r mirror.Run, how delivery) (n int64, ok bool) {
	if how&deflated != 0 {
		frames, ok := l.Rep.keptDeflated(r.Leaf, asItems)
		return frames.Len, ok
	}
	if n, ok = l.Rep.size(r); ok && l.Rep.varies.Load() {
		ok = l.Rep.keeps(r)
	}
	return n, ok
}

// prepareLarge makes the missing items of a run one by one, and returns the size of all items.
func (p *leaves) prepareLarge(ctx context.Context, r mirror.Run, spans *Spans) (n int64, err error) {
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
