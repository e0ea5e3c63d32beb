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
	"k8s.io/apiserver/pkg/registry/generic"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	api "k8s.io/kubernetes/pkg/apis/core"
	"k8s.io/kubernetes/pkg/controlplane"
	claims "k8s.io/kubernetes/pkg/registry/core/persistentvolumeclaim/storage"
	"k8s.io/kubernetes/pkg/registry/core/service/ipallocator"
	services "k8s.io/kubernetes/pkg/registry/core/service/storage"
	netutils "k8s.io/utils/net"

	"github.com/stratakube/strata/kube/kind"
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

// selectableMetadata are the fields of the metadata that selectors of labels, fields and shards
// evaluate.
var selectableMetadata = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels"}

// formOf returns the form of one of storedKinds. It reads feature gates, so it is called after
// flags are parsed. An error means that a type of this release has other fields, or a form that the
// transcoder does not support.
//
// The rules are generated from upstream's defaulting and conversion (storedrules.go). That they are
// complete, with conversion to the internal types and back, is proved by comparing bytes with those
// of upstream's path: of random objects of every kind, with and without defaults and with each
// field unset (TestTranscoders_EveryKind_EqualUpstream), of a pod with every defaulted field
// (TestTranscoders_RichPod_EqualsUpstream), and of objects of a server
// (server/test/answers/samebytes).
func formOf(gvk schema.GroupVersionKind, k storedKind) (f kind.Form, err error) {
	rules, err := rulesOf(gvk.Kind)
	if err != nil {
		return f, err
	}
	short, err := transcode.NewAbridger(gvk, k.typ, append(k.selectable, selectableMetadata...))
	if err != nil {
		return f, err
	}
	finder, err := transcode.NewFinder(gvk, k.typ, append(k.copied, "metadata.name"), k.filled)
	if err != nil {
		return f, err
	}
	f = kind.Form{Abridge: short.Append, Find: finder.Find, Stored: gvk}
	f.Transcoder, err = transcode.New(gvk, k.typ, rules)
	return f, err
}

// kinds returns kubestorage.Options.Kinds: of storedKinds, which are stored as protobuf, and of
// custom resources. Objects of other kinds are decoded, and may be decorated. extra is that of
// Attachment.attach.
func kinds(extra *controlplane.Extra) (kind.Table, error) {
	var decorators map[schema.GroupResource]func(runtime.Object)
	if extra != nil {
		var err error
		if decorators, err = readDecorators(*extra); err != nil {
			return nil, err
		}
	}
	all := map[schema.GroupKind]kind.Form{}
	for gvk, k := range storedKinds() {
		f, err := formOf(gvk, k)
		if err != nil {
			return nil, err
		}
		all[gvk.GroupKind()] = f
	}
	return func(resource schema.GroupResource, obj runtime.Object) (f kind.Form) {
		if _, custom := obj.(runtime.Unstructured); custom {
			gvk := obj.GetObjectKind().GroupVersionKind()
			return kind.Form{Find: func(label bool, name string) transcode.Find {
				if label {
					return transcode.FindJSONLabel(gvk, name)
				}
				return transcode.FindJSONField(gvk, name)
			}}
		}
		// An error is that of another scheme, such as that of APIServices.
		names, _, _ := legacyscheme.Scheme.ObjectKinds(obj)
		for _, gvk := range names { // an Event is of two groups
			if known, ok := all[gvk.GroupKind()]; ok {
				f = known
			}
		}
		f.Decorate = decorators[resource]
		return f
	}, nil
}

// readDecorators returns the decorators that upstream's registries apply when objects are read:
// they complete Services and PersistentVolumeClaims that were written by older releases without
// some fields. The functions are upstream's own, taken from registries without storage; no other
// registry has a decorator.
func readDecorators(config controlplane.Extra) (map[schema.GroupResource]func(runtime.Object), error) {
	primary, secondary := api.IPv4Protocol, api.IPv6Protocol
	if netutils.IsIPv6CIDR(&config.ServiceIPRange) {
		primary, secondary = secondary, primary
	}
	// A registry of Services does not call its allocators for reads, but may count them.
	allocators := map[api.IPFamily]ipallocator.Interface{primary: nil}
	if config.SecondaryServiceIPRange.IP != nil {
		allocators[secondary] = nil
	}
	service, _, _, err := services.NewREST(noStorage{}, primary, allocators, nil, nil, nil, nil)
	if err != nil {
		return nil, fmt.Errorf("registry of services: %w", err)
	}
	claim, _, err := claims.NewREST(noStorage{})
	if err != nil {
		return nil, fmt.Errorf("registry of persistentvolumeclaims: %w", err)
	}
	return map[schema.GroupResource]func(runtime.Object){
		{Resource: "services"}:               service.Decorator,
		{Resource: "persistentvolumeclaims"}: claim.Decorator,
	}, nil
}

// noStorage is a RESTOptionsGetter for registries without storage.
type noStorage struct{}

func (noStorage) GetRESTOptions(resource schema.GroupResource, _ runtime.Object) (generic.RESTOptions, error) {
	return generic.RESTOptions{
		StorageConfig:  &storagebackend.ConfigForResource{GroupResource: resource},
		ResourcePrefix: resource.Resource,
		Decorator: func(*storagebackend.ConfigForResource, string, func(runtime.Object) (string, error), func() runtime.Object,
			func() runtime.Object, storage.AttrFunc, storage.IndexerFuncs, *cache.Indexers) (storage.Interface, factory.DestroyFunc, error) {
			return nil, func() {}, nil
		},
	}, nil
}
