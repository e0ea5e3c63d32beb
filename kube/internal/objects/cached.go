package objects

import (
	"context"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// Decoded objects are cached for readers that need them repeatedly: tables, and typed LISTs in the
// process.
const (
	// objectFactor estimates the memory of a decoded object from its stored size, objectBase its
	// fixed part (k/k#142062: 5.2 times for unstructured objects).
	objectFactor = 4
	objectBase   = 1024
)

// cachedObject is the memo of a decoded object, which is never written.
type cachedObject struct{ block *blockcache.Block }

// Superseded implements memo.Superseder.
func (o *cachedObject) Superseded() { o.block.Unref() }

// Object returns the entry's object, decoded once for all readers while there is room. It is
// shared: do not write to it. now is the time of Blocks, which a loop over many entries reads once
// for some of them. Errors are those of Decode.
func (g *Generation) Object(ctx context.Context, e *mirror.Entry, now uint32) (runtime.Object, error) {
	obj, err := g.cached(ctx, e, now, g.decodedKey, (*Generation).decodeWhole, nil)
	if err != nil {
		return nil, err
	}
	return obj.(runtime.Object), nil
}

// Decoder returns the object of an entry, which the caller owns. Errors are those of Decode.
type Decoder func(g *Generation, ctx context.Context, e *mirror.Entry) (runtime.Object, error)

func (g *Generation) decodeWhole(ctx context.Context, e *mirror.Entry) (runtime.Object, error) {
	return g.Decode(ctx, e, e.ModRevision())
}

// cached returns the object of an entry that convert makes of the decoded one; nil makes none. It
// is the memo of key while there is room.
func (g *Generation) cached(ctx context.Context, e *mirror.Entry, now uint32, key *memo.Key, decode Decoder, convert func(runtime.Object) (any, error)) (any, error) {
	old, _ := e.Memos().Get(key).(*cachedObject)
	if old != nil {
		if kept := old.block.Load(now); kept != nil {
			return kept.Object, nil
		}
	}
	decoded, err := decode(g, ctx, e)
	if err != nil {
		return nil, err
	}
	var obj any = decoded
	if convert != nil {
		if obj, err = convert(decoded); err != nil {
			return nil, err
		}
	}
	if e.Detached() {
		return obj, nil
	}
	if b := g.Blocks().AddObject(obj, objectFactor*e.Size()+objectBase, key); b != nil {
		if !blockcache.SwapMemo(e, key, old, &cachedObject{b}) {
			b.Unref()
		}
		g.DropIfEnded(e)
	}
	return obj, nil
}

// Converted are objects that a reader makes of entries in a way of its own. They are cached as
// those of Object are. Methods may be called concurrently.
type Converted struct {
	g       *Generation
	key     memo.Key
	decode  Decoder
	convert func(runtime.Object) (any, error) // nil: none
}

// Converted returns the objects that convert makes of the decoded ones. name is comparable and has
// one convert.
func (g *Generation) Converted(name any, convert func(runtime.Object) (any, error)) *Converted {
	return g.Derived(name, func() Derived { return &Converted{g: g, decode: (*Generation).decodeWhole, convert: convert} }).(*Converted)
}

// DecodedBy returns the objects that decode makes. name is comparable and has one decode.
func (g *Generation) DecodedBy(name any, decode Decoder) *Converted {
	return g.Derived(name, func() Derived { return &Converted{g: g, decode: decode} }).(*Converted)
}

// Object returns the object of an entry. It is shared: do not write to it. Errors are those of
// decoding it and of the conversion.
func (c *Converted) Object(ctx context.Context, e *mirror.Entry) (any, error) {
	return c.g.cached(ctx, e, c.g.Blocks().Now(), &c.key, c.decode, c.convert)
}

// Loop returns Object for a loop over many entries: it reads the time once.
func (c *Converted) Loop() func(context.Context, *mirror.Entry) (any, error) {
	now := c.g.Blocks().Now()
	return func(ctx context.Context, e *mirror.Entry) (any, error) {
		return c.g.cached(ctx, e, now, &c.key, c.decode, c.convert)
	}
}

// Close implements Derived.
func (c *Converted) Close() { c.key.Close() }

// convertedItem is the memo of a custom resource that was converted to the served version. It
// outlives the deletion of its key, for the DELETED event: a webhook that is down must not delay
// deletions.
type convertedItem struct{ block *blockcache.Block }

// Superseded implements memo.Superseder.
func (c *convertedItem) Superseded() { c.block.Unref() }

// OutlivesDeletion implements memo.DeletionRetainer.
func (c *convertedItem) OutlivesDeletion() {}

// keepConverted caches a custom resource that is stored in another version than it was decoded to:
// a webhook may have converted it, which is slow, and fails when the webhook is down. Each entry is
// converted once for all readers (D2).
func (g *Generation) keepConverted(e *mirror.Entry, stored []byte, obj runtime.Object) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok || e.Detached() {
		return
	}
	old, _ := e.Memos().Get(g.convertedKey).(*convertedItem)
	if old != nil && old.block.Load(blockcache.Unread) != nil {
		return
	}
	if same, known := versionIs(stored, g.view.served, u.GetAPIVersion()); same || !known {
		return
	}
	data, err := u.MarshalJSON()
	if err != nil {
		return
	}
	b := g.Blocks().Add(blockcache.Payload{Data: data}, int64(cap(data)), g.convertedKey)
	if b != nil && !blockcache.SwapMemo(e, g.convertedKey, old, &convertedItem{b}) {
		b.Unref() // another reader was first
	}
	g.DropIfEnded(e)
}

// converted returns the converted custom resource of an entry with the resource version rev, nil if
// it is not cached. The caller owns the object.
func (g *Generation) converted(e *mirror.Entry, rev mirror.Revision) *unstructured.Unstructured {
	c, ok := e.Memos().Get(g.convertedKey).(*convertedItem)
	if !ok {
		return nil
	}
	kept := c.block.Load(g.Blocks().Now())
	if kept == nil {
		return nil
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(kept.Data); err != nil {
		return nil
	}
	u.SetResourceVersion(strconv.FormatInt(rev, 10))
	return u
}
