package mirror_test

import (
	"flag"
	"testing"

	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
)

// The flag of a command line comes later, and wins.
func init() {
	if testrace.Few() {
		if err := flag.Set("rapid.checks", "25"); err != nil {
			panic(err)
		}
	}
}

// slow skips a test that takes seconds in `make quick`. `make test-invariants` is short too, and
// runs it: the checks find other defects than the test's own comparisons.
func slow(t *testing.T) {
	t.Helper()
	if testing.Short() && !mirror.CheckInvariants {
		t.Skip("short: takes seconds")
	}
}

// oneSequence skips a test of one long sequence of steps under the race detector: see testrace.Few.
func oneSequence(t *testing.T) {
	t.Helper()
	if testrace.Few() {
		t.Skip("one sequence: not under the race detector")
	}
}
