package apiserver_test

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/pflag"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/server/internal/apiserver"
	"github.com/stratakube/strata/server/internal/datadir"
	"github.com/stratakube/strata/server/internal/replica"
	"github.com/stratakube/strata/server/internal/up"
)

const referenceFile = "../../../docs/reference.md"

var update = flag.Bool("update", false, "write the generated tables to docs/reference.md")

// TestReference_TablesAreCurrent compares the tables in docs/reference.md with the flags of the
// commands and with the metrics that the packages register. With -update (make generate) it writes
// the tables.
func TestReference_TablesAreCurrent(t *testing.T) {
	t.Setenv(datadir.EnvVar, "") // the default of a flag of strata up
	before, err := os.ReadFile(referenceFile)
	testcheck.NoError(t, err)
	documented := readMetricDocs(t)
	strataMetrics, cacheMetrics := registeredMetrics(t)
	after := before
	for _, table := range []struct{ name, text string }{
		{"flags of strata apiserver", flagTable(apiserver.NewCommand().Flags(), func(f *pflag.Flag) bool {
			return f.Name == "engine" || strings.HasPrefix(f.Name, "strata-")
		})},
		{"flags of strata replica", flagTable(replica.NewCommand().Flags(), func(f *pflag.Flag) bool {
			return apiserver.NewCommand().Flags().Lookup(f.Name) == nil && f.Name != "help"
		})},
		{"flags of strata up", flagTable(up.NewCommand().Flags(), func(f *pflag.Flag) bool { return f.Name != "help" })},
		{"metrics", metricTable(t, strataMetrics, documented.Strata)},
		{"metrics of the watch cache", metricTable(t, cacheMetrics, documented.Cache)},
	} {
		if after, err = replaceTable(after, table.name, table.text); err != nil {
			t.Fatal(err)
		}
	}
	switch {
	case bytes.Equal(before, after):
	case *update:
		testcheck.NoError(t, os.WriteFile(referenceFile, after, 0o644))
	default:
		t.Errorf("docs/reference.md is stale (make generate); first line that differs: %s", firstDifference(before, after))
	}
}

// TestReference_HasGates checks the rows of the gates: name and default.
func TestReference_HasGates(t *testing.T) {
	text, err := os.ReadFile(referenceFile)
	testcheck.NoError(t, err)
	for name, spec := range kubestorage.Gates() {
		state := "off"
		if spec.Default {
			state = "on"
		}
		if row := fmt.Sprintf("\n| `%s` | %s", name, state); !bytes.Contains(text, []byte(row)) {
			t.Errorf("docs/reference.md has no row %q", strings.TrimSpace(row))
		}
	}
}

// replaceTable replaces the lines between the markers of a table.
func replaceTable(text []byte, name, table string) ([]byte, error) {
	begin, end := fmt.Sprintf("<!-- generated: %s -->\n", name), fmt.Sprintf("<!-- end of %s -->\n", name)
	head, rest, found := bytes.Cut(text, []byte(begin))
	_, tail, closed := bytes.Cut(rest, []byte(end))
	if !found || !closed {
		return nil, fmt.Errorf("docs/reference.md lacks the markers %q and %q", begin, end)
	}
	return slices.Concat(head, []byte(begin), []byte(table), []byte(end), tail), nil
}

func firstDifference(a, b []byte) string {
	lines := strings.Split(string(b), "\n")
	for i, line := range strings.Split(string(a), "\n") {
		if i >= len(lines) || lines[i] != line {
			return line
		}
	}
	return "at the end"
}

// flagTable lists the visible flags of own, in the order of --help.
func flagTable(flags *pflag.FlagSet, own func(*pflag.Flag) bool) string {
	table := "| flag | type | default | meaning |\n| --- | --- | --- | --- |\n"
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || !own(f) {
			return
		}
		usage, _, _ := strings.Cut(f.Usage, " Options are:")
		kind := strings.ReplaceAll(f.Value.Type(), "|", " or ")
		table += fmt.Sprintf("| `--%s` | %s | %s | %s |\n", f.Name, kind, defaultCell(f), cell(usage))
	})
	return table
}

// defaultCell formats the default of a flag: a value as code, a description as text.
func defaultCell(f *pflag.Flag) string {
	if strings.Contains(f.DefValue, " ") {
		return cell(f.DefValue)
	}
	return code(strings.Trim(f.DefValue, "[]"))
}

// named matches names of metrics, flags and gates in help texts.
var named = regexp.MustCompile(`--[a-z][a-z-]*[a-z]|\b(strata|apiserver)_[a-z_]+|\b(compact_rev_key|GOMEMLIMIT|STRATA_DATA)\b|(GET|POST) /[a-z/]+`)

// cell formats a help text as a cell of a table.
func cell(help string) string {
	help = named.ReplaceAllString(help, "`$0`")
	return strings.ReplaceAll(strings.ReplaceAll(help, "|", `\|`), "*", `\*`)
}

func code(text string) string {
	if text == "" {
		return ""
	}
	return "`" + text + "`"
}
