package kubestorage

import (
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apiserver/pkg/storage"
)

// olderThanMemory returns the options of a list at the current revision, and then makes memory drop
// that revision: etcd is not compacted.
func (f *fixture) olderThanMemory(t testing.TB) storage.ListOptions {
	t.Helper()
	f.catchUp(t)
	rev := f.cluster.mirror.PublishedRevision()
	f.create(t, newPod("later"))
	f.catchUp(t)
	f.cluster.mirror.Compact(f.cluster.mirror.PublishedRevision())
	eventually(t, "the mirror compacts its history", func() bool { return f.cluster.mirror.Stats().Compacted > rev })
	opts := everything()
	opts.ResourceVersion, opts.ResourceVersionMatch = fmt.Sprint(rev), metav1.ResourceVersionMatchExact
	return opts
}
