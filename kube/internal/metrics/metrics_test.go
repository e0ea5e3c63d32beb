package metrics

import (
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"math"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/storage"

	"k8s.io/component-base/metrics"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

var resources atomic.Int64

// resource returns a resource with metrics of its own: counters of the process stay.
func resource(t *testing.T) schema.GroupResource {
	return schema.GroupResource{Group: "metrics", Resource: fmt.Sprint(t.Name(), resources.Add(1))}
}

// require fails unless the metric of the resource has the value.
func require(t *testing.T, want float64, name string, r schema.GroupResource, labels ...string) {
	t.Helper()
	if got, _ := podtest.Series(t, name, r, labels...); got != want {
		t.Errorf("%s %v of %s is %v, want %v", name, labels, r, got, want)
	}
}

// requireNone fails if the metric of the resource has a series.
func requireNone(t *testing.T, r schema.GroupResource, names ...string) {
	t.Helper()
	for _, name := range names {
		if got, ok := podtest.Series(t, name, r); ok {
			t.Errorf("%s is %v, want no series before the first use", name, got)
		}
	}
}

// TestCache_Events_AreCountedOnce: upstream's metrics of the watch cache show the mirror's work on
// a resource, also over several reports.
func TestCache_Events_AreCountedOnce(t *testing.T) {
	r, c := resource(t), podtest.New(t)
	cache := NewCache(c.Mirror)
	cache.Add(c.Resource, r)
	cache.Add(c.Resource, schema.GroupResource{Resource: "other"}) // keeps its first name
	if all := cache.Resources(); len(all) != 1 || all[c.Resource] != r {
		t.Errorf("reported resources are %v", all)
	}
	changes := []func() mirror.Revision{
		func() mirror.Revision { return c.Put(t, podtest.Pod("a")) },
		func() mirror.Revision { return c.Put(t, podtest.Pod("a")) },
		func() mirror.Revision { return c.Etcd.Delete(podtest.Key(podtest.Pod("a"))) },
	}
	for i, change := range changes {
		last, want := change(), float64(i+1)
		c.CatchUp(t)
		podtest.Eventually(t, "the mirror counts the event", func() bool {
			n := int64(0)
			for _, p := range c.Resource.Stats().Publications { // counted last
				n += p.N
			}
			return n == int64(i+1)
		})
		for range 2 {
			cache.report()
			require(t, want, "apiserver_watch_cache_events_received_total", r)
			require(t, want, "apiserver_watch_cache_events_dispatched_total", r)
			require(t, want, "watch_cache_capacity", r)
			require(t, want, "apiserver_watch_events_dispatch_duration_seconds", r, "stage", "storage_to_cache")
			require(t, 1, "apiserver_watch_cache_initializations_total", r)
			require(t, 1, "apiserver_watch_cache_initialization_duration_seconds", r)
			require(t, float64(last), "apiserver_watch_cache_resource_version", r)
		}
	}
	requireNone(t, r, "apiserver_watch_cache_initialization_errors_total")
}

// TestCacheMetrics_OfFailedLists_CountErrors: a resource that cannot be listed is an initialization
// error each time, and one initialization when it can. Run reports every second, and at its end.
func TestCacheMetrics_OfFailedLists_CountErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		r, etcd := resource(t), memory.New()
		etcd.FailLists(errors.New("no list for now"))
		m, err := mirror.New(mirror.Options{Prefix: podtest.Prefix, Source: etcd, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
		testcheck.NoError(t, err)
		defer m.Close()
		pods, err := m.Claim(podtest.Root)
		testcheck.NoError(t, err)
		time.Sleep(10 * time.Second)
		cache, failures := NewCache(m), pods.Stats().LoadFailures
		cache.Add(pods, r)
		if cache.report(); failures == 0 {
			t.Error("no list has failed")
		}
		require(t, float64(failures), "apiserver_watch_cache_initialization_errors_total", r)
		requireNone(t, r, "apiserver_watch_cache_initializations_total", "apiserver_watch_cache_resource_version")
		etcd.FailLists(nil)
		testcheck.NoError(t, pods.WaitReady(podtest.Context(t)))
		done := make(chan struct{})
		ctx := podtest.Context(t)
		go func() { cache.Run(ctx); close(done) }()
		time.Sleep(cacheMetricsInterval + time.Millisecond)
		synctest.Wait()
		st := pods.Stats()
		require(t, float64(st.LoadFailures), "apiserver_watch_cache_initialization_errors_total", r)
		require(t, 1, "apiserver_watch_cache_initializations_total", r)
		<-ctx.Done()
		<-done
	})
}

// TestLists_Counts_HaveLabels of their source, reason, plan and page, and are summed by resource.
func TestLists_Counts_HaveLabels(t *testing.T) {
	r := resource(t)
	m := NewLists(r)
	requireNone(t, r, "strata_lists_expired_total", "strata_index_refusals_total", "strata_indexes")
	page, next := storage.ListOptions{}, storage.ListOptions{}
	page.Predicate.Limit, next.Predicate.Continue = 5, "token"
	m.Count(storage.ListOptions{}, SourcePresent, ReasonConsistent)
	m.Count(page, SourcePresent, ReasonConsistent)
	m.Count(next, SourcePast, ReasonContinue)
	m.Count(storage.ListOptions{}, SourceEtcd, ReasonGate)
	require(t, 2, "strata_lists_total", r, "source", SourcePresent, "reason", ReasonConsistent)
	require(t, 1, "strata_lists_total", r, "source", SourcePast, "reason", ReasonContinue)
	require(t, 1, "strata_list_pages_total", r, "continued", "false")
	require(t, 1, "strata_list_pages_total", r, "continued", "true")
	if got := CountedLists()[r]; got != (ListCounts{Present: 2, Past: 1, Etcd: 1}) {
		t.Errorf("counted %+v", got)
	}

	expired, other := apierrors.NewResourceExpired("x"), errors.New("x")
	if m.Failed(expired) != error(expired) || m.Failed(other) != other || m.Failed(nil) != nil {
		t.Error("an error is changed")
	}
	require(t, 1, "strata_lists_expired_total", r)

	m.Selected(PlanIndex, 10, 4)
	m.Selected(PlanIndex, 5, 1)
	m.Selected(PlanScan, 100, 0)
	require(t, 2, "strata_list_plans_total", r, "plan", PlanIndex)
	require(t, 15, "strata_list_examined_objects_total", r, "plan", PlanIndex)
	require(t, 5, "strata_list_selected_objects_total", r, "plan", PlanIndex)
	require(t, 100, "strata_list_examined_objects_total", r, "plan", PlanScan)
	m.Read(7, 0)
	m.Read(1, 2)
	require(t, 8, "strata_list_read_values_total", r, "source", "stored")
	require(t, 2, "strata_list_read_values_total", r, "source", "decoded")
	m.Indexes(2, 1000)
	m.Indexes(-1, -300)
	m.IndexRefused()
	require(t, 1, "strata_indexes", r)
	require(t, 700, "strata_index_bytes", r)
	require(t, 1, "strata_index_refusals_total", r)
}

// TestReads_Outcomes_HaveUpstreamsLabels, and the status counts the GETs that etcd answered.
func TestReads_Outcomes_HaveUpstreamsLabels(t *testing.T) {
	r := resource(t)
	m := NewReads(r)
	before := GetsFromEtcd()
	for _, c := range []struct {
		success, fallback bool
		labels            []string
	}{
		{true, false, []string{"success", "true", "fallback", "false"}},
		{true, true, []string{"success", "true", "fallback", "true"}},
		{false, false, []string{"success", "false", "fallback", "false"}},
		{false, true, []string{"success", "false", "fallback", "true"}},
	} {
		const name = "apiserver_watch_cache_consistent_read_total"
		require(t, 0, name, r, c.labels...)
		m.Consistent(c.success, c.fallback)
		require(t, 1, name, r, c.labels...)
	}
	if n := GetsFromEtcd() - before; n != 1 {
		t.Errorf("%d GETs from etcd, want 1", n)
	}
	m.Waited(time.Second)
	require(t, 1, "apiserver_watch_cache_read_wait_seconds", r)
}

// TestWatches_Counts_AppearOnFirstUse of the start, the bookmarks, the deliveries and the end of a
// watch.
func TestWatches_Counts_AppearOnFirstUse(t *testing.T) {
	r := resource(t)
	m := NewWatches(r)
	m.Started(0, 0)
	m.Filtered(0)
	requireNone(t, r, "apiserver_init_events_total", "strata_watch_replayed_events_total", "strata_watch_bookmarks_total",
		"apiserver_terminated_watchers_total", "strata_watches_unindexed_total", "strata_watch_delivery_seconds")
	m.Started(4, 3)
	m.Started(5, 0)
	m.Bookmark()
	m.Ended("timeout")
	m.Unindexed()
	m.Terminated()
	require(t, 12, "apiserver_init_events_total", r)
	require(t, 3, "strata_watch_replayed_events_total", r)
	require(t, 1, "strata_watch_bookmarks_total", r)
	require(t, 1, "strata_watches_ended_total", r, "reason", "timeout")
	require(t, 1, "strata_watches_unindexed_total", r)
	require(t, 1, "apiserver_terminated_watchers_total", r)
	now := driver.Now()
	m.Delivered(now, now)
	m.Dispatched(now, now)
	require(t, 1, "strata_watch_delivery_seconds", r)
	for _, stage := range []string{"total", "cache_to_watcher"} {
		require(t, 2, "apiserver_watch_events_dispatch_duration_seconds", r, "stage", stage)
	}
}

// reported returns a cluster that is scraped until the test ends or remove is called.
func reported(t *testing.T, c *podtest.Cluster, r schema.GroupResource) (remove func()) {
	cl := &Cluster{
		Mirror: c.Mirror, Blocks: c.Blocks, Prefix: podtest.Prefix, ProgressMode: etcdsource.ByProgress,
		Endpoints: t.Name,
		EtcdPages: func() (int, int) { return 1, 4 },
		AddLag:    func(lag map[schema.GroupResource]int) { lag[r] = max(lag[r], 7) },
	}
	Add(cl)
	t.Cleanup(func() { Remove(cl) })
	return func() { Remove(cl) }
}

// TestClusters_Scrape_HasStatsOfMirror and of its resources, while the cluster is not removed.
func TestClusters_Scrape_HasStatsOfMirror(t *testing.T) {
	c := podtest.New(t)
	c.Put(t, podtest.Pod("a"), podtest.Pod("b"))
	c.CatchUp(t)
	r := resource(t)
	remove := reported(t, c, r)
	of := []string{"endpoints", t.Name(), "prefix", podtest.Prefix}
	st := c.Mirror.Stats()
	for name, want := range map[string]float64{
		"strata_mirror_ready": 1, "strata_mirror_revision": float64(st.PublishedRevision), "strata_mirror_events_total": float64(st.Events),
		"strata_mirror_etcd_lists": 1, "strata_mirror_etcd_lists_limit": 4, "strata_mirror_relists_total": float64(st.Relists),
	} {
		if got, ok := podtest.Labels(t, name, of...); !ok || got != want {
			t.Errorf("%s is %v, %t, want %v", name, got, ok, want)
		}
	}
	if got, _ := podtest.Labels(t, "strata_mirror_resource_objects", append(of, "resource", podtest.Root)...); got != 2 {
		t.Errorf("%v objects, want 2", got)
	}
	require(t, 7, "strata_watch_lag_events", r)
	remove()
	if _, ok := podtest.Labels(t, "strata_mirror_ready", of...); ok {
		t.Error("a removed cluster is reported")
	}
}

// TestMetrics_TwoEnginesOfOneCluster_AreGathered: two servers in one process, each with a mirror of
// the same etcd and prefix, have the same labels; the one that was added last reports.
func TestMetrics_TwoEnginesOfOneCluster_AreGathered(t *testing.T) {
	first, second := podtest.New(t), podtest.New(t)
	second.Put(t, podtest.Pod("a"))
	second.CatchUp(t)
	reported(t, first, resource(t))
	remove := reported(t, second, resource(t))
	for _, c := range []*podtest.Cluster{second, first} {
		got, ok := podtest.Labels(t, "strata_mirror_revision", "endpoints", t.Name(), "prefix", podtest.Prefix)
		if want := c.Mirror.PublishedRevision(); !ok || mirror.Revision(got) != want {
			t.Errorf("the revision is %v, %t, want %d", got, ok, want)
		}
		remove()
	}
}

// TestClusters_SharedBlocks_AreCountedOnce: the block cache of an engine is that of all its
// clusters.
func TestClusters_SharedBlocks_AreCountedOnce(t *testing.T) {
	limit := func() float64 {
		n, _ := podtest.Labels(t, "strata_representation_limit_bytes")
		return n
	}
	before := limit()
	one, two := podtest.New(t), podtest.New(t)
	two.Blocks = one.Blocks
	for _, c := range []*podtest.Cluster{one, two} {
		reported(t, c, resource(t))
		if got, want := limit()-before, float64(one.Blocks.Stats().Limit); got != want {
			t.Errorf("the limit is %v, want %v", got, want)
		}
	}
}

// TestFamilies_ValueIsNaN_HasNoSeries, and other values have their kind and labels.
func TestFamilies_ValueIsNaN_HasNoSeries(t *testing.T) {
	of := scope{prefix: "test_", labels: []string{"a"}}
	all := families[float64]{
		gauge(of, "gauge", "A gauge.", func(s float64) float64 { return s }),
		counter(of, "counter_total", "A counter.", func(float64) int { return 3 }),
	}
	collector := &scraped{families: all}
	registry := metrics.NewKubeRegistry()
	registry.CustomMustRegister(collector)
	for _, value := range []float64{math.NaN(), 5} {
		collector.value = value
		gathered, err := registry.Gather()
		testcheck.NoError(t, err)
		got := map[string]string{}
		for _, f := range gathered {
			got[f.GetName()] = fmt.Sprint(f.GetType(), " ", f.GetMetric()[0].GetGauge().GetValue(), f.GetMetric()[0].GetCounter().GetValue(), f.GetMetric()[0].GetLabel()[0].GetValue())
		}
		want := map[string]string{"test_counter_total": "COUNTER 0 3b"}
		if value == 5 {
			want["test_gauge"] = "GAUGE 5 0b"
		}
		if !maps.Equal(got, want) {
			t.Errorf("of %v: %v, want %v", value, got, want)
		}
	}
}

// scraped is a collector of families of one value.
type scraped struct {
	metrics.BaseStableCollector
	families[float64]
	value float64
}

func (s *scraped) DescribeWithStability(ch chan<- *metrics.Desc) { s.describe(ch) }
func (s *scraped) CollectWithStability(ch chan<- metrics.Metric) { s.collect(ch, s.value, "b") }
