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
	"k8s.io/apimachinery/pkg/types"
)

const (
	// Namespace is the namespace of all ConfigMaps except the large ones.
	Namespace = "bench"

	// payloadBytes is the size of the random text in each object but the large ones.
	payloadBytes = 1024

	// dataKey is the annotation of a pod with its random bytes.
	dataKey = "example.com/data"

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

// Pod returns a running pod of one container, with an annotation of 1,024 random bytes.
func Pod(index, nodes, namespaces int) *corev1.Pod {
	name, namespace := PodName(index), PodNamespace(index, namespaces)
	return &corev1.Pod{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "Pod"},
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			Namespace:         namespace,
			UID:               uid("pod " + name),
			CreationTimestamp: created,
			Labels:            map[string]string{"app": fmt.Sprintf("app-%d", index%100)},
			Annotations:       map[string]string{dataKey: text("pod "+name, 0)},
		},
		Spec: corev1.PodSpec{
			NodeName:           NodeName(index, nodes),
			ServiceAccountName: "default",
			Containers: []corev1.Container{{
				Name:  "main",
				Image: "registry.example.com/app:v1",
				Resources: corev1.ResourceRequirements{Requests: corev1.ResourceList{
					corev1.ResourceCPU:    resource.MustParse("100m"),
					corev1.ResourceMemory: resource.MustParse("128Mi"),
				}},
			}},
		},
		Status: corev1.PodStatus{
			Phase:      corev1.PodRunning,
			Conditions: []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue, LastTransitionTime: created}},
			HostIP:     "192.0.2.1",
			PodIP:      "198.51.100.1",
			StartTime:  &created,
		},
	}
}

// ManagedPod is Pod without random bytes, and with the environment of its container, its mounts,
// and the managed fields of a controller, a scheduler and a kubelet: 2.5 KB as stored, of which
// they are a half.
func ManagedPod(index, nodes, namespaces int) *corev1.Pod {
	pod := Pod(index, nodes, namespaces)
	pod.Annotations = map[string]string{"kubernetes.io/config.seen": created.UTC().Format(time.RFC3339)}
	c := &pod.Spec.Containers[0]
	var spec, status strings.Builder
	fmt.Fprintf(&spec, `,"k:{\"name\":\"%s\"}":{".":{},"f:image":{},"f:imagePullPolicy":{},"f:name":{},"f:resources":{".":{},"f:requests":{".":{},"f:cpu":{},"f:memory":{}}},"f:terminationMessagePath":{},"f:terminationMessagePolicy":{},"f:env":{".":{}`, c.Name)
	for i := range 1 {
		name := fmt.Sprintf("VARIABLE_%d", i)
		c.Env = append(c.Env, corev1.EnvVar{Name: name, Value: textOf(24, pod.Name+name, i)})
		fmt.Fprintf(&spec, `,"k:{\"name\":\"%s\"}":{".":{},"f:name":{},"f:value":{}}`, name)
	}
	spec.WriteString(`},"f:volumeMounts":{".":{}`)
	c.VolumeMounts = []corev1.VolumeMount{{Name: "data", MountPath: "/var/lib/data"}, {Name: "config", MountPath: "/etc/config", ReadOnly: true}}
	pod.Spec.Volumes = []corev1.Volume{
		{Name: "data", VolumeSource: corev1.VolumeSource{EmptyDir: &corev1.EmptyDirVolumeSource{}}},
		{Name: "config", VolumeSource: corev1.VolumeSource{ConfigMap: &corev1.ConfigMapVolumeSource{LocalObjectReference: corev1.LocalObjectReference{Name: "config"}}}},
	}
	for _, m := range c.VolumeMounts {
		fmt.Fprintf(&spec, `,"k:{\"mountPath\":\"%s\"}":{".":{},"f:mountPath":{},"f:name":{},"f:readOnly":{}}`, m.MountPath)
	}
	spec.WriteString(`}}`)
	for _, condition := range []string{"ContainersReady", "Initialized", "PodReadyToStartContainers", "Ready"} {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: corev1.PodConditionType(condition), Status: corev1.ConditionTrue, LastTransitionTime: created})
		fmt.Fprintf(&status, `"k:{\"type\":\"%s\"}":{".":{},"f:lastProbeTime":{},"f:lastTransitionTime":{},"f:status":{},"f:type":{}},`, condition)
	}
	entry := func(manager, subresource, fields string) metav1.ManagedFieldsEntry {
		return metav1.ManagedFieldsEntry{Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", Time: &created, FieldsType: "FieldsV1",
			FieldsV1: metav1.NewFieldsV1(fields), Subresource: subresource}
	}
	pod.ManagedFields = []metav1.ManagedFieldsEntry{
		entry("kube-controller-manager", "", `{"f:metadata":{"f:annotations":{".":{},"f:example.com/data":{}},"f:generateName":{},"f:labels":{".":{},"f:app":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"`+
			string(pod.UID)+`\"}":{}}},"f:spec":{"f:containers":{".":{}`+spec.String()+`},"f:dnsPolicy":{},"f:enableServiceLinks":{},"f:restartPolicy":{},"f:schedulerName":{},"f:securityContext":{},"f:serviceAccountName":{},"f:terminationGracePeriodSeconds":{}}}`),
		entry("kube-scheduler", "binding", `{"f:spec":{"f:nodeName":{}}}`),
		entry("kubelet", "status", `{"f:status":{"f:conditions":{`+status.String()+`".":{}},"f:containerStatuses":{},"f:hostIP":{},"f:hostIPs":{},"f:phase":{},"f:podIP":{},"f:podIPs":{".":{},"k:{\"ip\":\"198.51.100.1\"}":{".":{},"f:ip":{}}},"f:startTime":{}}}`),
	}
	return pod
}

// PodTemplateKey is the key in etcd of the PodTemplate with this name.
func PodTemplateKey(name string) string { return "/registry/podtemplates/" + Namespace + "/" + name }

// PodTemplate returns a template for the pod with this index, in Namespace: a small object, without
// random text.
func PodTemplate(index int) *corev1.PodTemplate {
	name, pod := fmt.Sprintf("template-%06d", index), Pod(index, 1, 1)
	return &corev1.PodTemplate{
		TypeMeta: metav1.TypeMeta{APIVersion: "v1", Kind: "PodTemplate"},
		ObjectMeta: metav1.ObjectMeta{
			Name:              name,
			Namespace:         Namespace,
			UID:               uid("podtemplate " + name),
			CreationTimestamp: created,
		},
		Template: corev1.PodTemplateSpec{
			ObjectMeta: metav1.ObjectMeta{Labels: pod.Labels},
			Spec:       pod.Spec,
		},
	}
}

func namespaceObject(name string) *corev1.Namespace {
	return &corev1.Namespace{
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
