package dataset

import (
	"crypto/sha256"
	"fmt"
	"math/rand/v2"
	"strings"
	"time"

	"github.com/google/uuid"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// Namespace is the namespace of all ConfigMaps.
	Namespace = "bench"

	// payloadBytes is the size of the random text in each ConfigMap.
	payloadBytes = 1024

	// SentKey is the key in a ConfigMap's data under which StampedConfigMap stores its creation
	// time.
	SentKey = "sent"
)

// created is when all objects claim to have been made: the content of an object depends on its
// index and variant alone.
var created = metav1.NewTime(time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC))

// ConfigMapName is the name of the ConfigMap with this index.
func ConfigMapName(index int) string { return fmt.Sprintf("cm-%06d", index) }

// ConfigMapKey is the key in etcd of the ConfigMap with this name.
func ConfigMapKey(name string) string { return "/registry/configmaps/" + Namespace + "/" + name }

// ConfigMap returns a ConfigMap of 1,024 random bytes (letters and digits, so that JSON needs no
// escapes) with the label app=app-(index%100). Another variant of the same index has other data and
// the same identity.
func ConfigMap(index, variant int) *corev1.ConfigMap {
	return NamedConfigMap(ConfigMapName(index), index, variant)
}

// NamedConfigMap is ConfigMap with a name outside the numbered ones.
func NamedConfigMap(name string, index, variant int) *corev1.ConfigMap {
	return &corev1.ConfigMap{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			Namespace:         Namespace,
			UID:               uid("configmap " + name),
			CreationTimestamp: created,
			Labels:            map[string]string{"app": fmt.Sprintf("app-%d", index%100)},
		},
		Data: map[string]string{"data": text("configmap "+name, variant)},
	}
}

// StampedConfigMap is ConfigMap with the time, in nanoseconds since 1970, under SentKey, from which
// a watcher computes the latency of the event.
func StampedConfigMap(index, variant int, sent time.Time) *corev1.ConfigMap {
	cm := ConfigMap(index, variant)
	cm.Data[SentKey] = fmt.Sprint(sent.UnixNano())
	return cm
}

// PodName is the name of the pod with this index.
func PodName(index int) string { return fmt.Sprintf("pod-%06d", index) }

// PodNamespace is the namespace of the pod with this index when pods are spread over the given
// number of namespaces.
func PodNamespace(index, namespaces int) string {
	if namespaces <= 1 {
		return Namespace
	}
	return fmt.Sprintf("%s-%03d", Namespace, index%namespaces)
}

// NodeName is the name of the node that runs the pod with this index, among the given number of
// nodes.
func NodeName(index, nodes int) string { return fmt.Sprintf("node-%05d", index%nodes) }

// PodKey is the key in etcd of a pod.
func PodKey(namespace, name string) string { return "/registry/pods/" + namespace + "/" + name }

// PodSpec is the spec of a pod of one container.
func PodSpec(nodeName string) corev1.PodSpec {
	return corev1.PodSpec{
		NodeName:           nodeName,
		ServiceAccountName: "default",
		Containers: []corev1.Container{{
			Name:  "main",
			Image: "registry.example.com/app:v1",
			Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
				corev1.ResourceCPU:    resource.MustParse("100m"),
				corev1.ResourceMemory: resource.MustParse("128Mi"),
			}},
		}},
	}
}

// Pod returns a running pod with the managed fields of a controller, a scheduler and a kubelet: 2.5
// KB as stored, of which they are a half.
func Pod(index, nodes, namespaces int) *corev1.Pod {
	name, namespace := PodName(index), PodNamespace(index, namespaces)
	pod := &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			Namespace:         namespace,
			UID:               uid("pod " + name),
			CreationTimestamp: created,
			Labels:            map[string]string{"app": fmt.Sprintf("app-%d", index%100)},
			Annotations:       map[string]string{"kubernetes.io/config.seen": created.UTC().Format(time.RFC3339)},
		},
		Spec: PodSpec(NodeName(index, nodes)),
		Status: corev1.PodStatus{
			Phase:     corev1.PodRunning,
			HostIP:    "192.0.2.1",
			PodIP:     "198.51.100.1",
			StartTime: &created,
		},
	}
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}},
	}
	c := &pod.Spec.Containers[0]
	c.Env = []corev1.EnvVar{{Name: "VARIABLE_0", Value: textOf(24, name+"VARIABLE_0", 0)}}
	c.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/var/lib/data"}, {Name: "config", MountPath: "/etc/config", ReadOnly: true}}
	var conditions strings.Builder
	for _, condition := range []string{"ContainersReady", "Initialized", "PodReadyToStartContainers", "Ready"} {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodConditionType(condition), Status: corev1.ConditionTrue, LastTransitionTime: created})
		fmt.Fprintf(&conditions, `"k:{\"type\":\"%s\"}":{".":{},"f:lastProbeTime":{},"f:lastTransitionTime":{},"f:status":{},"f:type":{}},`, condition)
	}
	for _, entry := range [][3]string{
		{"kube-controller-manager", "", fmt.Sprintf(controllerFields, pod.UID)},
		{"kube-scheduler", "binding", `{"f:spec":{"f:nodeName":{}}}`},
		{"kubelet", "status", `{"f:status":{"f:conditions":{` + conditions.String() + kubeletFields},
	} {
		pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{Manager: entry[0], Subresource: entry[1], Operation: metav1.ManagedFieldsOperationUpdate,
			APIVersion: "v1", Time: &created, FieldsType: "FieldsV1", FieldsV1: metav1.NewFieldsV1(entry[2])})
	}
	return pod
}

// controllerFields has a place for the UID of the owner; kubeletFields follow the conditions.
const (
	controllerFields = `{"f:metadata":{"f:annotations":{".":{},"f:example.com/data":{}},"f:generateName":{},"f:labels":{".":{},"f:app":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"%s\"}":{}}},` +
		`"f:spec":{"f:containers":{".":{},"k:{\"name\":\"main\"}":{".":{},"f:image":{},"f:imagePullPolicy":{},"f:name":{},"f:resources":{".":{},"f:requests":{".":{},"f:cpu":{},"f:memory":{}}},` +
		`"f:terminationMessagePath":{},"f:terminationMessagePolicy":{},"f:env":{".":{},"k:{\"name\":\"VARIABLE_0\"}":{".":{},"f:name":{},"f:value":{}}},"f:volumeMounts":{".":{},` +
		`"k:{\"mountPath\":\"/var/lib/data\"}":{".":{},"f:mountPath":{},"f:name":{},"f:readOnly":{}},"k:{\"mountPath\":\"/etc/config\"}":{".":{},"f:mountPath":{},"f:name":{},"f:readOnly":{}}}}},` +
		`"f:dnsPolicy":{},"f:enableServiceLinks":{},"f:restartPolicy":{},"f:schedulerName":{},"f:securityContext":{},"f:serviceAccountName":{},"f:terminationGracePeriodSeconds":{}}}`
	kubeletFields = `".":{}},"f:containerStatuses":{},"f:hostIP":{},"f:hostIPs":{},"f:phase":{},"f:podIP":{},"f:podIPs":{".":{},"k:{\"ip\":\"198.51.100.1\"}":{".":{},"f:ip":{}}},"f:startTime":{}}}`
)

func namespaceObject(name string) (key string, o runtime.Object) {
	return "/registry/namespaces/" + name, &corev1.Namespace{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Namespace"},
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			UID:               uid("namespace " + name),
			CreationTimestamp: created,
			Labels:            map[string]string{corev1.LabelMetadataName: name},
		},
		Spec:   corev1.NamespaceSpec{Finalizers: []corev1.FinalizerName{corev1.FinalizerKubernetes}},
		Status: corev1.NamespaceStatus{Phase: corev1.NamespaceActive},
	}
}

// source returns the random numbers that belong to a name and a variant.
func source(name string, variant int) *rand.ChaCha8 {
	return rand.NewChaCha8(sha256.Sum256(fmt.Appendf(nil, "%s %d", name, variant)))
}

// uid returns the UID of a named object.
func uid(name string) types.UID {
	id, err := uuid.NewRandomFromReader(source("uid of "+name, 0))
	if err != nil {
		panic(err) // a ChaCha8 never fails to be read
	}
	return types.UID(id.String())
}

// text returns payloadBytes random letters and digits that belong to a name and a variant.
func text(name string, variant int) string { return textOf(payloadBytes, name, variant) }

func textOf(bytes int, name string, variant int) string {
	const alphabet = "abcdefghijklmnopqrstuvwxyz0123456789"
	random := rand.New(source(name, variant))
	var b strings.Builder
	b.Grow(bytes)
	for range bytes {
		b.WriteByte(alphabet[random.IntN(len(alphabet))])
	}
	return b.String()
}
