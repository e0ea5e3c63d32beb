package representation

import (
	"context"
	"sync"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/flight"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// form is the delivery that a compressed run is for. A list and a watch have different bytes
// between two objects, and a deflated item refers to the items before it by their distance, so
// neither form can be made from the other without compressing it again.
type form int

const (
	asItems  form = iota // in their form in a list
	asFrames             // as the frames of the initial events of a watch

	forms // the number of forms
)

// Framer appends to dst the frame in which a watch sends the object of the item, as an event of the
// type, and returns the size of the event in bytes for the metrics. All calls for one
// representation must give the same result.
type Framer func(dst []byte, t watch.EventType, item []byte) (framed []byte, size int)

// Frames are the items of a leaf as frames of ADDED events, compressed.
type Frames struct {
	gzipjoin.Segment
	Sizes []uint32 // of the events, in key order
}

// Frame is the frame of one event, compressed.
type Frame struct {
	gzipjoin.Segment
	Size int // of the event
}

// deflatingKey identifies one compression in progress.
type deflatingKey struct {
	leaf *leaf
	form form
}

// deflatedItems returns the items of a whole leaf compressed. They are made once and cached while
// the leaf is part of the newest version and there is room. Errors are those of Item.
func (p *leaves) deflatedItems(ctx context.Context, r mirror.Run) (gzipjoin.Segment, error) {
	frames, err := p.deflated(ctx, r, asItems, nil)
	return frames.Segment, err
}

// keepsDeflated reports whether the compressed run is cached.
func (p *leaves) keepsDeflated(r mirror.Run) bool {
	_, ok := p.keptDeflated(r.Leaf, asItems)
	return ok
}

// WorthFrames reports whether the initial events of a run should be sent as DeflatedFrames. Other
// runs have too few bytes, or too many to be held together, or are a part of a leaf.
func (p *leaves) WorthFrames(r mirror.Run) bool {
	n, _ := p.estimate(r)
	return r.Whole() && gzipjoin.WorthApart(n)
}

// DeflatedFrames returns for each of the runs, all of which are WorthFrames, the compressed frames
// of its objects, in the order of runs, appended to dst. Frames are made once and cached as in
// deflatedItems. Missing ones are made on several processors. A run with an object that
// cannot be decoded or encoded has no frames (Len is 0): the caller meets the error again when it
// writes the objects one by one. Error: that of ctx.
func (p *leaves) DeflatedFrames(ctx context.Context, dst []Frames, runs []mirror.Run, frame Framer) ([]Frames, error) {
	from := len(dst)
	var missing []int
	for i, r := range runs {
		frames, ok := p.keptDeflated(r.Leaf, asFrames)
		if dst = append(dst, frames); !ok {
			missing = append(missing, from+i)
		}
	}
	if len(missing) == 0 {
		return dst, nil
	}
	var next atomic.Int64
	work := func() {
		for {
			n := int(next.Add(1)) - 1
			if n >= len(missing) || ctx.Err() != nil {
				return
			}
			i := missing[n]
			_ = flight.RecoverPanic(func() (err error) {
				dst[i], err = p.deflated(ctx, runs[i-from], asFrames, frame)
				return err
			})
		}
	}
	var wg sync.WaitGroup
	for range min(len(missing), cap(encoders)) - 1 {
		select {
		case encoders <- struct{}{}:
			wg.Go(func() {
				defer func() { <-encoders }()
				work()
			})
		default: // other readers use all of them, perhaps for long: this reader works alone (I9)
		}
	}
	work()
	wg.Wait()
	return dst, ctx.Err()
}

// deflated returns the compressed form of a leaf. Concurrent readers wait for the result and use
// it, even if there was no room to cache it: readers of the same list would otherwise walk it in
// step and compress every leaf once each.
func (p *leaves) deflated(ctx context.Context, r mirror.Run, f form, frame Framer) (Frames, error) {
	if frames, ok := p.keptDeflated(r.Leaf, f); ok {
		return frames, nil
	}
	key := deflatingKey{r.Leaf, f}
	frames, _, err := p.deflating.Do(ctx, key, func() (frames Frames, err error) {
		if frames, ok := p.keptDeflated(r.Leaf, f); ok { // by a reader that has just finished
			return frames, nil
		}
		if f == asFrames {
			frames, err = p.deflateFrames(ctx, r, frame)
		} else {
			frames.Segment, err = p.deflateItems(ctx, r)
		}
		if err == nil {
			p.keepDeflated(key, frames)
		}
		return frames, err
	})
	return frames, err
}

// deflateItems compresses the items of a leaf. The items are needed only once: missing ones are
// cached only if less than half of the cache is used, and loading cached ones does not count as a
// read.
func (p *leaves) deflateItems(ctx context.Context, r mirror.Run) (gzipjoin.Segment, error) {
	var spans Spans
	var ok bool
	if kept := p.itemsOf(r.Leaf); kept != nil {
		spans.All, ok = kept.load(nil, blockcache.Unread)
	}
	if !ok {
		if err := p.build(ctx, &spans, r, p.blocks.HalfEmpty()); err != nil {
			return gzipjoin.Segment{}, err
		}
	}
	return gzipjoin.Compress(nil, spans.All...), nil
}

// frameBuffers are buffers for the frames of a leaf before compression.
var frameBuffers = sync.Pool{New: func() any { return new([]byte) }}

// deflateFrames compresses the frames of a leaf; see deflateItems.
func (p *leaves) deflateFrames(ctx context.Context, r mirror.Run, frame Framer) (Frames, error) {
	l := r.Leaf
	buf := frameBuffers.Get().(*[]byte)
	defer func() {
		if cap(*buf) <= 16*blockBytes {
			frameBuffers.Put(buf)
		}
	}()
	framed := (*buf)[:0]
	sizes := make([]uint32, 0, len(l.Items()))
	add := func(item []byte) {
		var size int
		framed, size = frame(framed, watch.Added, item)
		sizes = append(sizes, uint32(size))
	}
	kept := p.itemsOf(l) != nil
	for _, e := range l.Items() {
		it, _ := e.Memos().Get(p.memoKey).(*item)
		data := it.load(blockcache.Unread)
		if kept = kept && data != nil; !kept {
			break
		}
		add(data)
	}
	if !kept {
		framed, sizes = framed[:0], sizes[:0]
		b, _, err := p.buildLeaf(ctx, r, p.blocks.HalfEmpty())
		if err != nil {
			return Frames{}, err
		}
		b.each(add)
	}
	*buf = framed
	return Frames{Segment: gzipjoin.Compress(nil, framed), Sizes: sizes}, nil
}

func (p *leaves) keptDeflated(l *leaf, f form) (frames Frames, ok bool) {
	if kept := p.itemsOf(l); kept != nil {
		if k := kept.deflated[f].Load(); k != nil {
			if payload := k.Load(p.blocks.Now()); payload != nil {
				return payload.Object.(Frames), true
			}
		}
	}
	return Frames{}, false
}

func (p *leaves) keepDeflated(key deflatingKey, frames Frames) {
	kept := p.itemsOf(key.leaf)
	if kept == nil {
		return
	}
	if k := p.blocks.Add(blockcache.Payload{Object: frames}, int64(cap(frames.Deflated)+4*cap(frames.Sizes)), p.memoKey); k != nil {
		if old := kept.deflated[key.form].Swap(k); old != nil {
			old.Unref()
		}
	}
}
