package main

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"
)

// runEnv makes the test binary run main with its arguments.
const runEnv = "STRATA_TEST_MAIN"

func TestMain(m *testing.M) {
	if os.Getenv(runEnv) != "" {
		main()
		return
	}
	os.Exit(m.Run())
}

// strata runs the command to its end.
func strata(t *testing.T, args ...string) (stdout, stderr string, exitCode int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), runEnv+"=1")
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); cmd.ProcessState == nil || ctx.Err() != nil {
		t.Fatalf("strata %v: %v", args, err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

func TestMisuseIsOneLineAndExitCode1(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string // in the line
	}{
		"unknown command":         {[]string{"serve"}, `unknown command "serve"`},
		"unknown command, nearly": {[]string{"apiservr"}, `unknown command "apiservr"`}, // cobra suggests, over several lines
		"unknown flag":            {[]string{"apiserver", "--nonsense"}, "unknown flag: --nonsense"},
		"unknown root flag":       {[]string{"--nonsense"}, "unknown flag: --nonsense"},
		"unknown engine":          {[]string{"apiserver", "--engine=mvcc"}, "must be strata or upstream"},
		"unknown gate":            {[]string{"apiserver", "--strata-feature-gates=NoSuchGate=true"}, "NoSuchGate"},
		"unknown Kubernetes gate": {[]string{"apiserver", "--feature-gates=NoSuchGate=true"}, "NoSuchGate"},
		"locked Kubernetes gate":  {[]string{"apiserver", "--feature-gates=ConsistentListFromCache=false"}, "ConsistentListFromCache"},
		"bad value":               {[]string{"apiserver", "--secure-port=https"}, "--secure-port"},
		"missing value":           {[]string{"apiserver", "--etcd-servers"}, "--etcd-servers"},
		"argument to apiserver":   {[]string{"apiserver", "now"}, "takes flags only"},
		"argument to version":     {[]string{"version", "now"}, `unknown command "now"`},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := strata(t, tc.args...)
			if code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			if stdout != "" {
				t.Errorf("standard output is %q, want nothing", stdout)
			}
			line := strings.TrimSuffix(stderr, "\n")
			if !strings.HasPrefix(line, "strata: ") || strings.Contains(line, "\n") || !strings.Contains(line, tc.want) {
				t.Errorf("standard error is %q, want one line with %q", stderr, tc.want)
			}
		})
	}
}

// What only shows when all flags are checked together comes after what the server has logged by then.
func TestMissingFlagsEndWithOneLine(t *testing.T) {
	_, stderr, code := strata(t, "apiserver", "--cert-dir="+t.TempDir())
	if code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "strata: ") || !strings.Contains(last, "--etcd-servers must be specified") {
		t.Errorf("last line is %q, want it to ask for --etcd-servers", last)
	}
}

func TestVersionNamesAllParts(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}} {
		stdout, stderr, code := strata(t, args...)
		if code != 0 || stderr != "" {
			t.Errorf("strata %v: exit code %d, standard error %q", args, code, stderr)
		}
		for _, want := range []string{"strata ", "kubernetes  v1.36.3\n", "etcd        v3.", "go          go1."} {
			if !strings.Contains(stdout, want) {
				t.Errorf("strata %v prints %q without %q", args, stdout, want)
			}
		}
	}
}

func TestApiserverVersionIsThatOfKubernetes(t *testing.T) {
	stdout, _, code := strata(t, "apiserver", "--version")
	if code != 0 || !strings.HasPrefix(stdout, "Kubernetes v1.36.3+strata.") {
		t.Errorf("exit code %d, output %q, want 0 and Kubernetes v1.36.3+strata.*", code, stdout)
	}
}

func TestHelp(t *testing.T) {
	stdout, _, code := strata(t, "--help")
	if code != 0 || !strings.Contains(stdout, "apiserver ") || !strings.Contains(stdout, "version ") {
		t.Errorf("exit code %d, help %q does not list the commands", code, stdout)
	}
	if strings.Contains(stdout, " etcd ") {
		t.Errorf("help lists the hidden command:\n%s", stdout)
	}
	stdout, _, code = strata(t, "apiserver", "--help")
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, want := range []string{"--engine ", "--strata-feature-gates ", "--etcd-servers ", "--feature-gates ", "Etcd flags:"} {
		if !strings.Contains(stdout, want) {
			t.Errorf("help of apiserver does not contain %q", want)
		}
	}
}
