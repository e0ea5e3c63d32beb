package representation

import (
	"context"
	"slices"
	"sync/atomic"

	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// eventItem is the memo of an event: an item that is made by its first reader
// (eventItems.lazy).
type eventItem struct {
	data atomic.Pointer[[]byte]
	// modified and other are the compressed frames of the event, as MODIFIED and as the other type
	// in which the item is sent.
	modified, other atomic.Pointer[Frame]
}

// lazy returns the item, made once for all readers; concurrent readers wait, each as long as its
// own context lasts. After a failure the next reader tries again.
func (p *eventItems) lazy(ctx context.Context, i *eventItem, encode func(ctx context.Context) ([]byte, error)) ([]byte, error) {
	if data := i.data.Load(); data != nil {
		return *data, nil
	}
	data, _, err := p.encoding.Do(ctx, i, func() ([]byte, error) {
		if data := i.data.Load(); data != nil { // made since the first check
			return *data, nil
		}
		ctx, cancel := context.WithTimeout(ctx, objects.DecodeTimeout)
		defer cancel()
		data, err := encode(ctx)
		if err != nil {
			return nil, err
		}
		i.data.Store(&data)
		return data, nil
	})
	return data, err
}

// ItemAfter returns the item of the object after the event, made once for all watchers and cached
// while the event is among the newest. The bytes are shared: do not write to them. Errors are those
// of Item.
func (p *eventItems) ItemAfter(ctx context.Context, ev *mirror.Event) ([]byte, error) {
	return p.lazy(ctx, p.eventItem(p.items.memoKey, ev, ev.Entry), func(ctx context.Context) ([]byte, error) {
		if p.items.format.Transcode != nil {
			return p.items.Item(ctx, ev.Entry)
		}
		obj, err := p.items.gen.ObjectAfterIfWanted(ctx, ev)
		if err != nil {
			return nil, err
		}
		if obj == nil {
			return p.items.Item(ctx, ev.Entry)
		}
		data, err := p.items.format.Encode(nil, obj)
		return slices.Clip(data), err
	})
}

// ItemBefore returns the item of the object before the event with the revision of the event, for a
// DELETED event. Otherwise it is like ItemAfter.
func (p *eventItems) ItemBefore(ctx context.Context, ev *mirror.Event) ([]byte, error) {
	return p.lazy(ctx, p.eventItem(p.deletedItemKey, ev, ev.Prev), func(ctx context.Context) ([]byte, error) {
		return p.items.newItem(ctx, ev.Prev, ev.Rev)
	})
}

// DeflatedEvent returns the compressed frame of an event with the type t, made once for all
// watchers and cached as long as its item. Errors are those of Item.
func (p *eventItems) DeflatedEvent(ctx context.Context, ev *mirror.Event, t watch.EventType, frame Framer) (*Frame, error) {
	memoKey, e, item := p.items.memoKey, ev.Entry, p.ItemAfter
	if t == watch.Deleted {
		memoKey, e, item = p.deletedItemKey, ev.Prev, p.ItemBefore
	}
	kept := p.eventItem(memoKey, ev, e)
	cached := &kept.other
	if t == watch.Modified {
		cached = &kept.modified
	}
	if f := cached.Load(); f != nil {
		return f, nil
	}
	data, err := item(ctx, ev)
	if err != nil {
		return nil, err
	}
	f, _, err := p.framing.Do(ctx, cached, func() (*Frame, error) {
		if f := cached.Load(); f != nil { // made since the first check
			return f, nil
		}
		framed, size := frame(nil, t, data)
		f := &Frame{Segment: gzipjoin.Compress(nil, framed), Size: size}
		cached.Store(f)
		return f, nil
	})
	return f, err
}

func (p *eventItems) eventItem(memoKey *memo.Key, ev *mirror.Event, e *mirror.Entry) *eventItem {
	for {
		if i, ok := ev.Memos().Get(memoKey).(*eventItem); ok {
			return i
		}
		i := &eventItem{}
		if ev.Memos().Swap(memoKey, nil, i) {
			p.cached.Add(memoKey, ev, i, e.Size()+256)
			return i
		}
	}
}
