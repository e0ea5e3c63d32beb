package tour

import (
	"fmt"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/transcript"
)

// TestExamples_Sessions_HaveTheirOutput runs the commands of docs/examples.md in order, and
// compares their output. With -update, the output is written into the document. Free ports replace
// those of the document, and a temporary directory replaces bin.
func TestExamples_Sessions_HaveTheirOutput(t *testing.T) {
	harness.OnlyStrata(t)
	files := temporary(t)
	top := harness.Must[string](t)(filepath.Abs("../../../.."))
	term := newTerminals(t, harness.Context(t, testTimeout), top, "KUBECONFIG=/dev/null")
	commands, outputs := []string{"../bin/", files + "/", "bin/", files + "/"}, []string{files, "bin"}
	for terminal, port := range map[string]string{"etcd": "2379", "apiserver": "8443", "up": "6443", "aggregated": "8444"} {
		free := harness.Must[*loopback.Port](t)(loopback.Reserve())
		t.Cleanup(func() { _ = free.Release() })
		commands = append(commands, port, fmt.Sprint(free.Number()))
		outputs = append(outputs, fmt.Sprint(free.Number()), port)
		term.addresses[terminal] = free.Address()
	}
	term.runs, term.shown = strings.NewReplacer(commands...), strings.NewReplacer(outputs...)
	transcript.Document{Path: "../../../../docs/examples.md", Update: *update, Same: same, Run: term.run}.Check(t, 28)
}
