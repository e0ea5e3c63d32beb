// Package testseed draws the seeds of tests that choose their actions at random.
package testseed

import (
	"math/rand/v2"
	"os"
	"strconv"
	"testing"
)

// EnvVar is the environment variable with the seed of a repetition.
const EnvVar = "STRATA_TEST_SEED"

// New returns the seed of a test: that of STRATA_TEST_SEED, or a random one. It logs the seed in
// the form in which a repetition sets it. tools/testrun recognizes a test with a seed by this line,
// and never runs it a second time.
func New(t testing.TB) uint64 {
	t.Helper()
	seed := rand.Uint64()
	if text := os.Getenv(EnvVar); text != "" {
		var err error
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("%s: %v", EnvVar, err)
		}
	}
	t.Logf("%s=%d", EnvVar, seed)
	return seed
}
