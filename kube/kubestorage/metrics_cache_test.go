package kubestorage

import (
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// series returns the value of a metric of the resource, for a histogram its count, and whether it
// exists. Other labels must have the given values.
func series(t testing.TB, name string, r schema.GroupResource, labels ...string) (float64, bool) {
	t.Helper()
	return podtest.Series(t, name, r, labels...)
}

// requireSeries fails unless the metric has the value.
func requireSeries(t *testing.T, want float64, name string, r schema.GroupResource, labels ...string) {
	t.Helper()
	if got, _ := series(t, name, r, labels...); got != want {
		t.Errorf("%s %v of %s is %v, want %v", name, labels, r, got, want)
	}
}

// TestCacheMetrics_OfEvents_CountThem: upstream's metrics of the watch cache show the engine's
// work, for a resource that is loaded, written and watched.
func TestCacheMetrics_OfEvents_CountThem(t *testing.T) {
	pods := schema.GroupResource{Group: "metrics", Resource: "cached"}
	f := setupInMemory(t, func(o *options) { o.store.GroupResource = pods })
	f.catchUp(t) // the feed has started
	w := f.watchPods(t, everything())
	for _, name := range []string{"a", "b", "c"} {
		f.create(t, newPod(name))
		nextPod(t, w, watch.Added)
	}
	f.update(t, newPod("a"), "x")
	nextPod(t, w, watch.Modified)
	f.remove(t, newPod("b"))
	last := nextPod(t, w, watch.Deleted)
	eventually(t, "the events are reported", func() bool {
		rv, _ := series(t, "apiserver_watch_cache_resource_version", pods) // reported last
		return rv >= float64(parseRevision(t, last.ResourceVersion))
	})
	requireSeries(t, 5, "apiserver_watch_cache_events_dispatched_total", pods)
	requireSeries(t, 5, "apiserver_watch_cache_events_received_total", pods)
	requireSeries(t, 1, "apiserver_watch_cache_initializations_total", pods)
	requireSeries(t, 1, "apiserver_watch_cache_initialization_duration_seconds", pods)
	requireSeries(t, 5, "watch_cache_capacity", pods)
	for _, stage := range []string{"storage_to_cache", "total", "cache_to_watcher"} {
		eventually(t, "five events are observed in stage "+stage, func() bool {
			n, _ := series(t, "apiserver_watch_events_dispatch_duration_seconds", pods, "stage", stage)
			return n == 5
		})
	}
	for _, name := range []string{"apiserver_watch_cache_initialization_errors_total", "apiserver_terminated_watchers_total"} {
		if n, ok := series(t, name, pods); ok {
			t.Errorf("%s is %v, want no series before the first", name, n)
		}
	}
}

// TestCacheMetrics_OfSlowWatch_CountTerminated: a watch whose position leaves the window is a
// terminated watcher.
func TestCacheMetrics_OfSlowWatch_CountTerminated(t *testing.T) {
	pods := schema.GroupResource{Group: "metrics", Resource: "slow"}
	f := setup(t, withWindow(mirror.Window{MaxAge: time.Hour, MaxBytes: 1 << 20}), func(o *options) { o.store.GroupResource = pods })
	pod := f.create(t, newPod("a"))[0]
	f.catchUp(t)
	stream, err := f.engine(t).openStream(contextFor(t), "/pods/", afterRevision(pod.ResourceVersion))
	if err != nil {
		t.Fatal(err)
	}
	f.update(t, pod, "x")
	f.outrun(contextFor(t), t, f.update(t, pod, "y").ResourceVersion)
	if got, err := record(stream); err == nil || len(got.events) > 0 {
		t.Fatalf("the stream has %d events and ends with %v, want that history has left it behind", len(got.events), err)
	}
	requireSeries(t, 1, "apiserver_terminated_watchers_total", pods)
}
