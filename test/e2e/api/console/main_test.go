// Package console opens the console of `strata up` in Chromium: by the link that it prints, with
// the keyboard, at the width of a phone, in light and dark. It makes the screenshots of
// docs/console.md. Without a browser it sends requests: links, sessions, and the rights of a
// session.
package console

import (
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	// testTimeout bounds a failing test, waitTimeout a wait in the browser.
	testTimeout = 10 * time.Minute
	waitTimeout = 3 * time.Minute
)

// cluster is `strata up`, with simulated nodes, so that there are rows to see.
var cluster *harness.Server

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		e.AtEnd(stopChromium)
		if harness.Engine() == harness.Strata {
			cluster = e.Up("--nodes=3")
		}
	})
}
