package main

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/server/internal/history"
	"github.com/stratakube/strata/server/internal/version"
)

func TestVersion_Plugin_IsThatOfStrata(t *testing.T) {
	var out bytes.Buffer
	cmd := newCommand([]string{history.PluginName, "--version"})
	cmd.SetOut(&out)
	if err := cmd.Execute(); err != nil || out.String() != "kubectl strata version "+version.Get().Strata+"\n" {
		t.Errorf("%q, error %v", out.String(), err)
	}
}

// The help of the plugin and of its commands has examples as kubectl's users type them, then
// Strata's flags, then those of kubectl's libraries.
func TestHelp_Plugin_HasExamplesAndOwnFlagsFirst(t *testing.T) {
	for _, name := range []string{"", "get", "diff", "log", "replay", "top"} {
		var out bytes.Buffer
		cmd := history.NewPlugin(slices.Concat([]string{history.PluginName}, strings.Fields(name), []string{"--help"}))
		cmd.SetOut(&out)
		if err := cmd.Execute(); err != nil {
			t.Fatal(err)
		}
		last := -1
		for _, part := range []string{"\nUsage:\n", "\nExamples:\n  " + strings.TrimSpace("kubectl strata "+name), "\nStrata flags:\n", "\nConnection flags:\n"} {
			i := strings.Index(out.String(), part)
			if i <= last || strings.Count(out.String(), part) != 1 {
				t.Errorf("%s: %q is missing, repeated, or before another part\n%s", name, part, out.String())
			}
			last = i
		}
	}
}
