package kubestorage

import (
	"context"
	"sync"
	"time"

	"github.com/stratakube/strata/mirror"
)

// lagSample is the interval at which the lag of memory is sampled, and so the resolution of
// Lag.Behind. A sample costs some loads.
const lagSample = 100 * time.Millisecond

// replicaLag measures how long memory has been behind etcd's known revision. The zero value is
// level. Its methods may be called concurrently.
type replicaLag struct {
	mu sync.Mutex // leaf
	// the oldest known revision of etcd that memory had not reached, 0 if level
	target mirror.Revision
	since  time.Time // when target was first seen
}

// follow samples the mirror until ctx ends.
func (l *replicaLag) follow(ctx context.Context, m *mirror.Mirror) {
	ticker := time.NewTicker(lagSample)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-ticker.C:
			l.sample(now, m.PublishedRevision(), m.EtcdRevision())
		}
	}
}

// sample records a published revision and the newest known revision of etcd.
func (l *replicaLag) sample(now time.Time, published, etcd mirror.Revision) {
	l.mu.Lock()
	defer l.mu.Unlock()
	switch {
	case published >= etcd:
		l.target = 0
	case l.target == 0 || published >= l.target:
		l.target, l.since = etcd, now
	}
}

// behind returns the time since target was first seen, 0 if the published revision has reached it.
func (l *replicaLag) behind(now time.Time, published mirror.Revision) time.Duration {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.target == 0 || published >= l.target {
		return 0
	}
	return now.Sub(l.since)
}
