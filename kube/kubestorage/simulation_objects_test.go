package kubestorage_test

import (
	"strconv"
	"strings"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
)

var simScheme = runtime.NewScheme()

func init() {
	utilruntime.ErrorHandlers = nil // one of them sleeps, by a time that all tests share
	metav1.AddToGroupVersion(simScheme, metav1.SchemeGroupVersion)
	utilruntime.Must(example.AddToScheme(simScheme))
	utilruntime.Must(examplev1.AddToScheme(simScheme))
	simScheme.AddKnownTypes(example.SchemeGroupVersion, &example.PodList{})
	simScheme.AddKnownTypes(examplev1.SchemeGroupVersion, &examplev1.PodList{})
	kind := examplev1.SchemeGroupVersion.WithKind("Pod")
	utilruntime.Must(simScheme.AddFieldLabelConversionFunc(kind, func(label, value string) (string, string, error) { return label, value, nil }))
}

var (
	simCodecs = serializer.NewCodecFactory(simScheme)
	simCodec  = simCodecs.LegacyCodec(examplev1.SchemeGroupVersion)
)

// simItem is the state of an object: all that the simulation writes.
type simItem struct {
	Key        string // namespace/name
	Rev        int64
	Seq, Count int // number of the write; number of writes since the creation
	Tier, Node string
}

func simPod(x simItem) *example.Pod {
	namespace, name, _ := strings.Cut(x.Key, "/")
	return &example.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{"tier": x.Tier, "seq": strconv.Itoa(x.Seq), "count": strconv.Itoa(x.Count)}},
		Spec: example.PodSpec{NodeName: x.Node},
	}
}

func simItemOf(obj runtime.Object) simItem {
	if shared, ok := obj.(runtime.CacheableObject); ok {
		obj = shared.GetObject()
	}
	pod := obj.(*example.Pod)
	number := func(label string) int {
		n, err := strconv.Atoi(pod.Labels[label])
		if err != nil {
			return -1 // no write has it
		}
		return n
	}
	rev, _ := strconv.ParseInt(pod.ResourceVersion, 10, 64)
	return simItem{pod.Namespace + "/" + pod.Name, rev, number("seq"), number("count"), pod.Labels["tier"], pod.Spec.NodeName}
}

func simAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod := obj.(*example.Pod)
	return pod.Labels, fields.Set{"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "spec.nodeName": pod.Spec.NodeName}, nil
}

// simSelector selects objects. Its zero value selects all.
type simSelector struct{ Namespace, Tier, Node, Name string }

func (s simSelector) matches(x simItem) bool {
	namespace, name, _ := strings.Cut(x.Key, "/")
	return (s.Namespace == "" || s.Namespace == namespace) && (s.Tier == "" || s.Tier == x.Tier) && (s.Node == "" || s.Node == x.Node) && (s.Name == "" || s.Name == name)
}

func (s simSelector) predicate() storage.SelectionPredicate {
	p := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: simAttrs, IndexFields: []string{"spec.nodeName"}}
	if s.Tier != "" {
		p.Label = labels.SelectorFromSet(labels.Set{"tier": s.Tier})
	}
	if set := s.fields(); len(set) > 0 {
		p.Field = fields.SelectorFromSet(set)
	}
	return p
}

func (s simSelector) fields() fields.Set {
	set := fields.Set{}
	if s.Node != "" {
		set["spec.nodeName"] = s.Node
	}
	if s.Name != "" {
		set["metadata.name"] = s.Name
	}
	return set
}

func (s simSelector) key() string {
	if s.Namespace != "" {
		return "/pods/" + s.Namespace
	}
	return "/pods"
}
