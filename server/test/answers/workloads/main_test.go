// Package workloads tests the controllers, the scheduler and the simulated nodes of `strata up`: objects that users create lead to pods,
// and pods run.
package workloads

import (
	"context"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/stratakube/strata/server/test/internal/harness"
)

const (
	// testTimeout bounds a hanging test; each takes seconds.
	testTimeout = 3 * time.Minute

	// nodes is the number of simulated nodes of the shared cluster.
	nodes = 3
)

var cluster *harness.Server

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { cluster = e.Up(fmt.Sprintf("--nodes=%d", nodes)) })
}

// user is the administrator of a cluster, in one namespace.
type user struct {
	t         *testing.T
	ctx       context.Context
	server    *harness.Server
	client    kubernetes.Interface
	namespace string
}

// newUser returns the administrator of server in a new namespace that has its service account.
func newUser(t *testing.T, server *harness.Server) user {
	t.Helper()
	u := newAdmin(t, server)
	u.namespace = harness.NewName("ns")
	u.kubectl("create", "namespace", u.namespace)
	u.eventually("the service account exists", func() (bool, error) {
		_, err := u.client.CoreV1().ServiceAccounts(u.namespace).Get(u.ctx, "default", metav1.GetOptions{})
		return err == nil, err
	})
	return u
}

// newAdmin returns the administrator of server in the namespace "default".
func newAdmin(t *testing.T, server *harness.Server) user {
	t.Helper()
	client, err := kubernetes.NewForConfig(server.Config)
	harness.Check(t, err)
	return user{t: t, ctx: harness.Context(t, testTimeout), server: server, client: client, namespace: "default"}
}

// kubectl calls kubectl in the namespace of u and demands success.
func (u user) kubectl(args ...string) string {
	u.t.Helper()
	r, err := u.server.Kubectl(u.ctx, "", append([]string{"--namespace=" + u.namespace}, args...)...)
	harness.Check(u.t, err)
	if r.Code != 0 {
		u.t.Fatalf("kubectl %s: exit code %d\n%s", strings.Join(args, " "), r.Code, r.Stderr)
	}
	return r.Stdout
}

// apply creates the objects of manifests in the namespace of u.
func (u user) apply(manifests string) {
	u.t.Helper()
	r, err := u.server.Kubectl(u.ctx, manifests, "--namespace="+u.namespace, "apply", "-f", "-")
	harness.Check(u.t, err)
	if r.Code != 0 {
		u.t.Fatalf("apply: exit code %d\n%s", r.Code, r.Stderr)
	}
}

// eventually waits until condition is true. An error of condition explains why it is not.
func (u user) eventually(what string, condition func() (bool, error)) {
	u.t.Helper()
	if err := harness.Poll(u.ctx, func(context.Context) (bool, error) { return condition() }); err != nil {
		u.t.Fatalf("%s: %v", what, err)
	}
}

// pods waits until exactly n pods have the label app=name and satisfy is, and returns them by name.
func (u user) pods(name string, n int, is func(*corev1.Pod) error) []corev1.Pod {
	u.t.Helper()
	var pods []corev1.Pod
	u.eventually(fmt.Sprintf("%d pods of %s", n, name), func() (bool, error) {
		list, err := u.client.CoreV1().Pods(u.namespace).List(u.ctx, metav1.ListOptions{LabelSelector: "app=" + name})
		if err != nil {
			return false, err
		}
		pods = list.Items
		for i := range pods {
			if err := is(&pods[i]); err != nil {
				return false, fmt.Errorf("pod %s %w", pods[i].Name, err)
			}
		}
		if len(pods) != n {
			return false, fmt.Errorf("%d pods", len(pods))
		}
		return true, nil
	})
	slices.SortFunc(pods, func(a, b corev1.Pod) int { return strings.Compare(a.Name, b.Name) })
	return pods
}

// running demands of a pod that it runs on a node, is ready and has an address.
func running(pod *corev1.Pod) error {
	ready := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
	scheduled := slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodScheduled && c.Status == corev1.ConditionTrue
	})
	if pod.DeletionTimestamp != nil || pod.Status.Phase != corev1.PodRunning || !ready || !scheduled ||
		pod.Spec.NodeName == "" || pod.Status.PodIP == "" || len(pod.Status.ContainerStatuses) != len(pod.Spec.Containers) {
		return fmt.Errorf("is not running: node %q, %+v", pod.Spec.NodeName, pod.Status)
	}
	return nil
}

// nodesOf returns the number of pods on each node.
func nodesOf(pods []corev1.Pod) map[string]int {
	count := map[string]int{}
	for _, pod := range pods {
		count[pod.Spec.NodeName]++
	}
	return count
}

// addresses returns the sorted addresses of pods.
func addresses(pods []corev1.Pod) []string {
	var all []string
	for _, pod := range pods {
		all = append(all, pod.Status.PodIP)
	}
	slices.Sort(all)
	return all
}
