package textform

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"testing"

	corev1 "k8s.io/api/core/v1"
	serializerjson "k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/client-go/kubernetes/scheme"
	"sigs.k8s.io/yaml"
)

// pods returns a list of pods of 2.5 KB with three managers each.
func pods(tb testing.TB, n int) *corev1.PodList {
	list := &corev1.PodList{}
	list.Kind, list.APIVersion, list.ResourceVersion = "PodList", "v1", "1"
	for i := range n {
		pod := corev1.Pod{}
		if err := yaml.Unmarshal(fmt.Appendf(nil, podText, i), &pod); err != nil {
			tb.Fatal(err)
		}
		list.Items = append(list.Items, pod)
	}
	return list
}

const podText = `
metadata:
  name: web-6d4b75cb6d-%05d
  generateName: web-6d4b75cb6d-
  namespace: default
  uid: 0b1e8f0c-7c1d-4d4e-9a3e-3d3f6a1b2c4d
  resourceVersion: "123456"
  creationTimestamp: "2026-11-20T10:11:12Z"
  labels: {app: web, pod-template-hash: 6d4b75cb6d, tier: frontend, topology.kubernetes.io/zone: a}
  annotations: {checksum/config: 7e1f1ac0b6f2c0e6f6c2b0a5d5c1c4f3, note: "a text of some words, which a person wrote: to be read by others"}
  ownerReferences: [{apiVersion: apps/v1, kind: ReplicaSet, name: web-6d4b75cb6d, uid: 5e6f7a8b-1111-2222-3333-444455556666, controller: true, blockOwnerDeletion: true}]
  managedFields:
  - {manager: kube-controller-manager, operation: Update, apiVersion: v1, time: "2026-11-20T10:11:12Z", fieldsType: FieldsV1, fieldsV1: {"f:metadata": {"f:generateName": {}, "f:labels": {".": {}, "f:app": {}, "f:pod-template-hash": {}}, "f:ownerReferences": {".": {}, 'k:{"uid":"5e6f7a8b-1111-2222-3333-444455556666"}': {}}}, "f:spec": {"f:containers": {'k:{"name":"web"}': {".": {}, "f:image": {}, "f:name": {}, "f:resources": {}}}, "f:dnsPolicy": {}, "f:restartPolicy": {}}}}
  - {manager: kubelet, operation: Update, apiVersion: v1, time: "2026-11-20T10:11:22Z", subresource: status, fieldsType: FieldsV1, fieldsV1: {"f:status": {"f:conditions": {'k:{"type":"ContainersReady"}': {".": {}, "f:status": {}, "f:type": {}}, 'k:{"type":"Ready"}': {".": {}, "f:status": {}, "f:type": {}}}, "f:containerStatuses": {}, "f:hostIP": {}, "f:phase": {}, "f:podIP": {}}}}
  - {manager: operator, operation: Apply, apiVersion: v1, time: "2026-11-20T10:11:32Z", fieldsType: FieldsV1, fieldsV1: {"f:metadata": {"f:annotations": {"f:checksum/config": {}, "f:note": {}}}}}
spec:
  nodeName: node-0001
  restartPolicy: Always
  dnsPolicy: ClusterFirst
  serviceAccountName: default
  terminationGracePeriodSeconds: 30
  containers:
  - name: web
    image: registry.example.com/web:1.2.3
    args: ["--port=8080", "--verbose"]
    env: [{name: A, value: "1"}, {name: B, valueFrom: {fieldRef: {apiVersion: v1, fieldPath: metadata.name}}}]
    ports: [{containerPort: 8080, protocol: TCP}]
    resources: {requests: {cpu: 100m, memory: 128Mi}, limits: {cpu: "1", memory: 256Mi}}
    volumeMounts: [{name: token, mountPath: /var/run/secrets, readOnly: true}]
  volumes: [{name: token, emptyDir: {}}]
  tolerations: [{key: node.kubernetes.io/not-ready, operator: Exists, effect: NoExecute, tolerationSeconds: 300}]
status:
  phase: Running
  hostIP: 10.0.0.1
  podIP: 10.244.1.17
  startTime: "2026-11-20T10:11:13Z"
  conditions:
  - {type: Ready, status: "True", lastTransitionTime: "2026-11-20T10:11:22Z"}
  - {type: ContainersReady, status: "True", lastTransitionTime: "2026-11-20T10:11:22Z"}
  containerStatuses: [{name: web, ready: true, restartCount: 0, image: registry.example.com/web:1.2.3, imageID: sha256:0123456789abcdef, containerID: "containerd://0123", started: true, state: {running: {startedAt: "2026-11-20T10:11:20Z"}}}]
`

// BenchmarkList makes the forms of a list of pods: from the JSON of its items, and as upstream's
// serializers make them of decoded objects.
func BenchmarkList(b *testing.B) {
	list := pods(b, 100)
	var items [][]byte
	for i := range list.Items {
		item, err := json.Marshal(&list.Items[i])
		if err != nil {
			b.Fatal(err)
		}
		items = append(items, item)
	}
	size := len(slices.Concat(items...))
	for _, f := range forms {
		b.Run("form="+f.name+"/from=items", func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			for b.Loop() {
				var text []byte
				for i, item := range items {
					var err error
					if text, err = f.form.Element(text[:0], item, i == 0); err != nil {
						b.Fatal(err)
					}
				}
			}
		})
		b.Run("form="+f.name+"/from=objects", func(b *testing.B) {
			b.SetBytes(int64(size))
			b.ReportAllocs()
			s := serializerjson.NewSerializerWithOptions(serializerjson.DefaultMetaFactory, scheme.Scheme, scheme.Scheme, f.options)
			for b.Loop() {
				var out bytes.Buffer
				if err := s.Encode(list, &out); err != nil {
					b.Fatal(err)
				}
			}
		})
	}
}
