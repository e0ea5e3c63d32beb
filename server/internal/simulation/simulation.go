// Package simulation lets pods run without machines: it creates Node objects, runs kwok's
// controller in place of their kubelets, and runs kube-scheduler, which binds pods to them.
//
//	Node objects ─▶ kwok: Ready, leases ──────────────┐
//	pods ─▶ kube-scheduler: spec.nodeName ─▶ kwok: Running, Succeeded, deleted
//
// No container is started. All of it acts through the API, as ordinary clients. Neither kwok nor
// the scheduler offers a wait for the end of its goroutines; therefore Run owns their requests
// (requests.go), the only effect that they have outside.
package simulation

import (
	"context"
	"errors"
	"fmt"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	"k8s.io/klog/v2"
)

// MaxNodes is the largest number of nodes, and the largest one that is measured.
const MaxNodes = 1000

const (
	// retryInterval is the pause after an error of the API server at the start; a guess.
	retryInterval = time.Second
	// readyInterval is the interval at which nodes are listed until all are ready; a guess.
	readyInterval = 250 * time.Millisecond
)

// Options configures Run.
type Options struct {
	// Nodes is the number of simulated nodes, at most MaxNodes. 0 removes the nodes of earlier
	// runs.
	Nodes int
	// Kubelets is the connection of kwok's controller and of the creation of nodes: a member of
	// system:masters.
	Kubelets *rest.Config
	// Scheduler is the connection of kube-scheduler: the user system:kube-scheduler.
	Scheduler *rest.Config
	// OnReady is called once, by Run, when all nodes are ready and the scheduler runs. It may be
	// nil.
	OnReady func()
}

// Run makes the cluster have exactly o.Nodes simulated nodes, and runs them until ctx is cancelled.
// It then returns nil when no request is in flight and none can follow. The API server must be
// ready. Run may be called once per process: the scheduler's metrics are global.
func Run(ctx context.Context, o Options) error {
	requests := newRequests(ctx)
	defer requests.stop()
	kubelets, scheduler := requests.through(o.Kubelets), requests.through(o.Scheduler)

	client, err := kubernetes.NewForConfig(kubelets)
	if err != nil {
		return err
	}
	err = wait.PollUntilContextCancel(ctx, retryInterval, true, func(ctx context.Context) (bool, error) {
		err := adjustNodes(ctx, client.CoreV1().Nodes(), o.Nodes)
		if errors.Is(err, errForeignNode) {
			return false, err
		}
		if err != nil && ctx.Err() == nil {
			klog.ErrorS(err, "Failed to create the simulated nodes; retrying")
		}
		return err == nil, nil
	})
	if ctx.Err() != nil {
		return nil
	}
	if err != nil {
		return err
	}
	if o.Nodes == 0 {
		<-ctx.Done()
		return nil
	}

	var group errgroup.Group
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	run := func(name string, run func(context.Context) error) {
		group.Go(func() error {
			defer cancel() // one part without the others simulates nothing
			if err := run(ctx); err != nil && ctx.Err() == nil {
				return fmt.Errorf("%s: %w", name, err)
			}
			return nil
		})
	}
	run("kwok", func(ctx context.Context) error { return runKubelets(ctx, kubelets) })
	run("scheduler", func(ctx context.Context) error { return runScheduler(ctx, scheduler) })
	run("nodes", func(ctx context.Context) error {
		if awaitReady(ctx, client, o.Nodes) == nil && o.OnReady != nil {
			o.OnReady()
		}
		<-ctx.Done()
		return nil
	})
	return group.Wait()
}

// awaitReady returns nil when n simulated nodes are ready and accept pods, or an error if ctx is
// cancelled before.
func awaitReady(ctx context.Context, client kubernetes.Interface, n int) error {
	return wait.PollUntilContextCancel(ctx, readyInterval, false, func(ctx context.Context) (bool, error) {
		list, err := client.CoreV1().Nodes().List(ctx, metav1.ListOptions{LabelSelector: simulatedLabel, ResourceVersion: "0"})
		if err != nil {
			return false, nil
		}
		ready := 0
		for i := range list.Items {
			if acceptsPods(&list.Items[i]) {
				ready++
			}
		}
		return ready >= n, nil
	})
}

// acceptsPods reports whether node is ready and has no taint of the node lifecycle controller.
func acceptsPods(node *corev1.Node) bool {
	for _, taint := range node.Spec.Taints {
		if taint.Key == corev1.TaintNodeNotReady || taint.Key == corev1.TaintNodeUnreachable {
			return false
		}
	}
	for _, condition := range node.Status.Conditions {
		if condition.Type == corev1.NodeReady {
			return condition.Status == corev1.ConditionTrue
		}
	}
	return false
}
