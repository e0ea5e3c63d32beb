package history

import (
	"bytes"
	"context"
	"errors"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"

	"github.com/creack/pty"

	"github.com/stratakube/strata/test/harness"
)

// onTerminal runs `strata history` with a terminal as its standard output, and returns the text
// that the terminal received. environment is added to that of the test, which has neither NO_COLOR
// nor TERM there.
func onTerminal(t *testing.T, ctx context.Context, environment []string, args ...string) string {
	t.Helper()
	screen, tty, err := pty.Open()
	harness.Check(t, err)
	defer screen.Close()
	cmd := exec.CommandContext(ctx, harness.Must[string](t)(harness.Binary()), append([]string{"history", "--kubeconfig=" + server.Kubeconfig}, args...)...)
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name != "NO_COLOR" && name != "TERM" {
			cmd.Env = append(cmd.Env, v)
		}
	}
	cmd.Env = append(cmd.Env, environment...)
	var problems bytes.Buffer
	cmd.Stdout, cmd.Stderr = tty, &problems
	err = cmd.Start()
	tty.Close()
	harness.Check(t, err)
	// A terminal that no process has open any more is an error of this kind on Linux.
	out, err := io.ReadAll(screen)
	if err != nil && !errors.Is(err, syscall.EIO) {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("history %q: %v\n%s%s", args, err, out, &problems)
	}
	return string(out)
}

const (
	xterm = "TERM=xterm-256color"
	clear = "\x1b[H\x1b[2J"
)

// TestTables_OnTerminal_HaveColoursUnlessTurnedOff: created objects are green, deleted ones red,
// and changed ones yellow.
func TestTables_OnTerminal_HaveColoursUnlessTurnedOff(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("colours")
	states := story(t, ctx, namespace)
	timeOf(t, ctx, states[len(states)-1].revision) // does not change any more
	args := []string{"diff", "configmaps", "--since", "1h", "-n", namespace}
	escape := regexp.MustCompile("\x1b\\[[0-9;]*m")
	coloured := onTerminal(t, ctx, []string{xterm}, args...)
	if !regexp.MustCompile("\x1b\\[3[123]m").MatchString(coloured) || !strings.Contains(coloured, "\x1b[0m") {
		t.Errorf("on a terminal there are no colours in\n%q", coloured)
	}
	plain := strings.ReplaceAll(escape.ReplaceAllString(coloured, ""), "\r\n", "\n")
	if want := ok(t, ctx, args...); plain != want {
		t.Errorf("on a terminal, without colours:\n%s\nin a pipe:\n%s", plain, want)
	}
	for _, environment := range [][]string{{xterm, "NO_COLOR=1"}, {"TERM=dumb"}} {
		if out := onTerminal(t, ctx, environment, args...); strings.Contains(out, "\x1b") || !strings.Contains(out, "configmap/") {
			t.Errorf("%q: there are escape sequences, or no objects, in\n%q", environment, out)
		}
	}
	if out := onTerminal(t, ctx, []string{xterm}, append(args, "-o", "json")...); strings.Contains(out, "\x1b") {
		t.Errorf("JSON has escape sequences:\n%q", out)
	}
}

// TestTop_OnTerminal_RedrawsTable: each table replaces the one before, and those after the first
// have rates.
func TestTop_OnTerminal_RedrawsTable(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	args := []string{"top", "configmaps", "--all", "--count", "3", "--interval", "50ms"}
	tables := strings.Split(onTerminal(t, ctx, []string{xterm, "NO_COLOR=1"}, args...), clear)
	if len(tables) != 4 || tables[0] != "" {
		t.Fatalf("%d tables, or text before the first, want 3 in\n%q", len(tables)-1, tables)
	}
	rate := regexp.MustCompile(`(?m)^configmaps +.* (-|[0-9.]+)\r$`)
	for i, table := range tables[1:] {
		match := rate.FindStringSubmatch(table)
		if match == nil || (match[1] == "-") != (i == 0) || strings.Count(table, "RESOURCE") != 1 {
			t.Errorf("table %d, rate %q:\n%q", i+1, match, table)
		}
	}
	if out := onTerminal(t, ctx, []string{"TERM=dumb"}, args...); strings.Contains(out, "\x1b") || strings.Count(out, "RESOURCE") != 3 {
		t.Errorf("a terminal without escape sequences got\n%q", out)
	}
	if out := ok(t, ctx, "top", "configmaps", "--all"); strings.Count(out, "RESOURCE") != 1 {
		t.Errorf("not on a terminal, want one table:\n%s", out)
	}
}

// TestCompletions_Scripts_AreValid has the shells that are installed, bash at least, parse the
// scripts of both programs.
func TestCompletions_Scripts_AreValid(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	dir := plugin(t)
	for shell, parse := range map[string]string{"bash": "-n", "zsh": "-n", "fish": "--no-execute"} {
		path, err := exec.LookPath(shell)
		if err != nil && shell != "bash" {
			t.Logf("%s is not installed", shell)
			continue
		}
		harness.Check(t, err)
		for name, program := range map[string]string{"strata": harness.Must[string](t)(harness.Binary()), "kubectl-strata": filepath.Join(dir, "kubectl-strata")} {
			script, err := exec.CommandContext(ctx, program, "completion", shell).Output()
			harness.Check(t, err)
			if len(script) < 1000 {
				t.Errorf("%s completion %s: %q", name, shell, script)
			}
			file := filepath.Join(t.TempDir(), name+"."+shell)
			harness.Check(t, os.WriteFile(file, script, 0o644))
			if out, err := exec.CommandContext(ctx, path, parse, file).CombinedOutput(); err != nil || len(out) > 0 {
				t.Errorf("%s %s on the script of %s: %v\n%s", shell, parse, name, err, out)
			}
		}
	}
}
