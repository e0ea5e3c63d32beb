package apiserver

import (
	"strings"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/component-base/featuregate"
)

// gateSpecs is the one list of Strata's own gates, set with --strata-feature-gates. A gate turns off the behaviour
// of one KEP; it is listed from the moment that behaviour exists, and read once, when the engine is built.
var gateSpecs = map[featuregate.Feature]featuregate.FeatureSpec{}

// gateSet is a feature gate that is also the value of a flag.
type gateSet interface {
	featuregate.MutableFeatureGate
	String() string
	Type() string
}

// newGates returns Strata's gates with their defaults.
func newGates() gateSet {
	gates := featuregate.NewFeatureGate()
	utilruntime.Must(gates.Add(gateSpecs))
	return gates
}

func gatesUsage(gates featuregate.FeatureGate) string {
	return "Comma-separated key=value pairs that turn behaviour of the engine on or off; " +
		"with all of them off the server is correct, only slower. Options are:\n" +
		strings.Join(gates.KnownFeatures(), "\n")
}
