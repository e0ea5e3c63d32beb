package consistency

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"k8s.io/apimachinery/pkg/runtime/schema"
)

// Path is where servers mount Handler.
const Path = "/debug/strata/consistency"

// Handler returns a handler that answers with results as JSON: an object whose items are Results.
// checkers is called for each request.
//
//	GET                    the last check of each resource
//	GET ?revision=N        the hash of memory at a revision; etcd is not read
//	POST                   check now
//	... resource=R[.group] only that resource
//
// Results contain the names of objects, but not their contents. The handler does not authorize
// requests: mount it behind filters that do.
func Handler(checkers func() Checkers) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q, all := r.URL.Query(), checkers()
		var only *schema.GroupResource
		if name := q.Get("resource"); name != "" {
			resource := schema.ParseGroupResource(name)
			if only = &resource; !all.serves(resource) {
				http.Error(w, fmt.Sprintf("resource %q is not served from memory", name), http.StatusNotFound)
				return
			}
		}
		var answer struct {
			Items []Result `json:"items"`
		}
		switch {
		case r.Method == http.MethodPost && q.Has("revision"):
			http.Error(w, "POST checks the latest revision and does not accept the parameter revision; use GET for the hash at a revision", http.StatusBadRequest)
			return
		case r.Method == http.MethodPost:
			var err error
			answer.Items, err = all.Check(r.Context(), only)
			if r.Context().Err() != nil {
				return // the client is gone, or a filter has answered
			}
			if err != nil {
				status := http.StatusServiceUnavailable
				if errors.Is(err, ErrOff) {
					status = http.StatusForbidden
				}
				http.Error(w, err.Error(), status)
				return
			}
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD, POST")
			http.Error(w, "method not allowed: use GET, HEAD or POST", http.StatusMethodNotAllowed)
			return
		case q.Has("revision"):
			rev, err := strconv.ParseInt(q.Get("revision"), 10, 64)
			if err != nil || rev < 1 {
				http.Error(w, fmt.Sprintf("invalid revision %q: must be a positive integer", q.Get("revision")), http.StatusBadRequest)
				return
			}
			answer.Items = all.Hashes(rev, only)
		default:
			answer.Items = all.Last(only)
		}
		if answer.Items == nil {
			answer.Items = []Result{} // not null
		}
		body, err := json.MarshalIndent(answer, "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(append(body, '\n')) // an error is the client's
	})
}
