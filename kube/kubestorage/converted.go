package kubestorage

import (
	"encoding/json"
	"strconv"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/mirror"
)

// remember keeps a custom resource that is stored in another version than it was
// decoded to: a webhook may have converted it, which is slow, and fails when the
// webhook is down. Each entry is converted once for all its readers (D2).
func (g *generation) remember(e *mirror.Entry, stored []byte, obj runtime.Object) {
	u, ok := obj.(*unstructured.Unstructured)
	if !ok || e.Foreign() {
		return
	}
	old, _ := e.Memo(g.converted).(*convertedItem)
	if old != nil && old.block.payload.Load() != nil {
		return
	}
	var was struct {
		APIVersion string `json:"apiVersion"`
	}
	if err := json.Unmarshal(stored, &was); err != nil || was.APIVersion == u.GetAPIVersion() {
		return
	}
	data, err := u.MarshalJSON()
	if err != nil {
		return
	}
	var before any // nil if nothing was kept
	if old != nil {
		before = old
	}
	if k := g.view.budget.add(payload{data: data}, int64(cap(data)), g.converted); k != nil && !e.SwapMemo(g.converted, before, &convertedItem{k}) {
		k.unref() // another reader was faster
	}
	if g.ended.Load() {
		e.DropClosed() // dropClosed may have been here before
	}
}

// convertedItem is kept on an entry until it is replaced. When its key is deleted it stays, for the
// event that tells of that: a webhook that is down must not hold up a deletion.
type convertedItem struct{ block *block }

// Retired implements mirror.Retirer.
func (c *convertedItem) Retired() { c.block.unref() }

// OutlivesDeletion implements mirror.DeletionRetainer.
func (c *convertedItem) OutlivesDeletion() {}

// recall returns the entry as it was converted before, with the resource version
// rev, or nil. The object belongs to the caller.
func (g *generation) recall(e *mirror.Entry, rev mirror.Revision) *unstructured.Unstructured {
	c, ok := e.Memo(g.converted).(*convertedItem)
	if !ok {
		return nil
	}
	kept := c.block.load(g.view.budget.now())
	if kept == nil {
		return nil
	}
	u := &unstructured.Unstructured{}
	if err := u.UnmarshalJSON(kept.data); err != nil {
		return nil
	}
	u.SetResourceVersion(strconv.FormatInt(rev, 10))
	return u
}
