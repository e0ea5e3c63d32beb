package readclients

import (
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
)

// requireEnv names programs, separated by commas, whose absence is a failure rather than a reason to skip.
const requireEnv = "STRATA_TEST_REQUIRE"

// program returns the path of the first of the names that is installed. If none is, the test is skipped, or fails if the
// first name is required.
func program(t *testing.T, names ...string) string {
	t.Helper()
	for _, name := range names {
		if path, err := exec.LookPath(name); err == nil {
			return path
		}
	}
	missing(t, names[0], "not installed")
	return ""
}

// missing skips the test, for it cannot use the program, or fails it if the program is required.
func missing(t *testing.T, name, why string) {
	t.Helper()
	if slices.Contains(strings.Split(os.Getenv(requireEnv), ","), name) {
		t.Fatalf("%s is required (%s), and %s", name, requireEnv, why)
	}
	t.Skipf("without %s there is nothing to test: %s (%s=%s makes this a failure)", name, why, requireEnv, name)
}
