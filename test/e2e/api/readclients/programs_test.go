package readclients

import (
	"os/exec"
	"testing"

	"github.com/stratakube/strata/internal/test/testrequire"
)

// program returns the path of the first of the names that is installed. If none is, the test is
// skipped, or fails if the first name is required.
func program(t *testing.T, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	testrequire.Missing(t, names[0], "not installed")
	return ""
}
