//go:build !apiserver_v0_38

package readpath

import (
	"testing"

	apiextensionsfeatures "k8s.io/apiextensions-apiserver/pkg/features"
	utilversion "k8s.io/apimachinery/pkg/util/version"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	featuregatetesting "k8s.io/component-base/featuregate/testing"
)

// TestResolver_SelectableFields_NeedGate: the gate is checked for each request, as upstream does.
func TestResolver_SelectableFields_NeedGate(t *testing.T) {
	r := newResolving(t)
	r.define("1", 0, "v1")
	res := r.want(widgetsPath, r.widgets("v1"), 1)
	if res == nil {
		return
	}
	featuregatetesting.SetFeatureGateEmulationVersionDuringTest(t, utilfeature.DefaultFeatureGate, utilversion.MustParse("1.31"))
	for _, enabled := range []bool{false, true} {
		featuregatetesting.SetFeatureGateDuringTest(t, utilfeature.DefaultFeatureGate, apiextensionsfeatures.CustomResourceFieldSelectors, enabled)
		if _, _, err := res.FieldLabel("spec.color", "x"); (err == nil) != enabled {
			t.Errorf("gate %t: selecting by spec.color: %v", enabled, err)
		}
		if _, _, err := res.FieldLabel("metadata.name", "x"); err != nil {
			t.Errorf("gate %t: selecting by metadata.name: %v", enabled, err)
		}
	}
}
