// Package tour runs the commands of docs/tour.md and docs/examples.md: servers in their terminals,
// everything else in a shell.
package tour

import (
	"flag"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/transcript"
)

var update = flag.Bool("update", false, "write the outputs of the commands into the documents")

// the tour takes 30 s on two cores, and the examples as long unless they have to be compiled
const testTimeout = 20 * time.Minute

// TestDocument_Sessions_HaveTheirOutput runs the commands of docs/tour.md in order, and compares
// their output. With -update, the output is written into the document. Those of `strata up --ha`,
// which test/e2e/faults/ha tests, run in the long form and with -update.
func TestDocument_Sessions_HaveTheirOutput(t *testing.T) {
	harness.OnlyStrata(t)
	home := temporary(t)
	work := filepath.Join(home, "tour")
	harness.Check(t, os.Mkdir(work, 0o755))
	term := newTerminals(t, harness.Context(t, testTimeout), work, "HOME="+home)
	term.parts["server"] = []string{"nodes: ready", "controllers: ready"}
	term.parts["processes"], term.silent["processes"] = []string{"for other Kubernetes clients"}, true
	term.shown = strings.NewReplacer(work, "/home/user/tour")
	skips := false
	run := func(c transcript.Command) string {
		if skips = skips || c.Terminal == "processes" && !harness.Long() && !*update; !skips {
			return term.run(c)
		}
		skips = c.Line != "unset STRATA_DATA"
		return c.Want
	}
	transcript.Document{Path: "../../../../docs/tour.md", Update: *update, Same: same, Run: run}.Check(t, 25)
}

// variable are the parts of the outputs that differ between two runs, besides those of
// transcript.Invariable.
var variable = []struct {
	pattern *regexp.Regexp
	with    string
}{
	// progress, on a slow machine
	{regexp.MustCompile(`(?m)^ .*: (not ready yet|loading objects).*\n`), ""},
	{regexp.MustCompile(`(?m)^ +\d+\.\d\ds`), "SECONDS"},
	{regexp.MustCompile(`(?m)^Waiting for deployment .*\n`), ""}, // the same
	// A server that was killed knows the time of the last change if nothing was written after it.
	{regexp.MustCompile(`(?m)^(\d+ +)<unknown>( +changed .*"world")`), "${1}TIME$2"},
	{regexp.MustCompile(`hello-[0-9a-z]{6,10}-[0-9a-z]{5}\b`), "hello-POD"},
	{regexp.MustCompile(`#token=[\w-]{43}`), "#token=TOKEN"}, // of a link of the console
	{regexp.MustCompile(`\bnode-\d{4}\b`), "NODE"},
	{regexp.MustCompile(`\b198\.1[89](\.\d+){2}\b`), "IP"},
	{regexp.MustCompile(`"hash": "[0-9a-f]+"`), `"hash": HASH`},
	{regexp.MustCompile(`"seconds": [0-9.e-]+`), `"seconds": SECONDS`},
	{regexp.MustCompile(`resource version: \d+ \(\d+\)`), "resource version: N (N)"},
}

// same compares two outputs of a command. Lines of the server are compared in any order: its parts
// get ready in any.
func same(c transcript.Command, got string) bool {
	if strings.HasPrefix(c.Line, "strata history top") {
		return transcript.WithoutNumbers(got) == transcript.WithoutNumbers(c.Want)
	}
	return slices.Equal(lines(c, got), lines(c, c.Want))
}

func lines(c transcript.Command, text string) []string {
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.with)
	}
	all := strings.Split(transcript.Invariable(text), "\n")
	if c.Terminal == "server" {
		slices.Sort(all)
	}
	return all
}
