package gzipjoin

import (
	"bytes"
	stdgzip "compress/gzip"
	"encoding/base64"
	"encoding/binary"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"io"
	"math/rand/v2"
	"strings"
	"testing"
	"time"

	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/utils/ptr"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
)

// lists are the kinds of objects that sizes are measured on, each named by its characteristic.
var lists = []struct {
	name  string
	count int
	make  func(*source, int) object
}{
	{"configmaps-1KB-random", 800, func(s *source, i int) object {
		return &corev1.ConfigMap{ObjectMeta: s.meta("cm", i), Data: map[string]string{"data": s.text(1024, alphanumeric)}}
	}},
	{"configmaps-1KB-words", 800, func(s *source, i int) object {
		return &corev1.ConfigMap{ObjectMeta: s.meta("settings", i), Data: map[string]string{"app.properties": s.words(1024)}}
	}},
	{"configmaps-tiny", 3000, func(s *source, i int) object {
		return &corev1.ConfigMap{ObjectMeta: s.meta("cm", i), Data: map[string]string{"a": "b"}}
	}},
	{"configmaps-nothing-but-a-name", 3000, func(s *source, i int) object {
		return &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: fmt.Sprint("cm-", i), Namespace: "default"}}
	}},
	{"configmaps-512KB-words", 2, func(s *source, i int) object {
		return &corev1.ConfigMap{ObjectMeta: s.meta("big", i), Data: map[string]string{"data": s.words(1 << 19)}}
	}},
	{"secrets-1KB", 800, func(s *source, i int) object {
		return &corev1.Secret{ObjectMeta: s.meta("token", i), Data: map[string][]byte{"data": s.bytes(1024)}}
	}},
	// In JSON the data is base64: there are no repetitions, but only 64 different bytes.
	{"secrets-1MB", 2, func(s *source, i int) object {
		return &corev1.Secret{ObjectMeta: s.meta("release", i), Data: map[string][]byte{"data": s.bytes(700 << 10)}}
	}},
	{"pods", 300, (*source).pod},
	{"leases", 2000, func(s *source, i int) object {
		return &coordinationv1.Lease{ObjectMeta: s.meta("node", i), Spec: coordinationv1.LeaseSpec{
			HolderIdentity: ptr.To(fmt.Sprintf("node-%06d", i)), LeaseDurationSeconds: ptr.To[int32](40),
			RenewTime: ptr.To(metav1.NewMicroTime(s.time().Add(time.Duration(s.IntN(1e6)) * time.Microsecond))),
		}}
	}},
	{"endpointslices", 2000, func(s *source, i int) object {
		slice := &discoveryv1.EndpointSlice{ObjectMeta: s.meta("service", i), AddressType: discoveryv1.AddressTypeIPv4}
		slice.Ports = []discoveryv1.EndpointPort{{Name: ptr.To("http"), Port: ptr.To[int32](8080), Protocol: ptr.To(corev1.ProtocolTCP)}}
		for range 2 {
			slice.Endpoints = append(slice.Endpoints, discoveryv1.Endpoint{Addresses: []string{s.ip()}, Conditions: discoveryv1.EndpointConditions{Ready: ptr.To(true)}})
		}
		return slice
	}},
	{"metadata-only", 3000, func(s *source, i int) object { return &metav1.PartialObjectMetadata{ObjectMeta: s.meta("object", i)} }},
}

type object interface{ Marshal() ([]byte, error) }

const alphanumeric = "abcdefghijklmnopqrstuvwxyz0123456789"

// source generates the differences between objects.
type source struct{ *rand.Rand }

func (s *source) text(n int, alphabet string) string {
	b := make([]byte, n)
	for i := range b {
		b[i] = alphabet[s.IntN(len(alphabet))]
	}
	return string(b)
}

func (s *source) bytes(n int) []byte { return randomBytes(n, s.Uint64()) }

func (s *source) hex(n int) string { return hex.EncodeToString(s.bytes((n + 1) / 2))[:n] }

var vocabulary = strings.Fields(`server port listen timeout retry backoff enable true false log level info debug error path
	config data cache size max min connection pool database host user secret name token issuer audience replica shard region
	zone cluster endpoint metrics health ready live interval seconds threshold window policy rule match prefix header session`)

func (s *source) word() string { return vocabulary[s.IntN(len(vocabulary))] }

func (s *source) words(n int) string {
	var b strings.Builder
	for b.Len() < n {
		fmt.Fprintf(&b, "%s.%s_%s=%d\n", s.word(), s.word(), s.word(), s.IntN(5000))
	}
	return b.String()
}

func (s *source) uid() types.UID {
	return types.UID(s.hex(8) + "-" + s.hex(4) + "-4" + s.hex(3) + "-a" + s.hex(3) + "-" + s.hex(12))
}

func (s *source) time() metav1.Time {
	return metav1.Unix(1_767_225_600+s.Int64N(30*86_400), 0).Rfc3339Copy()
}

func (s *source) ip() string {
	return fmt.Sprintf("10.%d.%d.%d", s.IntN(256), s.IntN(256), s.IntN(256))
}

func (s *source) meta(prefix string, i int) metav1.ObjectMeta {
	return metav1.ObjectMeta{
		Name: fmt.Sprintf("%s-%06d", prefix, i), Namespace: fmt.Sprintf("team-%02d", i/100), UID: s.uid(),
		ResourceVersion: fmt.Sprint(300_000 + s.IntN(1_000_000)), CreationTimestamp: s.time(),
		Labels: map[string]string{"app": fmt.Sprintf("app-%d", i%100)},
	}
}

// pod returns about 5 KB of JSON, in the state after a controller and a kubelet.
func (s *source) pod(i int) object {
	app, hash, ip, since := vocabulary[i/20%len(vocabulary)], fmt.Sprintf("%x", 0x6f00000000+i/20*7919), s.ip(), s.time()
	pod := &corev1.Pod{ObjectMeta: s.meta(app+"-"+hash, i), Spec: corev1.PodSpec{
		NodeName: "ip-" + strings.ReplaceAll(s.ip(), ".", "-") + ".example.internal", ServiceAccountName: "default",
		RestartPolicy: corev1.RestartPolicyAlways, DNSPolicy: corev1.DNSClusterFirst, SchedulerName: corev1.DefaultSchedulerName,
	}, Status: corev1.PodStatus{Phase: corev1.PodRunning, HostIP: s.ip(), PodIP: ip, PodIPs: []corev1.PodIP{{IP: ip}}, StartTime: &since}}
	pod.Labels["pod-template-hash"] = hash
	pod.Annotations = map[string]string{"checksum/config": s.hex(64)}
	pod.OwnerReferences = []metav1.OwnerReference{{APIVersion: "apps/v1", Kind: "ReplicaSet", Name: app + "-" + hash, UID: s.uid(), Controller: ptr.To(true)}}
	managed := func(manager, subresource, fields string) {
		pod.ManagedFields = append(pod.ManagedFields, metav1.ManagedFieldsEntry{
			Manager: manager, Operation: metav1.ManagedFieldsOperationUpdate, APIVersion: "v1", Time: &since, FieldsType: "FieldsV1",
			Subresource: subresource, FieldsV1: metav1.NewFieldsV1(fields),
		})
	}
	managed("kube-controller-manager", "", `{"f:metadata":{"f:annotations":{".":{},"f:checksum/config":{}},"f:generateName":{},"f:labels":{".":{},"f:app":{},`+
		`"f:pod-template-hash":{}},"f:ownerReferences":{".":{},"k:{\"uid\":\"`+string(s.uid())+`\"}":{}}},"f:spec":{"f:containers":{"k:{\"name\":\"main\"}":{".":{},`+
		`"f:env":{".":{},"k:{\"name\":\"LOG_LEVEL\"}":{".":{},"f:name":{},"f:value":{}}},"f:image":{},"f:imagePullPolicy":{},"f:name":{},"f:ports":{},`+
		`"f:resources":{".":{},"f:limits":{},"f:requests":{}}}},"f:dnsPolicy":{},"f:restartPolicy":{},"f:schedulerName":{},"f:securityContext":{}}}`)
	managed("kubelet", "status", `{"f:status":{"f:conditions":{"k:{\"type\":\"Ready\"}":{".":{},"f:lastProbeTime":{},"f:lastTransitionTime":{},"f:status":{},`+
		`"f:type":{}}},"f:containerStatuses":{},"f:hostIP":{},"f:phase":{},"f:podIP":{},"f:podIPs":{".":{},"k:{\"ip\":\"`+ip+`\"}":{".":{},"f:ip":{}}}}}`)
	for _, name := range []string{"main", "proxy"} {
		image := "registry.example.com/" + app + "/" + name
		pod.Spec.Containers = append(pod.Spec.Containers, corev1.Container{
			Name: name, Image: image + ":v1.2.3", ImagePullPolicy: corev1.PullIfNotPresent, TerminationMessagePath: "/dev/termination-log",
			Ports: []corev1.ContainerPort{{Name: "http", ContainerPort: 8080, Protocol: corev1.ProtocolTCP}},
			Env:   []corev1.EnvVar{{Name: "POD_NAME", ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "metadata.name"}}}, {Name: "LOG_LEVEL", Value: "info"}},
			Resources: corev1.ResourceRequirements{
				Requests: corev1.ResourceList{corev1.ResourceCPU: resource.MustParse("100m"), corev1.ResourceMemory: resource.MustParse("128Mi")},
				Limits:   corev1.ResourceList{corev1.ResourceMemory: resource.MustParse("256Mi")},
			},
			VolumeMounts: []corev1.VolumeMount{{Name: "kube-api-access-" + s.text(5, alphanumeric), ReadOnly: true, MountPath: "/var/run/secrets/kubernetes.io/serviceaccount"}},
		})
		pod.Status.ContainerStatuses = append(pod.Status.ContainerStatuses, corev1.ContainerStatus{
			Name: name, Ready: true, Started: ptr.To(true), Image: image + ":v1.2.3", ImageID: image + "@sha256:" + s.hex(64), ContainerID: "containerd://" + s.hex(64),
			State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{StartedAt: since}},
		})
	}
	for _, condition := range []corev1.PodConditionType{corev1.PodReadyToStartContainers, corev1.PodInitialized, corev1.PodReady, corev1.ContainersReady, corev1.PodScheduled} {
		pod.Status.Conditions = append(pod.Status.Conditions, corev1.PodCondition{Type: condition, Status: corev1.ConditionTrue, LastTransitionTime: s.time()})
	}
	return pod
}

// list is the items of a list in their form in a response.
type list struct {
	name  string
	items [][]byte
}

// encoded yields every list in JSON and in protobuf.
func encoded(t testing.TB, yield func(list)) {
	for _, l := range lists {
		s := &source{rand.New(rand.NewPCG(1, 1))}
		inJSON, inProtobuf := list{name: l.name + "/json"}, list{name: l.name + "/protobuf"}
		for i := range l.count {
			o := l.make(s, i)
			text, err := json.Marshal(o)
			testcheck.NoError(t, err)
			message, err := o.Marshal()
			testcheck.NoError(t, err)
			inJSON.items = append(inJSON.items, append(text, ','))
			inProtobuf.items = append(inProtobuf.items, append(binary.AppendUvarint([]byte{0x12}, uint64(len(message))), message...))
		}
		yield(inJSON)
		yield(inProtobuf)
	}
}

// leaves splits a list like a tree with so many items per leaf.
func (l list) leaves(items int) (leaves [][]byte) {
	for i := 0; i < len(l.items); i += items {
		leaves = append(leaves, bytes.Join(l.items[i:min(i+items, len(l.items))], nil))
	}
	return leaves
}

// sizeOf returns the number of bytes that write sends to its writer.
func sizeOf(t testing.TB, write func(io.Writer) error) int {
	t.Helper()
	var body bytes.Buffer
	testcheck.NoError(t, write(&body))
	return body.Len()
}

// standard compresses content as kube-apiserver does.
func standard(content []byte) func(io.Writer) error {
	return func(w io.Writer) error {
		z, err := stdgzip.NewWriterLevel(w, stdgzip.BestSpeed)
		if err != nil {
			return err
		}
		if _, err := z.Write(content); err != nil {
			return err
		}
		return z.Close()
	}
}

// joined writes a list as the read path does: a head, leaves, some of them compressed on their own,
// and a tail. The last leaf is loose, because no comma follows its last item.
func joined(leaves [][]byte) func(io.Writer) error {
	return func(w io.Writer) error {
		z := NewWriter(w)
		if _, err := io.WriteString(z, `{"kind":"List","apiVersion":"v1","metadata":{"resourceVersion":"1"},"items":[`); err != nil {
			return err
		}
		for i, leaf := range leaves {
			if !WorthApart(int64(len(leaf))) || i == len(leaves)-1 {
				if _, err := z.Write(leaf); err != nil {
					return err
				}
			} else if err := z.WriteRun(Compress(nil, leaf)); err != nil {
				return err
			}
		}
		if _, err := io.WriteString(z, "]}"); err != nil {
			return err
		}
		return z.Close()
	}
}

// A leaf of the tree has 21 to 64 objects; leaves filled with ascending keys have 32. The standard
// library's output depends on its version: with Go 1.27 the largest ratio is 1.096, before 1.031.
func TestCompress_JoinedLeaves_AreNearStandardSize(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	if testrace.Few() {
		t.Skip("one goroutine: not under the race detector")
	}
	encoded(t, func(l list) {
		want := sizeOf(t, standard(bytes.Join(l.items, nil)))
		for _, items := range []int{21, 32, 64} {
			leaves := l.leaves(items)
			got := sizeOf(t, joined(leaves))
			ratio := float64(got) / float64(want)
			t.Logf("%-40s leaves of %2d items, %8d bytes: %.3f", l.name, items, len(leaves[0]), ratio)
			if ratio > 1.1 {
				t.Errorf("%s, leaves of %d items: %d bytes, %.3f times the %d of compress/gzip", l.name, items, got, ratio, want)
			}
		}
	})
}

// Text without repetitions must be Huffman-coded, not stored.
func TestCompress_TextWithoutRepetition_IsHuffmanCoded(t *testing.T) {
	content := base64.StdEncoding.AppendEncode(nil, randomBytes(300_000, 1))
	if run := Compress(nil, content); len(run.Deflated) > len(content)*77/100 {
		t.Errorf("%d bytes of base64 became %d, want 76%% (6 of 8 bits, and a code)", len(content), len(run.Deflated))
	}
}
