package clients

import (
	"fmt"
	"path/filepath"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	policyv1 "k8s.io/api/policy/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

func eviction(pod corev1.Pod) *policyv1.Eviction {
	return &policyv1.Eviction{ObjectMeta: metav1.ObjectMeta{Name: pod.Name, Namespace: pod.Namespace}}
}

// nodeNames waits until the cluster has n nodes, all ready, and returns their names.
func (u user) nodeNames(n int) (names []string) {
	u.t.Helper()
	u.eventually(fmt.Sprintf("%d nodes are ready", n), func() (bool, error) {
		names = nil
		list, err := u.client.CoreV1().Nodes().List(u.ctx, metav1.ListOptions{})
		if err != nil {
			return false, err
		}
		for _, node := range list.Items {
			if slices.ContainsFunc(node.Status.Conditions, func(c corev1.NodeCondition) bool {
				return c.Type == corev1.NodeReady && c.Status == corev1.ConditionTrue
			}) {
				names = append(names, node.Name)
			}
		}
		return len(names) == n && len(list.Items) == n, fmt.Errorf("%d nodes, ready ones %q", len(list.Items), names)
	})
	return names
}

// pending demands of a pod that it has no node.
func pending(pod *corev1.Pod) error {
	if pod.Status.Phase != corev1.PodPending || pod.Spec.NodeName != "" {
		return fmt.Errorf("is %s on node %q", pod.Status.Phase, pod.Spec.NodeName)
	}
	return nil
}

// One data directory is started with two nodes, with three and with none: the workloads continue
// each time. In the long form it is started with none before.
func TestRestart_WithMoreAndFewerNodes_Continues(t *testing.T) {
	t.Parallel()
	env := harness.New(t)
	dataDir := filepath.Join(env.Dir("kept"), "data")
	create := func(u user) { u.ok("create", "deployment", "web", "--image=example.test/i", "--replicas=4") }

	if harness.Long() {
		server := env.UpIn(dataDir)
		u := newAdmin(t, server)
		create(u)
		u.pods("web", 4, pending)
		u.nodeNames(0)
		harness.Check(t, server.Stop())
	}

	server := env.UpIn(dataDir, "--nodes=2")
	u := newAdmin(t, server)
	if !harness.Long() {
		create(u)
	}
	before := u.pods("web", 4, running)
	two := u.nodeNames(2)
	u.apply(workload("DaemonSet", "agent", ""))
	all := append(addresses(before), addresses(u.pods("agent", 2, running))...)
	slices.Sort(all)
	if distinct := slices.Compact(slices.Clone(all)); len(distinct) != len(all) {
		t.Errorf("pods share addresses: %q", all)
	}
	harness.Check(t, server.Stop())

	server = env.UpIn(dataDir, "--nodes=3")
	u = newAdmin(t, server)
	if three := u.nodeNames(3); !slices.Equal(three[:2], two) {
		t.Errorf("the nodes are %q, before the restart %q", three, two)
	}
	after := u.pods("web", 4, running)
	for i := range before {
		if before[i].UID != after[i].UID || before[i].Status.PodIP != after[i].Status.PodIP {
			t.Errorf("pod %s is now %s (%s, %s)", before[i].Name, after[i].Name, before[i].Status.PodIP, after[i].Status.PodIP)
		}
	}
	// kwok may give the address of a pod that it has not seen since its start to a new one.
	u.pods("agent", 3, running)
	u.ok("scale", "deployment/web", "--replicas=12")
	u.pods("web", 12, running)
	harness.Check(t, server.Stop())

	server = env.UpIn(dataDir)
	u = newAdmin(t, server)
	u.nodeNames(0)
	u.ok("create", "deployment", "late", "--image=example.test/i", "--replicas=2")
	u.pods("late", 2, pending)
}

// A cluster of the largest size runs a Deployment on all nodes.
func TestMaxNodes_RunPods(t *testing.T) {
	if !harness.Long() {
		t.Skip("takes minutes: STRATA_TEST_LONG=1")
	}
	u := newAdmin(t, harness.New(t).Up("--nodes=1000"))
	u.nodeNames(1000)
	u.ok("create", "deployment", "web", "--image=example.test/i", "--replicas=2000")
	if on := nodesOf(u.pods("web", 2000, running)); len(on) != 1000 {
		t.Errorf("the pods run on %d nodes", len(on))
	}
	u.ok("delete", "deployment", "web")
	u.pods("web", 0, running)
}
