package ha

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/informers"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/cache"
	"k8s.io/client-go/tools/leaderelection"
	"k8s.io/client-go/tools/leaderelection/resourcelock"

	"github.com/stratakube/strata/test/harness"
)

// The durations of kube-controller-manager's election, in the long form. In the short form other
// tests take the processors for seconds.
var leaseDuration, renewDeadline = harness.Pick(45*time.Second, 15*time.Second), harness.Pick(40*time.Second, 10*time.Second)

const retryPeriod = 2 * time.Second

const (
	inputs  = "inputs"  // namespace of a controller's objects
	outputs = "outputs" // and of those that it creates, one for each
)

// election is a lease with two candidates, of which the first one leads. The leader is a
// controller: for each ConfigMap of a namespace it creates one in another.
type election struct {
	name    string
	client  kubernetes.Interface
	lost    atomic.Int64 // leaders that stopped before the end
	second  atomic.Int64 // starts of the other candidate
	created atomic.Int64
}

// startElection starts an election whose candidates use the connection config, and returns when the
// first candidate leads.
func startElection(t *testing.T, ctx context.Context, name string, config *rest.Config) *election {
	t.Helper()
	client, err := kubernetes.NewForConfig(harness.OwnConnections(config))
	harness.Check(t, err)
	e := &election{name: name, client: client}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	leads := make(chan struct{})
	running.Go(func() {
		e.run(ctx, "first", func(ctx context.Context) { close(leads); e.control(ctx) }, func() {
			if ctx.Err() == nil {
				e.lost.Add(1)
			}
		})
	})
	select {
	case <-leads:
	case <-ctx.Done():
		t.Fatalf("no candidate of %s leads: %v", name, context.Cause(ctx))
	}
	running.Go(func() { e.run(ctx, "second", func(context.Context) { e.second.Add(1) }, func() {}) })
	return e
}

func (e *election) run(ctx context.Context, identity string, start func(context.Context), stop func()) {
	leaderelection.RunOrDie(ctx, leaderelection.LeaderElectionConfig{
		Lock: &resourcelock.LeaseLock{LeaseMeta: metav1.ObjectMeta{Namespace: namespace, Name: e.name}, Client: e.client.CoordinationV1(),
			LockConfig: resourcelock.ResourceLockConfig{Identity: identity}},
		LeaseDuration: leaseDuration, RenewDeadline: renewDeadline, RetryPeriod: retryPeriod,
		Callbacks: leaderelection.LeaderCallbacks{OnStartedLeading: start, OnStoppedLeading: stop},
	})
}

// control creates an output for each input until ctx ends, and retries after errors.
func (e *election) control(ctx context.Context) {
	factory := informers.NewSharedInformerFactoryWithOptions(e.client, 0, informers.WithNamespace(inputs))
	queue := make(chan string, 10_000) // more than a test has inputs
	informer := factory.Core().V1().ConfigMaps().Informer()
	_, err := informer.AddEventHandler(cache.ResourceEventHandlerFuncs{AddFunc: func(o any) { queue <- o.(*corev1.ConfigMap).Name }})
	if err != nil {
		panic(err) // a new informer accepts handlers
	}
	var running sync.WaitGroup
	defer running.Wait()
	running.Go(func() { informer.RunWithContext(ctx) })
	for {
		select {
		case name := <-queue:
			if name == "kube-root-ca.crt" {
				continue
			}
			output := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: e.name + "-" + name}}
			err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				_, err := e.client.CoreV1().ConfigMaps(outputs).Create(ctx, output, metav1.CreateOptions{})
				return err == nil || apierrors.IsAlreadyExists(err), err
			})
			if err == nil {
				e.created.Add(1)
			}
		case <-ctx.Done():
			return
		}
	}
}

// judge returns when the controller has created an output for each of n inputs. It reports a lost
// lease, which ends the controller.
func (e *election) judge(t *testing.T, ctx context.Context, n int) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return e.created.Load() == int64(n) || e.lost.Load() > 0, fmt.Errorf("the controller of %s has created %d objects of %d", e.name, e.created.Load(), n)
	}))
	if lost, second := e.lost.Load(), e.second.Load(); lost > 0 || second > 0 {
		t.Errorf("the leader of %s lost its lease %d times, another one led %d times, want 0", e.name, lost, second)
	}
	var lease struct{ transitions int32 }
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		l, err := e.client.CoordinationV1().Leases(namespace).Get(ctx, e.name, metav1.GetOptions{})
		if err == nil && l.Spec.LeaseTransitions != nil {
			lease.transitions = *l.Spec.LeaseTransitions
		}
		return err == nil, err
	}))
	if lease.transitions > 0 {
		t.Errorf("the lease of %s changed its holder %d times", e.name, lease.transitions)
	}
}
