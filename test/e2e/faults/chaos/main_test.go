// Package chaos injects faults into the environment of three API servers while clients create,
// update, delete, get, list, page and watch through all of them, and judges the answers afterwards.
//
// All parts are real: an etcd of three members, three API servers, HTTP. A round is a sequence of
// faults under load in namespaces of its own. A seed determines the requests of each client and the
// order of the faults. Process and network timing is not deterministic, so a failing seed may have
// to be run several times. See judge_test.go for the checks.
//
// The same harness has to fail when the product is wrong: planted_test.go puts a proxy between one
// API server and etcd that drops an event, answers with an old revision, or reports progress ahead
// of its event.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_SEED        the seed of a single round; every failure prints the one to set
//	STRATA_TEST_LONG        1: rounds with new seeds until STRATA_TEST_OPERATIONS (default 100,000) are checked and
//	                        STRATA_TEST_DURATION (default 0) has passed
package chaos

import (
	"context"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	seedEnv       = "STRATA_TEST_SEED"
	operationsEnv = "STRATA_TEST_OPERATIONS"
	durationEnv   = "STRATA_TEST_DURATION"
)

// testTimeout bounds a failing test; the long form has no bound.
const testTimeout = 10 * time.Minute

func newContext(t *testing.T) context.Context {
	if harness.Long() {
		return t.Context()
	}
	return harness.Context(t, testTimeout)
}

// number reads a number from the environment.
func number(t testing.TB, name string, otherwise uint64) uint64 {
	t.Helper()
	text := os.Getenv(name)
	if text == "" {
		return otherwise
	}
	n, err := strconv.ParseUint(text, 10, 64)
	if err != nil {
		t.Fatalf("%s: %v", name, err)
	}
	return n
}

func envOr(name, otherwise string) string {
	if text := os.Getenv(name); text != "" {
		return text
	}
	return otherwise
}
