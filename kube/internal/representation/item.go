package representation

import (
	"bytes"
	"context"
	"slices"

	apiruntime "k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// item is the memo of an entry: a part of a block, while it is cached, and whether the item can be
// spliced after its eviction.
type item struct {
	block    *blockcache.Block // nil: there was no room
	from, to uint32
	splices  bool
}

// load returns the item's bytes, nil if they are gone.
func (i *item) load(now uint32) []byte {
	if i == nil || i.block == nil {
		return nil
	}
	if k := i.block.Load(now); k != nil {
		return k.Data[i.from:i.to]
	}
	return nil
}

// canSplice reports whether the item is known to splice.
func (i *item) canSplice() bool { return i != nil && i.splices }

// unref is called when the entry no longer refers to the item.
func (i *item) unref() {
	if i != nil && i.block != nil {
		i.block.Unref()
	}
}

// Superseded implements memo.Superseder: the entry was replaced.
func (i *item) Superseded() { i.unref() }

// Item returns the entry's object in its form in a list. The bytes are shared: do not write to
// them. Cost is a few loads if they are cached, a copy if they can be spliced, else decoding and
// encoding the object. Errors are those of decoding it, and of the encoder.
func (p *items) Item(ctx context.Context, e *mirror.Entry) ([]byte, error) {
	var own []byte
	return p.ItemIn(ctx, e, &own)
}

// ItemIn is Item for a caller that needs the bytes briefly: a spliced item is put into buf, which
// the caller reuses.
func (p *items) ItemIn(ctx context.Context, e *mirror.Entry, buf *[]byte) ([]byte, error) {
	old, _ := e.Memos().Get(p.memoKey).(*item)
	if data := old.load(p.blocks.Now()); data != nil {
		return data, nil
	}
	if old.canSplice() {
		*buf = p.appendSpliced(slices.Grow((*buf)[:0], int(old.to-old.from)), e)
		return *buf, nil
	}
	data, err := p.newItem(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	if p.splices(e, data) {
		p.keep(e, old, &item{to: uint32(len(data)), splices: true})
		return data, nil
	}
	if e.Detached() {
		return data, nil
	}
	if k := p.blocks.Add(blockcache.Payload{Data: data}, int64(cap(data)), p.memoKey); k != nil {
		p.keep(e, old, &item{block: k, to: uint32(len(data))})
		k.Unref()
	}
	return data, nil
}

// ItemSize returns the number of bytes of ItemIn, without copying an item that can be spliced. It
// encodes an item that is not known, and returns its errors.
func (p *items) ItemSize(ctx context.Context, e *mirror.Entry, buf *[]byte) (int, error) {
	if it, _ := e.Memos().Get(p.memoKey).(*item); it.canSplice() && it.block == nil {
		return int(it.to - it.from), nil
	}
	data, err := p.ItemIn(ctx, e, buf)
	return len(data), err
}

// keep makes the entry refer to a part of a block, unless another reader was first.
func (p *items) keep(e *mirror.Entry, old, it *item) {
	if it.block != nil {
		it.block.Ref()
	}
	if blockcache.SwapMemo(e, p.memoKey, old, it) {
		old.unref()
	} else {
		it.unref()
	}
	p.gen.DropIfEnded(e)
}

// splices reports whether splicing the stored value of the entry gives the encoded item. It does
// not if the object is stored in another version, by a release with other fields or defaults, or
// encrypted.
func (p *items) splices(e *mirror.Entry, encoded []byte) bool {
	if p.format.Splice == nil {
		return false
	}
	buf := scratch.Get().(*[]byte)
	defer scratch.Put(buf)
	data, ok := p.splice((*buf)[:0], e)
	*buf = data[:0]
	return ok && bytes.Equal(data, encoded)
}

// appendSpliced appends the item of an entry that is known to splice.
func (p *items) appendSpliced(dst []byte, e *mirror.Entry) []byte {
	dst, _ = p.splice(dst, e)
	return dst
}

// splice appends the item that splicing makes of the stored value; see Splicer.
func (p *items) splice(dst []byte, e *mirror.Entry) ([]byte, bool) {
	value := values.Get().(*[]byte)
	defer values.Put(value)
	return p.format.Splice(dst, e.ValueIn(value), e.ModRevision())
}

// newItem returns the item of an entry with the resource version rev, in memory of its size. Errors
// are those of Item.
func (p *items) newItem(ctx context.Context, e *mirror.Entry, rev mirror.Revision) ([]byte, error) {
	buf := scratch.Get().(*[]byte)
	data, err := p.appendItem(ctx, (*buf)[:0], e, rev)
	own := slices.Clip(bytes.Clone(data))
	if cap(data) <= 16*blockBytes {
		*buf = data[:0]
		scratch.Put(buf)
	}
	if err != nil {
		return nil, err
	}
	return own, nil
}

// appendItem appends the item of an entry with the resource version rev. Errors are those of Item.
func (p *items) appendItem(ctx context.Context, dst []byte, e *mirror.Entry, rev mirror.Revision) ([]byte, error) {
	if whole := p.format.Whole; whole != nil && rev == e.ModRevision() {
		known, _ := e.Memos().Get(whole.memoKey).(*item)
		if data := known.load(p.blocks.Now()); data != nil {
			if cut, ok := p.format.Cut(dst, data); ok {
				return cut, nil
			}
		}
	}
	if p.format.Transcode == nil {
		obj, err := p.gen.Decode(ctx, e, rev)
		if err != nil {
			return dst, err
		}
		return p.format.Encode(dst, obj)
	}
	value := values.Get().(*[]byte)
	defer values.Put(value)
	data, err := p.gen.Stored(ctx, e, value)
	if err != nil {
		return dst, err
	}
	if item, ok := p.format.Transcode(dst, data, rev); ok {
		return item, nil
	}
	obj, err := p.gen.DecodeStored(ctx, e, data, rev)
	if err != nil {
		return dst, err
	}
	return p.format.Encode(dst, obj)
}

// unmanaged is the name of the objects of Unmanaged.
type unmanaged struct{}

// Unmanaged returns a function that returns the objects of entries, without managed fields where
// they can be cut out of the stored value: they are half of many objects, and no table shows them.
// If shared is set, the objects are cached: do not write to them. Errors are those of decoding.
func (p *items) Unmanaged(shared bool) func(context.Context, *mirror.Entry) (any, error) {
	if shared {
		return p.gen.DecodedBy(unmanaged{}, decodeUnmanaged).Loop()
	}
	return func(ctx context.Context, e *mirror.Entry) (any, error) { return decodeUnmanaged(p.gen, ctx, e) }
}

// decodeUnmanaged is the objects.Decoder of Unmanaged.
func decodeUnmanaged(gen *objects.Generation, ctx context.Context, e *mirror.Entry) (apiruntime.Object, error) {
	value, buf := values.Get().(*[]byte), scratch.Get().(*[]byte)
	defer values.Put(value)
	defer scratch.Put(buf)
	data, err := gen.Stored(ctx, e, value)
	if err != nil {
		return nil, err
	}
	cut, ok := cutStored((*buf)[:0], data)
	if *buf = cut[:0]; ok {
		data = cut
	}
	return gen.DecodeStored(ctx, e, data, e.ModRevision())
}
