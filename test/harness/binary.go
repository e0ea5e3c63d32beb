package harness

import (
	"os"

	"github.com/stratakube/strata/internal/test/testbin"
)

const (
	engineEnv = "STRATA_TEST_ENGINE"

	// Strata and Upstream are the values of --engine.
	Strata   = "strata"
	Upstream = "upstream"
)

// Engine is the engine under test.
func Engine() string {
	if engine := os.Getenv(engineEnv); engine != "" {
		return engine
	}
	return Strata
}

// Binary returns the path of the command.
func Binary() (string, error) { return testbin.Path() }
