package apiserver

import (
	"reflect"

	appsv1 "k8s.io/api/apps/v1"
	coordinationv1 "k8s.io/api/coordination/v1"
	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
	"k8s.io/kubernetes/pkg/features"

	"github.com/stratakube/strata/kube/transcode"
)

// storedKind is a kind whose stored form is read without decoding it.
type storedKind struct {
	typ reflect.Type
	// rules are the conditions under which upstream's defaulting and conversion (pkg/apis/*/v1/defaults.go, conversion.go and
	// zz_generated.defaults.go) leave the stored form as it is.
	rules transcode.Rules
	// selectable are the fields on which the selectable fields depend (GetAttrs in pkg/registry), besides those of the metadata.
	selectable []string
	// copied are the strings that the selectable field of the same name always has as they are stored, and filled those that it has so unless they are
	// empty (defaulting, conversion and GetAttrs). metadata.name is copied too. The labels of all these kinds are those that are stored.
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
		core.WithKind("Secret"): {typ: reflect.TypeFor[corev1.Secret](), rules: transcode.Rules{
			reflect.TypeFor[corev1.Secret](): {Set: []string{"type"}, Unset: []string{"stringData"}},
		}, selectable: []string{"type"}, filled: []string{"type"}},
		//lint:ignore SA1019 controllers write Endpoints, and clients read them, although EndpointSlices replace them
		core.WithKind("Endpoints"): {typ: reflect.TypeFor[corev1.Endpoints](), rules: transcode.Rules{
			reflect.TypeFor[corev1.EndpointPort](): {Set: []string{"protocol"}},
		}},
		core.WithKind("Node"): {typ: reflect.TypeFor[corev1.Node](), rules: transcode.Rules{
			reflect.TypeFor[corev1.NodeSpec]():   {First: [][2]string{{"podCIDR", "podCIDRs"}}},
			reflect.TypeFor[corev1.NodeStatus](): {Covered: [][2]string{{"capacity", "allocatable"}}},
		}, selectable: []string{"spec.unschedulable"}},
		core.WithKind("Pod"): {typ: reflect.TypeFor[corev1.Pod](), rules: podRules(), selectable: []string{
			"spec.nodeName", "spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "spec.serviceAccount", "spec.hostNetwork",
			"status.phase", "status.podIP", "status.podIPs", "status.nominatedNodeName",
		}, copied: []string{"spec.nodeName", "status.nominatedNodeName"},
			filled: []string{"spec.restartPolicy", "spec.schedulerName", "spec.serviceAccountName", "status.phase"}},
		coordinationv1.SchemeGroupVersion.WithKind("Lease"): {typ: reflect.TypeFor[coordinationv1.Lease]()},
		discoveryv1.SchemeGroupVersion.WithKind("EndpointSlice"): {typ: reflect.TypeFor[discoveryv1.EndpointSlice](), rules: transcode.Rules{
			reflect.TypeFor[discoveryv1.EndpointPort](): {Set: []string{"name", "protocol"}},
		}},
		appsv1.SchemeGroupVersion.WithKind("ReplicaSet"): {typ: reflect.TypeFor[appsv1.ReplicaSet](), rules: replicaSetRules(), selectable: []string{"status.replicas"}},
	}
}

// replicaSetRules are the conditions on a ReplicaSet and its template.
func replicaSetRules() transcode.Rules {
	rules := templateRules()
	rules[reflect.TypeFor[appsv1.ReplicaSetSpec]()] = transcode.Rule{Set: []string{"replicas"}}
	return rules
}

// podRules are the conditions on a Pod: those on a template, and on what is defaulted in pods only.
func podRules() transcode.Rules {
	rules := templateRules()
	spec := rules[reflect.TypeFor[corev1.PodSpec]()]
	spec.Set = append(spec.Set, "enableServiceLinks")
	// Pods on the host's network get host ports, and those with resources of their own get requests.
	spec.Unset = append(spec.Unset, "hostNetwork", "resources")
	spec.NotNegative = append(spec.NotNegative, "terminationGracePeriodSeconds")
	rules[reflect.TypeFor[corev1.PodSpec]()] = spec
	rules[reflect.TypeFor[corev1.ResourceRequirements]()] = transcode.Rule{Covered: [][2]string{{"limits", "requests"}}}
	if utilfeature.DefaultFeatureGate.Enabled(features.H2CContainerProbe) {
		httpGet := rules[reflect.TypeFor[corev1.HTTPGetAction]()]
		httpGet.Set = append(httpGet.Set, "protocol")
		rules[reflect.TypeFor[corev1.HTTPGetAction]()] = httpGet
	}
	rules[reflect.TypeFor[corev1.PodStatus]()] = transcode.Rule{First: [][2]string{{"podIP", "podIPs"}}}
	return rules
}

// templateRules are the conditions on the template of a pod.
func templateRules() transcode.Rules {
	container := transcode.Rule{Set: []string{"imagePullPolicy", "terminationMessagePath", "terminationMessagePolicy"}}
	mode := transcode.Rule{Set: []string{"defaultMode"}}
	return transcode.Rules{
		reflect.TypeFor[corev1.PodSpec](): {
			Set:   []string{"dnsPolicy", "restartPolicy", "securityContext", "terminationGracePeriodSeconds", "schedulerName"},
			Equal: [][2]string{{"serviceAccountName", "serviceAccount"}},
		},
		reflect.TypeFor[corev1.Container]():                container,
		reflect.TypeFor[corev1.EphemeralContainerCommon](): container,
		reflect.TypeFor[corev1.ContainerPort]():            {Set: []string{"protocol"}},
		reflect.TypeFor[corev1.Probe]():                    {Set: []string{"timeoutSeconds", "periodSeconds", "successThreshold", "failureThreshold"}},
		reflect.TypeFor[corev1.HTTPGetAction]():            {Set: []string{"path", "scheme"}},
		reflect.TypeFor[corev1.GRPCAction]():               {Set: []string{"service"}},
		reflect.TypeFor[corev1.ObjectFieldSelector]():      {Set: []string{"apiVersion"}},
		reflect.TypeFor[corev1.FileKeySelector]():          {Set: []string{"optional"}},
		// Volumes of these types have defaults of their own, and are rare.
		reflect.TypeFor[corev1.VolumeSource]():                  {OneOf: true, Unset: []string{"iscsi", "rbd", "azureDisk", "scaleIO"}},
		reflect.TypeFor[corev1.ImageVolumeSource]():             {Set: []string{"pullPolicy"}},
		reflect.TypeFor[corev1.HostPathVolumeSource]():          {Set: []string{"type"}},
		reflect.TypeFor[corev1.SecretVolumeSource]():            mode,
		reflect.TypeFor[corev1.ConfigMapVolumeSource]():         mode,
		reflect.TypeFor[corev1.DownwardAPIVolumeSource]():       mode,
		reflect.TypeFor[corev1.ProjectedVolumeSource]():         mode,
		reflect.TypeFor[corev1.ServiceAccountTokenProjection](): {Set: []string{"expirationSeconds"}},
		reflect.TypeFor[corev1.PersistentVolumeClaimSpec]():     {Set: []string{"volumeMode"}},
	}
}

// transcoders returns the transcoders of storedKinds. It reads feature gates, so it is called after flags are parsed. An error means that a type of this release has a form that they do not support.
func transcoders() (map[schema.GroupVersionKind]*transcode.Transcoder, error) {
	all := map[schema.GroupVersionKind]*transcode.Transcoder{}
	for gvk, k := range storedKinds() {
		t, err := transcode.New(gvk, k.typ, k.rules)
		if err != nil {
			return nil, err
		}
		all[gvk] = t
	}
	return all, nil
}

// selectableMetadata are the fields of the metadata that selectors of labels, fields and shards evaluate.
var selectableMetadata = []string{"metadata.name", "metadata.namespace", "metadata.uid", "metadata.labels"}

// abridger returns the abridger of storedKinds. An error means that a type of this release has other fields.
func abridger() (*transcode.Abridger, error) {
	a := &transcode.Abridger{}
	for gvk, k := range storedKinds() {
		if err := a.Add(gvk, k.typ, append(k.selectable, selectableMetadata...)); err != nil {
			return nil, err
		}
	}
	return a, nil
}

// finders returns the finder of each of storedKinds. An error means that a type of this release has other fields.
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

// finder returns kubestorage.Options.Finder: of storedKinds, which are stored as protobuf, and of custom resources. Other kinds have none.
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
