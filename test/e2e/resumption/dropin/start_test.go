package dropin

import (
	"context"
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// readyzCheck is a line of /readyz?verbose: the name of a check that has passed.
var readyzCheck = regexp.MustCompile(`(?m)^\[\+\](\S+) ok$`)

// readyzChecks returns the names of the checks of a server that is ready.
func readyzChecks(t *testing.T, ctx context.Context, s *harness.Server) (names []string) {
	t.Helper()
	var ready *harness.Response
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		// a check of etcd may time out on a busy machine
		ready, err = s.API().Do(ctx, http.MethodGet, "/readyz", "verbose", nil)
		return err == nil && ready.Code == http.StatusOK, err
	}))
	for _, check := range readyzCheck.FindAllStringSubmatch(string(ready.Body), -1) {
		names = append(names, check[1])
	}
	return names
}

// requireStarted checks a server that is ready: it has the checks of upstream's engine, and the
// system's priority classes exist.
func requireStarted(t *testing.T, ctx context.Context, s *harness.Server, upstream []string) {
	t.Helper()
	got := readyzChecks(t, ctx, s)
	added := slices.DeleteFunc(slices.Clone(got), func(c string) bool {
		return slices.Contains(upstream, c) || strings.HasPrefix(c, "poststarthook/strata-")
	})
	lost := slices.DeleteFunc(slices.Clone(upstream), func(c string) bool { return slices.Contains(got, c) })
	if len(upstream) == 0 || len(added) > 0 || len(lost) > 0 {
		t.Errorf("checks %q are added to upstream's %d, and %q are missing", added, len(upstream), lost)
	}
	requirePriorityClass(t, ctx, s.API())
}

const nodeCriticalKey = "/registry/priorityclasses/system-node-critical"

func requirePriorityClass(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	if _, err := api.Get(ctx, "/apis/scheduling.k8s.io/v1/priorityclasses/system-node-critical", ""); err != nil {
		t.Error(err)
	}
}
