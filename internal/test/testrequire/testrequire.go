// Package testrequire skips tests where a program of others, or a permission, is missing. Where it
// is required, such a test fails.
package testrequire

import (
	"os"
	"slices"
	"strings"
	"testing"
)

// EnvVar is the environment variable with the names of required programs and permissions, separated
// by commas, or all. `make nightly` requires all; .ci/run those that it can install.
const EnvVar = "STRATA_TEST_REQUIRE"

// Missing skips the test because something is missing, or fails it if STRATA_TEST_REQUIRE has its
// name, or is all. Names of programs are those of their files; cgroups, mount, ptrace
// and seccomp are permissions.
func Missing(t testing.TB, name, why string) {
	t.Helper()
	required := strings.Split(os.Getenv(EnvVar), ",")
	if slices.Contains(required, name) || slices.Contains(required, "all") {
		t.Fatalf("%s is required (%s), and %s", name, EnvVar, why)
	}
	t.Skipf("skipped without %s: %s (%s=%s makes this a failure)", name, why, EnvVar, name)
}
