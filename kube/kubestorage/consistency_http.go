package kubestorage

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"strconv"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/klog/v2"
)

// ConsistencyPath is where servers offer ConsistencyHandler.
const ConsistencyPath = "/debug/strata/consistency"

// ConsistencyHandler returns a handler that tells of consistency checks, as JSON: an object whose
// items are ConsistencyChecks.
//
//	GET                    the last check of each resource
//	GET ?revision=N        the hash of memory at a revision; nothing is asked of etcd
//	POST                   check now
//	... resource=R[.group] only that resource
//
// The objects' names are in it, their contents are not. It authorizes nobody: mount it behind
// filters that do.
func (e *Engine) ConsistencyHandler() http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		q := r.URL.Query()
		var only *schema.GroupResource
		if name := q.Get("resource"); name != "" {
			resource := schema.ParseGroupResource(name)
			if only = &resource; !e.checks(resource) {
				http.Error(w, fmt.Sprintf("no resource %q is served from memory", name), http.StatusNotFound)
				return
			}
		}
		var answer struct {
			Items []ConsistencyCheck `json:"items"`
		}
		switch {
		case r.Method == http.MethodPost && q.Has("revision"):
			http.Error(w, "a check is of the present: POST without revision, or GET with it", http.StatusBadRequest)
			return
		case r.Method == http.MethodPost:
			var err error
			answer.Items, err = e.CheckConsistency(r.Context(), only)
			if r.Context().Err() != nil {
				return // nobody is there, or a filter has answered
			}
			if err != nil {
				status := http.StatusServiceUnavailable
				if errors.Is(err, errChecksOff) {
					status = http.StatusForbidden
				}
				http.Error(w, err.Error(), status)
				return
			}
		case r.Method != http.MethodGet && r.Method != http.MethodHead:
			w.Header().Set("Allow", "GET, HEAD, POST")
			http.Error(w, "want GET or POST", http.StatusMethodNotAllowed)
			return
		case q.Has("revision"):
			rev, err := strconv.ParseInt(q.Get("revision"), 10, 64)
			if err != nil || rev < 1 {
				http.Error(w, fmt.Sprintf("%q is not a revision", q.Get("revision")), http.StatusBadRequest)
				return
			}
			answer.Items = e.ConsistencyHashes(rev, only)
		default:
			answer.Items = e.ConsistencyChecks(only)
		}
		if answer.Items == nil {
			answer.Items = []ConsistencyCheck{} // not null
		}
		body, err := json.MarshalIndent(answer, "", "  ")
		if err != nil {
			http.Error(w, err.Error(), http.StatusInternalServerError)
			return
		}
		w.Header().Set("Content-Type", "application/json")
		if _, err := w.Write(append(body, '\n')); err != nil {
			klog.FromContext(r.Context()).V(4).Info("Consistency checks were not told", "err", err)
		}
	})
}

// checks reports whether the resource is served from memory.
func (e *Engine) checks(resource schema.GroupResource) bool {
	for _, k := range e.checkers() {
		if len(k.selected(&resource)) > 0 {
			return true
		}
	}
	return false
}
