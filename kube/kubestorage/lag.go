package kubestorage

import (
	"context"
	"sync"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
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

// addLag adds, by resource, the number of events of the log that the slowest watch has not read.
func (c *cluster) addLag(lag map[schema.GroupResource]int) {
	behind := map[*watch.Env]mirror.Revision{}
	c.watches.EachDrainable(func(w watchset.Watch) {
		st, ok := w.(*watch.Stream)
		if !ok {
			return
		}
		at := st.Position()
		if least, known := behind[st.Env()]; !known || at < least {
			behind[st.Env()] = at
		}
	})
	for env, at := range behind {
		l := env.Lists
		lag[l.View.Kind().GroupResource] = max(lag[l.View.Kind().GroupResource], eventsAfter(l.Memory, l.Mirror.PublishedRevision(), at))
	}
}

// eventsAfter returns the number of events in the log after rev; now is the published revision. If
// rev is below the log's floor, all events count. Cost is a walk over them.
func eventsAfter(r *mirror.Resource, now, rev mirror.Revision) int {
	if rev >= now {
		return 0
	}
	cur, err := r.CursorAfter(rev, "", "")
	if err != nil {
		return r.Stats().Events
	}
	n := 0
	for buf := make([]*mirror.Event, 0, 1024); ; {
		if buf, err = cur.Next(buf[:0], cap(buf)); err != nil || len(buf) == 0 {
			return n
		}
		n += len(buf)
	}
}
