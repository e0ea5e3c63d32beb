package kubestorage

import (
	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

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
