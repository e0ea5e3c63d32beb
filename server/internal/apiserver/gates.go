package apiserver

import (
	"strings"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/kube/kubestorage"
)

// gateSet is a feature gate that is also the value of a flag.
type gateSet interface {
	featuregate.MutableFeatureGate
	String() string
	Type() string
}

// newGates returns Strata's own gates, which the engine defines, with their defaults. They are read
// when the engine creates its storages and when the read path is mounted, and not later.
func newGates() gateSet {
	gates := featuregate.NewFeatureGate()
	utilruntime.Must(gates.Add(kubestorage.Gates()))
	return gates
}

func gatesUsage(gates featuregate.FeatureGate) string {
	return "Comma-separated Name=true|false pairs that turn behaviour of the engine on or off. " +
		"Responses are correct with any gate off, and cost more. Options are:\n" +
		strings.Join(gates.KnownFeatures(), "\n")
}
