package watch

import (
	"context"
	"io"
	"log/slog"
	"maps"
	"strconv"
	"testing"
	"testing/synctest"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/freshness"
	"github.com/stratakube/strata/kube/internal/index"
	"github.com/stratakube/strata/kube/internal/list"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/pages"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// fixture is the watches of pods in memory. It runs in a synctest bubble. Its metrics are those of
// a resource whose group is the name of the test.
type fixture struct {
	*podtest.Cluster
	env        *Env
	group      schema.GroupResource
	running    watchset.Watches
	goroutines watchset.Group
	cancel     context.CancelFunc // ends the storage
}

func newFixture(t testing.TB, change ...func(*podtest.Options)) *fixture {
	t.Helper()
	pods := schema.GroupResource{Group: t.Name(), Resource: "pods"}
	f := &fixture{Cluster: podtest.New(t, change...), group: pods}
	ctx, cancel := context.WithCancel(context.Background())
	f.cancel = cancel
	lists, watches := metrics.NewLists(pods), metrics.NewWatches(pods)
	logger := slog.New(slog.NewTextHandler(io.Discard, nil))
	selections := index.New(index.Config{
		Resource: f.Resource, View: f.View, Blocks: f.Blocks, Context: ctx, Logger: logger, Start: f.goroutines.Start,
		Unindexed: watches.Unindexed, Filtered: watches.Filtered, Read: lists.Read, Refused: lists.IndexRefused, Measured: lists.Indexes,
	})
	f.env = &Env{
		Lists: &list.Env{
			Mirror: f.Mirror, Memory: f.Resource,
			Fresh: freshness.New(f.Mirror, f.Resource, pods, false), View: f.View, Selections: selections,
			Keys:    pages.Keys{PathPrefix: podtest.Prefix, ResourcePrefix: "/pods/"},
			Metrics: lists, Gates: list.Gates{Latest: true},
		},
		Running: &f.running, Goroutines: &f.goroutines, Context: ctx,
		Metrics: watches, Logger: logger, Gates: Gates{Bookmarks: true, WatchList: true},
	}
	context.AfterFunc(ctx, func() {
		f.running.Every(func(w watchset.Watch) { w.Abort(watchset.ByStorage) })
	})
	t.Cleanup(func() {
		cancel()
		f.goroutines.End()
		selections.EndShards()
	})
	return f
}

// open opens a stream of all pods that ends with the test, again while memory is late.
func (f *fixture) open(t testing.TB, ctx context.Context, opts storage.ListOptions) *Stream {
	t.Helper()
	st, err := f.env.Open(ctx, "/pods/", opts)
	for n := 0; apierrors.IsTooManyRequests(err) && n < 10; n++ {
		st, err = f.env.Open(ctx, "/pods/", opts)
	}
	testcheck.NoError(t, err)
	t.Cleanup(st.Close)
	return st
}

// drain begins to drain the watches, in a synctest bubble.
func (f *fixture) drain(t testing.TB) {
	t.Helper()
	go func() { _ = f.running.Drain(t.Context()) }()
	synctest.Wait()
}

// series returns the value of a metric of the fixture's resource, 0 if there is none.
func (f *fixture) series(t testing.TB, name string, labels ...string) int {
	t.Helper()
	n, _ := podtest.Series(t, name, f.group, labels...)
	return int(n)
}

// fromNow are the options of a watch that starts after the writes so far.
func (f *fixture) fromNow() storage.ListOptions { return after(f.Etcd.Revision()) }

// after are the options of a watch that starts after a revision.
func after(rev mirror.Revision) storage.ListOptions {
	opts := everything()
	opts.ResourceVersion = strconv.FormatInt(rev, 10)
	return opts
}

func everything() storage.ListOptions {
	return storage.ListOptions{Recursive: true, Predicate: storage.Everything}
}

func withLabel(pod *example.Pod, name, value string) *example.Pod {
	pod = pod.DeepCopy()
	pod.Labels = maps.Clone(pod.Labels)
	if pod.Labels == nil {
		pod.Labels = map[string]string{}
	}
	pod.Labels[name] = value
	return pod
}

// take returns the next batch of the stream, waiting for it.
func take(t testing.TB, st *Stream) delivery {
	t.Helper()
	for {
		b, err := st.next()
		if err == nil && b.empty() {
			err = st.wait(nil)
		}
		if err != nil {
			t.Fatalf("the stream ends: %v", err)
		}
		if !b.empty() {
			return b
		}
	}
}

// endOf returns the error that ends the stream, and the number of events before it.
func endOf(st *Stream) (events int, _ error) {
	for {
		b, err := st.next()
		if err == nil && b.empty() {
			err = st.wait(nil)
		}
		if err != nil {
			return events, err
		}
		events += len(b.events)
	}
}

func withBookmarks(opts storage.ListOptions) storage.ListOptions {
	opts.Predicate.AllowWatchBookmarks = true
	return opts
}

// record reads a stream to its end, closes it, and returns its batches.
func record(st *Stream) (got []delivery, err error) {
	defer st.Close()
	for {
		b, err := st.next()
		if err == nil && b.empty() {
			err = st.wait(nil)
		}
		if err != nil {
			return got, err
		}
		if !b.empty() {
			b.events = append([]*mirror.Event(nil), b.events...)
			got = append(got, b)
		}
	}
}

func selector(t testing.TB, text string) labels.Selector {
	t.Helper()
	parsed, err := labels.Parse(text)
	testcheck.NoError(t, err)
	return parsed
}
