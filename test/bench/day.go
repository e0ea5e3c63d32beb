package main

import (
	"context"
	"fmt"
	"path/filepath"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"
	appsclient "k8s.io/client-go/kubernetes/typed/apps/v1"
	"k8s.io/client-go/util/retry"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/bench/internal/dataset"
)

// dayWorkloads are the life of a small cluster.
var dayWorkloads = []Workload{{
	Name: "day", Title: "a cluster is filled, rolled out and emptied", Alone: true, Fresh: true, Runs: 3,
	Run:    dayLoad{nodes: size{200, 2}, pods: size{3_000, 6}, rest: settled}.run,
	Wanted: []Bound{toUpstream("server CPU of all", 0.65), toUpstream("etcd CPU of all", 0.65), toUpstream("peak memory", 0.45)},
	// While the machine is full, etcd answers a GET that memory cannot answer soon.
	PassesOn: true,
}}

// dayLoad is kube-controller-manager's controllers, kube-scheduler and kwok with simulated nodes,
// in a process of their own. Deployments are created, changed and scaled to zero; each phase lasts
// until all of their pods have followed.
type dayLoad struct {
	nodes, pods size
	rest        span // with pods that nothing changes
}

// podsPerDeployment is the number of replicas of each Deployment.
const podsPerDeployment = 100

func (l dayLoad) run(ctx context.Context, s *Sample) error {
	kubeconfig := filepath.Join(s.Dir, "kubeconfig")
	keyFile, certFile, err := s.Engine.WriteKubeconfig(kubeconfig)
	if err != nil {
		return err
	}
	nodes, pods := l.nodes.at(s.Scale), l.pods.at(s.Scale)
	var clients *process.Child
	defer func() {
		if clients != nil {
			_ = clients.Stop(syscall.SIGTERM, 20*time.Second) // gone in any case
		}
	}()
	client, closeAll, err := s.Engine.Clientset()
	if err != nil {
		return err
	}
	defer closeAll()
	deployments := client.AppsV1().Deployments(dataset.Namespace)
	replicas := min(pods, podsPerDeployment)
	n := pods / replicas

	s.Detail("%d nodes, %s pods", nodes, grouped(n*replicas))
	if err := s.Engine.ResetPeak(); err != nil {
		return err
	}
	var all reading
	for _, phase := range []struct {
		name string
		run  func(ctx context.Context) error
	}{
		{"the nodes start", func(ctx context.Context) (err error) {
			clients, err = process.Start(process.Spec{
				Name: "simulate", Path: s.strata, Log: filepath.Join(s.Dir, "simulate-"+s.Engine.Label+".log"), Lines: true,
				Args: []string{"simulate", "--kubeconfig=" + kubeconfig, "--service-account-private-key-file=" + keyFile, "--root-ca-file=" + certFile, fmt.Sprintf("--nodes=%d", nodes)},
			})
			if err == nil {
				_, _, err = clients.WaitLine(ctx, 0, "ready")
			}
			return err
		}},
		{"filling", func(ctx context.Context) error {
			return eachDeployment(ctx, n, func(ctx context.Context, i int) error {
				_, err := deployments.Create(ctx, deployment(i, int32(replicas)), metav1.CreateOptions{})
				return err
			})
		}},
		{"rolling out", func(ctx context.Context) error {
			return changeDeployments(ctx, deployments, n, func(d *appsv1.Deployment) { d.Spec.Template.Spec.Containers[0].Image = "registry.example.com/app:v2" })
		}},
		{"at rest", func(ctx context.Context) error { return s.rest(ctx, l.rest.at(s.Scale)) }},
		{"scaling to zero", func(ctx context.Context) error {
			return changeDeployments(ctx, deployments, n, func(d *appsv1.Deployment) { d.Spec.Replicas = new(int32) })
		}},
	} {
		cost, err := s.phase(ctx, phase.name, func(ctx context.Context) error {
			if err := phase.run(ctx); err != nil {
				return err
			}
			return awaitDeployments(ctx, client, clients)
		})
		if err != nil {
			return fmt.Errorf("%s: %w", phase.name, err)
		}
		all.server, all.etcd = all.server+cost.server, all.etcd+cost.etcd
	}
	s.Report("server CPU of all", Seconds, all.server.Seconds())
	s.Report("etcd CPU of all", Seconds, all.etcd.Seconds())
	s.Report("peak memory", Bytes, float64(s.observed.Memory.Peak))
	return nil
}

// phase reports the duration and the cost of a part of a sample, and the memory after it.
func (s *Sample) phase(ctx context.Context, name string, run func(ctx context.Context) error) (cost reading, err error) {
	before, err := s.read(ctx, true)
	if err != nil {
		return cost, err
	}
	if err := run(ctx); err != nil {
		return cost, err
	}
	after, err := s.read(ctx, false)
	if err != nil {
		return cost, err
	}
	memory, err := s.Engine.Memory()
	if err != nil {
		return cost, err
	}
	cost.server, cost.etcd = after.server-before.server, after.etcd-before.etcd
	s.Report("time: "+name, Seconds, after.at.Sub(before.at).Seconds())
	s.Report("server CPU: "+name, Seconds, cost.server.Seconds())
	s.Report("etcd CPU: "+name, Seconds, cost.etcd.Seconds())
	s.Report("resident after "+name, Bytes, float64(memory.Resident))
	s.observed.Memory = memory
	return cost, nil
}

// eachDeployment calls do for each Deployment, some at a time.
func eachDeployment(ctx context.Context, n int, do func(ctx context.Context, i int) error) error {
	all, ctx := errgroup.WithContext(ctx)
	all.SetLimit(4)
	for i := range n {
		all.Go(func() error { return do(ctx, i) })
	}
	return all.Wait()
}

func deploymentName(i int) string { return fmt.Sprintf("deployment-%02d", i) }

// deployment returns a Deployment whose pods may all be replaced at once.
func deployment(i int, replicas int32) *appsv1.Deployment {
	labels := map[string]string{"app": deploymentName(i)}
	return &appsv1.Deployment{
		ObjectMeta: metav1.ObjectMeta{Name: deploymentName(i)},
		Spec: appsv1.DeploymentSpec{
			Replicas: &replicas,
			Selector: &metav1.LabelSelector{MatchLabels: labels},
			Template: corev1.PodTemplateSpec{ObjectMeta: metav1.ObjectMeta{Labels: labels}, Spec: dataset.PodSpec("")},
		},
	}
}

func changeDeployments(ctx context.Context, deployments appsclient.DeploymentInterface, n int, change func(*appsv1.Deployment)) error {
	return eachDeployment(ctx, n, func(ctx context.Context, i int) error {
		return retry.RetryOnConflict(retry.DefaultBackoff, func() error {
			// the controller writes the status
			d, err := deployments.Get(ctx, deploymentName(i), metav1.GetOptions{})
			if err != nil {
				return err
			}
			change(d)
			_, err = deployments.Update(ctx, d, metav1.UpdateOptions{})
			return err
		})
	})
}

// awaitDeployments returns when there are as many pods as the Deployments want, all of them ready
// and of the last revision.
func awaitDeployments(ctx context.Context, client kubernetes.Interface, clients *process.Child) error {
	for clients.Ended() == nil {
		list, err := client.AppsV1().Deployments(dataset.Namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
		if err != nil {
			return err
		}
		wanted, done := 0, 0
		for _, d := range list.Items {
			wanted += int(*d.Spec.Replicas)
			if status := d.Status; status.ObservedGeneration == d.Generation && status.UpdatedReplicas == *d.Spec.Replicas && status.Replicas == *d.Spec.Replicas &&
				status.AvailableReplicas == *d.Spec.Replicas {
				done++
			}
		}
		if len(list.Items) == done {
			// pods that end are in no status
			pods, err := client.CoreV1().Pods(dataset.Namespace).List(ctx, metav1.ListOptions{ResourceVersion: "0"})
			if err != nil || len(pods.Items) == wanted {
				return err
			}
		}
		if !waitUntil(ctx, time.Now().Add(250*time.Millisecond)) {
			return context.Cause(ctx)
		}
	}
	return clients.Ended()
}
