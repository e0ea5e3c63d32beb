package objects

import (
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
)

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
