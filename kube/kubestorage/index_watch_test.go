package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	kruntime "k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// podOn returns a pod on a node; n distinguishes two versions of it.
func podOn(name, node string, n int) *example.Pod {
	pod := newPod(name)
	pod.Spec.NodeName = node
	pod.Annotations = map[string]string{"n": fmt.Sprint(n)}
	return pod
}

// put writes a pod into an in-memory etcd.
func put(t testing.TB, etcd *memory.Store, pod *example.Pod) mirror.Revision {
	t.Helper()
	data, err := kruntime.Encode(testCodec(), pod)
	if err != nil {
		t.Fatal(err)
	}
	return etcd.Put(etcdKey(pod), string(data))
}

// inMemory returns a fixture on an in-memory etcd.
func inMemory(t testing.TB, opts ...func(*options)) (*fixture, *memory.Store) {
	t.Helper()
	etcd := memory.New()
	etcd.Put(testPrefix+"something", "else")
	return setup(t, append(opts, withSource(func(driver.Source) driver.Source { return etcd }))...), etcd
}

// after starts a watch after a revision.
func (f *fixture) after(ctx context.Context, t testing.TB, rev mirror.Revision, pred storage.SelectionPredicate) watch.Interface {
	t.Helper()
	w, err := f.Watch(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: pred})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// line describes an event.
func line(t testing.TB, e watch.Event) string {
	t.Helper()
	if shared, ok := e.Object.(kruntime.CacheableObject); ok {
		e.Object = shared.GetObject()
	}
	pod, ok := e.Object.(*example.Pod)
	if !ok {
		return fmt.Sprintf("%s %+v", e.Type, e.Object)
	}
	return fmt.Sprintf("%s %s@%s on %s", e.Type, pod.Name, pod.ResourceVersion, pod.Spec.NodeName)
}

// TestIndexedWatch_EqualsWatchWithoutIndex: 200 watches of the pods of a node start, at the present and
// in the past, while pods are created, deleted and moved between nodes; each gets exactly the
// events of the same watch without an index.
func TestIndexedWatch_EqualsWatchWithoutIndex(t *testing.T) {
	t.Parallel()
	f, etcd := inMemory(t)
	s, ctx := f.engine(t), contextFor(t)
	nodes := []string{"", "a", "b", "ab", "c"}
	const fence = "fence"
	var wg sync.WaitGroup
	begin := etcd.Revision()
	var writing sync.WaitGroup
	writing.Go(func() {
		rnd := rand.New(rand.NewPCG(rand.Uint64(), 0))
		live := map[string]*example.Pod{}
		for n := range 3000 {
			pod := podOn(fmt.Sprintf("pod-%02d", rnd.IntN(40)), nodes[rnd.IntN(len(nodes))], n)
			if held := live[pod.Name]; held != nil && rnd.IntN(4) == 0 {
				etcd.Delete(etcdKey(held))
				delete(live, pod.Name)
			} else {
				put(t, etcd, pod)
				live[pod.Name] = pod
			}
			if n%100 == 0 {
				time.Sleep(2 * time.Millisecond) // the watches start meanwhile
			}
		}
		for _, node := range nodes {
			put(t, etcd, podOn(fence+node, node, 0))
		}
	})
	lines := func(w watch.Interface, node string) (out []string) {
		defer w.Stop()
		for {
			e := next(t, w)
			out = append(out, line(t, e))
			if pod, ok := e.Object.(metav1.Object); !ok || pod.GetName() == fence+node {
				return out
			}
		}
	}
	for i := range 200 {
		node := nodes[i%len(nodes)]
		rev := begin
		if published := s.mirror.PublishedRevision(); i%3 > 0 && published > begin {
			rev = begin + rand.Int64N(published-begin)
		}
		wg.Go(func() {
			got := lines(f.after(ctx, t, rev, onNode(node, true)), node)
			if i%10 == 0 {
				if want := lines(f.after(ctx, t, rev, onNode(node, false)), node); !slices.Equal(got, want) {
					t.Errorf("after %d on %q: %d events, want %d:\n%v\n%v", rev, node, len(got), len(want), got, want)
				}
			}
			if len(got) == 0 {
				t.Errorf("no events after %d on %q", rev, node)
			}
		})
		if i%20 == 0 {
			time.Sleep(time.Millisecond)
		}
	}
	writing.Wait()
	wg.Wait()
}

// TestIndexedWatch_PodMoves_IsDeletedAndAdded is deleted for watches of the node that it leaves, and added for those of the
// node that it moves to; no other watch is woken, or reads the event.
func TestIndexedWatch_PodMoves_IsDeletedAndAdded(t *testing.T) {
	f, etcd := inMemory(t)
	ctx, s := contextFor(t), f.engine(t)
	rev := put(t, etcd, podOn("pod", "a", 1))
	f.catchUp(t)
	var streams []*Stream
	for i := range 100 {
		st, err := s.OpenStream(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: onNode(fmt.Sprint("other-", i), true)})
		if err != nil {
			t.Fatal(err)
		}
		defer st.Close()
		if b, err := st.next(); err != nil || !b.empty() {
			t.Fatalf("%+v, %v", b, err)
		}
		streams = append(streams, st)
	}
	a, b := f.after(ctx, t, rev, onNode("a", true)), f.after(ctx, t, rev, onNode("b", true))
	defer a.Stop()
	defer b.Stop()
	put(t, etcd, podOn("pod", "a", 2))
	if pod := nextPod(t, a, watch.Modified); pod.Annotations["n"] != "2" {
		t.Errorf("changed: %v", pod)
	}
	moved := put(t, etcd, podOn("pod", "b", 3))
	if pod := nextPod(t, a, watch.Deleted); pod.ResourceVersion != fmt.Sprint(moved) || pod.Spec.NodeName != "a" {
		t.Errorf("the node that it leaves: %s on %s, want %d", pod.ResourceVersion, pod.Spec.NodeName, moved)
	}
	if pod := nextPod(t, b, watch.Added); pod.ResourceVersion != fmt.Sprint(moved) || pod.Spec.NodeName != "b" {
		t.Errorf("the watch of the new node: %s on %s, want %d", pod.ResourceVersion, pod.Spec.NodeName, moved)
	}
	gone := etcd.Delete(testPrefix + "pods/ns/pod")
	if pod := nextPod(t, b, watch.Deleted); pod.ResourceVersion != fmt.Sprint(gone) {
		t.Errorf("deleted: %s, want %d", pod.ResourceVersion, gone)
	}
	for i, st := range streams {
		select {
		case <-st.logChanged:
			t.Errorf("the watch of node other-%d was woken", i)
		default:
		}
		if b, err := st.next(); err != nil || !b.empty() || st.cursor.Position() != gone {
			t.Errorf("the watch of node other-%d: %+v, %v, position %d, want %d", i, b, err, st.cursor.Position(), gone)
		}
	}
}

// TestIndexedWatch_UndecodableEvent_ReachesAllWatches: each watch reaches it, and continues when it can be
// decoded.
func TestIndexedWatch_UndecodableEvent_ReachesAllWatches(t *testing.T) {
	swap := newSwappable(encryption(t, "1"))
	f, etcd := inMemory(t, withTransformer(swap))
	ctx := contextFor(t)
	write := func(tr value.Transformer, pod *example.Pod) mirror.Revision {
		t.Helper()
		data, err := kruntime.Encode(testCodec(), pod)
		if err == nil {
			data, err = tr.TransformToStorage(ctx, data, value.DefaultContext(etcdKey(pod)))
		}
		if err != nil {
			t.Fatal(err)
		}
		return etcd.Put(etcdKey(pod), string(data))
	}
	rev := write(swap, podOn("first", "a", 0))
	f.catchUp(t)
	a, b := f.after(ctx, t, rev, onNode("a", true)), f.after(ctx, t, rev, onNode("b", true))
	defer a.Stop()
	defer b.Stop()
	other := encryption(t, "2")
	write(other, podOn("unreadable", "a", 0))
	f.catchUp(t)
	select {
	case e := <-a.ResultChan():
		t.Fatalf("got %s", line(t, e))
	case <-time.After(50 * time.Millisecond):
	}
	swap.set(other)
	write(other, podOn("last", "b", 0))
	if pod := nextPod(t, a, watch.Added); pod.Name != "unreadable" {
		t.Errorf("a: %s", pod.Name)
	}
	if pod := nextPod(t, b, watch.Added); pod.Name != "last" {
		t.Errorf("b: %s", pod.Name)
	}
}

// TestIndexedWatch_StoreEnds_LeavesNoFollower: its watches end, and so do the followers of the log for
// them, even while an object is decoded slowly.
func TestIndexedWatch_StoreEnds_LeavesNoFollower(t *testing.T) {
	slow := &slowTransformer{Transformer: encryption(t, "1"), begun: make(chan struct{})}
	f, etcd := inMemory(t, withTransformer(slow))
	ctx := contextFor(t)
	rev := etcd.Revision()
	f.catchUp(t)
	var watches []watch.Interface
	for i := range 10 {
		watches = append(watches, f.after(ctx, t, rev, onNode(fmt.Sprint("node-", i), true)))
	}
	etcd.Put(testPrefix+"pods/ns/slow", "x")
	<-slow.begun
	f.destroy() // waits for its goroutines
	if n := slow.inside.Load(); n != 0 {
		t.Errorf("%d are still decoding", n)
	}
	for _, w := range watches {
		ended(t, w)
	}
}

// slowTransformer does not return before its context ends, or 300 ms have passed.
type slowTransformer struct {
	value.Transformer
	begun  chan struct{}
	once   sync.Once
	inside atomic.Int64
}

func (s *slowTransformer) TransformFromStorage(ctx context.Context, _ []byte, _ value.Context) ([]byte, bool, error) {
	s.inside.Add(1)
	defer s.inside.Add(-1)
	s.once.Do(func() { close(s.begun) })
	select {
	case <-ctx.Done():
	case <-time.After(300 * time.Millisecond):
	}
	return nil, false, errors.New("too slow")
}

// BenchmarkWatchesOfNodes is the cost of an event of a pod when 5,000 watches wait, each for the
// pods of another node: processor time of the whole process, until all watches wait again; and the
// memory of a watch, without its goroutine.
func BenchmarkWatchesOfNodes(b *testing.B) {
	const n = 5000
	for _, indexed := range []bool{false, true} {
		b.Run(fmt.Sprintf("watches=%d/indexed=%t", n, indexed), func(b *testing.B) {
			f, etcd := inMemory(b)
			s := f.engine(b)
			node := func(i int) string { return fmt.Sprintf("node-%04d", i) }
			for i := range n {
				put(b, etcd, podOn(fmt.Sprintf("pod-%04d", i), node(i), 0))
			}
			f.catchUp(b)
			rev := etcd.Revision()
			ctx, cancel := context.WithCancel(context.Background())
			var wg sync.WaitGroup
			defer wg.Wait()
			defer cancel()
			var delivered, waiting, wakes atomic.Int64
			var streams []*Stream
			before := heap()
			for i := range n {
				st, err := s.OpenStream(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: onNode(node(i), indexed)})
				if err == nil {
					_, err = st.next()
				}
				if err != nil {
					b.Fatal(err)
				}
				streams = append(streams, st)
			}
			held := heap() - before
			for _, st := range streams {
				wg.Go(func() {
					defer st.Close()
					for {
						batch, err := st.next()
						if err != nil {
							return
						}
						for _, ev := range batch.events {
							if what, err := st.translate(ev); err == nil && what != "" {
								delivered.Add(1)
							}
						}
						if !batch.empty() {
							continue
						}
						waiting.Add(1)
						if st.wait(nil) != nil {
							return
						}
						waiting.Add(-1)
						wakes.Add(1)
					}
				})
			}
			settle := func() {
				for s.mirror.PublishedRevision() < etcd.Revision() || waiting.Load() < n {
					runtime.Gosched()
				}
			}
			settle()
			var events int64
			cpu := cpuTime()
			b.ReportAllocs()
			for b.Loop() {
				events++
				i := int(events*7919) % n
				put(b, etcd, podOn(fmt.Sprintf("pod-%04d", i), node(i), int(events)))
				for delivered.Load() < events {
					runtime.Gosched()
				}
				settle()
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(events), "cpu-ns/event")
			b.ReportMetric(float64(wakes.Load())/float64(events), "wakes/event")
			b.ReportMetric(float64(held)/n, "B/watch")
		})
	}
}

// heap returns the bytes in use.
func heap() int64 {
	var m runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&m)
	return int64(m.HeapAlloc)
}

// cpuTime returns the processor time used by the process.
func cpuTime() time.Duration {
	var u syscall.Rusage
	_ = syscall.Getrusage(syscall.RUSAGE_SELF, &u)
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}
