package clients

import (
	"slices"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// TestManagers_OfWorkload_AreThoseOfCluster: metadata.managedFields, and `strata history log`
// thereby, names the programs that a cluster of several processes names.
func TestManagers_OfWorkload_AreThoseOfCluster(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.ok("create", "deployment", "web", "--image=example.test/i", "--replicas=1")
	u.ok("rollout", "status", "deployment/web", "--timeout="+testTimeout.String())
	deployment, err := u.client.AppsV1().Deployments(u.namespace).Get(u.ctx, "web", metav1.GetOptions{})
	harness.Check(t, err)
	if got, want := managersOf(deployment.ManagedFields), []string{"kube-controller-manager", "kubectl-create"}; !slices.Equal(got, want) {
		t.Errorf("the managers of the deployment are %q, want %q", got, want)
	}
	pod := u.pods("web", 1, running)[0]
	if got, want := managersOf(pod.ManagedFields), []string{"kube-controller-manager", "kwok"}; !slices.Equal(got, want) {
		t.Errorf("the managers of the pod are %q, want %q", got, want)
	}
	account, err := u.client.CoreV1().ServiceAccounts("kube-system").Get(u.ctx, "deployment-controller", metav1.GetOptions{})
	harness.Check(t, err)
	if got := managersOf(account.ManagedFields); slices.Contains(got, "strata") {
		t.Errorf("the managers of a controller's account are %q", got)
	}

	// The scheduler writes a condition of a pod that no node accepts.
	u.apply(`{apiVersion: v1, kind: Pod, metadata: {name: nowhere}, spec: {nodeSelector: {no: node}, containers: [{name: c, image: example.test/i}]}}`)
	var nowhere *corev1.Pod
	u.eventually("the pod has a condition", func() (bool, error) {
		nowhere, err = u.client.CoreV1().Pods(u.namespace).Get(u.ctx, "nowhere", metav1.GetOptions{})
		return err == nil && len(nowhere.Status.Conditions) > 0, err
	})
	if got := managersOf(nowhere.ManagedFields); !slices.Contains(got, "kube-scheduler") {
		t.Errorf("the managers of a pod without a node are %q", got)
	}

	if harness.Engine() != harness.Strata {
		return // it has no history
	}
	r := harness.Must[harness.Result](t)(cluster.History(u.ctx, "log", "--namespace="+u.namespace, "deployment/web"))
	if r.Code != 0 || !strings.Contains(r.Stdout, "kube-controller-manager") || strings.Contains(r.Stdout, "strata") {
		t.Errorf("strata history log: code %d\n%s%s", r.Code, r.Stdout, r.Stderr)
	}
}

// managersOf returns the managers of an object, sorted, each once.
func managersOf(entries []metav1.ManagedFieldsEntry) []string {
	var all []string
	for _, entry := range entries {
		all = append(all, entry.Manager)
	}
	slices.Sort(all)
	return slices.Compact(all)
}
