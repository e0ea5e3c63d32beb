package kubestorage

import (
	"context"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// Decoded objects are kept for readers that need them again and again: tables, and
// readers in the process that LIST. They take a share of the budget at most, because they
// are several times as large as their bytes and the collector has to follow their pointers.
const (
	objectShare = 4
	// objectFactor estimates the memory of a decoded object from its stored size, and
	// objectBase what it takes beside that (k/k#142062: 5.2 times for unstructured objects).
	objectFactor = 4
	objectBase   = 1024
)

// object is kept on an entry: the decoded object, which nobody writes.
type object struct{ block *block }

// Retired implements mirror.Retirer.
func (o *object) Retired() { o.block.unref() }

// shared returns the entry's object, decoded once for all readers while there is
// room. Do not write to what it points to.
func (g *generation) shared(ctx context.Context, e *mirror.Entry) (runtime.Object, error) {
	old, _ := e.Memo(g.objects).(*object)
	if old != nil {
		if kept := old.block.load(g.view.budget.now()); kept != nil {
			return kept.object.(runtime.Object), nil
		}
	}
	obj, err := g.decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	if e.Foreign() {
		return obj, nil
	}
	if k := g.view.budget.addObject(obj, objectFactor*e.Size()+objectBase, g.objects); k != nil {
		var before any
		if old != nil {
			before = old
		}
		if !e.SwapMemo(g.objects, before, &object{k}) {
			k.unref()
		}
		if g.ended.Load() {
			e.DropClosed() // dropClosed may have been here before
		}
	}
	return obj, nil
}
