package readpath

import (
	"net/http"
	"strings"
	"sync"

	"k8s.io/apiserver/pkg/features"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/component-base/featuregate"
)

// negotiateGzip reports whether the response may be compressed, by upstream's rules: the first
// Accept-Encoding header names gzip, without parameters.
func negotiateGzip(req *http.Request) bool {
	return acceptsGzip(req) && utilfeature.DefaultFeatureGate.Enabled(features.APIResponseCompression)
}

// watchListCompression is a gate of Kubernetes 1.37 and later; older releases have no constant for
// it.
const watchListCompression featuregate.Feature = "WatchListCompression"

// knowsWatchListCompression reports whether this release of k8s.io/apiserver compresses watches.
var knowsWatchListCompression = sync.OnceValue(func() bool {
	_, known := utilfeature.DefaultMutableFeatureGate.GetAll()[watchListCompression]
	return known
})

// negotiateWatchGzip is negotiateGzip for a watch that begins with initial events and marks their
// end. Other watches are never compressed.
func negotiateWatchGzip(req *http.Request) bool {
	return acceptsGzip(req) && knowsWatchListCompression() && utilfeature.DefaultFeatureGate.Enabled(watchListCompression)
}

func acceptsGzip(req *http.Request) bool {
	accepted := req.Header.Get("Accept-Encoding")
	if accepted == "" {
		return false
	}
	for coding := range strings.SplitSeq(accepted, ",") {
		if strings.TrimSpace(coding) == "gzip" {
			return true
		}
	}
	return false
}
