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

// compactor compacts the etcd of a cluster and follows compactions by others. It forwards the
// compacted revision to the mirror once add has set one.
type compactor struct {
	*etcdsource.Compactor
	mirror atomic.Pointer[mirror.Mirror]
	early  atomic.Int64 // the last compacted revision, for a mirror that is set later
}

var _ etcd3.Compactor = (*compactor)(nil)

// startCompactor starts a compactor. With interval 0 it does not compact, and only follows
// compactions by others (KEP-4988). With readOnly it does so without a watch, so that a replica
// costs etcd one watch stream.
func startCompactor(client *clientv3.Client, interval time.Duration, readOnly bool, logger *slog.Logger) *compactor {
	c := &compactor{}
	c.Compactor = etcdsource.NewCompactor(client, etcdsource.CompactorOptions{
		Interval:     interval,
		OnCompaction: c.drop,
		Oldest:       c.oldest,
		WithoutWatch: readOnly,
		Logger:       logger,
	})
	return c
}

// add sets the mirror, and passes it the compacted revision, now and after each compaction.
func (c *compactor) add(m *mirror.Mirror) {
	c.mirror.Store(m)
	m.Compact(c.early.Load())
}

func (c *compactor) drop(rev mirror.Revision) {
	// This precedes c.mirror.Load: add stores the mirror before it reads c.early, so no revision
	// is lost.
	for old := c.early.Load(); rev > old && !c.early.CompareAndSwap(old, rev); old = c.early.Load() {
	}
	if m := c.mirror.Load(); m != nil {
		m.Compact(rev)
	}
}

// oldest returns the oldest revision at which a list can be served from memory, 0 if there is none
// or only the latest state.
func (c *compactor) oldest() mirror.Revision {
	m := c.mirror.Load()
	if m == nil {
		return 0
	}
	oldest := m.PublishedRevision()
	for _, r := range m.Resources() {
		if rev, _, err := r.Oldest(); err == nil {
			oldest = min(oldest, rev)
		}
	}
	if oldest == m.PublishedRevision() {
		return 0
	}
	return oldest
}
