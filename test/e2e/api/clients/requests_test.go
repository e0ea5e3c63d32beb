package clients

import (
	"net/http"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"
)

// requests counts the requests for all objects of a collection: LISTs, and watches with initial
// events. An informer sends one, and further ones only if it cannot resume.
type requests struct {
	mu    sync.Mutex
	lists map[string][]string // by path: the query of each that was answered with 200
}

// config returns a copy of config whose requests are counted.
func (r *requests) config(config *rest.Config) *rest.Config {
	r.lists = map[string][]string{}
	counted := rest.CopyConfig(config)
	counted.Wrap(func(next http.RoundTripper) http.RoundTripper { return roundTripper{r, next} })
	return counted
}

type roundTripper struct {
	*requests
	next http.RoundTripper
}

func (r roundTripper) RoundTrip(req *http.Request) (*http.Response, error) {
	query := req.URL.Query()
	watch := query.Get("watch") == "true" || query.Get("watch") == "1"
	chunk := query.Get("continue") != ""
	all := req.Method == http.MethodGet && isCollection(req.URL.Path) && !chunk && (!watch || query.Get("sendInitialEvents") == "true")
	resp, err := r.next.RoundTrip(req)
	if all && err == nil && resp.StatusCode == http.StatusOK {
		r.mu.Lock()
		r.lists[req.URL.Path] = append(r.lists[req.URL.Path], req.URL.RawQuery)
		r.mu.Unlock()
	}
	return resp, err
}

// isCollection reports whether path is that of all objects of a resource, in all namespaces:
// /api/v1/pods, /apis/group/v1/things.
func isCollection(path string) bool {
	parts := strings.Split(strings.Trim(path, "/"), "/")
	return len(parts) == 3 && parts[0] == "api" || len(parts) == 4 && parts[0] == "apis"
}

// expectAtMost fails the test unless each path was listed at least once, and at most times times.
func (r *requests) expectAtMost(t *testing.T, times int, who string, paths ...string) {
	t.Helper()
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, path := range paths {
		if n := len(r.lists[path]); n < 1 || n > times {
			t.Errorf("%s listed %s %d times, want at most %d:\n%s", who, path, n, times, strings.Join(r.lists[path], "\n"))
		}
	}
}
