package kubestorage

import (
	"cmp"
	"context"
	"maps"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/watch"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/kube/status"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Status returns a reading of the engine, without the values of the Go runtime. Reads are the lists
// of the whole process, and the GETs that etcd answered. Cost is O(resources and watches), and a
// walk over the events that the slowest watch of each resource has not examined.
func (e *Engine) Status() status.Status {
	e.mu.Lock()
	clusters := slices.Collect(maps.Values(e.clusters))
	var down []status.Cluster
	for key, d := range e.deferrals {
		if e.clusters[key] == nil {
			down = append(down, status.Cluster{Endpoints: d.endpoints, Prefix: d.prefix})
		}
	}
	e.mu.Unlock()
	s := status.Status{Clusters: []status.Cluster{}, Resources: []status.Resource{}, SlowWatches: []status.Watch{}}
	lists := metrics.CountedLists()
	for _, l := range lists {
		s.Reads.Memory += l.Present
		s.Reads.Past += l.Past
		s.Reads.Etcd += l.Etcd
	}
	s.Reads.Etcd += metrics.GetsFromEtcd()
	blocks := e.blocks.Stats()
	s.Memory.RepresentationBytes, s.Memory.RepresentationLimitBytes = blocks.Used, blocks.Limit
	for _, c := range clusters {
		if c.mirror != nil {
			c.addStatus(&s, lists)
		}
	}
	s.Clusters = append(s.Clusters, down...)
	slices.SortFunc(s.Clusters, func(a, b status.Cluster) int {
		return cmp.Or(cmp.Compare(a.Endpoints, b.Endpoints), cmp.Compare(a.Prefix, b.Prefix))
	})
	slices.SortFunc(s.Resources, func(a, b status.Resource) int {
		return cmp.Or(strings.Compare(a.Resource, b.Resource), strings.Compare(a.Group, b.Group))
	})
	slices.SortFunc(s.SlowWatches, func(a, b status.Watch) int {
		return cmp.Or(cmp.Compare(b.BehindSeconds, a.BehindSeconds), cmp.Compare(b.BehindRevisions, a.BehindRevisions))
	})
	s.Slow = len(s.SlowWatches)
	s.SlowWatches = s.SlowWatches[:min(status.MaxSlowWatches, s.Slow)]
	return s
}

// addStatus adds a cluster, its resources and its watches.
func (c *cluster) addStatus(s *status.Status, lists map[schema.GroupResource]metrics.ListCounts) {
	m := c.mirror.Stats()
	s.Clusters = append(s.Clusters, status.Cluster{
		Endpoints: c.endpoints(), Prefix: c.prefix, Ready: m.Ready, Restoring: m.Restoring > 0,
		Revision: m.PublishedRevision, EtcdRevision: m.EtcdRevision, Floor: m.HistoryFloor, Compacted: m.Compacted,
		HistoryBytes: m.HistoryBytes + m.VersionBytes, HistoryLimitBytes: m.HistoryLimit,
		Events: m.Events, Relists: m.Relists, Reconnects: m.Reconnects, Divergences: m.Divergences, Repairs: m.Repairs,
	})
	watches, lagging := c.openStreams()
	s.Watches += c.watches.All()
	s.SlowWatches = append(s.SlowWatches, slow(lagging, m.PublishedRevision)...)
	lag := map[schema.GroupResource]int{}
	c.addLag(lag)
	for resource, group := range c.cache.Resources() {
		r, l := resource.Stats(), lists[group]
		s.Resources = append(s.Resources, status.Resource{
			Group: group.Group, Resource: group.Resource, Ready: r.Ready, Inconsistent: r.Inconsistent,
			Objects: r.Entries, Bytes: r.Bytes, Watches: watches[group], LagEvents: lag[group],
			LogEvents: r.Events, Oldest: r.OldestRevision, Events: r.Received,
			Lists: status.Reads{Memory: l.Present, Past: l.Past, Etcd: l.Etcd},
		})
	}
}

// laggingStream is an open stream with events that it has not examined.
type laggingStream struct {
	lists *list.Env
	ctx   context.Context
	at    mirror.Revision
}

// openStreams counts the open streams of each resource, and returns those that have not examined
// all events.
func (c *cluster) openStreams() (count map[schema.GroupResource]int, lagging []laggingStream) {
	count = map[schema.GroupResource]int{}
	now := c.mirror.PublishedRevision()
	c.watches.Every(func(w watchset.Watch) {
		st, ok := w.(*watch.Stream)
		if !ok {
			return
		}
		count[st.Env().Lists.View.Kind().GroupResource]++
		if at := st.Position(); at < now {
			lagging = append(lagging, laggingStream{st.Env().Lists, st.Context(), at})
		}
	})
	return count, lagging
}

// slow returns the streams whose oldest event that they have not examined arrived more than
// status.SlowAfter before. Streams at one position of a resource cost one look-up.
func slow(streams []laggingStream, now mirror.Revision) (all []status.Watch) {
	type position struct {
		resource *mirror.Resource
		at       mirror.Revision
	}
	type delay struct {
		time    time.Duration
		known   bool // otherwise the event is from before the server's start
		pending bool
		expired bool
	}
	delays := map[position]delay{}
	for _, st := range streams {
		at := position{st.lists.Memory, st.at}
		d, ok := delays[at]
		if !ok {
			var ev *mirror.Event
			if ev, d.expired = nextEvent(st.lists.Memory, st.at); ev != nil {
				d.pending = true
				if ev.Arrived != 0 {
					d.time, d.known = time.Duration(driver.Now()-ev.Arrived), true
				}
			}
			delays[at] = d
		}
		if !d.expired && (!d.pending || d.known && d.time <= status.SlowAfter) {
			continue
		}
		group := st.lists.View.Kind().GroupResource
		w := status.Watch{Group: group.Group, Resource: group.Resource, Revision: st.at,
			BehindSeconds: d.time.Seconds(), BehindRevisions: now - st.at, Expired: d.expired}
		if info, ok := request.RequestInfoFrom(st.ctx); ok {
			w.Namespace = info.Namespace
		}
		if user, ok := request.UserFrom(st.ctx); ok {
			w.User = user.GetName()
		}
		if received, ok := request.ReceivedTimestampFrom(st.ctx); ok {
			w.Since = received
		}
		all = append(all, w)
	}
	return all
}

// nextEvent returns the first event of the log after a revision, nil if there is none, and whether
// the log no longer has it.
func nextEvent(r *mirror.Resource, after mirror.Revision) (ev *mirror.Event, expired bool) {
	cur, err := r.CursorAfter(after, "", "")
	if err != nil {
		return nil, true
	}
	events, err := cur.Next(nil, 1)
	if err != nil || len(events) == 0 {
		return nil, err != nil
	}
	return events[0], false
}

// Lag is the distance of the memory of one etcd cluster behind etcd, in time.
type Lag struct {
	Endpoints string // of etcd, separated by commas
	Prefix    string // of the keys
	// Behind is the time since memory fell behind the newest revision that etcd is known to have, 0
	// if it is level. Continuous writes do not add up: the time counts from the oldest known
	// revision that memory has not reached.
	Behind time.Duration
	// Published and Etcd are the published revision and the newest known revision of etcd.
	Published, Etcd mirror.Revision
}

// Lags returns the lag of each etcd cluster that is mirrored. It is empty without Options.ReadOnly.
// Cost is some loads for each cluster.
func (e *Engine) Lags() (all []Lag) {
	if !e.opts.ReadOnly {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, c := range e.clusters {
		if c.mirror == nil {
			continue
		}
		published, etcd := c.mirror.PublishedRevision(), c.mirror.EtcdRevision()
		all = append(all, Lag{Endpoints: c.endpoints(), Prefix: c.prefix, Published: published, Etcd: etcd,
			Behind: c.lag.behind(time.Now(), published)})
	}
	return all
}
