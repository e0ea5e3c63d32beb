package main

import (
	"fmt"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/stratakube/strata/test/bench/internal/scaling"
)

const (
	leaseNamespace = "kube-node-lease"
	leasePath      = "/apis/coordination.k8s.io/v1/namespaces/" + leaseNamespace + "/leases"
	nodePath       = "/api/v1/nodes"
	slicePath      = "/apis/discovery.k8s.io/v1/namespaces/" + sliceNamespace + "/endpointslices"
	sliceNamespace = "load-0000"
	nodeImages     = 30 // of a Node's status; a kubelet reports 50 at most
)

func nodeName(i int) string      { return fmt.Sprintf("load-node-%05d", i) }
func namespaceName(i int) string { return fmt.Sprintf("load-%04d", i/scaling.ListPods) }
func sliceName(i int) string     { return fmt.Sprintf("slice-%06d", i) }
func podName(i int) string       { return fmt.Sprintf("load-pod-%07d", i) }
func podsPath(ns string) string  { return "/api/v1/namespaces/" + ns + "/pods" }

// newNode returns a Node with addresses, conditions, images and, if kwok, kwok's annotation.
func newNode(i int, kwok bool) *corev1.Node {
	node := &corev1.Node{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Node"},
		ObjectMeta: metav1.ObjectMeta{Name: nodeName(i), Labels: map[string]string{
			corev1.LabelHostname: nodeName(i), corev1.LabelOSStable: "linux", corev1.LabelArchStable: "amd64",
			corev1.LabelTopologyZone: fmt.Sprintf("zone-%d", i%3), corev1.LabelInstanceTypeStable: "large",
		}},
		Status: corev1.NodeStatus{
			Capacity: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("32"), corev1.ResourceMemory: resource.MustParse("128Gi"), corev1.ResourcePods: resource.MustParse("110")},
			Addresses: []corev1.NodeAddress{
				{Type: corev1.NodeInternalIP, Address: fmt.Sprintf("172.16.%d.%d", i>>8, i&255)},
				{Type: corev1.NodeHostName, Address: nodeName(i)},
			},
			NodeInfo: corev1.NodeSystemInfo{KubeletVersion: "v1.37.1", OSImage: "linux", ContainerRuntimeVersion: "containerd://2.1.0", Architecture: "amd64", OperatingSystem: "linux"},
		},
	}
	node.Status.Allocatable = node.Status.Capacity
	for j := range nodeImages {
		node.Status.Images = append(node.Status.Images, corev1.ContainerImage{
			Names:     []string{fmt.Sprintf("registry.example.com/team-%d/application-%d:v1.%d", j%5, j, j), fmt.Sprintf("registry.example.com/team-%d/application-%d@sha256:%064x", j%5, j, i*nodeImages+j)},
			SizeBytes: int64(j+1) << 24,
		})
	}
	if kwok {
		node.Annotations = map[string]string{"kwok.x-k8s.io/node": "fake"}
	}
	return node
}

// heartbeat is the change of a node's status.
func heartbeat(now time.Time) any {
	stamp := now.UTC().Format(time.RFC3339)
	var conditions []map[string]string
	for _, kind := range []string{"MemoryPressure", "DiskPressure", "PIDPressure", "Ready"} {
		status := "False"
		if kind == "Ready" {
			status = "True"
		}
		conditions = append(conditions, map[string]string{"type": kind, "status": status, "lastHeartbeatTime": stamp, "reason": "Kubelet" + kind, "message": "kubelet reports " + kind})
	}
	return map[string]any{"status": map[string]any{"conditions": conditions}}
}

func newLease(node string) *coordinationv1.Lease {
	now := metav1.NowMicro()
	return &coordinationv1.Lease{
		TypeMeta:   metav1.TypeMeta{APIVersion: "coordination.k8s.io/v1", Kind: "Lease"},
		ObjectMeta: metav1.ObjectMeta{Name: node, Namespace: leaseNamespace, OwnerReferences: []metav1.OwnerReference{{APIVersion: "v1", Kind: "Node", Name: node, UID: types.UID("0d4d7eb4-0000-4000-8000-" + node[len(node)-5:] + "0000000")}}},
		Spec:       coordinationv1.LeaseSpec{HolderIdentity: &node, LeaseDurationSeconds: ptr.To(int32(40)), RenewTime: &now},
	}
}

// newPod returns a pod as a ReplicaSet's controller creates it, with one container.
func newPod(i int) *corev1.Pod {
	var env []corev1.EnvVar
	for j := range 8 {
		env = append(env, corev1.EnvVar{Name: fmt.Sprintf("VARIABLE_%d", j), Value: fmt.Sprintf("value %d of the environment", j)})
	}
	probe := &corev1.Probe{PeriodSeconds: 10, ProbeHandler: corev1.ProbeHandler{TCPSocket: &corev1.TCPSocketAction{}}}
	probe.TCPSocket.Port.IntVal = 8080
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name: podName(i), Namespace: namespaceName(i), GenerateName: "load-pod-",
			Labels:          map[string]string{"app": fmt.Sprintf("app-%d", i/20), "pod-template-hash": "5d4f8c7b9d"},
			OwnerReferences: []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: fmt.Sprintf("app-%d-5d4f8c7b9d", i/20), UID: "3f0f0f3e-5a5e-4f6e-9a50-6a6a6a6a6a6a", Controller: ptr.To(true), BlockOwnerDeletion: ptr.To(true)}},
		},
		Spec: corev1.PodSpec{
			ServiceAccountName: "default",
			Containers: []corev1.Container{{
				Name: "main", Image: "registry.example.com/team-0/application-0:v1.0", Env: env, ReadinessProbe: probe, LivenessProbe: probe,
				Ports:        []corev1.ContainerPort{{Name: "http", ContainerPort: 8080}},
				Resources:    corev1.ResourceRequirements{Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi")}},
				VolumeMounts: []corev1.VolumeMount{{Name: "config", MountPath: "/etc/config", ReadOnly: true}},
			}},
			Volumes: []corev1.Volume{{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}}},
		},
	}
}

// podStatus is the change of a kubelet to the status of a pod; its phase is Running or Succeeded.
func podStatus(pod *corev1.Pod, phase corev1.PodPhase, now time.Time) any {
	stamp := now.UTC().Format(time.RFC3339)
	ready, state := "True", map[string]any{"running": map[string]any{"startedAt": stamp}}
	if phase == corev1.PodSucceeded {
		ready, state = "False", map[string]any{"terminated": map[string]any{"exitCode": 0, "startedAt": stamp, "finishedAt": stamp, "reason": "Completed"}}
	}
	var conditions []map[string]any
	for _, kind := range []string{"PodReadyToStartContainers", "Initialized", "Ready", "ContainersReady"} {
		conditions = append(conditions, map[string]any{"type": kind, "status": ready, "lastProbeTime": nil, "lastTransitionTime": stamp})
	}
	return map[string]any{
		"metadata": map[string]any{"uid": pod.UID},
		"status": map[string]any{
			"phase": phase, "startTime": stamp, "hostIP": "172.16.0.1", "podIP": "10.128.0.7",
			"hostIPs": []any{map[string]any{"ip": "172.16.0.1"}}, "podIPs": []any{map[string]any{"ip": "10.128.0.7"}},
			"conditions": conditions,
			"containerStatuses": []any{map[string]any{
				"name": "main", "image": pod.Spec.Containers[0].Image, "imageID": "registry.example.com/team-0/application-0@sha256:0f0f", "containerID": "containerd://" + string(pod.UID),
				"ready": phase == corev1.PodRunning, "started": phase == corev1.PodRunning, "restartCount": 0, "state": state,
			}},
		},
	}
}

func newEvent(pod *corev1.Pod, n int64, reason string) *corev1.Event {
	now := metav1.Now()
	return &corev1.Event{
		TypeMeta:       metav1.TypeMeta{APIVersion: "v1", Kind: "Event"},
		ObjectMeta:     metav1.ObjectMeta{Name: fmt.Sprintf("%s.%016x", pod.Name, n), Namespace: pod.Namespace},
		InvolvedObject: corev1.ObjectReference{APIVersion: "v1", Kind: "Pod", Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, FieldPath: "spec.containers{main}"},
		Reason:         reason, Message: `Successfully pulled image "registry.example.com/team-0/application-0:v1.0" in 1.2s (1.3s including waiting). Image size: 10000000 bytes.`,
		Source:         corev1.EventSource{Component: "kubelet", Host: pod.Spec.NodeName},
		FirstTimestamp: now, LastTimestamp: now, Count: 1, Type: corev1.EventTypeNormal,
		ReportingController: "kubelet", ReportingInstance: pod.Spec.NodeName,
	}
}

func newSlice(i, endpoints, variant int) *discoveryv1.EndpointSlice {
	slice := &discoveryv1.EndpointSlice{
		TypeMeta:    metav1.TypeMeta{APIVersion: "discovery.k8s.io/v1", Kind: "EndpointSlice"},
		ObjectMeta:  metav1.ObjectMeta{Name: sliceName(i), Namespace: sliceNamespace, Labels: map[string]string{discoveryv1.LabelServiceName: fmt.Sprintf("service-%d", i), discoveryv1.LabelManagedBy: "endpointslice-controller.k8s.io"}},
		AddressType: discoveryv1.AddressTypeIPv4,
		Ports:       []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To(int32(8080)), Protocol: ptr.To(corev1.ProtocolTCP)}},
	}
	for j := range endpoints {
		slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{
			Addresses:  []string{fmt.Sprintf("10.%d.%d.%d", 128+i>>8&63, i&255, (j+variant)%250+1)},
			Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true), Serving: ptr.To(true), Terminating: ptr.To(false)},
			NodeName:   ptr.To(nodeName(i)), Zone: ptr.To("zone-1"),
			TargetRef: &corev1.ObjectReference{Kind: "Pod", Namespace: sliceNamespace, Name: podName(i*endpoints + j), UID: "6ba7b810-9dad-11d1-80b4-00c04fd430c8"},
		})
	}
	return slice
}
