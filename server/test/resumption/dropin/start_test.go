package dropin

import (
	"net/http"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// readyzCheck is a line of /readyz?verbose: the name of a check that has passed.
var readyzCheck = regexp.MustCompile(`(?m)^\[\+\](\S+) ok$`)

const (
	priorityClasses = "/apis/scheduling.k8s.io/v1/priorityclasses"
	nodeCritical    = priorityClasses + "/system-node-critical"
)

// TestStart_ChecksAndPriorityClasses_EqualUpstreams: /readyz has the checks of upstream's engine, and when it succeeds the
// system's priority classes exist, in a new cluster, in one that has them, and in one that has lost one of them.
func TestStart_ChecksAndPriorityClasses_EqualUpstreams(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	checks := map[string][]string{}
	for _, start := range []struct{ name, engine string }{
		{"new cluster", harness.Strata}, {"class exists", harness.Strata}, {"class is missing", harness.Strata}, {"upstream", harness.Upstream},
	} {
		s := env.APIServer(etcd, engine(start.engine))
		api := s.API()
		ready, err := api.Do(ctx, http.MethodGet, "/readyz", "verbose", nil)
		harness.Check(t, err)
		for _, check := range readyzCheck.FindAllStringSubmatch(string(ready.Body), -1) {
			checks[start.name] = append(checks[start.name], check[1])
		}
		if _, err := api.Get(ctx, nodeCritical, ""); err != nil {
			t.Errorf("%s: %v", start.name, err)
		}
		if start.name == "class exists" {
			// The API rejects this deletion.
			_, err := etcd.Client().Delete(ctx, "/registry/priorityclasses/system-node-critical")
			harness.Check(t, err)
		}
		harness.Check(t, s.Stop())
	}
	for name, got := range checks {
		want := checks["upstream"]
		added := slices.DeleteFunc(slices.Clone(got), func(c string) bool {
			return slices.Contains(want, c) || strings.HasPrefix(c, "poststarthook/strata-")
		})
		lost := slices.DeleteFunc(slices.Clone(want), func(c string) bool { return slices.Contains(got, c) })
		if len(want) == 0 || len(added) > 0 || len(lost) > 0 {
			t.Errorf("%s: checks %q are added to upstream's %d, and %q are missing", name, added, len(want), lost)
		}
	}
}
