package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"runtime"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/kube/internal/watch"

	kruntime "k8s.io/apimachinery/pkg/runtime"
	apiwatch "k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// podOn returns a pod on a node; n distinguishes two versions of it.
func podOn(name, node string, n int) *example.Pod {
	pod := newPod(name)
	pod.Spec.NodeName = node
	pod.Annotations = map[string]string{"n": fmt.Sprint(n)}
	return pod
}

// put writes a pod into an in-memory etcd.
func put(t testing.TB, etcd *memory.Store, pod *example.Pod) {
	t.Helper()
	data, err := kruntime.Encode(testCodec(), pod)
	if err != nil {
		t.Fatal(err)
	}
	etcd.Put(etcdKey(pod), string(data))
}

// after starts a watch after a revision.
func (f *fixture) after(ctx context.Context, t testing.TB, rev mirror.Revision, pred storage.SelectionPredicate) apiwatch.Interface {
	t.Helper()
	w, err := f.Watch(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: pred})
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// TestIndexedWatch_StoreEnds_LeavesNoFollower: its watches end, and so do the followers of the log
// for them, even while an object is decoded slowly.
func TestIndexedWatch_StoreEnds_LeavesNoFollower(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		slow := &slowTransformer{Transformer: podtest.Encryption(t, "1"), begun: make(chan struct{})}
		etcd := memory.New()
		f := setup(t, inMemory(etcd), withTransformer(slow))
		ctx := contextFor(t)
		rev := etcd.Revision()
		f.catchUp(t)
		var watches []apiwatch.Interface
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
	})
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
			etcd := memory.New()
			f := setup(b, inMemory(etcd))
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
			counts := &nodeWatches{}
			var streams []*watch.Stream
			before := heap()
			for i := range n {
				st, err := s.OpenStream(ctx, "/pods", storage.ListOptions{Recursive: true, ResourceVersion: fmt.Sprint(rev), Predicate: onNode(node(i), indexed)})
				if err != nil {
					b.Fatal(err)
				}
				streams = append(streams, st)
			}
			held := heap() - before
			for _, st := range streams {
				wg.Go(func() {
					defer st.Close()
					_ = st.Deliver(nil, &nodeWatch{all: counts}) // until ctx ends
				})
			}
			settle := func() {
				for s.mirror.PublishedRevision() < etcd.Revision() || counts.waiting.Load() < n {
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
				for counts.delivered.Load() < events {
					runtime.Gosched()
				}
				settle()
			}
			b.ReportMetric(float64(cpuTime()-cpu)/float64(events), "cpu-ns/event")
			b.ReportMetric(float64(counts.wakes.Load())/float64(events), "wakes/event")
			b.ReportMetric(float64(held)/n, "B/watch")
		})
	}
}

// nodeWatches counts what the watches of a benchmark do.
type nodeWatches struct{ delivered, waiting, wakes atomic.Int64 }

// nodeWatch is the Sink of one of them.
type nodeWatch struct {
	recorder
	all   *nodeWatches
	waits bool
}

func (w *nodeWatch) Refresh() error {
	if w.waits {
		w.waits = false
		w.all.waiting.Add(-1)
		w.all.wakes.Add(1)
	}
	return nil
}

func (w *nodeWatch) Flush() error {
	if !w.waits {
		w.waits = true
		w.all.waiting.Add(1)
	}
	return nil
}

func (w *nodeWatch) Event(apiwatch.EventType, *mirror.Event) error {
	w.all.delivered.Add(1)
	return nil
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
