package clients

import (
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	batchv1 "k8s.io/api/batch/v1"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// workload returns the manifest of a workload whose pods have the label app=name. more is added to
// its spec.
func workload(kind, name, more string) string {
	return fmt.Sprintf(`{apiVersion: apps/v1, kind: %s, metadata: {name: %s}, spec: {selector: {matchLabels: {app: %s}},
  template: {metadata: {labels: {app: %s}}, spec: {containers: [{name: c, image: example.test/i}]}}, %s}}`, kind, name, name, name, more)
}

func TestDeployment_RunsScalesAndIsDeleted(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.ok("create", "deployment", "web", "--image=example.test/i", "--replicas=6")
	pods := u.pods("web", 6, running)
	if on := nodesOf(pods); len(on) != nodes {
		t.Errorf("the pods run on %v, want %d nodes", on, nodes)
	}
	if distinct := slices.Compact(addresses(pods)); len(distinct) != 6 {
		t.Errorf("the pods have addresses %q", distinct)
	}
	u.ok("rollout", "status", "deployment/web", "--timeout="+testTimeout.String())
	u.ok("scale", "deployment/web", "--replicas=2")
	u.pods("web", 2, running)
	u.ok("set", "image", "deployment/web", "*=example.test/next")
	u.ok("rollout", "status", "deployment/web", "--timeout="+testTimeout.String())

	u.ok("delete", "deployment", "web")
	u.pods("web", 0, running)
	u.eventually("no replica sets", func() (bool, error) {
		list, err := u.client.AppsV1().ReplicaSets(u.namespace).List(u.ctx, metav1.ListOptions{})
		return err == nil && len(list.Items) == 0, err
	})
}

func TestStatefulSet_CreatesPodsInOrder(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(workload("StatefulSet", "db", "serviceName: db, replicas: 3"))
	pods := u.pods("db", 3, running)
	for i, pod := range pods {
		if want := fmt.Sprintf("db-%d", i); pod.Name != want {
			t.Errorf("pod %d is %s, want %s", i, pod.Name, want)
		}
		if i > 0 && pod.CreationTimestamp.Before(&pods[i-1].CreationTimestamp) {
			t.Errorf("%s was created before %s", pod.Name, pods[i-1].Name)
		}
	}
	u.ok("delete", "pod", "db-1")
	u.eventually("db-1 is replaced", func() (bool, error) {
		pod, err := u.client.CoreV1().Pods(u.namespace).Get(u.ctx, "db-1", metav1.GetOptions{})
		return err == nil && pod.UID != pods[1].UID && running(pod) == nil, err
	})
}

func TestDaemonSet_HasOnePodOnEachNode(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(workload("DaemonSet", "agent", ""))
	if on := nodesOf(u.pods("agent", nodes, running)); len(on) != nodes {
		t.Errorf("the pods run on %v", on)
	}
}

func TestJob_Completes(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(`{apiVersion: batch/v1, kind: Job, metadata: {name: job}, spec: {completions: 4, parallelism: 2,
  template: {spec: {restartPolicy: Never, containers: [{name: c, image: example.test/i}]}}}}`)
	u.ok("wait", "job/job", "--for=condition=Complete", "--timeout="+testTimeout.String())
	job, err := u.client.BatchV1().Jobs(u.namespace).Get(u.ctx, "job", metav1.GetOptions{})
	harness.Check(t, err)
	if job.Status.Succeeded != 4 || job.Status.Failed != 0 {
		t.Errorf("status %+v, want 4 succeeded", job.Status)
	}
}

// A CronJob that missed its time starts a Job at once, so the test does not wait for the next
// minute.
func TestCronJob_MissedSchedule_CreatesJobThatCompletes(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(`{apiVersion: batch/v1, kind: CronJob, metadata: {name: cron}, spec: {schedule: "0 0 1 1 *", suspend: true,
  jobTemplate: {spec: {template: {spec: {restartPolicy: Never, containers: [{name: c, image: example.test/i}]}}}}}}`)
	crons := u.client.BatchV1().CronJobs(u.namespace)
	u.eventually("the last schedule is set", func() (bool, error) {
		cron, err := crons.Get(u.ctx, "cron", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		last := metav1.NewTime(cron.CreationTimestamp.AddDate(-2, 0, 0))
		cron.Status.LastScheduleTime = &last
		_, err = crons.UpdateStatus(u.ctx, cron, metav1.UpdateOptions{})
		return err == nil, err
	})
	u.ok("patch", "cronjob", "cron", "--patch", `{"spec": {"suspend": false}}`)
	u.eventually("a job completes", func() (bool, error) {
		jobs, err := u.client.BatchV1().Jobs(u.namespace).List(u.ctx, metav1.ListOptions{})
		if err != nil || len(jobs.Items) == 0 {
			return false, err
		}
		if owner := metav1.GetControllerOf(&jobs.Items[0]); owner == nil || owner.Kind != "CronJob" || owner.Name != "cron" {
			t.Fatalf("the owner of the job is %+v", owner)
		}
		return slices.ContainsFunc(jobs.Items[0].Status.Conditions, func(c batchv1.JobCondition) bool {
			return c.Type == batchv1.JobComplete && c.Status == corev1.ConditionTrue
		}), nil
	})
}

func TestService_HasEndpointsOfItsPods(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(workload("Deployment", "web", "replicas: 3"))
	u.ok("expose", "deployment", "web", "--port=80")
	check := func(replicas int) {
		t.Helper()
		want := addresses(u.pods("web", replicas, running))
		u.eventually("endpoints", func() (bool, error) {
			endpoints, err := u.client.CoreV1().Endpoints(u.namespace).Get(u.ctx, "web", metav1.GetOptions{}) //nolint:staticcheck // deprecated, and served
			if err != nil {
				return false, err
			}
			var got []string
			for _, subset := range endpoints.Subsets {
				for _, address := range subset.Addresses {
					got = append(got, address.IP)
				}
			}
			slices.Sort(got)
			return slices.Equal(got, want), fmt.Errorf("%q, want %q", got, want)
		})
		u.eventually("endpoint slices", func() (bool, error) {
			slicesOf, err := u.client.DiscoveryV1().EndpointSlices(u.namespace).List(u.ctx, metav1.ListOptions{LabelSelector: "kubernetes.io/service-name=web"})
			if err != nil {
				return false, err
			}
			var got []string
			for _, slice := range slicesOf.Items {
				for _, endpoint := range slice.Endpoints {
					if endpoint.Conditions.Ready != nil && *endpoint.Conditions.Ready {
						got = append(got, endpoint.Addresses...)
					}
				}
			}
			slices.Sort(got)
			return slices.Equal(got, want), fmt.Errorf("%q, want %q", got, want)
		})
	}
	check(3)
	u.ok("scale", "deployment/web", "--replicas=1")
	check(1)
}

func TestPodDisruptionBudget_HasStatusAndLimitsEvictions(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	// The pods are not replaced, so that the budget remains used.
	for i := range 3 {
		u.ok("run", fmt.Sprintf("p%d", i), "--image=example.test/i", "--labels=app=web", "--restart=Never")
	}
	u.ok("create", "poddisruptionbudget", "web", "--selector=app=web", "--min-available=2")
	pods := u.pods("web", 3, running)
	u.eventually("one disruption is allowed", func() (bool, error) {
		budget, err := u.client.PolicyV1().PodDisruptionBudgets(u.namespace).Get(u.ctx, "web", metav1.GetOptions{})
		if err != nil {
			return false, err
		}
		return budget.Status.CurrentHealthy == 3 && budget.Status.DisruptionsAllowed == 1, fmt.Errorf("status %+v", budget.Status)
	})
	evict := func(pod corev1.Pod) error {
		return u.client.CoreV1().Pods(u.namespace).EvictV1(u.ctx, eviction(pod))
	}
	harness.Check(t, evict(pods[0]))
	u.pods("web", 2, running)
	u.eventually("the second eviction is refused", func() (bool, error) {
		err := evict(pods[1])
		if err == nil {
			t.Fatal("the second eviction succeeded")
		}
		return apierrors.IsTooManyRequests(err), err
	})
}

func TestNamespace_WithRunningPods_IsDeleted(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(workload("Deployment", "web", "replicas: 2"))
	u.pods("web", 2, running)
	u.ok("delete", "namespace", u.namespace, "--timeout="+testTimeout.String())
}

func TestNodes_LookLikeNodes(t *testing.T) {
	t.Parallel()
	u := newAdmin(t, cluster)
	list, err := u.client.CoreV1().Nodes().List(u.ctx, metav1.ListOptions{})
	harness.Check(t, err)
	if len(list.Items) != nodes {
		t.Fatalf("%d nodes", len(list.Items))
	}
	for _, node := range list.Items {
		if node.Spec.PodCIDR == "" || len(node.Status.Addresses) != 2 || node.Status.Allocatable.Pods().Value() == 0 || len(node.Spec.Taints) != 0 {
			t.Errorf("node %s: %+v %+v", node.Name, node.Spec, node.Status)
		}
		lease, err := u.client.CoordinationV1().Leases(corev1.NamespaceNodeLease).Get(u.ctx, node.Name, metav1.GetOptions{})
		harness.Check(t, err)
		if lease.Spec.RenewTime == nil || time.Since(lease.Spec.RenewTime.Time) > testTimeout {
			t.Errorf("the lease of %s was renewed at %v", node.Name, lease.Spec.RenewTime)
		}
	}
}

func TestPod_ThatFitsOnNoNode_IsPendingWithReason(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.apply(`{apiVersion: v1, kind: Pod, metadata: {name: large, labels: {app: large}}, spec: {containers: [{name: c, image: example.test/i,
  resources: {requests: {cpu: 1000}}}]}}`)
	u.pods("large", 1, func(pod *corev1.Pod) error {
		for _, c := range pod.Status.Conditions {
			if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && strings.Contains(c.Message, "Insufficient cpu") {
				return nil
			}
		}
		return fmt.Errorf("has status %+v", pod.Status)
	})
}
