package main

import (
	"reflect"

	corev1 "k8s.io/api/core/v1"

	"github.com/stratakube/strata/kube/transcode"
)

// statement is a statement or the body of a function that rulegen does not translate, with the rule
// under which it changes nothing. Without a type it needs no rule.
type statement struct {
	function string
	typ      reflect.Type
	rule     transcode.Rule
}

// known are statements by the digest of their source, which the error of an unknown statement
// names. A statement that upstream changes has another digest, so its rule has to be examined
// again.
var known = func() map[string]statement {
	podCIDR := transcode.Rule{First: [][2]string{{"podCIDR", "podCIDRs"}}}
	requests := transcode.Rule{Covered: [][2]string{{"limits", "requests"}}}
	return map[string]statement{
		// Rounds to thousandths. A transcoder declines quantities of more precision.
		"3f216e92920c": {function: "SetDefaults_ResourceList"},
		// Make the list from the single field, or the field from the list.
		"76b4a5fd45a1": {"SetDefaults_PodStatus", reflect.TypeFor[corev1.PodStatus](), transcode.Rule{First: [][2]string{{"podIP", "podIPs"}}}},
		"985eccd3bad7": {"Convert_core_NodeSpec_To_v1_NodeSpec", reflect.TypeFor[corev1.NodeSpec](), podCIDR},
		"51443f60f699": {"Convert_v1_NodeSpec_To_core_NodeSpec", reflect.TypeFor[corev1.NodeSpec](), podCIDR},
		"966f7ac86af1": {"Convert_v1_NodeSpec_To_core_NodeSpec", reflect.TypeFor[corev1.NodeSpec](), podCIDR},
		// Give each container, and each init container, the limits without a request as requests.
		"cb717dc8f201": {"SetDefaults_Pod", reflect.TypeFor[corev1.ResourceRequirements](), requests},
		"e9016e790138": {"SetDefaults_Pod", reflect.TypeFor[corev1.ResourceRequirements](), requests},
	}
}()
