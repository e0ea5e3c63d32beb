package apiserver

import (
	"fmt"
	"reflect"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
	"k8s.io/kubernetes/pkg/api/legacyscheme"

	"github.com/stratakube/strata/kube/transcode"
)

// storedKind is a kind whose stored form is read without decoding it.
type storedKind struct {
	typ reflect.Type
	// selectable are the fields on which the selectable fields depend (GetAttrs in pkg/registry),
	// besides those of the metadata.
	selectable []string
	// copied are the strings that the selectable field of the same name always has as they are
	// stored, and filled those that it has so unless they are empty (defaulting, conversion and
	// GetAttrs). metadata.name is copied too. The labels of all these kinds are those that are
	// stored.
	copied, filled []string
}

// storedKinds are the kinds with many objects in large clusters.
func storedKinds() map[schema.GroupVersionKind]storedKind {
	core := corev1.SchemeGroupVersion
	return map[schema.GroupVersionKind]storedKind{
		core.WithKind("ConfigMap"): {typ: reflect.TypeFor[corev1.ConfigMap]()},
		core.WithKind("Event"): {typ: reflect.TypeFor[corev1.Event](),
			selectable: []string{"involvedObject", "reason", "source", "type", "reportingComponent"},
			copied: []string{
				"involvedObject.kind", "involvedObject.namespace", "involvedObject.name", "involvedObject.uid", "involvedObject.apiVersion",
				"involvedObject.resourceVersion", "involvedObject.fieldPath", "reason", "reportingComponent", "type",
			}},
		core.WithKind("ServiceAccount"): {typ: reflect.TypeFor[corev1.ServiceAccount]()},
		core.WithKind("Secret"):         {typ: reflect.TypeFor[corev1.Secret](), selectable: []string{"type"}, filled: []string{"type"}},
		//lint:ignore SA1019 clients read Endpoints, although EndpointSlices replace them
		core.WithKind("Endpoints"): {typ: reflect.TypeFor[corev1.Endpoints]()},
		core.WithKind("Node"):      {typ: reflect.TypeFor[corev1.Node](), selectable: []string{"spec.unschedulable"}},
		core.WithKind("Pod"): {typ: reflect.TypeFor[corev1.Pod](), selectable: []string{
			"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.serviceAccount", "spec.hostNetwork",
			"status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName",
		}, copied: []string{"spec.nodeName", "status.nominatedNodeName"},
			filled: []string{"spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"}},
		coordinationv1.SchemeGroupVersion.WithKind("Lease"):      {typ: reflect.TypeFor[coordinationv1.Lease]()},
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"): {typ: reflect.TypeFor[discoveryv1.EndpointSlice]()},
		appsv1.SchemeGroupVersion.WithKind("ReplicaSet"):         {typ: reflect.TypeFor[appsv1.ReplicaSet](), selectable: []string{"status.replicas"}},
	}
}

// storedRule is a rule for a type; with a gate, while the feature gate is enabled.
type storedRule struct {
	typ  reflect.Type
	gate featuregate.Feature
	rule transcode.Rule
}

// rulesOf returns the rules of storedRules for a kind, under the feature gates of the process.
func rulesOf(kind string) (transcode.Rules, error) {
	all, ok := storedRules[kind]
	if !ok {
		return nil, fmt.Errorf("server/internal/rulegen has no rules for %s", kind)
	}
	rules := transcode.Rules{}
	for _, r := range all {
		if r.gate == "" || utilfeature.DefaultFeatureGate.Enabled(r.gate) {
			rules[r.typ] = append(rules[r.typ], r.rule)
		}
	}
	return rules, nil
}

// transcoders returns the transcoders of storedKinds. It reads feature gates, so it is called after
// flags are parsed. An error means that a type of this release has a form that they do not support.
//
// The rules are generated from upstream's defaulting and conversion (storedrules.go). That they are
// complete, with conversion to the internal types and back, is proved by comparing bytes with those
// of upstream's path: of random objects of every kind, with and without defaults and with each
// field unset (TestTranscoders_EveryKind_EqualUpstream), of a pod with every defaulted field
// (TestTranscoders_RichPod_EqualsUpstream), and of objects of a server
// (server/test/answers/samebytes).
func transcoders() (map[schema.GroupVersionKind]*transcode.Transcoder, error) {
	all := map[schema.GroupVersionKind]*transcode.Transcoder{}
	for gvk, k := range storedKinds() {
		rules, err := rulesOf(gvk.Kind)
		if err != nil {
			return nil, err
		}
		t, err := transcode.New(gvk, k.typ, rules)
		if err != nil {
			return nil, err
		}
		all[gvk] = t
	}
	return all, nil
}

// selectableMetadata are the fields of the metadata that selectors of labels, fields and shards
// evaluate.
var selectableMetadata = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels"}

// abridger returns the abridger of storedKinds. An error means that a type of this release has
// other fields.
func abridger() (*transcode.Abridger, error) {
	a := &transcode.Abridger{}
	for gvk, k := range storedKinds() {
		if err := a.Add(gvk, k.typ, append(k.selectable, selectableMetadata...)); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// finders returns the finder of each of storedKinds. An error means that a type of this release has
// other fields.
func finders() (map[schema.GroupKind]*transcode.Finders, error) {
	all := map[schema.GroupKind]*transcode.Finders{}
	for gvk, k := range storedKinds() {
		f := &transcode.Finders{}
		if err := f.Add(gvk, k.typ, append(k.copied, "metadata.name"), k.filled); err != nil {
			return nil, err
		}
		all[gvk.GroupKind()] = f
	}
	return all, nil
}

// finder returns kubestorage.Options.Finder: of storedKinds, which are stored as protobuf, and of
// custom resources. Other kinds have none.
func finder() (func(obj runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool), error) {
	all, err := finders()
	if err != nil {
		return nil, err
	}
	return func(obj runtime.Object, label bool, name string) func([]byte) ([]byte, bool, bool) {
		if _, custom := obj.(runtime.Unstructured); custom {
			gvk := obj.GetObjectKind().GroupVersionKind()
			if label {
				return transcode.FindJSONLabel(gvk, name)
			}
			return transcode.FindJSONField(gvk, name)
		}
		kinds, _, err := legacyscheme.Scheme.ObjectKinds(obj)
		if err != nil {
			return nil // of another scheme, such as that of APIServices
		}
		for _, gvk := range kinds { // an Event is of two groups
			switch f := all[gvk.GroupKind()]; {
			case f == nil:
			case label:
				return f.Label(name)
			default:
				return f.Field(name)
			}
		}
		return nil
	}, nil
}
