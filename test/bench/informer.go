package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/test/bench/internal/dataset"
)

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
// patch until the informer has it; 0 if it came first. Other pods change in etcd meanwhile.
type ownWritesLoad struct {
	during span
	others int // changes of other pods per second; asMany means as many as the machine carries
}

const asMany = -1

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
	seen := newSeen()
	if _, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{UpdateFunc: func(_, o any) { seen.add(o.(*corev1.Pod).ResourceVersion) }}); err != nil {
		return err
	}
	var others atomic.Int64
	change := put(s)
	during := l.during.at(s.Scale)
	err = s.Measure(ctx, func(ctx context.Context) error {
		deadline := time.Now().Add(during)
		all, ctx := errgroup.WithContext(ctx)
		other := func(ctx context.Context, i int) error {
			key, pod := changedPods.change(s, 1+i%max(1, s.Data.Pods-1))
			others.Add(1)
			return change(ctx, key, pod)
		}
		switch {
		case l.others > 0:
			all.Go(func() error { return perSecond(l.others, during, writesAtOnce).run(ctx, other) })
		case l.others == asMany:
			for writer := range writesAtOnce {
				all.Go(func() error {
					var err error
					for i := writer; err == nil && time.Now().Before(deadline); i += writesAtOnce {
						err = other(ctx, i)
					}
					return err
				})
			}
		}
		all.Go(func() error {
			var err error
			for i := 0; err == nil && time.Now().Before(deadline); i++ {
				err = l.patch(ctx, s, client, namespace, seen, i)
			}
			return err
		})
		return all.Wait()
	})
	s.Report("other writes per second", PerSecond, float64(others.Load())/during.Seconds())
	return err
}

// patch changes a pod and observes the wait for the informer.
func (l ownWritesLoad) patch(ctx context.Context, s *Sample, client kubernetes.Interface, namespace string, seen *seen, i int) error {
	name := dataset.PodName(i % max(1, s.Data.Pods/s.Data.Namespaces) * s.Data.Namespaces)
	body := fmt.Appendf(nil, `{"metadata":{"annotations":{"example.com/own":"%d-%d"}}}`, s.Number, i)
	pod, err := client.CoreV1().Pods(namespace).Patch(ctx, name, types.MergePatchType, body, metav1.PatchOptions{})
	if err != nil {
		return err
	}
	answered := time.Now()
	at, err := seen.wait(ctx, pod.ResourceVersion)
	if err == nil {
		s.Observe(max(0, at.Sub(answered)))
	}
	return err
}

// seen is the progress of an informer, for one waiting client.
type seen struct {
	mu     sync.Mutex
	latest int64 // revision
	want   int64 // revision that wait waits for; 0 if there is none
	got    chan time.Time
}

func newSeen() *seen { return &seen{got: make(chan time.Time, 1)} }

// add records the resource version of an event.
func (s *seen) add(version string) {
	revision, err := strconv.ParseInt(version, 10, 64)
	if err != nil {
		return // the wait fails
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.latest = revision
	if s.want != 0 && revision >= s.want {
		s.got <- time.Now()
		s.want = 0
	}
}

// wait returns the time at which the informer has an event of this version or a later one.
func (s *seen) wait(ctx context.Context, version string) (time.Time, error) {
	const patience = time.Minute
	revision, err := strconv.ParseInt(version, 10, 64)
	if err != nil {
		return time.Time{}, err
	}
	s.mu.Lock()
	if s.latest >= revision {
		s.mu.Unlock()
		return time.Time{}, nil // before the answer
	}
	s.want = revision
	s.mu.Unlock()
	select {
	case at := <-s.got:
		return at, nil
	case <-time.After(patience):
		return time.Time{}, errors.New("the informer has not got a write within a minute")
	case <-ctx.Done():
		return time.Time{}, context.Cause(ctx)
	}
}
