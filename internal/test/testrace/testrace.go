// Package testrace lets a test depend on the race detector.
package testrace

import "os"

// Few reports whether a test that explores many states of one sequence of steps should explore few
// of them. It is true under the race detector, which multiplies the cost and finds nothing in such
// a sequence that it does not find in a short one. tools/testrun runs these tests a second time
// without the detector, with all states; `make nightly` runs all states under the detector, too
// (STRATA_TEST_STATES=all).
func Few() bool { return Enabled && os.Getenv("STRATA_TEST_STATES") != "all" }

// Count returns few if Few is true, and else all.
func Count(all, few int) int {
	if Few() {
		return few
	}
	return all
}
