package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"net/http"
	goruntime "runtime"
	"testing"
	"testing/synctest"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/value"
	"k8s.io/apiserver/pkg/storage/value/encrypt/identity"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// twin is a storage of pods on the in-memory twin of etcd. It can be read, and runs in a synctest
// bubble.
type twin struct {
	*Store
	etcd  *memory.Store
	codec *countingCodec
}

func newTwin(t testing.TB, window mirror.Window) *twin {
	t.Helper()
	return newTwinWith(t, window, func(*storeConfig) {})
}

// newTwinWith is newTwin for another kind of objects, below the same prefix.
func newTwinWith(t testing.TB, window mirror.Window, change func(*storeConfig)) *twin {
	t.Helper()
	return newTwinOf(t, window, change, nil)
}

// newTwinOf is newTwinWith with Options.Finder. A swappable transformer has keys that change.
func newTwinOf(t testing.TB, window mirror.Window, change func(*storeConfig), finder func(runtime.Object, bool, string) objects.Find) *twin {
	t.Helper()
	codec := &countingCodec{Codec: testCodec()}
	cfg := storeConfig{
		Codec:          codec,
		GroupResource:  schema.GroupResource{Resource: "pods"},
		ResourcePrefix: "/pods/",
		NewFunc:        newExamplePod,
		NewListFunc:    newExamplePodList,
		GetAttrs:       podAttrs,
	}
	change(&cfg)
	if cfg.Transformer == nil {
		cfg.Transformer = identity.NewEncryptCheckTransformer()
	}
	var keys func() any
	if swap, ok := cfg.Transformer.(*swappable); ok {
		keys = func() any { return swap.current.Load() }
	}
	etcd := memory.New()
	m, err := mirror.New(mirror.Options{
		Prefix: testPrefix, Source: etcd, Window: window,
		Logger: slog.New(slog.NewTextHandler(io.Discard, nil)),
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(m.Close)
	r, err := m.Claim(testPrefix + "pods/")
	if err != nil {
		t.Fatal(err)
	}
	if err := r.WaitReady(contextFor(t)); err != nil {
		t.Fatal(err)
	}
	c := &cluster{prefix: testPrefix, mirror: m, blocks: newBlocks(DefaultRepresentationBytes), latestReads: latestReads{lists: true, gets: true}}
	c.opts.Converts = func(r schema.GroupResource) bool { return r.Group != withoutWebhook }
	decoder := etcd3.NewDefaultDecoder(cfg.Codec, storage.APIObjectVersioner{})
	s := newStore(c, nil, r, cfg, objects.Config{
		Resource: cfg.GroupResource, Transformer: cfg.Transformer, Keys: keys, Decoder: decoder, NewFunc: cfg.NewFunc, GetAttrs: cfg.GetAttrs, Blocks: c.blocks,
		Finder: finderOf(finder, cfg.NewFunc), Conversions: c.conversions(&cfg),
	}, false)
	t.Cleanup(s.stop)
	return &twin{s, etcd, codec}
}

// put writes a pod of the namespace ns and returns its revision.
func (w *twin) put(t testing.TB, pod *example.Pod) mirror.Revision {
	t.Helper()
	return w.etcd.Put(etcdKey(pod), storedPod(t, pod))
}

// storedPod returns the stored value of a pod.
func storedPod(t testing.TB, pod *example.Pod) string {
	t.Helper()
	data, err := runtime.Encode(testCodec(), pod)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}

// catchUp returns when memory has caught up with etcd.
func (w *twin) catchUp(t testing.TB) {
	t.Helper()
	if err := w.mirror.Wait(contextFor(t), w.etcd.Revision()); err != nil {
		t.Fatal(err)
	}
}

// open opens a stream of all pods that ends with the test.
func (w *twin) open(t testing.TB, ctx context.Context, opts storage.ListOptions) *Stream {
	t.Helper()
	st, err := w.OpenStream(ctx, "/pods/", opts)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(st.Close)
	return st
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

// fromNow are the options of a watch that starts after the writes so far.
func (w *twin) fromNow() storage.ListOptions {
	return afterRevision(fmt.Sprint(w.etcd.Revision()))
}

// TestStream_Bookmark_HasPublishedRevision: about once a minute, with the current revision even
// without events for the watch, and once more before the server ends the watch.
func TestStream_Bookmark_HasPublishedRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		begin := time.Now()
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Second)
		defer cancel()
		st := w.open(t, ctx, withBookmarks(w.fromNow()))
		last := begin
		for i := range 2 {
			other := w.etcd.Put(testPrefix+"other", fmt.Sprint(i))
			w.catchUp(t)
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
			if errors.Is(err, ErrStreamEnded) {
				break
			}
			if err != nil {
				t.Fatal(err)
			}
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
		w := newTwin(t, mirror.DefaultWindow)
		opts := withBookmarks(w.fromNow())
		opts.Predicate.Label = labels.SelectorFromSet(labels.Set{"app": "none"})
		opts.Predicate.GetAttrs = podAttrs
		st := w.open(t, t.Context(), opts)
		begin := time.Now()
		for i := 0; ; i++ {
			w.put(t, withLabel(newPod("a"), "i", fmt.Sprint(i)))
			w.catchUp(t)
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
		w := newTwin(t, mirror.DefaultWindow)
		st := w.open(t, t.Context(), withBookmarks(w.fromNow()))
		var written []mirror.Revision // not delivered yet
		bookmarks, handed := 0, mirror.Revision(0)
		for bookmarks < 20 {
			switch random.IntN(5) {
			case 3: // several in one transaction, which may not fit into one batch
				for range random.IntN(readAhead) {
					var ops []memory.Op
					for i := range 1 + random.IntN(5) {
						pod := withLabel(newPod(fmt.Sprint(i)), "r", fmt.Sprint(random.Uint32()))
						ops = append(ops, memory.Op{Key: etcdKey(pod), Value: storedPod(t, pod)})
					}
					rev := w.etcd.Txn(ops...)
					for range ops {
						written = append(written, rev)
					}
				}
			case 0:
				for range random.IntN(2 * readAhead) {
					written = append(written, w.put(t, withLabel(newPod(fmt.Sprint(random.IntN(10))), "r", fmt.Sprint(random.Uint32()))))
				}
			case 1:
				w.etcd.Put(testPrefix+"other", fmt.Sprint(random.Uint32()))
			case 2:
				time.Sleep(time.Duration(random.IntN(60)) * time.Second)
			}
			b, err := st.next()
			if err != nil {
				t.Fatal(err)
			}
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
	const n = 5*initialAtOnce + 7
	w := newTwin(t, mirror.DefaultWindow)
	for i := range n {
		w.put(t, newPod(fmt.Sprintf("pod-%05d", i)))
	}
	w.catchUp(t)
	at := w.mirror.PublishedRevision()
	yes := true
	opts := withBookmarks(everything())
	opts.SendInitialEvents = &yes
	st := w.open(t, contextFor(t), opts)
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
			w.put(t, newPod("pod-new"))
			w.catchUp(t)
		}
		part := 0
		for _, run := range b.runs {
			for _, e := range run.Items() {
				if want := etcdKey(newPod(fmt.Sprintf("pod-%05d", names))); e.Key() != want {
					t.Fatalf("got %s, want %s", e.Key(), want)
				}
				names++
				part++
			}
		}
		if part > 2*initialAtOnce {
			t.Errorf("%d entries at once", part)
		}
	}
	if names != n {
		t.Errorf("the stream has listed %d of %d", names, n)
	}
	b := take(t, st)
	if len(b.events) != 1 || b.events[0].Key() != etcdKey(newPod("pod-new")) {
		t.Errorf("got %+v, want the pod that was created meanwhile", b)
	}
	if decoded := w.codec.decodes.Load(); decoded != 0 {
		t.Errorf("%d objects were decoded, want none", decoded)
	}
}

// TestStream_OfOneKey_ReadsNoOtherKey, neither in the present nor in the log.
func TestStream_OfOneKey_ReadsNoOtherKey(t *testing.T) {
	w := newTwin(t, mirror.DefaultWindow)
	for _, name := range []string{"a", "aa", "a-b", "b"} {
		w.put(t, newPod(name))
	}
	w.catchUp(t)
	opts := afterRevision("0")
	opts.Recursive = false
	st, err := w.OpenStream(contextFor(t), "/pods/ns/a", opts)
	if err != nil {
		t.Fatal(err)
	}
	defer st.Close()
	if b := take(t, st); len(b.runs) != 1 || len(b.runs[0].Items()) != 1 || b.runs[0].Items()[0].Key() != etcdKey(newPod("a")) {
		t.Errorf("got %+v, want the pod a", b)
	}
	for _, name := range []string{"b", "aa", "a-b"} {
		w.put(t, withLabel(newPod(name), "n", "2"))
	}
	want := w.put(t, withLabel(newPod("a"), "n", "2"))
	w.catchUp(t)
	if b := take(t, st); len(b.events) != 1 || b.events[0].Rev != want {
		t.Errorf("got %+v, want the event at %d", b, want)
	}
}

func parseLabels(t testing.TB, selector string) labels.Selector {
	t.Helper()
	parsed, err := labels.Parse(selector)
	if err != nil {
		t.Fatal(err)
	}
	return parsed
}

// TestStream_Selector_TranslatesEventTypes: an object that starts or ceases to match is ADDED or
// DELETED, for any type of change.
func TestStream_Selector_TranslatesEventTypes(t *testing.T) {
	w := newTwin(t, mirror.DefaultWindow)
	opts := w.fromNow()
	// a watch of one value is woken by its events only
	opts.Predicate.Label = parseLabels(t, "app in (yes, perhaps)")
	opts.Predicate.GetAttrs = podAttrs
	st := w.open(t, contextFor(t), opts)
	pod := newPod("a")
	yes := withLabel(pod, "app", "yes")
	for i, step := range []struct {
		do   func()
		want watch.EventType
	}{
		{func() { w.put(t, pod) }, ""},
		{func() { w.put(t, yes) }, watch.Added},
		{func() { w.put(t, withLabel(yes, "n", "2")) }, watch.Modified},
		{func() { w.put(t, pod) }, watch.Deleted},
		{func() { w.etcd.Delete(etcdKey(pod)) }, ""},
		{func() { w.put(t, yes) }, watch.Added},
		{func() { w.etcd.Delete(etcdKey(pod)) }, watch.Deleted},
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
	if decoded := w.codec.decodes.Load(); decoded != 5 {
		t.Errorf("5 states were decoded %d times", decoded)
	}
}

// TestStream_SelectorAndItem_ShareDecoding of an event, between watches that select it, watches
// that do not, and watches without a selector.
func TestStream_SelectorAndItem_ShareDecoding(t *testing.T) {
	w := newTwin(t, mirror.DefaultWindow)
	rep := newRepresentation(w, podItem, nil)
	defer rep.Close()
	var streams []*Stream
	for _, app := range []string{"yes", "no", ""} {
		opts := w.fromNow()
		if app != "" {
			opts.Predicate.Label = parseLabels(t, "app in ("+app+", perhaps)")
			opts.Predicate.GetAttrs = podAttrs
		}
		streams = append(streams, w.open(t, contextFor(t), opts))
	}
	for i := range 3 {
		w.put(t, withLabel(newPod("a"), "app", "yes"))
		var items []string
		for j := range streams {
			st := streams[(i+j)%len(streams)] // each is first once
			ev := take(t, st).events[0]
			typ, err := st.translate(ev)
			if err != nil {
				t.Fatal(err)
			}
			if typ != "" {
				item, err := rep.ItemAfter(contextFor(t), ev)
				if err != nil {
					t.Fatal(err)
				}
				items = append(items, string(item))
			}
		}
		if len(items) != 2 || items[0] != items[1] {
			t.Errorf("the watches got %q", items)
		}
	}
	if decoded := w.codec.decodes.Load(); decoded != 3 {
		t.Errorf("3 events were decoded %d times", decoded)
	}
}

// TestStream_RequestOrStorageEnds_ReturnsNoError with the request, the storage and the mirror,
// without an error; with 410 if the next event is compacted.
func TestStream_RequestOrStorageEnds_ReturnsNoError(t *testing.T) {
	for name, end := range map[string]func(w *twin, cancel func(), stop chan struct{}){
		"request":  func(_ *twin, cancel func(), _ chan struct{}) { cancel() },
		"storage":  func(w *twin, _ func(), _ chan struct{}) { w.cancel() },
		"mirror":   func(w *twin, _ func(), _ chan struct{}) { w.mirror.Close() },
		"shutdown": func(_ *twin, _ func(), stop chan struct{}) { close(stop) },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTwin(t, mirror.DefaultWindow)
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
					if errors.Is(err, ErrStreamEnded) {
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
		w := newTwin(t, mirror.Window{MaxAge: time.Hour, MaxBytes: 4 << 20})
		st := w.open(t, contextFor(t), w.fromNow())
		from := w.mirror.PublishedRevision()
		filler := make([]byte, 64<<10)
		for floor := mirror.Revision(0); floor <= from; _, floor, _ = w.resource.Oldest() {
			w.put(t, withLabel(newPod("a"), "filler", string(filler)))
			w.catchUp(t)
		}
		_, err := endOf(st)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || status.Status().Code != http.StatusGone {
			t.Errorf("the stream ends with %v, want 410", err)
		}
	})
	t.Run("relisted", func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		st := w.open(t, contextFor(t), w.fromNow())
		w.etcd.Restore(1000, nil)
		_, err := endOf(st)
		var status apierrors.APIStatus
		if !errors.As(err, &status) || status.Status().Code != http.StatusGone {
			t.Errorf("the stream ends with %v, want 410", err)
		}
	})
	t.Run("before it begins", func(t *testing.T) {
		w := newTwin(t, mirror.DefaultWindow)
		w.cancel()
		if _, err := w.OpenStream(contextFor(t), "/pods/", everything()); !apierrors.IsTooManyRequests(err) {
			t.Errorf("a watch of a storage that has ended: %v, want 429", err)
		}
	})
}

// TestStream_RestoreDuringInitialEvents_Returns410: a watch in the middle of its initial events
// when etcd is restored gets no events of the new lineage, and no bookmark that claims a complete
// list.
func TestStream_RestoreDuringInitialEvents_Returns410(t *testing.T) {
	for _, collected := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			w := newTwin(t, mirror.DefaultWindow)
			for i := range 2000 {
				w.put(t, newPod(fmt.Sprintf("lost-%04d", i)))
			}
			w.catchUp(t)
			yes := true
			opts := storage.ListOptions{Recursive: true, Predicate: storage.Everything, SendInitialEvents: &yes, ResourceVersionMatch: "NotOlderThan"}
			opts.Predicate.AllowWatchBookmarks = true
			st := w.open(t, t.Context(), opts)
			take(t, st)
			w.etcd.Restore(w.etcd.Revision()-1000, map[string]string{})
			if collected { // the version of its start
				goruntime.GC()
				goruntime.GC()
			}
			time.Sleep(10 * time.Second)
			synctest.Wait()
			for i := range 1500 {
				w.put(t, newPod(fmt.Sprintf("new-%04d", i)))
			}
			for w.mirror.PublishedRevision() != w.etcd.Revision() {
				w.catchUp(t)
			}
			if w.mirror.Stats().EtcdRestores != 1 {
				t.Fatal("etcd was not restored")
			}
			if b, err := st.next(); !apierrors.IsResourceExpired(err) || !b.empty() {
				t.Errorf("%+v, %v, want that it has expired", b, err)
			}
		})
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
	discard
	leave  func()
	events int
}

func (d *departing) Event(_ watch.EventType, ev *mirror.Event) error {
	d.events++
	d.leave()
	_, err := d.st.selector.Generation.ObjectAfter(d.st.EventContext(), ev)
	return err
}

// TestStream_EndsWithinRevision_DeliversWholeRevision: the time of a watch ends while it delivers
// the events of a transaction. The client resumes after their revision, so it gets all of them.
func TestStream_EndsWithinRevision_DeliversWholeRevision(t *testing.T) {
	w := newTwinWith(t, mirror.DefaultWindow, func(cfg *storeConfig) {
		cfg.Transformer = obedient{identity.NewEncryptCheckTransformer()}
	})
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	st := w.open(t, ctx, w.fromNow())
	var ops []memory.Op
	for _, name := range []string{"a", "b", "c"} {
		pod := newPod(name)
		ops = append(ops, memory.Op{Key: etcdKey(pod), Value: storedPod(t, pod)})
	}
	w.etcd.Txn(ops...)
	w.catchUp(t)
	sink := &departing{discard: discard{st: st}, leave: cancel}
	if err := st.Deliver(nil, sink); err != nil || sink.events != len(ops) {
		t.Errorf("%d events, %v; want %d", sink.events, err, len(ops))
	}
}
