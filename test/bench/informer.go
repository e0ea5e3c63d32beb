package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	clientcorev1 "k8s.io/client-go/kubernetes/typed/core/v1"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/test/bench/internal/dataset"
	"github.com/stratakube/strata/test/bench/internal/stats"
)

var informerWorkloads = []Workload{
	{
		Name: "informers", Title: "informers of all pods that start at once", Op: "informer", Dataset: cluster, Lived: true, Tail: true,
		Run: informerLoad{informers: size{8, 2}}.run, Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream("server CPU per informer", 1)},
	},
	{
		Name: "informers-namespace", Title: "informers of the pods of a namespace each that start at once", Op: "informer", Dataset: cluster, Lived: true, Tail: true,
		Run: informerLoad{informers: size{100, 2}, ofNamespaces: true}.run, Wanted: []Bound{toUpstream(latencyP99, 1), toUpstream("server CPU per informer", 1)},
	},
	{
		Name: "own-writes", Title: "own writes until the informer has them", Op: "write", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
		Run: ownWritesLoad{}.run, Wanted: []Bound{toUpstream(latencyP99, 1)},
	},
	{
		Name: "own-writes-beside", Title: "own writes until the informer has them, beside others", Op: "write", Dataset: cluster, Alone: true, Lived: true, Tail: true, Runs: 1,
		Run: ownWritesLoad{others: 1_000}.run, Wanted: []Bound{toUpstream(latencyP99, 0.25)},
	},
	{
		Name: "own-writes-full", Title: "own writes until the informer has them, beside as many as the machine carries", Op: "write", Dataset: cluster, Alone: true, Lived: true,
		Tail: true, Runs: 1, Run: ownWritesLoad{others: asMany}.run, Wanted: []Bound{absolute(latencyP99, 0.005)},
	},
}

// informerLoad is informers of client-go that start at once: with WatchList, in protobuf, over a
// connection each. An operation lasts until an informer has synced.
type informerLoad struct {
	informers    size
	ofNamespaces bool // each of the pods of a namespace; otherwise of all pods
}

func (l informerLoad) run(ctx context.Context, s *Sample) error {
	n := l.informers.at(s.Scale)
	starts := make([]func(context.Context) error, n)
	for i := range starts {
		client, closeAll, err := s.Engine.Clientset()
		if err != nil {
			return err
		}
		defer closeAll()
		if _, err := client.Discovery().ServerVersion(); err != nil { // makes the connection
			return err
		}
		namespace, want := metav1.NamespaceAll, s.Data.Pods
		if l.ofNamespaces {
			namespace, want = dataset.PodNamespace(i%s.Data.Namespaces, s.Data.Namespaces), s.Data.Pods/s.Data.Namespaces
		}
		starts[i] = func(ctx context.Context) error {
			began := time.Now()
			pods, stop, err := startInformer(ctx, client, namespace)
			if err != nil {
				return err
			}
			defer stop()
			s.Observe(time.Since(began))
			if got := len(pods.GetStore().ListKeys()); got != want {
				return fmt.Errorf("an informer has %d pods, want %d", got, want)
			}
			return nil
		}
	}
	s.Detail("%s pods each", grouped(s.Data.Pods/max(1, map[bool]int{true: s.Data.Namespaces}[l.ofNamespaces])))
	err := s.Measure(ctx, func(ctx context.Context) error {
		all, ctx := errgroup.WithContext(ctx)
		for _, start := range starts {
			all.Go(func() error { return start(ctx) })
		}
		return all.Wait()
	})
	s.Report("until all are done", Seconds, s.observed.Elapsed.Seconds())
	return err
}

// startInformer returns an informer of the pods of a namespace when it has synced. It keeps of each
// object only its name and resource version: the memory of clients is not measured. The caller must
// call stop.
func startInformer(ctx context.Context, client kubernetes.Interface, namespace string) (informer cache.SharedIndexInformer, stop func(), err error) {
	factory := informers.NewSharedInformerFactoryWithOptions(client, 0, informers.WithNamespace(namespace), informers.WithTransform(func(o any) (any, error) {
		if pod, ok := o.(*corev1.Pod); ok {
			return &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion}}, nil
		}
		return o, nil
	}))
	informer = factory.Core().V1().Pods().Informer()
	running, cancel := context.WithCancel(ctx)
	stop = func() {
		cancel()
		factory.Shutdown()
	}
	factory.StartWithContext(running)
	select {
	case <-informer.HasSyncedChecker().Done():
		return informer, stop, nil
	case <-ctx.Done():
		stop()
		return nil, nil, context.Cause(ctx)
	}
}

// ownWritesLoad is a client that patches a pod of a namespace, waits until its own informer of this
// namespace has the change, and patches the next. The latency is the time from the answer to the
// patch until the informer has it; 0 if it came first. Other pods change in etcd meanwhile. A watch
// of etcd by the same client, which nothing decodes, is the limit.
type ownWritesLoad struct {
	others int // changes of other pods per second, 0 for none
}

// asMany is more than etcd does: a write begins within 100 µs of the end of another.
const asMany = 10_000

func (l ownWritesLoad) run(ctx context.Context, s *Sample) error {
	client, closeAll, err := s.Engine.Clientset()
	if err != nil {
		return err
	}
	defer closeAll()
	namespace := dataset.PodNamespace(0, s.Data.Namespaces)
	informer, stop, err := startInformer(ctx, client, namespace)
	if err != nil {
		return err
	}
	defer stop()
	w := ownWriter{client: client.CoreV1().Pods(namespace), informer: newSeen(), etcd: newSeen()}
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, o any) {
		revision, _ := strconv.ParseInt(o.(*corev1.Pod).ResourceVersion, 10, 64)
		w.informer.add(revision) // with 0 the wait fails
	}}); err != nil {
		return err
	}
	stopWatch := w.watchEtcd(ctx, s, namespace)
	defer stopWatch()
	var others atomic.Int64
	change := put(s)
	during := tenSeconds.at(s.Scale)
	err = s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(during)
		all, ctx := errgroup.WithContext(ctx)
		other := func(ctx context.Context, i int) error {
			key, pod := changedPods.change(s, 1+i%max(1, s.Data.Pods-1))
			others.Add(1)
			return change(ctx, key, pod)
		}
		if l.others > 0 {
			all.Go(func() error { return perSecond(l.others, during, writesAtOnce).run(ctx, other) })
		}
		all.Go(func() error {
			var err error
			for i := 0; err == nil && time.Now().Before(deadline); i++ {
				err = w.patch(ctx, s, i)
			}
			return err
		})
		return all.Wait()
	})
	s.Report("other writes per second", PerSecond, float64(others.Load())/during.Seconds())
	limits := stats.Percentiles([][]time.Duration{w.limits}, 1, 0.5, 0.99, 0.999)
	for i, name := range []string{"p50", "p99", "p99.9"} {
		s.Report("watch of etcd "+name, Seconds, limits[i].Seconds())
	}
	return err
}

// ownWriter is the client of ownWritesLoad.
type ownWriter struct {
	client         clientcorev1.PodInterface
	informer, etcd *seen
	limits         []time.Duration // of each patch, by the watch of etcd
}

// watchEtcd watches the pods of a namespace in etcd. The caller must call stop.
func (w *ownWriter) watchEtcd(ctx context.Context, s *Sample, namespace string) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	ended := make(chan struct{})
	created := make(chan struct{})
	go func() {
		defer close(ended)
		for response := range s.Etcd.Client.Watch(ctx, dataset.PodKey(namespace, ""), clientv3.WithPrefix(), clientv3.WithCreatedNotify()) {
			if response.Created {
				close(created)
			}
			for _, event := range response.Events {
				w.etcd.add(event.Kv.ModRevision)
			}
		}
	}()
	select {
	case <-created:
	case <-ended: // the wait of the first patch fails
	}
	return func() {
		cancel()
		<-ended
	}
}

// patch changes a pod and observes the waits for the informer and for the watch of etcd.
func (w *ownWriter) patch(ctx context.Context, s *Sample, i int) error {
	name := dataset.PodName(i % max(1, s.Data.Pods/s.Data.Namespaces) * s.Data.Namespaces)
	body := fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/own":"%d-%d"}}}`, s.Number, i)
	pod, err := w.client.Patch(ctx, name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	answered := time.Now()
	revision, err := strconv.ParseInt(pod.ResourceVersion, 10, 64)
	if err != nil {
		return err
	}
	w.informer.expect(revision)
	w.etcd.expect(revision)
	at, err := w.informer.wait(ctx)
	if err != nil {
		return fmt.Errorf("the informer: %w", err)
	}
	s.Observe(max(0, at.Sub(answered)))
	if at, err = w.etcd.wait(ctx); err != nil {
		return fmt.Errorf("the watch of etcd: %w", err)
	}
	w.limits = append(w.limits, max(0, at.Sub(answered)))
	return nil
}

// seen is the progress of an informer or of a watch, for one waiting client.
type seen struct {
	mu     sync.Mutex
	latest int64 // revision
	want   int64 // revision that wait waits for; 0 if there is none
	got    chan time.Time
}

func newSeen() *seen { return &seen{got: make(chan time.Time, 1)} }

// add records the revision of an event.
func (s *seen) add(revision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latest = revision
	if s.want != 0 && revision >= s.want {
		s.got <- time.Now()
		s.want = 0
	}
}

// expect sets the revision that wait waits for.
func (s *seen) expect(revision int64) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.latest >= revision {
		s.got <- time.Time{} // before the answer
		return
	}
	s.want = revision
}

// wait returns the time of the event of the expected revision or of a later one; the zero time if
// it came before expect.
func (s *seen) wait(ctx context.Context) (time.Time, error) {
	const patience = time.Minute
	select {
	case at := <-s.got:
		return at, nil
	case <-time.After(patience):
		return time.Time{}, errors.New("no event of a write within a minute")
	case <-ctx.Done():
		return time.Time{}, context.Cause(ctx)
	}
}
