package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// after starts a watch after a revision.
func (f *fixture) after(ctx context.Context, t testing.TB, rev mirror.Revision, pred storage.SelectionPredicate) apiwatch.Interface {
	t.Helper()
	w, err := f.Watch(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: pred})
	testcheck.NoError(t, err)
	return w
}

// TestIndexedWatch_StoreEnds_LeavesNoFollower: its watches end, and so do the followers of the log
// for them, even while an object is decoded slowly.
func TestIndexedWatch_StoreEnds_LeavesNoFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowTransformer{Transformer: podtest.Encryption(t, "1"), begun: make(chan struct{})}
		etcd := memory.New()
		f := setup(t, inMemory(etcd), withTransformer(slow))
		ctx := contextFor(t)
		rev := etcd.Revision()
		f.catchUp(t)
		var watches []apiwatch.Interface
		for i := range 10 {
			watches = append(watches, f.after(ctx, t, rev, onNode(fmt.Sprint("node-", i), true)))
		}
		etcd.Put(testPrefix+"pods/ns/slow", "x")
		<-slow.begun
		f.destroy() // waits for its goroutines
		if n := slow.inside.Load(); n != 0 {
			t.Errorf("%d are still decoding", n)
		}
		for _, w := range watches {
			ended(t, w)
		}
	})
}

// slowTransformer does not return before its context ends, or 300 ms have passed.
type slowTransformer struct {
	value.Transformer
	begun  chan struct{}
	once   sync.Once
	inside atomic.Int64
}

func (s *slowTransformer) TransformFromStorage(ctx context.Context, _ []byte, _ value.Context) ([]byte, bool, error) {
	s.inside.Add(1)
	defer s.inside.Add(-1)
	s.once.Do(func() { close(s.begun) })
	select {
	case <-ctx.Done():
	case <-time.After(300 * time.Millisecond):
	}
	return nil, false, errors.New("too slow")
}
