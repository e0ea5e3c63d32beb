package clients

import (
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

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
