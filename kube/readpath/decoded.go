package readpath

import (
	"net/http"
	"strings"

	"k8s.io/apiserver/pkg/endpoints/request"

	"github.com/stratakube/strata/kube/kubestorage"
)

// What a list holds that upstream's handlers make from decoded objects, as a multiple of the
// stored bytes of its objects and of their overhead (kubestorage.DecodedBytes). Measured with
// 20,000 ConfigMaps of 1 KB, as what the memory of a server grew by.
const (
	decodedFactor  = 2  // tables, and JSON or protobuf, whose encoders take one object after the other
	indentedFactor = 5  // indented JSON is made as a whole
	yamlFactor     = 18 // and YAML from JSON, by way of a tree of all its values
)

// BoundDecodedLists returns a handler in front of next, which makes lists from decoded objects: what
// they hold is bounded by lists, from when a storage of the engine is asked until next
// has returned. It stands behind the filters of an API server, and inside of the one
// that answers in place of a handler that takes too long.
func BoundDecodedLists(next http.Handler, lists *kubestorage.DecodedLists) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		info, ok := request.RequestInfoFrom(req.Context())
		if !ok || !info.IsResourceRequest || info.Verb != "list" || req.Method != http.MethodGet {
			next.ServeHTTP(w, req)
			return
		}
		ctx, end := lists.Begin(req.Context(), factorOf(req))
		defer end()
		next.ServeHTTP(w, req.WithContext(ctx))
	})
}

// factorOf returns the factor of the form that a list may be answered in, the largest if there are
// several.
func factorOf(req *http.Request) int64 {
	for _, accept := range req.Header["Accept"] {
		if strings.Contains(accept, "yaml") {
			return yamlFactor
		}
	}
	if asksForPretty(req) {
		return indentedFactor
	}
	return decodedFactor
}
