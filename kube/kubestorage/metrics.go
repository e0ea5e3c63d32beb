package kubestorage

import (
	"slices"
	"sync"

	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Metrics of the engines of this process, labelled with the etcd endpoints and
// prefix of the cluster they mirror.
var (
	descReady = clusterDesc("ready", "1 when the first list of etcd is in place.")
	descClock = clusterDesc("revision", "Revision that readers see.")
	descBytes = clusterDesc("history_bytes", "Stored bytes that only history keeps in memory.")
	descTrees = clusterDesc("version_bytes", "Bytes of versions of the past that they do not share with the present; the objects are in strata_mirror_history_bytes.")
	descLimit = clusterDesc("history_limit_bytes", "Bound of strata_mirror_history_bytes and strata_mirror_version_bytes together.")
	descFloor = clusterDesc("history_floor_revision", "Revision that history reaches back to.")
	descGone  = clusterDesc("compacted_revision", "Revision below which versions were dropped because etcd was compacted.")
	descLists = clusterDesc("etcd_lists", "Pages of lists of revisions older than memory that are being read from etcd.")
	descListL = clusterDesc("etcd_lists_limit", "Bound of strata_mirror_etcd_lists; others wait.")
	descIdle  = clusterDesc("unclaimed_bytes", "Values kept for resources that nobody has asked for.")
	descIdleL = clusterDesc("unclaimed_limit_bytes", "Bound of strata_mirror_unclaimed_bytes.")

	descEvents     = clusterDesc("events_total", "Events applied.")
	descDropped    = clusterDesc("dropped_events_total", "Events of resources that are not cached.")
	descListed     = clusterDesc("listed_keys_total", "Keys listed from etcd.")
	descRelists    = clusterDesc("relists_total", "Times the whole prefix had to be listed anew, or could not be listed.")
	descReconnects = clusterDesc("reconnects_total", "Times the feed was resumed after a loss.")
	descSilent     = clusterDesc("silent_feeds_total", "Times, of strata_mirror_reconnects_total, that the feed was left because it told nothing though etcd had moved on.")
	descDiverged   = clusterDesc("divergences_total", "Resources listed anew because the feed contradicted what was held.")
	descRepairs    = clusterDesc("repairs_total", "Times keys were read again because a consistency check had found that memory differs from etcd.")
	descEtcd       = clusterDesc("etcd_revision", "Revision of etcd, as last heard: when a read asked for it, or with the feed.")
	descLag        = clusterDesc("revision_lag", "How far strata_mirror_revision is behind strata_mirror_etcd_revision.")
	descSharers    = clusterDesc("revision_read_waiters_total", "Requests that waited for one of strata_mirror_revision_reads_total, each with others or alone.")
	descRestores   = clusterDesc("etcd_restores_total", "Times etcd turned out to be another cluster, or an older state of itself, so that everything began anew.")
	descReplays    = clusterDesc("replays_total", "Times history was read from etcd: of the whole prefix when it was listed, or of one resource.")
	descReplayed   = clusterDesc("replayed_events_total", "Events of the past that were read from etcd.")
	descReplayRev  = clusterDesc("replay_floor_revision", "Revision after which the last history that was read from etcd began.")
	descReplayTime = clusterDesc("replay_seconds", "How long the last history that was read from etcd took, after its list.")
	descReads      = clusterDesc("revision_reads_total", "Linearizable reads of etcd's revision, each shared by all readers that waited for it.")
	descProgress   = clusterDesc("progress_requests_total", "Progress requests sent to etcd.")

	descFeed = metrics.NewDesc("strata_mirror_feed_info", "1. freshness is how memory learns how far the feed has come: progress (etcd answers progress requests), "+
		"events (the feed watches all keys: kine, etcd's gRPC proxy) or unproven (reads of the present go to etcd). "+
		"arrival_check is off if the store does not count the writes to a key, so that only consistency checks find a lost event.",
		[]string{"endpoints", "prefix", "freshness", "arrival_check"}, nil, metrics.ALPHA, "")

	descObjects     = resourceDesc("resource_objects", "Objects in memory.")
	descObjectBytes = resourceDesc("resource_stored_bytes", "Stored size of the objects in memory.")
	descLoaded      = resourceDesc("resource_ready", "1 when the resource can be read from memory.")
	descWatchLag    = metrics.NewDesc("strata_watch_lag_events", "Of the running watches that have something to deliver: the largest number of events of the resource that one has still to read. Watches that wait for an event count as 0.", []string{"group", "resource"}, nil, metrics.ALPHA, "")
	descLog         = resourceDesc("resource_log_events", "Events that a watch can resume over.")
	descVersions    = resourceDesc("resource_versions", "Versions of the past that are kept, those made for readers included; revisions between two of them are put together from events.")
	descTreeBytes   = resourceDesc("resource_version_bytes", "Bytes of strata_mirror_resource_versions that the present does not share.")
	descSuspect     = resourceDesc("resource_suspect", "1 from when a consistency check finds that memory differs from etcd until one finds no difference: lists of the past are read from etcd.")
	descOldest      = resourceDesc("resource_oldest_revision", "Oldest revision that a list can be answered at from memory.")
	descReaders     = resourceDesc("resource_past_readers", "Lists of the past that are being read from memory, each of which keeps its version alive.")
	descOldestRead  = resourceDesc("resource_past_readers_oldest_revision", "Oldest revision of strata_mirror_resource_past_readers, 0 if there is none.")

	descCompactRev   = compactionDesc("revision", "Revision that etcd is known to be compacted to, or is about to be.")
	descCompactKept  = compactionDesc("kept_revisions", "Revisions of history that etcd keeps: how far it is ahead of strata_compaction_revision.")
	descCompactFeed  = compactionDesc("following", "1 while compactions are followed (compact_rev_key is watched).")
	descCompactDone  = compactionDesc("compactions_total", "Compactions that this server has made.")
	descCompactFail  = compactionDesc("failures_total", "Turns of this server to compact that have failed.")
	descCompactLost  = compactionDesc("watch_losses_total", "Times the watch of compact_rev_key was lost.")
	descCompactDoubt = compactionDesc("doubted_writes_total", "Writes to compact_rev_key that were not believed.")
	descCompactFound = compactionDesc("unannounced_total", "Compactions found that nobody had written to compact_rev_key.")
)

// What representations keep, of all engines of the process together.
var (
	descKept      = keptDesc("bytes", "Bytes kept of objects in the forms that clients ask for.")
	descKeptLimit = keptDesc("limit_bytes", "Bound of strata_representation_bytes.")
	descEvicted   = keptDesc("evictions_total", "Blocks of representations that nobody had read for a while and that made room for others.")
	descRefused   = keptDesc("refusals_total", "Blocks of representations that were not kept because everything kept is being read.")
)

func keptDesc(name, help string) *metrics.Desc {
	return metrics.NewDesc("strata_representation_"+name, help, nil, nil, metrics.ALPHA, "")
}

func compactionDesc(name, help string) *metrics.Desc {
	return metrics.NewDesc("strata_compaction_"+name, help, []string{"endpoints", "prefix"}, nil, metrics.ALPHA, "")
}

func clusterDesc(name, help string) *metrics.Desc {
	return metrics.NewDesc("strata_mirror_"+name, help, []string{"endpoints", "prefix"}, nil, metrics.ALPHA, "")
}

func resourceDesc(name, help string) *metrics.Desc {
	return metrics.NewDesc("strata_mirror_"+name, help, []string{"endpoints", "prefix", "resource"}, nil, metrics.ALPHA, "")
}

// collector reads the counters of all live clusters when it is scraped; nothing
// is counted twice on the way.
type collector struct {
	metrics.BaseStableCollector

	mu       sync.Mutex
	clusters []*cluster // in the order in which they were added
}

// Metrics of watches, by resource.
var (
	watchReplayed = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_watch_replayed_events_total", StabilityLevel: metrics.ALPHA,
		Help: "Events between the revision that a watch was started at and the present of that moment, before label and field selectors.",
	}, []string{"group", "resource"})
	watchBookmarks = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_watch_bookmarks_total", StabilityLevel: metrics.ALPHA,
		Help: "Bookmarks sent, those that close initial events included.",
	}, []string{"group", "resource"})
	watchesEnded = metrics.NewCounterVec(&metrics.CounterOpts{
		Name: "strata_watches_ended_total", StabilityLevel: metrics.ALPHA,
		Help: "Watches that have ended, by reason: timeout, client (which went away or asked for the end), shutdown of the server, " +
			"storage (destroyed, because a definition changed or the server ends), expired (410: the watch was older than memory, or the resource was listed anew), error.",
	}, []string{"group", "resource", "reason"})
	watchDelivery = metrics.NewHistogramVec(&metrics.HistogramOpts{
		Name: "strata_watch_delivery_seconds", StabilityLevel: metrics.ALPHA,
		Help: "From the arrival of an event from etcd to after it was written to the socket of a watch, of the oldest event of each write. " +
			"Of watches that the byte path serves; events of before the server's start have not arrived.",
		Buckets: []float64{.0005, .001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30},
	}, []string{"group", "resource"})

	registerWatchMetrics = sync.OnceFunc(func() {
		legacyregistry.MustRegister(watchReplayed, watchBookmarks, watchesEnded, watchDelivery)
	})
)

// watchMetrics are those of the watches of one resource. Each appears when it is first used.
type watchMetrics struct {
	resource                 schema.GroupResource
	initial, replayed, marks func() metrics.CounterMetric
	terminated               func() metrics.CounterMetric
	delivery                 func() metrics.ObserverMetric
	dispatch                 dispatchMetrics
}

func newWatchMetrics(r schema.GroupResource) watchMetrics {
	cachermetrics.Register()
	registerWatchMetrics()
	counter := func(vec *metrics.CounterVec) func() metrics.CounterMetric {
		return sync.OnceValue(func() metrics.CounterMetric { return vec.WithLabelValues(r.Group, r.Resource) })
	}
	return watchMetrics{
		resource:   r,
		initial:    counter(cachermetrics.InitCounter),
		replayed:   counter(watchReplayed),
		marks:      counter(watchBookmarks),
		terminated: counter(cachermetrics.TerminatedWatchersCounter),
		dispatch:   newDispatchMetrics(r),
		delivery:   sync.OnceValue(func() metrics.ObserverMetric { return watchDelivery.WithLabelValues(r.Group, r.Resource) }),
	}
}

// started counts what the start of a watch had to walk through: upstream's metric has both
// together.
func (m *watchMetrics) started(entries, events int) {
	if n := entries + events; n > 0 {
		m.initial().Add(float64(n))
	}
	if events > 0 {
		m.replayed().Add(float64(events))
	}
}

func (m *watchMetrics) bookmark() { m.marks().Inc() }

// sharded counts a watch with a shard selector, and returns the function that counts its end.
func (m *watchMetrics) sharded() (ended func()) {
	cachermetrics.RecordShardedWatchStarted(m.resource)
	return func() { cachermetrics.RecordShardedWatchStopped(m.resource) }
}

// filtered counts objects that a shard selector withholds from a watch.
func (m *watchMetrics) filtered(n int) {
	if n > 0 {
		cachermetrics.WatchFilteredEventsTotal.WithLabelValues(m.resource.Group, m.resource.Resource).Add(float64(n))
	}
}

func (m *watchMetrics) ended(why endReason) {
	watchesEnded.WithLabelValues(m.resource.Group, m.resource.Resource, why.String()).Inc()
}

var (
	clusters     = &collector{}
	registerOnce sync.Once
)

func (c *collector) add(cl *cluster) {
	registerOnce.Do(func() { legacyregistry.CustomMustRegister(c) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clusters = append(c.clusters, cl)
}

func (c *collector) remove(cl *cluster) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clusters = slices.DeleteFunc(c.clusters, func(other *cluster) bool { return other == cl })
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{
		descReady, descClock, descBytes, descTrees, descLimit, descLists, descListL,
		descVersions, descTreeBytes, descSuspect, descOldest, descReaders, descOldestRead,
		descCompactRev, descCompactKept, descCompactFeed, descCompactDone, descCompactFail, descCompactLost, descCompactDoubt, descCompactFound,
		descFloor, descGone, descIdle, descIdleL, descFeed,
		descRestores, descReplays, descReplayed, descReplayRev, descReplayTime, descWatchLag,
		descEvents, descDropped, descListed, descRelists, descReconnects, descSilent, descDiverged, descRepairs, descReads, descProgress, descEtcd, descLag, descSharers,
		descObjects, descObjectBytes, descLoaded, descLog,
		descKept, descKeptLimit, descEvicted, descRefused,
	} {
		ch <- d
	}
}

// CollectWithStability implements metrics.StableCollector.
func (c *collector) CollectWithStability(ch chan<- metrics.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	caches := map[*blockcache.Cache]struct{}{}
	lag := map[schema.GroupResource]int{}
	// Engines that mirror the same cluster, such as those of two servers in one process, have the same labels: the one
	// that was added last reports, as with upstream's gauges, where the last writer does.
	reported := map[[2]string]bool{}
	for _, cl := range slices.Backward(c.clusters) {
		if id := [2]string{cl.endpoints(), cl.prefix}; !reported[id] {
			reported[id] = true
			cl.collect(ch)
		}
		cl.watches.addLag(lag)
		caches[cl.blocks] = struct{}{}
	}
	for r, events := range lag {
		ch <- metrics.NewLazyConstMetric(descWatchLag, metrics.GaugeValue, float64(events), r.Group, r.Resource)
	}
	var used, limit, evictions, refusals int64
	for c := range caches {
		kept := c.Stats()
		used += kept.Used
		limit += kept.Limit
		evictions += kept.Evictions
		refusals += kept.Refusals
	}
	for _, m := range []struct {
		desc  *metrics.Desc
		kind  metrics.ValueType
		value int64
	}{
		{descKept, metrics.GaugeValue, used},
		{descKeptLimit, metrics.GaugeValue, limit},
		{descEvicted, metrics.CounterValue, evictions},
		{descRefused, metrics.CounterValue, refusals},
	} {
		ch <- metrics.NewLazyConstMetric(m.desc, m.kind, float64(m.value))
	}
}

func (c *cluster) collect(ch chan<- metrics.Metric) {
	labels := []string{c.endpoints(), c.prefix}
	gauge := func(d *metrics.Desc, v int64) {
		ch <- metrics.NewLazyConstMetric(d, metrics.GaugeValue, float64(v), labels...)
	}
	counter := func(d *metrics.Desc, v int64) {
		ch <- metrics.NewLazyConstMetric(d, metrics.CounterValue, float64(v), labels...)
	}
	checked := "off"
	if c.mirror.ChecksArrival() {
		checked = "on"
	}
	ch <- metrics.NewLazyConstMetric(descFeed, metrics.GaugeValue, 1, c.endpoints(), c.prefix, c.freshness.String(), checked)
	st := c.mirror.Stats()
	gauge(descReady, oneIf(st.Ready))
	gauge(descClock, st.Clock)
	gauge(descBytes, st.HistoryBytes)
	gauge(descTrees, st.VersionBytes)
	gauge(descLimit, st.HistoryLimit)
	gauge(descLists, int64(len(c.lists)))
	gauge(descListL, int64(cap(c.lists)))
	gauge(descFloor, st.HistoryFloor)
	gauge(descGone, st.Compacted)
	gauge(descIdle, st.UnclaimedBytes)
	gauge(descIdleL, st.UnclaimedLimit)
	counter(descEvents, st.Events)
	counter(descDropped, st.Dropped)
	counter(descListed, st.ListedKeys)
	counter(descRelists, st.Relists)
	counter(descReconnects, st.Reconnects)
	counter(descSilent, st.SilentFeeds)
	counter(descDiverged, st.Divergences)
	counter(descRepairs, st.Repairs)
	counter(descRestores, st.Restores)
	counter(descReplays, st.Replays)
	counter(descReplayed, st.ReplayedEvents)
	gauge(descReplayRev, st.ReplayFloor)
	ch <- metrics.NewLazyConstMetric(descReplayTime, metrics.GaugeValue, st.ReplayTime.Seconds(), labels...)
	counter(descReads, st.RevisionReads)
	counter(descProgress, st.ProgressRequests)
	gauge(descEtcd, st.EtcdRevision)
	gauge(descLag, max(0, st.EtcdRevision-st.Clock))
	counter(descSharers, st.RevisionReadWaiters)

	if c.compactor != nil {
		st := c.compactor.Stats()
		gauge(descCompactRev, st.Revision)
		if st.Revision > 0 {
			gauge(descCompactKept, max(0, st.EtcdRevision-st.Revision))
		}
		gauge(descCompactFeed, oneIf(st.Following))
		counter(descCompactDone, st.Compactions)
		counter(descCompactFail, st.Failures)
		counter(descCompactLost, st.Losses)
		counter(descCompactDoubt, st.Doubts)
		counter(descCompactFound, st.Unannounced)
	}

	for _, r := range c.mirror.Resources() {
		labels = []string{c.endpoints(), c.prefix, r.Prefix()}
		st := r.Stats()
		gauge(descLoaded, oneIf(st.Ready))
		gauge(descObjects, int64(st.Entries))
		gauge(descObjectBytes, st.Bytes)
		gauge(descLog, int64(st.Events))
		gauge(descVersions, int64(st.Versions))
		gauge(descTreeBytes, st.VersionBytes)
		gauge(descSuspect, oneIf(st.Suspect))
		gauge(descOldest, st.OldestRevision)
		gauge(descReaders, int64(st.Readers))
		gauge(descOldestRead, st.OldestRead)
	}
}

// readMetrics are upstream's, for one resource: the dashboards of Kubernetes know them.
// Each appears when it is first used, as upstream's do.
type readMetrics struct {
	wait func() metrics.ObserverMetric
	// Consistent reads: answered from memory, by etcd instead, and in vain.
	fromMemory, fallback, refused, failed func() metrics.CounterMetric
}

func newReadMetrics(r schema.GroupResource) readMetrics {
	cachermetrics.Register()
	reads := func(success, fallback string) func() metrics.CounterMetric {
		return sync.OnceValue(func() metrics.CounterMetric {
			return cachermetrics.ConsistentReadTotal.WithLabelValues(r.Group, r.Resource, success, fallback)
		})
	}
	return readMetrics{
		wait: sync.OnceValue(func() metrics.ObserverMetric {
			return cachermetrics.WatchCacheReadWait.WithLabelValues(r.Group, r.Resource)
		}),
		fromMemory: reads("true", "false"),
		fallback:   reads("true", "true"),
		refused:    reads("false", "false"),
		failed:     reads("false", "true"),
	}
}

// consistentRead counts a read of the present. fallback: etcd was to answer it.
func (m *readMetrics) consistentRead(success, fallback bool) {
	switch {
	case success && !fallback:
		m.fromMemory().Inc()
	case success:
		m.fallback().Inc()
	case !fallback:
		m.refused().Inc()
	default:
		m.failed().Inc()
	}
}

// addLag adds, by resource, how many events of the log the watch that is furthest behind has
// still to read.
func (r *running) addLag(lag map[schema.GroupResource]int) {
	behind := map[*Store]mirror.Revision{}
	r.each(func(w ender) {
		st, ok := w.(*Stream)
		if !ok {
			return
		}
		at := st.reading.Load()
		if least, known := behind[st.store]; !known || at < least {
			behind[st.store] = at
		}
	})
	for s, at := range behind {
		lag[s.group] = max(lag[s.group], s.eventsAfter(at))
	}
}

// eventsAfter returns how many events the log has after rev, all of them if rev is older. Cost
// is a walk over them.
func (s *Store) eventsAfter(rev mirror.Revision) int {
	if rev >= s.mirror.Clock() {
		return 0
	}
	cur, err := s.resource.CursorAfter(rev, "", "")
	if err != nil {
		return s.resource.Stats().Events
	}
	n := 0
	for buf := make([]*mirror.Event, 0, 1024); ; {
		if buf, err = cur.Next(buf[:0], cap(buf)); err != nil || len(buf) == 0 {
			return n
		}
		n += len(buf)
	}
}

func oneIf(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
