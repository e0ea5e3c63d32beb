package harness

import (
	"testing"

	"github.com/stratakube/strata/server/internal/testbin"
)

// KwokReplay returns the path of a program with kwok's code that replays a recording, which it builds from the version that tools/kwok
// pins. Where that is not possible the test is skipped. Its name in STRATA_TEST_REQUIRE is kwok.
func KwokReplay(t testing.TB) string {
	t.Helper()
	path, err := testbin.Build("test/kwok", "tools/kwok", ".", "GOWORK=off")
	if err != nil {
		Missing(t, "kwok", err.Error())
	}
	return path
}
