package apiserver

import (
	"bytes"
	"io"
	"strings"
	"testing"

	"github.com/spf13/pflag"
)

// ownFlags returns the flags of the command that kube-apiserver does not have.
func ownFlags(t *testing.T) (flags []*pflag.Flag) {
	t.Helper()
	NewCommand().Flags().VisitAll(func(f *pflag.Flag) {
		if f.Name == "engine" || strings.HasPrefix(f.Name, "strata-") {
			flags = append(flags, f)
		}
	})
	if len(flags) == 0 {
		t.Fatal("the command has no own flags")
	}
	return flags
}

// The numbers are the limits of what an operator has to know.
func TestOwnFlags_VisibleOnesAreFew(t *testing.T) {
	const maxFlags, maxBudgets = 10, 3
	visible, budgets := 0, 0
	for _, f := range ownFlags(t) {
		if _, deprecated := deprecatedLimits[f.Name]; deprecated != f.Hidden || deprecated != (f.Deprecated != "") {
			t.Errorf("--%s: hidden %t, deprecation %q; want a deprecated flag hidden and any other visible", f.Name, f.Hidden, f.Deprecated)
		}
		if f.Hidden {
			continue
		}
		visible++
		if f.Value.Type() == "quantity" {
			budgets++
		}
	}
	if visible > maxFlags || budgets > maxBudgets {
		t.Errorf("%d visible flags with %d byte budgets, want %d and %d at most", visible, budgets, maxFlags, maxBudgets)
	}
}

func TestDeprecatedFlag_IsAcceptedWithWarning(t *testing.T) {
	for name, check := range map[string]struct {
		value string
		took  func(engineLimits) bool
	}{
		flagUnclaimedBytes:          {"1Mi", func(l engineLimits) bool { return l.unclaimedBytes.Value() == 1<<20 }},
		flagReplayRevisions:         {"0", func(l engineLimits) bool { return l.replayRevisions == 0 }},
		flagReplayBytes:             {"2Mi", func(l engineLimits) bool { return l.replayBytes.Value() == 2<<20 }},
		flagProgressInterval:        {"200ms", func(l engineLimits) bool { return l.progressInterval.String() == "200ms" }},
		flagShutdownProgressTimeout: {"0", func(l engineLimits) bool { return l.progressTimeout == 0 }},
	} {
		t.Run(name, func(t *testing.T) {
			l := defaultEngineLimits()
			fs := pflag.NewFlagSet("strata", pflag.ContinueOnError)
			var warnings bytes.Buffer
			fs.SetOutput(&warnings)
			l.addFlags(fs)
			if err := fs.Parse([]string{"--" + name + "=" + check.value}); err != nil {
				t.Fatal(err)
			}
			l.fit(fs, 1<<40)
			if err := l.validate(); err != nil || !check.took(l) {
				t.Errorf("%s has no effect: %+v, %v", check.value, l, err)
			}
			if got := warnings.String(); strings.Count(got, "\n") != 1 || !strings.Contains(got, deprecatedLimits[name]) {
				t.Errorf("printed %q, want one line with %q", got, deprecatedLimits[name])
			}
		})
	}
	if len(deprecatedLimits) != 5 {
		t.Errorf("%d deprecated flags, 5 are tested", len(deprecatedLimits))
	}
}

func TestLimits_FitMemoryUnlessSet(t *testing.T) {
	const memory = 800 << 20
	for name, test := range map[string]struct {
		args                                   []string
		history, replay, representations, list int64
	}{
		"defaults":    {nil, 100 << 20, 100 << 20, 100 << 20, 100 << 20},
		"history set": {[]string{"--strata-history-bytes=1Gi"}, 1 << 30, 1 << 30, 100 << 20, 100 << 20},
		"replay set":  {[]string{"--strata-replay-bytes=3Mi"}, 100 << 20, 3 << 20, 100 << 20, 100 << 20},
		"others set":  {[]string{"--strata-representation-bytes=1Mi", "--strata-list-bytes-in-flight=2Mi"}, 100 << 20, 100 << 20, 1 << 20, 2 << 20},
	} {
		t.Run(name, func(t *testing.T) {
			l := defaultEngineLimits()
			fs := pflag.NewFlagSet("strata", pflag.ContinueOnError)
			fs.SetOutput(io.Discard)
			l.addFlags(fs)
			if err := fs.Parse(test.args); err != nil {
				t.Fatal(err)
			}
			l.fit(fs, memory)
			if name == "defaults" {
				large := defaultEngineLimits()
				large.fit(fs, 24<<30)
				if got := large.keptBytes.Value(); got != 3<<30 {
					t.Errorf("representations with 24 GiB: %d, want 3 GiB", got)
				}
			}
			got := [4]int64{l.historyBytes.Value(), l.replayBytes.Value(), l.keptBytes.Value(), l.listBytes.Value()}
			if want := [4]int64{test.history, test.replay, test.representations, test.list}; got != want {
				t.Errorf("history, replay, representations, lists: %d, want %d", got, want)
			}
		})
	}
}
