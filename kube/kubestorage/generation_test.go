package kubestorage

import (
	"context"
	"errors"
	"iter"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/server/options/encryptionconfig"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/representation"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/memo"
)

// reloaded is the transformers of an API server whose encryption configuration is reloaded
// automatically.
type reloaded struct {
	*encryptionconfig.DynamicTransformers
}

var podsResource = schema.GroupResource{Resource: "pods"}

func newReloaded(t value.Transformer) reloaded {
	return reloaded{encryptionconfig.NewDynamicTransformers(overrides(t), nil, func() {}, 0)}
}

func overrides(t value.Transformer) map[schema.GroupResource]value.Transformer {
	return map[schema.GroupResource]value.Transformer{podsResource: t}
}

// load replaces the configuration.
func (r reloaded) load(t value.Transformer) { r.Set(overrides(t), func() {}, nil, 0) }

func (r reloaded) pods() value.Transformer { return r.TransformerForResource(podsResource) }

// derivedReads reads pods in each form that a storage derives from stored objects and caches.
type derivedReads struct {
	f    *fixture
	s    *Store
	pod  *example.Pod // created after from on node "a", then changed
	from string       // the resource version of another pod; the two events of pod follow
}

// newDerivedReads creates the pods. A read does not retry.
func newDerivedReads(t *testing.T, f *fixture) *derivedReads {
	t.Helper()
	d := &derivedReads{f: f, s: f.engine(t)}
	d.s.watches.RetryFor = 0
	d.from = f.create(t, newPod("first"))[0].ResourceVersion
	pod := newPod("second")
	pod.Spec.NodeName = "a"
	d.pod = f.create(t, pod)[0]
	f.update(t, d.pod, "changed")
	f.catchUp(t)
	return d
}

func (d *derivedReads) representation() *representation.Representation {
	return d.s.Representation("pods", representation.Format{Encode: podItem})
}

// all returns the reads by name, but for the events, which become more.
func (d *derivedReads) all(t *testing.T) map[string]func() error {
	cached := everything()
	cached.ResourceVersion = "0"
	indexed := cached
	indexed.Predicate = onNode("a", true)
	shard := cached
	shard.Predicate = ofShard(shardOf(namespaceField, 0, 1))
	exact := everything()
	exact.ResourceVersion, exact.ResourceVersionMatch = d.from, metav1.ResourceVersionMatchExact
	return map[string]func() error{
		"get":                      func() error { return d.get(t, "") },
		"get, resource version 0":  func() error { return d.get(t, "0") },
		"list":                     func() error { return d.list(t, "list", everything()) },
		"list, resource version 0": func() error { return d.list(t, "cached list", cached) },
		"list of a value":          func() error { return d.list(t, "indexed list", indexed) },
		"list of a shard":          func() error { return d.list(t, "list of a shard", shard) },
		"list at an old revision":  func() error { return d.list(t, "list at an old revision", exact) },
		"item":                     func() error { return d.item(t) },
		"attributes":               func() error { return d.attributes(t) },
		"run":                      func() error { return d.runs(t) },
		"size":                     func() error { return d.size(t) },
		"initial events":           func() error { return firstEvent(t, d.f.watchPods(t, cached)) },
		"watch from a revision":    func() error { return firstEvent(t, d.f.watchPods(t, afterRevision(d.from))) },
	}
}

func (d *derivedReads) get(t *testing.T, resourceVersion string) error {
	return d.s.Get(contextFor(t), podKey(d.pod), storage.GetOptions{ResourceVersion: resourceVersion}, &example.Pod{})
}

func (d *derivedReads) list(t *testing.T, name string, opts storage.ListOptions) error {
	list := &example.PodList{}
	err := d.s.GetList(contextFor(t), "/pods/", opts, list)
	if err == nil && len(list.Items) == 0 {
		t.Errorf("%s: empty", name)
	}
	return err
}

func (d *derivedReads) item(t *testing.T) error {
	e, _ := mustLatest(t, d.s).Get(etcdKey(d.pod))
	_, err := d.representation().Item(contextFor(t), e)
	return err
}

func (d *derivedReads) attributes(t *testing.T) error {
	e, _ := mustLatest(t, d.s).Get(etcdKey(d.pod))
	_, err := d.s.view.CurrentGeneration().Attributes(contextFor(t), e)
	return err
}

func (d *derivedReads) runs(t *testing.T) (err error) {
	runs := mustLatest(t, d.s).Runs("", "")
	if err := readParts(contextFor(t), d.representation(), runs); err != nil {
		return err
	}
	frame := func(dst []byte, _ watch.EventType, item []byte) ([]byte, int) { return append(dst, item...), len(item) }
	_, err = d.representation().DeflatedFrames(contextFor(t), nil, slices.Collect(runs), frame)
	return err
}

// size returns an error unless the size of the list is known, as it is after its runs were read.
func (d *derivedReads) size(t *testing.T) error {
	if _, known := d.representation().Measure(mustLatest(t, d.s), "", ""); !known {
		return apierrors.NewInternalError(context.Canceled)
	}
	return nil
}

// events reads the two events of the pod.
func (d *derivedReads) events(t *testing.T) error {
	w, err := d.s.resource.CursorAfter(mustRevision(t, d.from), "", "")
	if err != nil {
		return err
	}
	events, err := w.Next(nil, 256)
	if err != nil || len(events) != 2 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	for _, ev := range events {
		if _, err = d.representation().ItemAfter(contextFor(t), ev); err == nil && ev.Prev != nil {
			_, err = d.representation().ItemBefore(contextFor(t), ev)
		}
		if err == nil {
			_, err = d.s.view.CurrentGeneration().ObjectAfter(contextFor(t), ev)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// requireReadable reads twice in each way, the second time from the caches filled by the first, in
// random order except for the size, which is last. Each read must succeed if readable, and fail
// otherwise.
func requireReadable(t *testing.T, reads map[string]func() error, readable bool) {
	t.Helper()
	var names []string
	for name := range reads {
		if name != "size" {
			names = append(names, name)
		}
	}
	names = append(names, "size")
	for range 2 {
		for _, name := range names {
			if err := reads[name](); (err == nil) != readable {
				t.Errorf("%s: error %v, want one: %t", name, err, !readable)
			}
		}
	}
}

// TestReload_KeyRemoved_InvalidatesDerivedData reads in every way, removes the key, and reads
// again: no read may be answered from data that was decrypted before. When the key returns,
// everything is readable.
func TestReload_KeyRemoved_InvalidatesDerivedData(t *testing.T) {
	shardGate(t)
	r := newReloaded(podtest.Encryption(t, "1"))
	f := setupInMemory(t, withTransformer(r.pods()))
	d := newDerivedReads(t, f)
	s := d.s
	reads := d.all(t)
	reads["events"] = func() error { return d.events(t) }
	requireReadable(t, reads, true)
	open := f.watchPods(t, afterRevision(s.currentRevision(t)))
	old := memos(t, s)
	if used := s.cluster.blocks.Stats().Used; used == 0 || len(old) == 0 {
		t.Fatalf("the cache has %d bytes, and memos of %d keys", used, len(old))
	}

	r.load(podtest.Encryption(t, "2"))
	requireReadable(t, reads, false)
	// Data decrypted with the key is released without a further read.
	eventually(t, "derived data of the removed key is released", func() bool { return s.cluster.blocks.Stats().Used == 0 })
	eventually(t, "memos are dropped", func() bool {
		for key := range memos(t, s) {
			if old[key] > 0 {
				return false
			}
		}
		return true
	})
	// A watch that began before does not need the past, and continues.
	other := newPod("third")
	f.create(t, other)
	if got := nextPod(t, open, watch.Added); got.Name != "third" {
		t.Errorf("got %s, want third", got.Name)
	}
	if err := s.Delete(contextFor(t), podKey(other), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.catchUp(t)

	r.load(podtest.Encryption(t, "2", "1"))
	delete(reads, "events") // there are more events now
	requireReadable(t, reads, true)
	if n := s.cluster.blocks.Stats().Used; n == 0 {
		t.Error("the cache is empty after the key returned")
	}
}

// currentRevision is the published revision as a resource version.
func (s *Store) currentRevision(t testing.TB) string {
	t.Helper()
	u := &unstructured.Unstructured{Object: map[string]any{}}
	testcheck.NoError(t, s.Versioner().UpdateObject(u, uint64(s.mirror.PublishedRevision())))
	return u.GetResourceVersion()
}

func mustRevision(t testing.TB, resourceVersion string) mirror.Revision {
	t.Helper()
	rev, err := storage.APIObjectVersioner{}.ParseResourceVersion(resourceVersion)
	testcheck.NoError(t, err)
	return mirror.Revision(rev)
}

// firstEvent returns the error in the first event of the watch, nil if it is another event.
func firstEvent(t testing.TB, w watch.Interface) error {
	t.Helper()
	defer w.Stop()
	if e := next(t, w); e.Type == watch.Error {
		return apierrors.FromObject(e.Object)
	}
	return nil
}

// memos returns the number of memos of entries, events and leaves by key.
func memos(t testing.TB, s *Store) map[*memo.Key]int {
	t.Helper()
	n := map[*memo.Key]int{}
	cursor, err := s.resource.CursorAfter(0, "", "")
	if err != nil {
		_, floor, _ := s.resource.Oldest()
		if cursor, err = s.resource.CursorAfter(floor, "", ""); err != nil {
			t.Fatal(err)
		}
	}
	events, err := cursor.Next(nil, 256)
	if err != nil {
		t.Fatal(err)
	}
	count := func(memos *memo.List) {
		for key := range memos.All() {
			n[key]++
		}
	}
	for run := range mustLatest(t, s).Runs("", "") {
		count(run.Leaf.Memos())
	}
	for e := range mustLatest(t, s).All("", "") {
		count(e.Memos())
	}
	for _, ev := range events {
		count(ev.Memos())
		if ev.Prev != nil {
			count(ev.Prev.Memos())
		}
	}
	return n
}

// TestReload_WithoutReaders_ReleasesMemory: memory is released without a read.
func TestReload_WithoutReaders_ReleasesMemory(t *testing.T) {
	t.Parallel()
	r := newReloaded(podtest.Encryption(t, "1"))
	f := setupInMemory(t, withTransformer(r.pods()))
	s := f.engine(t)
	f.create(t, newPod("one"))
	f.catchUp(t)
	e, _ := mustLatest(t, s).Get(etcdKey(newPod("one")))
	if _, err := s.Representation("pods", representation.Format{Encode: podItem}).Item(contextFor(t), e); err != nil {
		t.Fatal(err)
	}
	if s.cluster.blocks.Stats().Used == 0 {
		t.Fatal("the cache is empty")
	}
	r.load(podtest.Encryption(t, "2"))
	eventually(t, "blocks are released", func() bool { return s.cluster.blocks.Stats().Used == 0 })
}

// TestReload_DuringDecryption_ValueIsNotCached: later readers do not get a value that was being
// decrypted while its key was removed.
func TestReload_DuringDecryption_ValueIsNotCached(t *testing.T) {
	slow := podtest.NewPausing(podtest.Encryption(t, "1"))
	r := newReloaded(slow)
	f := setupInMemory(t, withTransformer(r.pods()))
	s, ctx := f.engine(t), contextFor(t)
	f.create(t, newPod("one"))
	f.catchUp(t)
	e, _ := mustLatest(t, s).Get(etcdKey(newPod("one")))
	shardGate(t)
	set := s.view.CurrentGeneration().Selector(ofShard(shardOf(namespaceField, 0, 1))).Shard
	// Concurrent reads of these wait for the one that does the work, until their requests end.
	oneReader := map[string]bool{"shard": true}
	reads := map[string]func(ctx context.Context) error{
		"item": func(ctx context.Context) error {
			_, err := s.Representation("pods", representation.Format{Encode: podItem}).Item(ctx, e)
			return err
		},
		"run": func(ctx context.Context) error {
			return readParts(ctx, s.Representation("pods", representation.Format{Encode: podItem}), mustLatest(t, s).Runs("", ""))
		},
		"object": func(ctx context.Context) error {
			g := s.view.CurrentGeneration()
			_, err := g.Object(ctx, e, g.Blocks().Now())
			return err
		},
		"attributes": func(ctx context.Context) error { _, err := s.view.CurrentGeneration().Attributes(ctx, e); return err },
		"shard":      func(ctx context.Context) error { _, err := s.selections.Shard(set).At(ctx, 0); return err },
	}
	for name, read := range reads {
		r.load(slow)
		slow.Pause()
		result := make(chan error, 1)
		go func() { result <- read(ctx) }()
		<-slow.Entered
		r.load(podtest.Encryption(t, "2"))
		short, cancel := ctx, context.CancelFunc(func() {})
		if oneReader[name] {
			short, cancel = context.WithTimeout(ctx, 20*time.Millisecond)
		}
		if err := read(short); err == nil || errors.Is(err, context.DeadlineExceeded) != oneReader[name] {
			t.Errorf("%s is read with a removed key: %v", name, err)
		}
		cancel()
		slow.Release <- struct{}{}
		if err := <-result; err != nil {
			t.Errorf("%s, started before the reload: %v", name, err)
		}
		if err := read(ctx); err == nil || ctx.Err() != nil {
			t.Errorf("%s is found with a removed key: %v", name, err)
		}
		if n := s.cluster.blocks.Stats().Used; n != 0 {
			t.Errorf("%s: %d bytes are cached of a removed key", name, n)
		}
	}
}

// generations is a transformer of an API server that reloads keys itself.
type generations struct {
	swappable
	n atomic.Pointer[int]
}

func (g *generations) Keys() any { return g.n.Load() }

func (g *generations) load(t value.Transformer) {
	g.set(t)
	g.n.Store(new(int))
}

// TestRekeyed_KeysReplaced_AreReported: a transformer that implements Rekeyed is trusted to report
// replaced keys.
func TestRekeyed_KeysReplaced_AreReported(t *testing.T) {
	t.Parallel()
	g := &generations{}
	g.load(podtest.Encryption(t, "1"))
	f := setupInMemory(t, withTransformer(g))
	pod := f.create(t, newPod("one"))[0]
	f.list(t, everything())
	g.load(podtest.Encryption(t, "2"))
	list := &example.PodList{}
	if err := f.GetList(contextFor(t), "/pods/", everything(), list); err == nil {
		t.Error("listed with a removed key")
	}
	g.load(podtest.Encryption(t, "1"))
	if got := podNames(f.list(t, everything())); got != pod.Name {
		t.Errorf("list has %q", got)
	}
}

// readParts reads the items of the runs, as a list does.
func readParts(ctx context.Context, rep *representation.Representation, runs iter.Seq[mirror.Run]) error {
	for _, err := range (&representation.List{Rep: rep}).Parts(ctx, runs) {
		if err != nil {
			return err
		}
	}
	return nil
}
