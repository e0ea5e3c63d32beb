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
func (v *view) shared(ctx context.Context, e *mirror.Entry) (runtime.Object, error) {
	old, _ := e.Memo(v.objects).(*object)
	if old != nil {
		if kept := old.block.load(v.budget.now()); kept != nil {
			return kept.object.(runtime.Object), nil
		}
	}
	obj, err := v.decode(ctx, e, e.ModRevision())
	if err != nil {
		return nil, err
	}
	if e.Foreign() {
		return obj, nil
	}
	if k := v.budget.addObject(obj, objectFactor*e.Size()+objectBase); k != nil {
		var before any
		if old != nil {
			before = old
		}
		if !e.SwapMemo(v.objects, before, &object{k}) {
			k.unref()
		}
	}
	return obj, nil
}
