// Package chaos breaks what stands around three API servers, while clients create, update, delete, get, list, page and
// watch through all of them, and judges afterwards what the clients were told.
//
// Everything is real: an etcd of three members, three API servers, HTTP. A round is a sequence of faults under load in
// namespaces of its own. A seed decides what each client does and which faults come when; processes and networks decide the
// rest, so a seed that has found something may have to be run several times. See judge_test.go for what is judged.
//
// The same harness has to fail when the product is wrong: planted_test.go puts a proxy between one API server and etcd that
// loses an event, answers with an old revision, or tells of progress ahead of its event.
//
// The environment chooses, beside what the harness lets it choose:
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

	"github.com/stratakube/strata/server/test/internal/harness"
)

const (
	seedEnv       = "STRATA_TEST_SEED"
	operationsEnv = "STRATA_TEST_OPERATIONS"
	durationEnv   = "STRATA_TEST_DURATION"
)

// testTimeout bounds a test that has failed; the long form takes as long as it takes.
const testTimeout = 6 * time.Minute

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
