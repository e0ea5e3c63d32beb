package dropin

import (
	"regexp"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

var reflectorError = regexp.MustCompile(`^E\d{4} .*reflector`)

// requireQuietStop stops a server that serves watches. Its own clients are stopped before their
// watches end, so no reflector logs a failed watch. (Upstream logs such errors when it is stopped
// soon after its start, or ends watches in a grace period.)
func requireQuietStop(t *testing.T, s *harness.Server) {
	t.Helper()
	logged := len(s.Output()) // a slow start may log that memory is not loaded
	harness.Check(t, s.Stop())
	var found []string
	for line := range strings.Lines(s.Output()[logged:]) {
		if reflectorError.MatchString(line) {
			found = append(found, line)
		}
	}
	if len(found) > 0 {
		t.Errorf("%d errors of reflectors, the first of which is %s", len(found), found[0])
	}
}
