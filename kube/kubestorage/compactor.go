package kubestorage

import (
	"log/slog"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/storage/etcd3"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/mirror"
)

// compactor compacts the etcd of a cluster, and follows what others compact. What it learns the
// mirror forgets, once it has one.
type compactor struct {
	*etcdsource.Compactor
	mirror atomic.Pointer[mirror.Mirror]
	early  atomic.Int64 // the last revision that was learned, for the mirror that is still to come
}

var _ etcd3.Compactor = (*compactor)(nil)

// startCompactor starts a compactor. With interval 0 it compacts nothing, and follows what others
// compact (KEP-4988).
func startCompactor(client *clientv3.Client, interval time.Duration, logger *slog.Logger) *compactor {
	c := &compactor{}
	c.Compactor = etcdsource.NewCompactor(client, etcdsource.CompactorOptions{
		Interval: interval,
		Forget:   c.forget,
		Oldest:   c.oldest,
		Logger:   logger,
	})
	return c
}

// tell makes the mirror forget from now on what etcd is compacted to.
func (c *compactor) tell(m *mirror.Mirror) {
	c.mirror.Store(m)
	m.Compact(c.early.Load())
}

func (c *compactor) forget(rev mirror.Revision) {
	// Before the mirror is looked for, which tell has set before it reads this.
	for old := c.early.Load(); rev > old && !c.early.CompareAndSwap(old, rev); old = c.early.Load() {
	}
	if m := c.mirror.Load(); m != nil {
		m.Compact(rev)
	}
}

// oldest returns the oldest revision that a list can be served of from memory, 0 if that is
// none or the present only.
func (c *compactor) oldest() mirror.Revision {
	m := c.mirror.Load()
	if m == nil {
		return 0
	}
	oldest := m.Clock()
	for _, r := range m.Resources() {
		if rev, _, err := r.Oldest(); err == nil {
			oldest = min(oldest, rev)
		}
	}
	if oldest == m.Clock() {
		return 0
	}
	return oldest
}
