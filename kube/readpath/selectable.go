//go:build !apiserver_v0_38

package readpath

import (
	apiextensionsfeatures "k8s.io/apiextensions-apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// selectableFields reports whether custom resources may be selected by fields. v0.38 has no gate.
func selectableFields() bool {
	return utilfeature.DefaultFeatureGate.Enabled(apiextensionsfeatures.CustomResourceFieldSelectors)
}
