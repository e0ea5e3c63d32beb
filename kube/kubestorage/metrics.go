package kubestorage

import (
	"sync"

	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"
)

// Metrics of the engines of this process, labelled with the etcd endpoints and
// prefix of the cluster they mirror.
var (
	descReady = clusterDesc("ready", "1 when the first list of etcd is in place.")
	descClock = clusterDesc("revision", "Revision that readers see.")
	descBytes = clusterDesc("history_bytes", "Stored bytes that only history keeps in memory.")
	descLimit = clusterDesc("history_limit_bytes", "Bound of strata_mirror_history_bytes.")
	descFloor = clusterDesc("history_floor_revision", "Revision that history reaches back to, 0 if nothing was dropped yet.")
	descGone  = clusterDesc("compacted_revision", "Revision below which versions were dropped because etcd was compacted.")
	descIdle  = clusterDesc("unclaimed_bytes", "Values kept for resources that nobody has asked for.")
	descIdleL = clusterDesc("unclaimed_limit_bytes", "Bound of strata_mirror_unclaimed_bytes.")

	descEvents     = clusterDesc("events_total", "Events applied.")
	descDropped    = clusterDesc("dropped_events_total", "Events of resources that are not cached.")
	descListed     = clusterDesc("listed_keys_total", "Keys listed from etcd.")
	descRelists    = clusterDesc("relists_total", "Times the whole prefix had to be listed anew, or could not be listed.")
	descReconnects = clusterDesc("reconnects_total", "Times the feed was resumed after a loss.")
	descDiverged   = clusterDesc("divergences_total", "Resources listed anew because the feed contradicted what was held.")
	descEtcd       = clusterDesc("etcd_revision", "Revision of etcd, as last heard: when a read asked for it, or with the feed.")
	descLag        = clusterDesc("revision_lag", "How far strata_mirror_revision is behind strata_mirror_etcd_revision.")
	descSharers    = clusterDesc("revision_read_waiters_total", "Requests that waited for one of strata_mirror_revision_reads_total, each with others or alone.")
	descReads      = clusterDesc("revision_reads_total", "Linearizable reads of etcd's revision, each shared by all readers that waited for it.")
	descProgress   = clusterDesc("progress_requests_total", "Progress requests sent to etcd.")

	descObjects     = resourceDesc("resource_objects", "Objects in memory.")
	descObjectBytes = resourceDesc("resource_stored_bytes", "Stored size of the objects in memory.")
	descLoaded      = resourceDesc("resource_ready", "1 when the resource can be read from memory.")
	descLog         = resourceDesc("resource_log_events", "Events that a watch can resume over.")
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
	clusters map[*cluster]struct{}
}

var (
	clusters     = &collector{clusters: map[*cluster]struct{}{}}
	registerOnce sync.Once
)

func (c *collector) add(cl *cluster) {
	registerOnce.Do(func() { legacyregistry.CustomMustRegister(c) })
	c.mu.Lock()
	defer c.mu.Unlock()
	c.clusters[cl] = struct{}{}
}

func (c *collector) remove(cl *cluster) {
	c.mu.Lock()
	defer c.mu.Unlock()
	delete(c.clusters, cl)
}

// DescribeWithStability implements metrics.StableCollector.
func (c *collector) DescribeWithStability(ch chan<- *metrics.Desc) {
	for _, d := range []*metrics.Desc{
		descReady, descClock, descBytes, descLimit, descFloor, descGone, descIdle, descIdleL,
		descEvents, descDropped, descListed, descRelists, descReconnects, descDiverged, descReads, descProgress, descEtcd, descLag, descSharers,
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
	budgets := map[*budget]struct{}{}
	for cl := range c.clusters {
		cl.collect(ch)
		budgets[cl.budget] = struct{}{}
	}
	var used, limit, evictions, refusals int64
	for b := range budgets {
		used += b.used.Load()
		limit += b.limit
		evictions += b.evictions.Load()
		refusals += b.refusals.Load()
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
	st := c.mirror.Stats()
	gauge(descReady, oneIf(st.Ready))
	gauge(descClock, st.Clock)
	gauge(descBytes, st.HistoryBytes)
	gauge(descLimit, st.HistoryLimit)
	gauge(descFloor, st.HistoryFloor)
	gauge(descGone, st.Compacted)
	gauge(descIdle, st.UnclaimedBytes)
	gauge(descIdleL, st.UnclaimedLimit)
	counter(descEvents, st.Events)
	counter(descDropped, st.Dropped)
	counter(descListed, st.ListedKeys)
	counter(descRelists, st.Relists)
	counter(descReconnects, st.Reconnects)
	counter(descDiverged, st.Divergences)
	counter(descReads, st.RevisionReads)
	counter(descProgress, st.ProgressRequests)
	gauge(descEtcd, st.EtcdRevision)
	gauge(descLag, max(0, st.EtcdRevision-st.Clock))
	counter(descSharers, st.RevisionReadWaiters)

	for _, r := range c.mirror.Resources() {
		labels = []string{c.endpoints(), c.prefix, r.Prefix()}
		st := r.Stats()
		gauge(descLoaded, oneIf(st.Ready))
		gauge(descObjects, int64(st.Entries))
		gauge(descObjectBytes, st.Bytes)
		gauge(descLog, int64(st.Events))
	}
}

// readMetrics are upstream's, for one resource: the dashboards of Kubernetes know them.
// Each appears when it is first used, as upstream's do.
type readMetrics struct {
	wait func() metrics.ObserverMetric
	// Consistent reads: answered from memory, by etcd instead, and in vain.
	fromMemory, fallback, refused, failed func() metrics.CounterMetric
}

func newReadMetrics(r groupResource) readMetrics {
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

func oneIf(b bool) int64 {
	if b {
		return 1
	}
	return 0
}
