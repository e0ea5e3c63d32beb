package objects

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
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
	old, _ := e.Memo(g.decodedKey).(*cachedObject)
	if old != nil {
		if kept := old.block.Load(now); kept != nil {
			return kept.Object.(runtime.Object), nil
		}
	}
	obj, err := g.Decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	if e.Detached() {
		return obj, nil
	}
	if b := g.Blocks().AddObject(obj, objectFactor*e.Size()+objectBase, g.decodedKey); b != nil {
		if !blockcache.SwapMemo(e, g.decodedKey, old, &cachedObject{b}) {
			b.Unref()
		}
		g.DropIfEnded(e)
	}
	return obj, nil
}
