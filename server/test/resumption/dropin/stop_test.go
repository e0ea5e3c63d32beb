package dropin

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestShutdown_LogsNoReflectorErrors: the server's own clients are stopped before their watches end, so no reflector logs a
// failed watch.
func TestShutdown_LogsNoReflectorErrors(t *testing.T) {
	t.Parallel()
	if harness.Engine() == harness.Upstream {
		t.Skip("upstream logs such errors when it is stopped soon after its start, or ends watches in a grace period")
	}
	reflectorError := regexp.MustCompile(`^E\d{4} .*reflector`)
	for name, flags := range map[string][]string{
		"default":           nil,
		"delay":             {"--shutdown-delay-duration=1s"},
		"send retry after":  {"--shutdown-send-retry-after=true"},
		"watch termination": {"--shutdown-send-retry-after=true", "--shutdown-watch-termination-grace-period=2s"},
	} {
		t.Run(name, func(t *testing.T) {
			ctx := harness.Context(t, testTimeout)
			env := harness.New(t)
			s := env.APIServer(env.Etcd(), flags...)
			w := startWatch(t, ctx, s.API(), defaultMaps, "")
			create(t, ctx, s.API(), defaultMaps, configMap("one"))
			expectEvent(t, ctx, w, "ADDED", "one")
			harness.Check(t, s.Stop())
			var found []string
			for line := range strings.Lines(s.Output()) {
				if reflectorError.MatchString(line) {
					found = append(found, line)
				}
			}
			if len(found) > 0 {
				t.Errorf("%d errors of reflectors, the first of which is %s", len(found), found[0])
			}
		})
	}
}
