package kubestorage

import (
	"fmt"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/kind"
)

// TestAbridge_Option_IsUsedBySelectors: lists by a label return whole objects.
func TestAbridge_Option_IsUsedBySelectors(t *testing.T) {
	t.Parallel()
	var cut atomic.Int64
	f := setupInMemory(t, func(o *options) {
		o.engine.Kinds = formOf(kind.Form{Abridge: func(dst, value []byte) ([]byte, bool) {
			cut.Add(1)
			return append(dst, value...), true
		}})
	})
	for i := range 3 {
		f.create(t, withLabel(newPod(fmt.Sprint("pod-", i)), "tier", fmt.Sprint(i)))
	}
	f.catchUp(t)
	opts := everything()
	opts.Predicate = storage.Everything
	opts.Predicate.Label, opts.Predicate.GetAttrs = labels.SelectorFromSet(labels.Set{"tier": "1"}), podAttrs
	if got := f.list(t, opts); podNames(got) != "pod-1" || got.Items[0].ResourceVersion == "" || cut.Load() != 3 {
		t.Errorf("list has %q, and %d values were cut down, want 3", podNames(got), cut.Load())
	}
}
