package access

import (
	"encoding/json"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// paths returns the paths listed in a server's answer to /.
func paths(body []byte) []string {
	var list struct{ Paths []string }
	if json.Unmarshal(body, &list) != nil {
		return nil
	}
	return list.Paths
}

// debugPaths are pages for operators; a server need not serve all of them.
var debugPaths = []string{
	"/metrics", "/metrics/", "/metrics/slis", "/metrics/cadvisor", "/statusz", "/flagz", "/configz", "/logs", "/logs/kube-apiserver.log",
	"/debug", "/debug/", "/debug/pprof", "/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/goroutine?debug=2", "/debug/pprof/cmdline", "/debug/pprof/profile?seconds=1",
	"/debug/pprof/symbol", "/debug/pprof/trace?seconds=1", "/debug/flags/v", "/debug/flags", "/debug/vars", "/debug/requests", "/debug/events",
	"/debug/api_priority_and_fairness/dump_priority_levels", "/debug/api_priority_and_fairness/dump_queues", "/debug/api_priority_and_fairness/dump_requests",
	"/debug/strata/status", "/debug/strata/status/", "/debug/strata/status?resource=secrets", "/debug/strata/../strata/status",
	"/debug/strata", "/debug/strata/", "/debug/strata/consistency", "/debug/strata/consistency/", "/debug/strata/consistency?resource=secrets", "//debug/strata/consistency",
	"/debug/strata/../strata/consistency", "/debug%2Fstrata%2Fconsistency", "/debug/strata%2Fconsistency", "/livez/../debug/strata/consistency", "/healthz/../metrics", "/readyz//../metrics", "/version/../metrics",
	"/version/metrics", "/livez/metrics",
}

// Readable by default roles of every cluster: system:public-info-viewer for all users,
// system:discovery for authenticated users.
var (
	public    = []string{"/healthz", "/livez", "/readyz", "/version", "/version/"}
	discovery = []string{"/api", "/api/*", "/apis", "/apis/*", "/openapi", "/openapi/*", "/healthz", "/livez", "/readyz", "/version", "/version/"}
)

func matches(patterns []string, path string) bool {
	return slices.ContainsFunc(patterns, func(p string) bool {
		prefix, any := strings.CutSuffix(p, "*")
		return path == p || any && strings.HasPrefix(path, prefix)
	})
}

// TestDebugPages_WithoutPermission_AreRefused: users without permission can neither read the pages
// that a server serves beside the API, including those that Strata adds, nor use their actions.
func TestDebugPages_WithoutPermission_AreRefused(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	all := debugPaths
	for _, e := range w.each() {
		r, err := e.send(ctx, request{user: admin, target: "/"})
		harness.Check(t, err)
		named := paths(r.Body)
		if len(named) < 20 {
			t.Fatalf("%s names %d paths", e.name, len(named))
		}
		all = append(all, named...)
	}
	slices.Sort(all)
	all = slices.Compact(all)
	var requests []asked
	for _, target := range all {
		path, _, _ := strings.Cut(target, "?")
		for user, open := range map[string][]string{anonymous: public, nothing: discovery, inA: discovery, nodeAgent: discovery, stranger: nil} {
			for _, method := range []string{http.MethodGet, http.MethodPost, http.MethodPut, http.MethodHead, http.MethodDelete, http.MethodOptions} {
				want := expectation{refused: http.StatusForbidden}
				switch {
				case user == stranger:
					want.refused = http.StatusUnauthorized
				case matches(open, path) && (method == http.MethodGet || method == http.MethodHead) || strings.HasPrefix(path, "/api"):
					want.refused = -1
				}
				requests = append(requests, asked{request{user: user, target: target, method: method}, want})
			}
		}
	}
	if !harness.Long() { // methods other than GET are refused alike
		requests = slices.DeleteFunc(requests, func(r asked) bool {
			return r.method != http.MethodGet && !strings.HasPrefix(r.target, "/debug") && !strings.HasPrefix(r.target, "/metrics")
		})
	}
	w.same(t, ctx, "debug", requests)
}
