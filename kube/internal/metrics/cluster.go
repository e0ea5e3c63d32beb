// Package metrics declares the metrics of the engine and feeds those of Kubernetes' watch cache: of clusters, lists, reads
// and watches.
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
	lists, listLimit int
}

// Metrics of a mirrored cluster.
var clusterMetrics = families[clusterStats]{
	gauge(ofCluster, "ready", "Whether the initial list from etcd has completed (1) or not (0).", func(s clusterStats) int { return oneIf(s.Ready) }),
	gauge(ofCluster, "revision", "Latest revision visible to readers.", func(s clusterStats) int64 { return s.Revision }),
	gauge(ofCluster, "history_bytes", "Stored bytes of replaced and deleted objects held in memory for history.", func(s clusterStats) int64 { return s.HistoryBytes }),
	gauge(ofCluster, "version_bytes", "Bytes of retained old versions that are not shared with the latest version, excluding objects, which strata_mirror_history_bytes counts.",
		func(s clusterStats) int64 { return s.VersionBytes }),
	gauge(ofCluster, "history_limit_bytes", "Limit of the sum of strata_mirror_history_bytes and strata_mirror_version_bytes.",
		func(s clusterStats) int64 { return s.HistoryLimit }),
	gauge(ofCluster, "history_floor_revision", "Oldest revision from which history in memory is complete.", func(s clusterStats) int64 { return s.HistoryFloor }),
	gauge(ofCluster, "compacted_revision", "Revision below which old versions were dropped because etcd was compacted.",
		func(s clusterStats) int64 { return s.Compacted }),
	gauge(ofCluster, "etcd_lists", "Number of list pages at revisions older than memory that are being read from etcd.", func(s clusterStats) int { return s.lists }),
	gauge(ofCluster, "etcd_lists_limit", "Limit of strata_mirror_etcd_lists, beyond which list pages wait.", func(s clusterStats) int { return s.listLimit }),
	gauge(ofCluster, "unclaimed_bytes", "Bytes of cached values of resources that no client has requested.", func(s clusterStats) int64 { return s.UnclaimedBytes }),
	gauge(ofCluster, "unclaimed_limit_bytes", "Limit of strata_mirror_unclaimed_bytes.", func(s clusterStats) int64 { return s.UnclaimedLimit }),
	counter(ofCluster, "events_total", "Number of events applied.", func(s clusterStats) int64 { return s.Events }),
	counter(ofCluster, "dropped_events_total", "Number of events dropped because their resource is not cached.", func(s clusterStats) int64 { return s.Dropped }),
	counter(ofCluster, "listed_keys_total", "Number of keys listed from etcd.", func(s clusterStats) int64 { return s.ListedKeys }),
	counter(ofCluster, "relists_total", "Number of relists of the whole prefix, including failed attempts.", func(s clusterStats) int64 { return s.Relists }),
	counter(ofCluster, "reconnects_total", "Number of times the watch on etcd was reopened after it ended.", func(s clusterStats) int64 { return s.Reconnects }),
	counter(ofCluster, "silent_feeds_total", "Number of reconnects (strata_mirror_reconnects_total) caused by a stalled watch on etcd: no response while etcd's revision advanced.",
		func(s clusterStats) int64 { return s.SilentFeeds }),
	counter(ofCluster, "divergences_total", "Number of resources relisted because an event did not match the cached state.", func(s clusterStats) int64 { return s.Divergences }),
	counter(ofCluster, "repairs_total", "Number of times that keys were read again because a consistency check found that memory differs from etcd.",
		func(s clusterStats) int64 { return s.Repairs }),
	gauge(ofCluster, "etcd_revision", "Latest known revision of etcd, from a revision read or from the feed.", func(s clusterStats) int64 { return s.EtcdRevision }),
	gauge(ofCluster, "revision_lag", "Number of revisions by which strata_mirror_revision is behind strata_mirror_etcd_revision.",
		func(s clusterStats) int64 { return max(0, s.EtcdRevision-s.Revision) }),
	counter(ofCluster, "revision_read_waiters_total", "Number of requests that waited for a read of etcd's revision (strata_mirror_revision_reads_total).",
		func(s clusterStats) int64 { return s.RevisionReadWaiters }),
	counter(ofCluster, "etcd_restores_total", "Number of times that all cached state was discarded because etcd was restored to an older state or replaced by another cluster.",
		func(s clusterStats) int64 { return s.Restores }),
	counter(ofCluster, "replays_total", "Number of times that history was restored from etcd, for the whole prefix or for one resource.",
		func(s clusterStats) int64 { return s.Replays }),
	counter(ofCluster, "replayed_events_total", "Number of past events read from etcd to restore history.", func(s clusterStats) int64 { return s.ReplayedEvents }),
	gauge(ofCluster, "replay_floor_revision", "Revision after which the most recently restored history begins.", func(s clusterStats) int64 { return s.ReplayFloor }),
	gauge(ofCluster, "replay_seconds", "Duration in seconds of the most recent restore of history, excluding its list.",
		func(s clusterStats) float64 { return s.ReplayTime.Seconds() }),
	counter(ofCluster, "revision_reads_total", "Number of linearizable reads of etcd's revision, each shared by all requests that wait for it.",
		func(s clusterStats) int64 { return s.RevisionReads }),
	counter(ofCluster, "progress_requests_total", "Number of progress requests sent to etcd.", func(s clusterStats) int64 { return s.ProgressRequests }),
}

// Metrics of a resource in memory.
var resourceMetrics = families[mirror.ResourceStats]{
	gauge(ofResource, "resource_objects", "Number of objects in memory.", func(s mirror.ResourceStats) int { return s.Entries }),
	gauge(ofResource, "resource_stored_bytes", "Stored size of the objects in memory in bytes.", func(s mirror.ResourceStats) int64 { return s.Bytes }),
	gauge(ofResource, "resource_ready", "Whether the resource can be read from memory (1) or not (0).", func(s mirror.ResourceStats) int { return oneIf(s.Ready) }),
	gauge(ofResource, "resource_log_events", "Number of events in memory from which watches can resume.", func(s mirror.ResourceStats) int { return s.Events }),
	gauge(ofResource, "resource_versions", "Number of retained old versions, including those cached for readers; revisions between two of them are reconstructed from events.",
		func(s mirror.ResourceStats) int { return s.Versions }),
	gauge(ofResource, "resource_version_bytes", "Bytes of the retained old versions (strata_mirror_resource_versions) that are not shared with the latest version.",
		func(s mirror.ResourceStats) int64 { return s.VersionBytes }),
	gauge(ofResource, "resource_suspect", "Whether the last completed consistency check found that memory differs from etcd (1) or not (0). While it is 1, lists at old revisions are read from etcd.",
		func(s mirror.ResourceStats) int { return oneIf(s.Inconsistent) }),
	gauge(ofResource, "resource_oldest_revision", "Oldest revision at which memory can serve a list.",
		func(s mirror.ResourceStats) int64 { return s.OldestRevision }),
	gauge(ofResource, "resource_past_readers", "Number of lists at old revisions that are being read from memory, each of which retains its version.",
		func(s mirror.ResourceStats) int { return s.Readers }),
	gauge(ofResource, "resource_past_readers_oldest_revision", "Oldest revision read by a list that strata_mirror_resource_past_readers counts, 0 if there is none.",
		func(s mirror.ResourceStats) int64 { return s.OldestRead }),
}

// Metrics of the compactions of a cluster.
var compactionMetrics = families[etcdsource.CompactionStats]{
	gauge(ofCompaction, "revision", "Latest known compact revision of etcd, including a compaction that has been recorded and is about to run.", func(s etcdsource.CompactionStats) int64 { return s.Revision }),
	gauge(ofCompaction, "kept_revisions", "Number of revisions of history retained by etcd: the difference between its revision and strata_compaction_revision.",
		func(s etcdsource.CompactionStats) float64 {
			if s.Revision == 0 {
				return math.NaN()
			}
			return float64(max(0, s.EtcdRevision-s.Revision))
		}),
	gauge(ofCompaction, "following", "Whether the watch on compact_rev_key, which announces compactions, is open (1) or not (0).", func(s etcdsource.CompactionStats) int { return oneIf(s.Following) }),
	counter(ofCompaction, "compactions_total", "Number of compactions made by this server.", func(s etcdsource.CompactionStats) int64 { return s.Compactions }),
	counter(ofCompaction, "failures_total", "Number of failed attempts of this server to compact etcd, at most one for each compaction interval.", func(s etcdsource.CompactionStats) int64 { return s.Failures }),
	counter(ofCompaction, "watch_losses_total", "Number of times that the watch on compact_rev_key was lost.", func(s etcdsource.CompactionStats) int64 { return s.Losses }),
	counter(ofCompaction, "doubted_writes_total", "Number of writes to compact_rev_key that were ignored because their value is invalid.", func(s etcdsource.CompactionStats) int64 { return s.Doubts }),
	counter(ofCompaction, "unannounced_total", "Number of detected compactions that were not recorded in compact_rev_key.", func(s etcdsource.CompactionStats) int64 { return s.Unannounced }),
}

// Metrics of cached representations.
var blockMetrics = families[blockcache.Stats]{
	gauge(ofBlocks, "bytes", "Bytes of cached encodings of objects (JSON, protobuf, metadata only, compressed, decoded).", func(s blockcache.Stats) int64 { return s.Used }),
	gauge(ofBlocks, "limit_bytes", "Limit of strata_representation_bytes.", func(s blockcache.Stats) int64 { return s.Limit }),
	counter(ofBlocks, "evictions_total", "Number of blocks of cached encodings that were evicted because they had not been read recently.",
		func(s blockcache.Stats) int64 { return s.Evictions }),
	counter(ofBlocks, "refusals_total", "Number of blocks of encodings that were not cached because all cached blocks are in use.",
		func(s blockcache.Stats) int64 { return s.Refusals }),
}

// Metrics of the running watches of a resource.
var lagMetrics = families[int]{
	gauge(ofWatches, "lag_events", "Number of events of the resource that the slowest running watch has not read yet. A watch that is waiting for an event counts as 0.",
		func(events int) int { return events }),
}

// feedInfo describes the feed of a cluster.
var feedInfo = metrics.NewDesc("strata_mirror_feed_info", "Mode of the watch on etcd, always 1. freshness is the source of the latest revision: progress (etcd answers progress requests), "+
	"events (the watch is on all keys: kine, etcd's gRPC proxy) or unproven (none, consistent reads are served from etcd). "+
	"arrival_check is off if the store does not count the writes to a key, so that only consistency checks detect a lost event.",
	[]string{"endpoints", "prefix", "freshness", "arrival_check"}, nil, metrics.ALPHA, "")

// Cluster is a mirrored cluster whose metrics are collected.
type Cluster struct {
	Mirror    *mirror.Mirror
	Compactor *etcdsource.Compactor // nil if there is none
	Blocks    *blockcache.Cache     // counted once if several clusters share it
	Prefix    string
	Freshness etcdsource.Freshness
	Endpoints func() string
	// Lists returns the number of pages that are being read from etcd, and its bound.
	Lists func() (reading, limit int)
	// AddLag adds, by resource, the number of events of the log that the slowest watch has not
	// read.
	AddLag func(lag map[schema.GroupResource]int)
}

// clusters reads the counters of all live clusters when it is scraped, without copies of them.
type clusters struct {
	metrics.BaseStableCollector

	mu  sync.Mutex
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
	// Engines that mirror the same cluster, such as those of two servers in one process, have the same labels: the one that was
	// added last reports, like the last writer of upstream's gauges.
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
	if c.Mirror.ChecksArrival() {
		checked = "on"
	}
	ch <- metrics.NewLazyConstMetric(feedInfo, metrics.GaugeValue, 1, endpoints, c.Prefix, c.Freshness.String(), checked)
	s := clusterStats{Stats: c.Mirror.Stats()}
	s.lists, s.listLimit = c.Lists()
	clusterMetrics.collect(ch, s, endpoints, c.Prefix)
	if c.Compactor != nil {
		compactionMetrics.collect(ch, c.Compactor.Stats(), endpoints, c.Prefix)
	}
	for _, r := range c.Mirror.Resources() {
		resourceMetrics.collect(ch, r.Stats(), endpoints, c.Prefix, r.Prefix())
	}
}
