package main

import (
	"bytes"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"github.com/stratakube/strata/internal/test/testcheck"
)

var (
	section  = regexp.MustCompile(`^([A-Z].*) flags:$`)
	flagLine = regexp.MustCompile(`^ +(?:-., )?--([a-z][a-z0-9-]*)\b`)
)

// helpOf returns the help of a command, the names of the sections of flags in order, and the flags
// of each.
func helpOf(t *testing.T, cmd *cobra.Command) (text string, names []string, flags map[string][]string) {
	t.Helper()
	var out bytes.Buffer
	cmd.SetOut(&out)
	testcheck.NoError(t, cmd.Help())
	flags = map[string][]string{}
	for line := range strings.Lines(out.String()) {
		line = strings.TrimRight(line, "\n")
		if m := section.FindStringSubmatch(line); m != nil {
			names = append(names, m[1])
		} else if m := flagLine.FindStringSubmatch(line); m != nil && len(names) > 0 {
			last := names[len(names)-1]
			flags[last] = append(flags[last], m[1])
		}
	}
	return out.String(), names, flags
}

// TestHelp_OwnFlagsComeFirst_EachOnce walks all commands: the first section has exactly Strata's
// own flags, which occur nowhere else, and examples are before it.
func TestHelp_OwnFlagsComeFirst_EachOnce(t *testing.T) {
	moments := []string{"since", "since-revision", "until", "until-revision"}
	selection := []string{"all-namespaces", "selector"}
	own := map[string][]string{
		"strata":    {"version"},
		"strata up": {"data-dir", "bind-address", "secure-port", "tls-san", "kubeconfig", "nodes", "controllers", "etcd-shards", "ha", "etcd-progress-notify-interval"},
		"strata apiserver": {"engine", "strata-consistency-check-interval", "strata-continue-token-key-rotation", "strata-feature-gates", "strata-history-age",
			"strata-history-bytes", "strata-list-bytes-in-flight", "strata-refuse-plain-continue-tokens", "strata-representation-bytes"},
		"strata etcd copy":      {"from", "to", "etcd-prefix", "etcd-cafile", "etcd-certfile", "etcd-keyfile", "dry-run", "replace"},
		"strata version":        {},
		"strata history":        {},
		"strata history get":    slices.Concat(selection, []string{"at", "at-revision", "no-headers", "output", "show-labels"}),
		"strata history diff":   slices.Concat(moments, selection, []string{"output"}),
		"strata history log":    slices.Concat(moments, []string{"output"}),
		"strata history replay": slices.Concat(moments, selection, []string{"output", "speed", "serve", "listen", "write-kubeconfig"}),
		"strata history top":    {"all", "count", "interval", "output", "sort-by"},
	}
	for path, want := range own {
		t.Run(path, func(t *testing.T) {
			cmd, _, err := newRootCommand().Find(strings.Fields(path)[1:])
			if err != nil || cmd.CommandPath() != path {
				t.Fatalf("%v: %v", cmd.CommandPath(), err)
			}
			text, names, flags := helpOf(t, cmd)
			if len(names) == 0 || names[0] != "Strata" {
				t.Fatalf("sections %q, want Strata first\n%s", names, text)
			}
			if path != "strata apiserver" {
				// has --help among kube-apiserver's global flags, as kube-apiserver
				want = append(want, "help")
			}
			slices.Sort(want)
			if got := slices.Sorted(slices.Values(flags["Strata"])); !slices.Equal(got, want) {
				t.Errorf("Strata's section has %q, want %q", got, want)
			}
			for _, name := range names[1:] {
				for _, flag := range flags[name] {
					if slices.Contains(want, flag) {
						t.Errorf("--%s is in section %s too", flag, name)
					}
				}
			}
			if path == "strata version" {
				return
			}
			example := strings.Index(text, "\nExamples:\n  "+path)
			if path == "strata history" || path == "strata" {
				example = strings.Index(text, "\nExamples:\n  "+path+" ")
			}
			if example < 0 || example > strings.Index(text, "\nStrata flags:") {
				t.Errorf("no example of %s before the flags\n%s", path, text)
			}
		})
	}
}

// Each visible flag of a command is in exactly one section of its help.
func TestHelp_EveryVisibleFlag_IsListedOnce(t *testing.T) {
	var walk func(*cobra.Command)
	walk = func(cmd *cobra.Command) {
		if cmd.DisableFlagParsing {
			return // kubectl prints its own help
		}
		text, names, flags := helpOf(t, cmd)
		count := map[string]int{}
		for _, name := range names {
			for _, flag := range flags[name] {
				count[flag]++
			}
		}
		check := func(f *pflag.Flag) {
			// of component-base, in sub-commands
			stray := f.Name == "version" && cmd.HasParent() && cmd.Name() != "apiserver"
			if n := count[f.Name]; !stray && !f.Hidden && n != 1 {
				t.Errorf("%s: --%s is listed %d times\n%.300s", cmd.CommandPath(), f.Name, n, text)
			}
		}
		cmd.LocalFlags().VisitAll(check)
		cmd.InheritedFlags().VisitAll(check)
		for _, child := range cmd.Commands() {
			walk(child)
		}
	}
	walk(newRootCommand())
}

// Defaults that follow the machine are described, and durations are short.
func TestHelp_APIServer_DefaultsAreDescribed(t *testing.T) {
	cmd, _, err := newRootCommand().Find([]string{"apiserver"})
	testcheck.NoError(t, err)
	text, _, _ := helpOf(t, cmd)
	for _, want := range []string{
		"(default 256Mi, or an eighth of the available memory if that is less)",
		"(default an eighth of the available memory, 384Mi if that is unknown)",
		"(default an eighth of the available memory)",
		"(default 1h)", "(default 5m)", "(default 168h)",
		"The available memory",
	} {
		if !strings.Contains(text, want) {
			t.Errorf("the help lacks %q", want)
		}
	}
}
