package kubestorage

import (
	"context"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// deflating is a leaf that one reader compresses. The others that want it meanwhile
// wait, and use what comes out of it, whether or not there was room to keep it: readers
// of the same list would otherwise walk it in step and compress every leaf once each.
type deflating struct {
	done chan struct{} // closed when it is over
	run  gzipjoin.Run
	made bool // otherwise there was an error, or a panic
}

// Deflated returns the items of a whole leaf compressed. It is made once and
// kept while the leaf is part of the newest version and there is room. Errors are
// those of Item.
func (p *Representation) Deflated(ctx context.Context, r mirror.Run) (gzipjoin.Run, error) {
	for {
		if run, ok := p.keptDeflated(r.Leaf); ok {
			return run, nil
		}
		p.mu.Lock()
		d, found := p.deflating[r.Leaf]
		if !found {
			d = &deflating{done: make(chan struct{})}
			p.deflating[r.Leaf] = d
		}
		p.mu.Unlock()
		if !found {
			return p.deflate(ctx, r, d)
		}
		select {
		case <-d.done:
			if d.made {
				return d.run, nil
			}
			// The other's request may have ended, which says nothing about this one.
		case <-ctx.Done():
			return gzipjoin.Run{}, ctx.Err()
		}
	}
}

// deflate compresses a leaf for the readers that wait for d.
func (p *Representation) deflate(ctx context.Context, r mirror.Run, d *deflating) (gzipjoin.Run, error) {
	defer func() {
		p.mu.Lock()
		defer p.mu.Unlock()
		delete(p.deflating, r.Leaf)
		close(d.done)
	}()
	if d.run, d.made = p.keptDeflated(r.Leaf); d.made { // by somebody who has just finished
		return d.run, nil
	}
	// That the items are needed once, to be compressed, is no reason to keep them, or to
	// keep them for longer, unless there is plenty of room.
	var spans Spans
	var ok bool
	if kept := leafRuns(r.Leaf).find(p.slot); kept != nil {
		spans.All, ok = kept.load(nil, unread)
	}
	if !ok {
		if err := p.build(ctx, &spans, r.Leaf, p.budget.roomy()); err != nil {
			return gzipjoin.Run{}, err
		}
	}
	d.run, d.made = gzipjoin.Compress(nil, spans.All...), true
	p.keepDeflated(r.Leaf, d.run)
	return d.run, nil
}

func (p *Representation) keptDeflated(l *mirror.Leaf) (run gzipjoin.Run, ok bool) {
	if kept := leafRuns(l).find(p.slot); kept != nil {
		if k := kept.deflated.Load(); k != nil {
			if payload := k.load(p.budget.now()); payload != nil {
				return payload.object.(gzipjoin.Run), true
			}
		}
	}
	return gzipjoin.Run{}, false
}

func (p *Representation) keepDeflated(l *mirror.Leaf, run gzipjoin.Run) {
	kept := leafRuns(l).find(p.slot)
	if kept == nil {
		return
	}
	if k := p.budget.add(payload{object: run}, int64(cap(run.Deflated))); k != nil {
		if old := kept.deflated.Swap(k); old != nil {
			old.unref()
		}
	}
}
