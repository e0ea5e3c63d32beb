package watch

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	goruntime "runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/features"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
	"k8s.io/component-base/metrics/legacyregistry"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestStream_Bookmark_HasPublishedRevision: about once a minute, with the current revision even
// without events for the watch, and once more before the server ends the watch.
func TestStream_Bookmark_HasPublishedRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Second)
		defer cancel()
		st := w.open(t, ctx, withBookmarks(w.fromNow()))
		last := begin
		for i := range 2 {
			other := w.Etcd.Put(podtest.Prefix+"other", fmt.Sprint(i))
			w.CatchUp(t)
			b := take(t, st)
			if b.bookmark.Revision != other || b.bookmark.InitialEventsEnd || len(b.events) > 0 {
				t.Fatalf("got %+v, want a bookmark at %d", b, other)
			}
			if wait := time.Since(last); wait < bookmarkInterval || wait > bookmarkInterval*5/4 {
				t.Errorf("bookmark %d follows %s", i, wait)
			}
			last = time.Now()
		}
		for {
			b, err := st.next()
			if err == nil && b.empty() {
				err = st.wait(nil)
			}
			if errors.Is(err, ErrEnded) {
				break
			}
			testcheck.NoError(t, err)
			if b.bookmark.Revision != 0 {
				last = time.Now()
			}
		}
		if end := time.Since(begin); end != 200*time.Second {
			t.Errorf("the stream ended after %s", end)
		}
		if lead := time.Since(last); lead != bookmarkLead {
			t.Errorf("the last bookmark was sent %s before the end, want %s", lead, bookmarkLead)
		}
	})
}

// TestStream_SelectsNoEvent_GetsBookmarks while there are always events that it does not select.
func TestStream_SelectsNoEvent_GetsBookmarks(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newFixture(t)
		opts := withBookmarks(w.fromNow())
		opts.Predicate.Label = labels.SelectorFromSet(labels.Set{"app": "none"})
		opts.Predicate.GetAttrs = podtest.Attrs
		st := w.open(t, t.Context(), opts)
		begin := time.Now()
		for i := 0; ; i++ {
			w.Put(t, withLabel(podtest.Pod("a"), "i", fmt.Sprint(i)))
			w.CatchUp(t)
			time.Sleep(time.Second)
			b := take(t, st)
			if b.bookmark.Revision != 0 {
				break
			}
			for _, ev := range b.events {
				if e, err := st.translate(ev); e != "" || err != nil {
					t.Fatalf("an event that is not selected is %q, %v", e, err)
				}
			}
			if time.Since(begin) > 2*bookmarkInterval {
				t.Fatalf("no bookmark in %s", time.Since(begin))
			}
		}
	})
}

// TestStream_Bookmark_ComesAfterItsEvents drives random writes, reads and pauses (I4).
func TestStream_Bookmark_ComesAfterItsEvents(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		random := rand.New(rand.NewPCG(testseed.New(t), 0))
		w := newFixture(t)
		st := w.open(t, t.Context(), withBookmarks(w.fromNow()))
		var written []mirror.Revision // not delivered yet
		bookmarks, handed := 0, mirror.Revision(0)
		for bookmarks < 20 {
			switch random.IntN(5) {
			case 3: // several in one transaction, which may not fit into one batch
				for range random.IntN(readAhead) {
					var ops []memory.Op
					for i := range 1 + random.IntN(5) {
						pod := withLabel(podtest.Pod(fmt.Sprint(i)), "r", fmt.Sprint(random.Uint32()))
						ops = append(ops, memory.Op{Key: podtest.Key(pod), Value: podtest.Stored(t, pod)})
					}
					rev := w.Etcd.Txn(ops...)
					for range ops {
						written = append(written, rev)
					}
				}
			case 0:
				for range random.IntN(2 * readAhead) {
					written = append(written, w.Put(t, withLabel(podtest.Pod(fmt.Sprint(random.IntN(10))), "r", fmt.Sprint(random.Uint32()))))
				}
			case 1:
				w.Etcd.Put(podtest.Prefix+"other", fmt.Sprint(random.Uint32()))
			case 2:
				time.Sleep(time.Duration(random.IntN(60)) * time.Second)
			}
			b, err := st.next()
			testcheck.NoError(t, err)
			for _, ev := range b.events {
				if ev.Rev != written[0] {
					t.Fatalf("got the event of %d, want %d", ev.Rev, written[0])
				}
				written, handed = written[1:], ev.Rev
			}
			if b.bookmark.Revision != 0 {
				bookmarks++
				if b.bookmark.Revision < handed {
					t.Fatalf("a bookmark at %d after the event of %d", b.bookmark.Revision, handed)
				}
				if len(written) > 0 && written[0] <= b.bookmark.Revision {
					t.Fatalf("a bookmark at %d before the event of %d", b.bookmark.Revision, written[0])
				}
			}
		}
	})
}

// TestStream_InitialEvents_ComeInParts: all current objects once, in key order, a part at a time,
// then the bookmark that closes them, then new events.
func TestStream_InitialEvents_ComeInParts(t *testing.T) {
	synctest.Test(t, initialEventsComeInParts)
}

func initialEventsComeInParts(t *testing.T) {
	const n = 5*initialAtOnce + 7
	w := newFixture(t)
	decoded := w.Decoded(func() {
		for i := range n {
			w.Put(t, podtest.Pod(fmt.Sprintf("pod-%05d", i)))
		}
		w.CatchUp(t)
		at := w.Mirror.PublishedRevision()
		yes := true
		opts := withBookmarks(everything())
		opts.SendInitialEvents = &yes
		st := w.open(t, podtest.Context(t), opts)
		var names int
		for {
			b := take(t, st)
			if b.bookmark.Revision != 0 {
				if !b.bookmark.InitialEventsEnd || b.bookmark.Revision != at {
					t.Fatalf("got %+v, want the end of the initial events at %d", b, at)
				}
				break
			}
			if names == 0 {
				// A write meanwhile is an event, not part of the list.
				w.Put(t, podtest.Pod("pod-new"))
				w.CatchUp(t)
			}
			part := 0
			for _, run := range b.runs {
				for _, e := range run.Items() {
					if want := podtest.Key(podtest.Pod(fmt.Sprintf("pod-%05d", names))); e.Key() != want {
						t.Fatalf("got %s, want %s", e.Key(), want)
					}
					names++
					part++
				}
			}
			if part > 2*initialAtOnce || part < initialAtOnce && names < n {
				t.Errorf("%d entries at once", part)
			}
		}
		if names != n {
			t.Errorf("the stream has listed %d of %d", names, n)
		}
		b := take(t, st)
		if len(b.events) != 1 || b.events[0].Key() != podtest.Key(podtest.Pod("pod-new")) {
			t.Errorf("got %+v, want the pod that was created meanwhile", b)
		}
	})
	if decoded != 0 {
		t.Errorf("%d objects were decoded, want none", decoded)
	}
}

// TestStream_OfOneKey_ReadsNoOtherKey, neither in the present nor in the log.
func TestStream_OfOneKey_ReadsNoOtherKey(t *testing.T) {
	w := newFixture(t)
	for _, name := range []string{"a", "aa", "a-b", "b"} {
		w.Put(t, podtest.Pod(name))
	}
	w.CatchUp(t)
	opts := after(0)
	opts.Recursive = false
	st, err := w.env.Open(podtest.Context(t), "/pods/ns/a", opts)
	testcheck.NoError(t, err)
	defer st.Close()
	if b := take(t, st); len(b.runs) != 1 || len(b.runs[0].Items()) != 1 || b.runs[0].Items()[0].Key() != podtest.Key(podtest.Pod("a")) {
		t.Errorf("got %+v, want the pod a", b)
	}
	for _, name := range []string{"b", "aa", "a-b"} {
		w.Put(t, withLabel(podtest.Pod(name), "n", "2"))
	}
	want := w.Put(t, withLabel(podtest.Pod("a"), "n", "2"))
	w.CatchUp(t)
	if b := take(t, st); len(b.events) != 1 || b.events[0].Rev != want {
		t.Errorf("got %+v, want the event at %d", b, want)
	}
}

// TestStream_Selector_TranslatesEventTypes: an object that starts or ceases to match is ADDED or
// DELETED, for any type of change.
func TestStream_Selector_TranslatesEventTypes(t *testing.T) {
	w := newFixture(t)
	decoded := w.Decoded(func() {
		opts := w.fromNow()
		// a watch of one value is woken by its events only
		opts.Predicate.Label = selector(t, "app in (yes, perhaps)")
		opts.Predicate.GetAttrs = podtest.Attrs
		st := w.open(t, podtest.Context(t), opts)
		pod := podtest.Pod("a")
		yes := withLabel(pod, "app", "yes")
		for i, step := range []struct {
			do   func()
			want watch.EventType
		}{
			{func() { w.Put(t, pod) }, ""},
			{func() { w.Put(t, yes) }, watch.Added},
			{func() { w.Put(t, withLabel(yes, "n", "2")) }, watch.Modified},
			{func() { w.Put(t, pod) }, watch.Deleted},
			{func() { w.Etcd.Delete(podtest.Key(pod)) }, ""},
			{func() { w.Put(t, yes) }, watch.Added},
			{func() { w.Etcd.Delete(podtest.Key(pod)) }, watch.Deleted},
		} {
			step.do()
			b := take(t, st)
			if len(b.events) != 1 {
				t.Fatalf("step %d: %d events", i, len(b.events))
			}
			if got, err := st.translate(b.events[0]); got != step.want || err != nil {
				t.Errorf("step %d: %q, %v, want %q", i, got, err, step.want)
			}
		}
	})
	if decoded != 5 {
		t.Errorf("5 states were decoded %d times", decoded)
	}
}

// TestStream_SelectorAndItem_ShareDecoding of an event, between watches that select it, watches
// that do not, and watches without a selector.
func TestStream_SelectorAndItem_ShareDecoding(t *testing.T) {
	w := newFixture(t)
	decoded := w.Decoded(func() {
		rep := representation.Of(w.View.CurrentGeneration(), "pods", representation.Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
			return fmt.Append(dst, obj), nil
		}})
		defer rep.Close()
		var streams []*Stream
		for _, app := range []string{"yes", "no", ""} {
			opts := w.fromNow()
			if app != "" {
				opts.Predicate.Label = selector(t, "app in ("+app+", perhaps)")
				opts.Predicate.GetAttrs = podtest.Attrs
			}
			streams = append(streams, w.open(t, podtest.Context(t), opts))
		}
		for i := range 3 {
			w.Put(t, withLabel(podtest.Pod("a"), "app", "yes"))
			var items []string
			for j := range streams {
				st := streams[(i+j)%len(streams)] // each is first once
				ev := take(t, st).events[0]
				typ, err := st.translate(ev)
				testcheck.NoError(t, err)
				if typ != "" {
					item, err := rep.ItemAfter(podtest.Context(t), ev)
					testcheck.NoError(t, err)
					items = append(items, string(item))
				}
			}
			if len(items) != 2 || items[0] != items[1] {
				t.Errorf("the watches got %q", items)
			}
		}
	})
	if decoded != 3 {
		t.Errorf("3 events were decoded %d times", decoded)
	}
}

// TestStream_RequestOrStorageEnds_ReturnsNoError with the request, the storage and the mirror,
// without an error; with 410 if the next event is compacted.
func TestStream_RequestOrStorageEnds_ReturnsNoError(t *testing.T) {
	for name, end := range map[string]func(w *fixture, cancel func(), stop chan struct{}){
		"request":  func(_ *fixture, cancel func(), _ chan struct{}) { cancel() },
		"storage":  func(w *fixture, _ func(), _ chan struct{}) { w.cancel() },
		"mirror":   func(w *fixture, _ func(), _ chan struct{}) { w.Mirror.Close() },
		"shutdown": func(_ *fixture, _ func(), stop chan struct{}) { close(stop) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newFixture(t)
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				st := w.open(t, ctx, withBookmarks(w.fromNow()))
				stop := make(chan struct{})
				begin := time.Now()
				time.AfterFunc(time.Second, func() { end(w, cancel, stop) })
				for {
					b, err := st.next()
					if err == nil && b.empty() {
						err = st.wait(stop)
					}
					if errors.Is(err, ErrEnded) {
						break
					}
					if err != nil || !b.empty() {
						t.Fatalf("got %+v, %v", b, err)
					}
				}
				if d := time.Since(begin); d != time.Second {
					t.Errorf("ended after %s, want at once", d)
				}
			})
		})
	}
	t.Run("too slow", func(t *testing.T) {
		w := newFixture(t, func(o *podtest.Options) { o.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 4 << 20} })
		st := w.open(t, podtest.Context(t), w.fromNow())
		from, terminated := w.Mirror.PublishedRevision(), w.series(t, "apiserver_terminated_watchers_total")
		filler := make([]byte, 64<<10)
		for floor := mirror.Revision(0); floor <= from; _, floor, _ = w.Resource.Oldest() {
			w.Put(t, withLabel(podtest.Pod("a"), "filler", string(filler)))
			w.CatchUp(t)
		}
		_, err := endOf(st)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || status.Status().Code != http.StatusGone {
			t.Errorf("the stream ends with %v, want 410", err)
		}
		if n := w.series(t, "apiserver_terminated_watchers_total") - terminated; n != 1 {
			t.Errorf("%d slow watches are counted, want 1", n)
		}
	})
	t.Run("relisted", func(t *testing.T) {
		w := newFixture(t)
		st := w.open(t, podtest.Context(t), w.fromNow())
		w.Etcd.Restore(1000, nil)
		_, err := endOf(st)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || status.Status().Code != http.StatusGone {
			t.Errorf("the stream ends with %v, want 410", err)
		}
		if n := w.series(t, "apiserver_terminated_watchers_total"); n != 0 {
			t.Errorf("%d slow watches are counted", n)
		}
	})
	t.Run("before it begins", func(t *testing.T) {
		w := newFixture(t)
		w.cancel()
		if _, err := w.env.Open(podtest.Context(t), "/pods/", everything()); !apierrors.IsTooManyRequests(err) {
			t.Errorf("a watch of a storage that has ended: %v, want 429", err)
		}
	})
}

// TestStream_RestoreDuringInitialEvents_Returns410: a watch in the middle of its initial events
// when etcd is restored gets no events of the new lineage, and no bookmark that claims a complete
// list.
func TestStream_RestoreDuringInitialEvents_Returns410(t *testing.T) {
	for _, c := range []struct {
		collected bool // the version of its start
		listed    bool // all of them were delivered, but not the bookmark
	}{{false, false}, {true, false}, {false, true}} {
		synctest.Test(t, func(t *testing.T) {
			w := newFixture(t)
			for i := range 2000 {
				w.Put(t, podtest.Pod(fmt.Sprintf("lost-%04d", i)))
			}
			w.CatchUp(t)
			yes := true
			opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, SendInitialEvents: &yes, ResourceVersionMatch: "NotOlderThan"}
			opts.Predicate.AllowWatchBookmarks = true
			st := w.open(t, t.Context(), opts)
			for take(t, st); c.listed && st.Listing(); {
				take(t, st)
			}
			w.Etcd.Restore(w.Etcd.Revision()-1000, map[string]string{})
			if c.collected {
				goruntime.GC()
				goruntime.GC()
			}
			time.Sleep(10 * time.Second)
			synctest.Wait()
			for i := range 1500 {
				w.Put(t, podtest.Pod(fmt.Sprintf("new-%04d", i)))
			}
			for w.Mirror.PublishedRevision() != w.Etcd.Revision() {
				w.CatchUp(t)
			}
			if w.Mirror.Stats().EtcdRestores != 1 {
				t.Fatal("etcd was not restored")
			}
			if b, err := st.next(); !apierrors.IsResourceExpired(err) || !b.empty() {
				t.Errorf("%+v, %v, want that it has expired", b, err)
			}
		})
	}
}

// TestStream_InitialEventsCompacted_Returns410, but not if only older revisions were.
func TestStream_InitialEventsCompacted_Returns410(t *testing.T) {
	for _, above := range []mirror.Revision{0, 1} {
		w := newFixture(t)
		w.Fill(t, 3*initialAtOnce)
		at := w.Mirror.PublishedRevision()
		st := w.open(t, podtest.Context(t), everything())
		take(t, st)
		read, err := st.snapshot() // by another watch: the version stays in memory
		testcheck.NoError(t, err)
		w.Put(t, podtest.Pod("other"))
		w.CatchUp(t)
		w.Mirror.Compact(at + above)
		podtest.Eventually(t, "the mirror compacts its history", func() bool { return w.Mirror.Stats().Compacted >= at+above })
		if b, err := st.next(); apierrors.IsResourceExpired(err) != (above > 0) || b.empty() != (above > 0) {
			t.Errorf("compacted to %d above the list: %+v, %v", above, b, err)
		}
		goruntime.KeepAlive(read)
	}
}

// TestStream_EventsBeforeStart_AreCounted when they are read, and not kept afterwards.
func TestStream_EventsBeforeStart_AreCounted(t *testing.T) {
	for _, later := range []int{0, 2} {
		w := newFixture(t)
		opts := w.fromNow()
		w.Put(t, podtest.Pod("a"), podtest.Pod("b"), podtest.Pod("c"))
		w.CatchUp(t)
		before := w.series(t, "strata_watch_replayed_events_total")
		st := w.open(t, podtest.Context(t), opts)
		for i := range later {
			w.Put(t, withLabel(podtest.Pod("d"), "i", fmt.Sprint(i)))
		}
		w.CatchUp(t)
		events := len(take(t, st).events)
		if n := w.series(t, "strata_watch_replayed_events_total") - before; n != 3 || events != 3+later {
			t.Errorf("%d of %d events are counted, want 3 of %d", n, events, 3+later)
		}
		_, err := st.next()
		if kept := slices.ContainsFunc(st.log.due[:cap(st.log.due)], func(ev *mirror.Event) bool { return ev != nil }); kept || err != nil {
			t.Errorf("the stream keeps delivered events: %t, %v", kept, err)
		}
	}
}

// TestStream_SelectedInitialEvents_AreCounted by plan, with and without an index of the label.
func TestStream_SelectedInitialEvents_AreCounted(t *testing.T) {
	w := newFixture(t)
	w.Fill(t, 1000)
	for _, c := range []struct {
		label, plan        string
		examined, returned int
	}{
		{"", metrics.PlanScan, 0, 0},         // only selectors have a plan
		{"i=3", metrics.PlanScan, 1000, 100}, // the second use of a label makes its index
		{"i=3", metrics.PlanIndex, 100, 100},
		{"i=3,i in (3,4)", metrics.PlanIndex, 100, 100},
		{"i=3,other=x", metrics.PlanIndex, 100, 0},
		{"i=none", metrics.PlanIndex, 0, 0},
		{"i!=3", metrics.PlanIndex, 900, 900},
		{"i", metrics.PlanIndex, 1000, 1000},
	} {
		counts := func() (plans, examined, returned int) {
			return w.series(t, "strata_list_plans_total", "plan", c.plan), w.series(t, "strata_list_examined_objects_total", "plan", c.plan),
				w.series(t, "strata_list_selected_objects_total", "plan", c.plan)
		}
		opts := everything()
		if c.label != "" {
			opts.Predicate = podtest.Selecting(t, c.label, "")
		}
		plans, examined, returned := counts()
		r := &recorder{st: w.open(t, podtest.Context(t), opts)}
		r.st.DeliverPending(nil, r)
		nowPlans, nowExamined, nowReturned := counts()
		plans, examined, returned = nowPlans-plans, nowExamined-examined, nowReturned-returned
		if (plans == 1) != (c.label != "") || examined != c.examined || returned != c.returned {
			t.Errorf("%q: %d plans %s, %d of %d objects selected, want %d of %d", c.label, plans, c.plan, returned, examined, c.returned, c.examined)
		}
	}
}

// obedient is a transformer that ends with its context, as one that calls a KMS does.
type obedient struct{ value.Transformer }

func (o obedient) TransformFromStorage(ctx context.Context, data []byte, dataCtx value.Context) ([]byte, bool, error) {
	if err := ctx.Err(); err != nil {
		return nil, false, err
	}
	return o.Transformer.TransformFromStorage(ctx, data, dataCtx)
}

// departing is a Sink of a client that leaves with the first event.
type departing struct {
	Sink
	st     *Stream
	leave  func()
	events int
}

func (d *departing) Refresh() error { return nil }
func (d *departing) Flush() error   { return nil }

func (d *departing) Event(_ watch.EventType, ev *mirror.Event) error {
	d.events++
	d.leave()
	_, err := d.st.scope.selector.Generation.ObjectAfter(d.st.EventContext(), ev)
	return err
}

// TestStream_EndsWithinRevision_DeliversWholeRevision: the time of a watch ends while it delivers
// the events of a transaction. The client resumes after their revision, so it gets all of them.
func TestStream_EndsWithinRevision_DeliversWholeRevision(t *testing.T) {
	w := newFixture(t, func(o *podtest.Options) { o.Config.Transformer = obedient{identity.NewEncryptCheckTransformer()} })
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	st := w.open(t, ctx, w.fromNow())
	var ops []memory.Op
	for _, name := range []string{"a", "b", "c"} {
		pod := podtest.Pod(name)
		ops = append(ops, memory.Op{Key: podtest.Key(pod), Value: podtest.Stored(t, pod)})
	}
	w.Etcd.Txn(ops...)
	w.CatchUp(t)
	sink := &departing{st: st, leave: cancel}
	if err := st.Deliver(nil, sink); err != nil || sink.events != len(ops) {
		t.Errorf("%d events, %v; want %d", sink.events, err, len(ops))
	}
}

// TestStream_ShardOfNamespace_FollowsItsKeys: a watch of a part of the resource does not follow the
// events of its shard in all of it.
func TestStream_ShardOfNamespace_FollowsItsKeys(t *testing.T) {
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	w := newFixture(t)
	opts := w.fromNow()
	opts.Predicate.ShardSelector = sharding.NewSelector(sharding.ShardRangeRequirement{Key: "object.metadata.uid", Start: "0x0000000000000000", End: "0x8000000000000000"})
	for key, followed := range map[string]int{"/pods": 1, "/pods/ns": 0} {
		st, err := w.env.Open(podtest.Context(t), key, opts)
		testcheck.NoError(t, err)
		if n := len(st.life.releases) - 1; n != followed { // besides the metric of sharded watches
			t.Errorf("a watch of %s follows %d shards, want %d", key, n, followed)
		}
		st.Close()
	}
}

// TestStream_Shards_GetEachObjectOnce: initial events and events of two shards of a namespace, with
// and without another selector. The metric counts each object that one of them does not get.
func TestStream_Shards_GetEachObjectOnce(t *testing.T) {
	cachermetrics.Register()
	_ = legacyregistry.Register(cachermetrics.WatchFilteredEventsTotal) // an error if it is already
	featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, features.ShardedListAndWatch, true)
	const n = 100
	for _, c := range []struct {
		label, plan                    string
		examined, runs, added, written int
	}{
		{"", metrics.PlanShard, n, n, 0, n},
		{"odd in (true, maybe)", metrics.PlanScan, 2 * n, 0, n / 2, n / 2},
	} {
		w := newFixture(t)
		write := func() {
			for i := range n {
				pod := podtest.Labelled(fmt.Sprint("pod-", i), "odd", fmt.Sprint(i%2 == 1))
				pod.UID = types.UID(fmt.Sprint(i, "-of-many"))
				w.Put(t, pod)
			}
			w.CatchUp(t)
		}
		withheld := func() int { return w.series(t, "apiserver_watch_filtered_events_total") }
		examined := func() int { return w.series(t, "strata_list_examined_objects_total", "plan", c.plan) }
		var streams []*recorder
		var runs, added, events int
		deliver := func(r *recorder) {
			r.calls = nil
			r.st.DeliverPending(nil, r)
			for _, call := range r.calls {
				inRun := 0
				if strings.HasPrefix(call, "added") {
					added++
				} else if strings.HasPrefix(call, "event") {
					events++
				} else if _, err := fmt.Sscanf(call, "runs %d", &inRun); err == nil {
					runs += inRun
				}
			}
		}
		write()
		before, examinedBefore := withheld(), examined()
		for _, bounds := range [][2]string{{"0x0000000000000000", "0x8000000000000000"}, {"0x8000000000000000", "0x10000000000000000"}} {
			opts := everything()
			opts.Predicate = podtest.Selecting(t, c.label, "")
			opts.Predicate.ShardSelector = sharding.NewSelector(sharding.ShardRangeRequirement{Key: "object.metadata.uid", Start: bounds[0], End: bounds[1]})
			st, err := w.env.Open(podtest.Context(t), "/pods/ns", opts)
			testcheck.NoError(t, err)
			defer st.Close()
			r := &recorder{st: st}
			deliver(r)
			streams = append(streams, r)
		}
		others, read := withheld()-before, examined()-examinedBefore
		if runs != c.runs || added != c.added || others != n || read != c.examined {
			t.Errorf("%q: %d objects in runs, %d added, %d withheld, %d examined; want %+v", c.label, runs, added, others, read, c)
		}
		before = withheld()
		write()
		podtest.Eventually(t, "all events are delivered, or withheld with both of their states", func() bool {
			deliver(streams[0])
			deliver(streams[1])
			return events == c.written && withheld()-before == 2*n
		})
	}
}
