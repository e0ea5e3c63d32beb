package readpath

import (
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
)

// negotiateGzip reports whether the response may be compressed, by upstream's rules:
// the client's Accept-Encoding names gzip, in its first header, without parameters.
func negotiateGzip(req *http.Request) bool {
	accepted := req.Header.Get("Accept-Encoding")
	if accepted == "" || !utilfeature.DefaultFeatureGate.Enabled(features.APIResponseCompression) {
		return false
	}
	for coding := range strings.SplitSeq(accepted, ",") {
		if strings.TrimSpace(coding) == "gzip" {
			return true
		}
	}
	return false
}
