// Package metrics declares the metrics of the engine and feeds those of Kubernetes' watch cache: of
// clusters, lists, reads and watches.
package metrics

import (
	"math"
	"slices"
	"sync"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/component-base/metrics"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/mirror"
)

// scope is the prefix of metric names, and their labels.
type scope struct {
	prefix string
	labels []string
}

var (
	ofCluster    = scope{"strata_mirror_", []string{"endpoints", "prefix"}}
	ofResource   = scope{"strata_mirror_", []string{"endpoints", "prefix", "resource"}}
	ofCompaction = scope{"strata_compaction_", []string{"endpoints", "prefix"}}
	ofBlocks     = scope{"strata_representation_", nil} // of all engines of the process together
	ofWatches    = scope{"strata_watch_", []string{"group", "resource"}}
)

// family is a metric that each scrape computes from stats S.
type family[S any] struct {
	desc  *metrics.Desc
	kind  metrics.ValueType
	value func(S) float64 // NaN: there is no series
}

// number is a type of values of metrics.
type number interface{ ~int | ~int64 | ~float64 }

func gauge[S any, N number](of scope, name, help string, value func(S) N) family[S] {
	return newFamily(of, name, help, metrics.GaugeValue, value)
}

func counter[S any, N number](of scope, name, help string, value func(S) N) family[S] {
	return newFamily(of, name, help, metrics.CounterValue, value)
}

func newFamily[S any, N number](of scope, name, help string, kind metrics.ValueType, value func(S) N) family[S] {
	return family[S]{
		desc:  metrics.NewDesc(of.prefix+name, help, of.labels, nil, metrics.ALPHA, ""),
		kind:  kind,
		value: func(s S) float64 { return float64(value(s)) },
	}
}

// families are all metrics of the same stats.
type families[S any] []family[S]

func (fs families[S]) describe(ch chan<- *metrics.Desc) {
	for _, f := range fs {
		ch <- f.desc
	}
}

func (fs families[S]) collect(ch chan<- metrics.Metric, s S, labels ...string) {
	for _, f := range fs {
		if v := f.value(s); !math.IsNaN(v) {
			ch <- metrics.NewLazyConstMetric(f.desc, f.kind, v, labels...)
		}
	}
}

func oneIf(b bool) int {
	if b {
		return 1
	}
	return 0
}

// clusterStats is a reading of a cluster.
type clusterStats struct {
	mirror.Stats
	etcdPages, etcdPagesLimit int
}

// Metrics of a mirrored cluster.
var clusterMetrics = families[clusterStats]{
	gauge(ofCluster, "ready", "1 when the first list of etcd is in place, otherwise 0.", func(s clusterStats) int { return oneIf(s.Ready) }),
	gauge(ofCluster, "revision", "Published revision, which readers see.", func(s clusterStats) int64 { return s.PublishedRevision }),
	gauge(ofCluster, "history_bytes", "Stored bytes that only history references.", func(s clusterStats) int64 { return s.HistoryBytes }),
	gauge(ofCluster, "version_bytes", "Bytes of old versions that the newest version does not share.", func(s clusterStats) int64 { return s.VersionBytes }),
	gauge(ofCluster, "history_limit_bytes", "Bound of strata_mirror_history_bytes and strata_mirror_version_bytes together.",
		func(s clusterStats) int64 { return s.HistoryLimit }),
	gauge(ofCluster, "history_floor_revision", "Revision that history reaches back to, for every resource.", func(s clusterStats) int64 { return s.HistoryFloor }),
	gauge(ofCluster, "compacted_revision", "Revision below which versions were dropped because etcd was compacted.", func(s clusterStats) int64 { return s.Compacted }),
	gauge(ofCluster, "etcd_lists", "Pages of lists at revisions older than memory that are being read from etcd.", func(s clusterStats) int { return s.etcdPages }),
	gauge(ofCluster, "etcd_lists_limit", "Bound of strata_mirror_etcd_lists; further pages wait.", func(s clusterStats) int { return s.etcdPagesLimit }),
	gauge(ofCluster, "unclaimed_bytes", "Bytes of cached values of resources that no client has requested.", func(s clusterStats) int64 { return s.UnclaimedBytes }),
	gauge(ofCluster, "unclaimed_limit_bytes", "Bound of strata_mirror_unclaimed_bytes.", func(s clusterStats) int64 { return s.UnclaimedLimit }),
	counter(ofCluster, "compressed_values_total", "Values compressed in memory, superseded or not read for minutes.",
		func(s clusterStats) int64 { return s.CompressedValues }),
	counter(ofCluster, "events_total", "Events applied.", func(s clusterStats) int64 { return s.Events }),
	counter(ofCluster, "dropped_events_total", "Events of resources that are not cached.", func(s clusterStats) int64 { return s.Dropped }),
	counter(ofCluster, "listed_keys_total", "Keys listed from etcd.", func(s clusterStats) int64 { return s.ListedKeys }),
	counter(ofCluster, "relists_total", "Relists of the whole prefix, including failed ones.", func(s clusterStats) int64 { return s.Relists }),
	counter(ofCluster, "reconnects_total", "Times the watch on etcd was resumed after a loss.", func(s clusterStats) int64 { return s.Reconnects }),
	counter(ofCluster, "silent_feeds_total", "Restarts of the watch on another member, because nothing arrived while etcd advanced.",
		func(s clusterStats) int64 { return s.SilentFeeds }),
	counter(ofCluster, "divergences_total", "Resources relisted because an event was lost or duplicated.", func(s clusterStats) int64 { return s.Divergences }),
	counter(ofCluster, "repairs_total", "Reads of keys that a consistency check found to differ.", func(s clusterStats) int64 { return s.Repairs }),
	gauge(ofCluster, "etcd_revision", "Last known revision of etcd.", func(s clusterStats) int64 { return s.EtcdRevision }),
	gauge(ofCluster, "revision_lag", "Distance of strata_mirror_revision behind strata_mirror_etcd_revision.",
		func(s clusterStats) int64 { return max(0, s.EtcdRevision-s.PublishedRevision) }),
	counter(ofCluster, "revision_read_waiters_total", "Requests that waited for reads of etcd's revision.", func(s clusterStats) int64 { return s.RevisionReadWaiters }),
	counter(ofCluster, "etcd_restores_total", "Times etcd was found to be another cluster, or an older state of itself.",
		func(s clusterStats) int64 { return s.EtcdRestores }),
	gauge(ofCluster, "restoring", "Restores of history that are running or queued.", func(s clusterStats) int64 { return s.Restoring }),
	counter(ofCluster, "replays_total", "Reads of history from etcd.", func(s clusterStats) int64 { return s.Replays }),
	counter(ofCluster, "replayed_events_total", "Events of history that were read from etcd.", func(s clusterStats) int64 { return s.ReplayedEvents }),
	gauge(ofCluster, "replay_floor_revision", "Revision after which the history of the last replay begins.", func(s clusterStats) int64 { return s.ReplayFloor }),
	gauge(ofCluster, "replay_seconds", "Duration of the last read of history from etcd.", func(s clusterStats) float64 { return s.ReplayTime.Seconds() }),
	counter(ofCluster, "revision_reads_total", "Linearizable reads of etcd's revision, shared by concurrent requests.", func(s clusterStats) int64 { return s.RevisionReads }),
	counter(ofCluster, "progress_requests_total", "Progress requests to etcd.", func(s clusterStats) int64 { return s.ProgressRequests }),
}

// Metrics of a resource in memory.
var resourceMetrics = families[mirror.ResourceStats]{
	gauge(ofResource, "resource_objects", "Objects in memory.", func(s mirror.ResourceStats) int { return s.Entries }),
	gauge(ofResource, "resource_stored_bytes", "Stored size of the objects in memory.", func(s mirror.ResourceStats) int64 { return s.Bytes }),
	gauge(ofResource, "resource_compressed_objects", "Objects that are compressed in memory.", func(s mirror.ResourceStats) int { return s.Compressed }),
	gauge(ofResource, "resource_compression_saved_bytes", "Memory saved by compression.", func(s mirror.ResourceStats) int64 { return s.CompressionSaves }),
	gauge(ofResource, "resource_ready", "1 when the resource is readable from memory, otherwise 0.", func(s mirror.ResourceStats) int { return oneIf(s.Ready) }),
	gauge(ofResource, "resource_log_events", "Events in memory over which a watch can resume.", func(s mirror.ResourceStats) int { return s.Events }),
	gauge(ofResource, "resource_versions", "Retained old versions; events lead to the revisions between them.", func(s mirror.ResourceStats) int { return s.Versions }),
	gauge(ofResource, "resource_version_bytes", "Bytes of retained old versions that the newest one does not share.",
		func(s mirror.ResourceStats) int64 { return s.VersionBytes }),
	gauge(ofResource, "resource_inconsistent", "1 from a difference found by a consistency check until a check finds none, otherwise 0.",
		func(s mirror.ResourceStats) int { return oneIf(s.Inconsistent) }),
	gauge(ofResource, "resource_oldest_revision", "Oldest revision at which memory can answer a list.", func(s mirror.ResourceStats) int64 { return s.OldestRevision }),
	gauge(ofResource, "resource_past_readers", "Lists at old revisions that are being read from memory.", func(s mirror.ResourceStats) int { return s.Readers }),
	gauge(ofResource, "resource_past_readers_oldest_revision", "Oldest revision that a list at an old revision reads, 0 without one.",
		func(s mirror.ResourceStats) int64 { return s.OldestRead }),
}

// Metrics of the compactions of a cluster.
var compactionMetrics = families[etcdsource.CompactionStats]{
	gauge(ofCompaction, "revision", "Revision to which etcd is compacted.", func(s etcdsource.CompactionStats) int64 { return s.Revision }),
	gauge(ofCompaction, "kept_revisions", "Revisions of history in etcd.",
		func(s etcdsource.CompactionStats) float64 {
			if s.Revision == 0 {
				return math.NaN()
			}
			return float64(max(0, s.EtcdRevision-s.Revision))
		}),
	gauge(ofCompaction, "following", "1 while compactions of others are followed, otherwise 0.", func(s etcdsource.CompactionStats) int { return oneIf(s.Following) }),
	counter(ofCompaction, "compactions_total", "Compactions by this server.", func(s etcdsource.CompactionStats) int64 { return s.Compactions }),
	counter(ofCompaction, "failures_total", "Failed turns of this server to compact etcd.", func(s etcdsource.CompactionStats) int64 { return s.Failures }),
	counter(ofCompaction, "watch_losses_total", "Losses of the watch of compact_rev_key.", func(s etcdsource.CompactionStats) int64 { return s.Losses }),
	counter(ofCompaction, "doubted_writes_total", "Rejected writes to compact_rev_key.", func(s etcdsource.CompactionStats) int64 { return s.InvalidAnnouncements }),
	counter(ofCompaction, "unannounced_total", "Compactions found without a write to compact_rev_key.", func(s etcdsource.CompactionStats) int64 { return s.Unannounced }),
}

// Metrics of cached representations.
var blockMetrics = families[blockcache.Stats]{
	gauge(ofBlocks, "bytes", "Bytes of cached encodings of objects.", func(s blockcache.Stats) int64 { return s.Used }),
	gauge(ofBlocks, "limit_bytes", "Bound of strata_representation_bytes.", func(s blockcache.Stats) int64 { return s.Limit }),
	counter(ofBlocks, "evictions_total", "Idle blocks that were evicted.", func(s blockcache.Stats) int64 { return s.Evictions }),
	counter(ofBlocks, "refusals_total", "Blocks that were not cached for lack of room.", func(s blockcache.Stats) int64 { return s.Refusals }),
}

// Metrics of the running watches of a resource.
var lagMetrics = families[int]{
	gauge(ofWatches, "lag_events", "Events that the watch furthest behind has not examined yet.", func(events int) int { return events }),
}

// feedInfo describes the feed of a cluster.
var feedInfo = metrics.NewDesc("strata_mirror_feed_info", "1, with the mode of the feed: freshness (progress, events or unproven) and arrival_check (on or off).",
	[]string{"endpoints", "prefix", "freshness", "arrival_check"}, nil, metrics.ALPHA, "")

// Cluster is a mirrored cluster whose metrics are collected.
type Cluster struct {
	Mirror       *mirror.Mirror
	Compactor    *etcdsource.Compactor // nil if there is none
	Blocks       *blockcache.Cache     // counted once if several clusters share it
	Prefix       string
	ProgressMode etcdsource.ProgressMode
	Endpoints    func() string
	// EtcdPages returns the number of pages that are being read from etcd, and its bound.
	EtcdPages func() (reading, limit int)
	// AddLag adds, by resource, the number of events of the log that the slowest watch has not
	// read.
	AddLag func(lag map[schema.GroupResource]int)
}

// clusters reads the counters of all live clusters when it is scraped, without copies of them.
type clusters struct {
	metrics.BaseStableCollector

	mu  sync.Mutex // leaf; guards all
	all []*Cluster // in the order in which they were added
}

var (
	live         = &clusters{}
	registerLive = sync.OnceFunc(func() { legacyregistry.CustomMustRegister(live) })
)

// Add reports the metrics of a cluster from now on.
func Add(c *Cluster) {
	registerLive()
	live.mu.Lock()
	defer live.mu.Unlock()
	live.all = append(live.all, c)
}

// Remove undoes Add. It has no effect for a cluster that was not added.
func Remove(c *Cluster) {
	live.mu.Lock()
	defer live.mu.Unlock()
	live.all = slices.DeleteFunc(live.all, func(other *Cluster) bool { return other == c })
}

// DescribeWithStability implements metrics.StableCollector.
func (c *clusters) DescribeWithStability(ch chan<- *metrics.Desc) {
	ch <- feedInfo
	clusterMetrics.describe(ch)
	resourceMetrics.describe(ch)
	compactionMetrics.describe(ch)
	blockMetrics.describe(ch)
	lagMetrics.describe(ch)
}

// CollectWithStability implements metrics.StableCollector.
func (c *clusters) CollectWithStability(ch chan<- metrics.Metric) {
	c.mu.Lock()
	defer c.mu.Unlock()
	caches := map[*blockcache.Cache]struct{}{}
	lag := map[schema.GroupResource]int{}
	// Engines that mirror the same cluster, such as those of two servers in one process, have the
	// same labels: the one that was added last reports, like the last writer of upstream's gauges.
	reported := map[[2]string]bool{}
	for _, cl := range slices.Backward(c.all) {
		if id := [2]string{cl.Endpoints(), cl.Prefix}; !reported[id] {
			reported[id] = true
			cl.collect(ch)
		}
		cl.AddLag(lag)
		caches[cl.Blocks] = struct{}{}
	}
	for r, events := range lag {
		lagMetrics.collect(ch, events, r.Group, r.Resource)
	}
	var sum blockcache.Stats
	for c := range caches {
		cached := c.Stats()
		sum.Used += cached.Used
		sum.Limit += cached.Limit
		sum.Evictions += cached.Evictions
		sum.Refusals += cached.Refusals
	}
	blockMetrics.collect(ch, sum)
}

func (c *Cluster) collect(ch chan<- metrics.Metric) {
	endpoints, checked := c.Endpoints(), "off"
	if c.Mirror.VerifiesVersions() {
		checked = "on"
	}
	ch <- metrics.NewLazyConstMetric(feedInfo, metrics.GaugeValue, 1, endpoints, c.Prefix, c.ProgressMode.String(), checked)
	s := clusterStats{Stats: c.Mirror.Stats()}
	s.etcdPages, s.etcdPagesLimit = c.EtcdPages()
	clusterMetrics.collect(ch, s, endpoints, c.Prefix)
	if c.Compactor != nil {
		compactionMetrics.collect(ch, c.Compactor.Stats(), endpoints, c.Prefix)
	}
	for _, r := range c.Mirror.Resources() {
		resourceMetrics.collect(ch, r.Stats(), endpoints, c.Prefix, r.Prefix())
	}
}
