package kubestorage

import (
	"context"
	"io"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/watch"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/runtime/schema"
	apiwatch "k8s.io/apimachinery/pkg/watch"

	enginemetrics "github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/watchset"
	"github.com/stratakube/strata/mirror"
)

// engine returns an engine whose only cluster is the twin's.
func (w *twin) engine() *Engine {
	e := New(Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))})
	w.cluster.opts.Logger = e.opts.Logger
	e.clusters["twin"] = w.cluster
	return e
}

// TestDrain_Watch_GetsPendingEventsAndBookmark: each watch gets its pending events, up to etcd's
// revision at the start of the drain, then one bookmark if it requested any, then its end; later
// watches are refused.
func TestDrain_Watch_GetsPendingEventsAndBookmark(t *testing.T) {
	for _, bookmarks := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newTwin(t, mirror.DefaultWindow)
			e := w.engine()
			opts := w.fromNow()
			if bookmarks {
				opts = withBookmarks(opts)
			}
			type result struct {
				got recorder
				err error
			}
			results := make(chan result)
			const n = 10
			for range n {
				st, err := w.openStream(t.Context(), "/pods/", opts)
				testcheck.NoError(t, err)
				go func() {
					got, err := record(st)
					results <- result{got, err}
				}()
			}
			synctest.Wait()
			w.put(t, newPod("a"))
			last := w.etcd.Put("/elsewhere/b", "") // only progress reports it
			drained := make(chan error, 1)
			go func() { drained <- e.Drain(t.Context(), time.Second) }()
			for range n {
				r := <-results
				if r.err != nil {
					t.Errorf("the watch ends with %v", r.err)
				}
				if len(r.got.events) != 1 || (len(r.got.bookmarks) == 1) != bookmarks {
					t.Fatalf("got %+v, want an event, and a bookmark: %t", r.got, bookmarks)
				}
				if bookmarks && (r.got.bookmarks[0].Revision < last || r.got.bookmarks[0].InitialEventsEnd) {
					t.Errorf("the bookmark is %+v, want one at %d", r.got.bookmarks[0], last)
				}
			}
			if err := <-drained; err != nil {
				t.Error(err)
			}
			_, err := w.openStream(t.Context(), "/pods/", opts)
			requireRetry(t, "a later watch", err)
		})
	}
}

// TestDrain_WatchWithoutDrain_Continues: a watch of a client that stops with the server continues,
// and may start, while the others end. It ends with its storage.
func TestDrain_WatchWithoutDrain_Continues(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		e := w.engine()
		type result struct {
			got recorder
			err error
		}
		open := func(ctx context.Context) <-chan result {
			st, err := w.openStream(ctx, "/pods/", w.fromNow())
			testcheck.NoError(t, err)
			results := make(chan result, 1)
			go func() {
				got, err := record(st)
				results <- result{got, err}
			}()
			return results
		}
		other := open(t.Context())
		before := open(watch.WithoutDrain(t.Context()))
		synctest.Wait()
		if err := e.Drain(t.Context(), time.Second); err != nil {
			t.Error(err)
		}
		<-other
		during := open(watch.WithoutDrain(t.Context()))
		w.put(t, newPod("a"))
		synctest.Wait()
		select {
		case r := <-before:
			t.Fatalf("a watch without drain ends with %v", r.err)
		case r := <-during:
			t.Fatalf("a watch without drain that began during the drain ends with %v", r.err)
		default:
		}
		w.cancel()
		for _, results := range []<-chan result{before, during} {
			if r := <-results; r.err != nil || len(r.got.events) != 1 {
				t.Errorf("got %+v, %v, want an event and the end", r.got, r.err)
			}
		}
	})
}

// TestDrain_EtcdOrClientHangs_IsBounded: neither an etcd that does not answer nor a client that
// does not read delays it further.
func TestDrain_EtcdOrClientHangs_IsBounded(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		e := w.engine()
		w.etcd.Stall(true)
		defer w.etcd.Stall(false)
		w.etcd.Put("/elsewhere/a", "")
		stalled := w.open(t, t.Context(), withBookmarks(w.fromNow()))
		go record(w.open(t, t.Context(), withBookmarks(w.fromNow())))
		ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second)
		defer cancel()
		began := time.Now()
		err := e.Drain(ctx, 2*time.Second)
		if took := time.Since(began); took != 5*time.Second || err == nil || !strings.HasPrefix(err.Error(), "1 watches") {
			t.Errorf("took %s: %v; want that one watch was broken off after 5 s", took, err)
		}
		if stalled.Context().Err() == nil {
			t.Error("the watch did not end")
		}
	})
}

// TestDrain_ThroughStorageInterface_EndsWatches is TestDrain_Watch_GetsPendingEventsAndBookmark
// through storage.Interface, and of an uncached resource: its watches end, and get no bookmarks
// that Kubernetes would not send.
func TestDrain_ThroughStorageInterface_EndsWatches(t *testing.T) {
	t.Parallel()
	for _, tt := range []struct {
		name string
		set  func(*options)
		want string
	}{
		{"cached", func(*options) {}, "ADDED,BOOKMARK"},
		{"without the gate", withGates(gates(t, Gates(), "WatchBookmark=false")), "ADDED"},
		{"uncached", uncached, "ADDED"},
		{"from etcd", fromEtcd, "ADDED"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			f := setup(t, tt.set)
			opts := withBookmarks(everything())
			opts.ResourceVersion = f.create(t, newPod("a"))[0].ResourceVersion
			f.catchUp(t)
			w, err := f.Watch(contextFor(t), "/pods/", opts)
			testcheck.NoError(t, err)
			defer w.Stop()
			f.create(t, newPod("b"))
			e := New(f.cluster.opts)
			e.clusters["test"] = f.cluster
			var got []string
			took := func(ev apiwatch.Event) { got = append(got, string(ev.Type)) }
			took(<-w.ResultChan())
			drained := make(chan error, 1)
			go func() { drained <- e.Drain(contextFor(t), time.Second) }()
			for ev := range w.ResultChan() {
				took(ev)
			}
			if types := strings.Join(got, ","); types != tt.want {
				t.Errorf("got %s, want %s", types, tt.want)
			}
			w.Stop()
			if err := <-drained; err != nil {
				t.Error(err)
			}
			_, err = f.Watch(contextFor(t), "/pods/", opts)
			requireRetry(t, "a later watch", err)
		})
	}
}

// TestEventsOnly_WatchResumptionGateOff_RequestsNoProgress: without EfficientWatchResumption etcd
// gets no progress requests, and gates that depend on progress cannot be set.
func TestEventsOnly_WatchResumptionGateOff_RequestsNoProgress(t *testing.T) {
	t.Parallel()
	f := setup(t, withGates(gates(t, Gates(), "EfficientWatchResumption=false")))
	pod := f.create(t, newPod("a"))[0]
	rev := parseRevision(t, pod.ResourceVersion)
	eventually(t, "the event arrives", func() bool { return f.cluster.mirror.PublishedRevision() >= rev })
	if _, err := f.client.Put(contextFor(t), "/elsewhere/b", ""); err != nil {
		t.Fatal(err)
	}
	if got := podNames(f.list(t, everything())); got != "a" {
		t.Errorf("list has %q", got)
	}
	if st := f.cluster.mirror.Stats(); st.ProgressRequests != 0 || st.PublishedRevision != rev {
		t.Errorf("%d progress requests, published revision %d; want 0, and the revision of the pod, %s", st.ProgressRequests, st.PublishedRevision, pod.ResourceVersion)
	}
	for _, gate := range []string{"ConsistentListFromCache", "ConsistentGetFromCache"} {
		opts := Options{Gates: gates(t, Gates(), "EfficientWatchResumption=false,"+gate+"=true"), Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
		if _, err := detectSource(f.client, testPrefix, opts); err == nil || !strings.Contains(err.Error(), gate) || strings.Contains(err.Error(), "\n") {
			t.Errorf("%s: %v, want one line that names it", gate, err)
		}
	}
}

// TestWatchMetrics_CountStartsBookmarksAndEnds: the cost of their start, their bookmarks, the
// reasons of their ends, and their lag.
func TestWatchMetrics_CountStartsBookmarksAndEnds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		w.Kind().GroupResource = schema.GroupResource{Group: "metrics", Resource: t.Name()}
		w.watches.Metrics = enginemetrics.NewWatches(w.Kind().GroupResource)
		value := func(name string, labels ...string) int {
			t.Helper()
			v, _ := series(t, name, w.Kind().GroupResource, labels...)
			return int(v)
		}
		requireCounts := func(what string, initial, replayed, marks int) {
			t.Helper()
			if i, r, m := value("apiserver_init_events_total"), value("strata_watch_replayed_events_total"), value("strata_watch_bookmarks_total"); i != initial || r != replayed || m != marks {
				t.Errorf("%s: %d initial events of which %d are replayed, %d bookmarks; want %d, %d, %d", what, i, r, m, initial, replayed, marks)
			}
		}
		requireEnded := func(why watchset.Reason) {
			t.Helper()
			if n := value("strata_watches_ended_total", "reason", why.String()); n != 1 {
				t.Errorf("%d watches have ended by %s, want 1", n, why)
			}
		}
		lag := func() int {
			all := map[schema.GroupResource]int{}
			w.cluster.addLag(all)
			return all[w.Kind().GroupResource]
		}
		from := w.fromNow()
		for range 3 {
			w.put(t, newPod("a"))
		}
		w.catchUp(t)

		st := w.open(t, t.Context(), everything())
		st.DeliverPending(nil, &recorder{})
		requireCounts("a list", 1, 0, 0)
		st.Close()
		st.Close()
		requireEnded(watchset.ByClient)

		ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
		defer cancel()
		st = w.open(t, ctx, withBookmarks(from))
		if got := lag(); got != 3 {
			t.Errorf("the watch is %d events behind, want 3", got)
		}
		st.DeliverPending(nil, &recorder{})
		w.put(t, newPod("b"))
		w.catchUp(t)
		if got := lag(); got != 1 {
			t.Errorf("the watch is %d events behind, want 1", got)
		}
		if _, err := record(st); err != nil {
			t.Fatal(err)
		}
		requireCounts("a watch that resumes", 4, 3, 2)
		requireEnded(watchset.ByTimeout)
		if got := lag(); got != 0 {
			t.Errorf("no watch is %d events behind", got)
		}

		st = w.open(t, t.Context(), from)
		w.etcd.Restore(1000, nil)
		if _, err := record(st); !apierrors.IsResourceExpired(err) {
			t.Errorf("the watch ends with %v, want 410", err)
		}
		requireEnded(watchset.Expired)
	})
}
