package main

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spf13/cobra"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/cli"
)

// runEnv makes the test binary run another program: main with its arguments, or a command that
// ignores a signal to stop.
const (
	runEnv      = "STRATA_TEST_RUN"
	runMain     = "main"
	runStubborn = "stubborn"
)

func TestMain(m *testing.M) {
	switch os.Getenv(runEnv) {
	case runMain:
		main()
	case runStubborn:
		cmd := untilSignal(&cobra.Command{RunE: func(cmd *cobra.Command, _ []string) error {
			fmt.Println("running")
			<-cmd.Context().Done()
			fmt.Println("context ended")
			time.Sleep(time.Hour)
			return nil
		}})
		cmd.SetArgs([]string{})
		_ = cmd.Execute()
	default:
		os.Exit(m.Run())
	}
}

// strata runs the command until it exits.
func strata(t *testing.T, args ...string) (stdout, stderr string, exitCode int) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, os.Args[0], args...)
	cmd.Env = append(os.Environ(), runEnv+"="+runMain)
	var out, errOut bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &errOut
	if err := cmd.Run(); cmd.ProcessState == nil || ctx.Err() != nil {
		t.Fatalf("strata %v: %v", args, err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

func TestCommand_Misuse_PrintsOneLineAndExits2(t *testing.T) {
	for name, tc := range map[string]struct {
		args []string
		want string // expected in the line
	}{
		"unknown command": {[]string{"serve"}, `unknown command "serve"`},
		// cobra adds suggestions on several lines
		"unknown command, nearly": {[]string{"apiservr"}, `unknown command "apiservr"`},
		"unknown flag":            {[]string{"apiserver", "--nonsense"}, "unknown flag: --nonsense"},
		"unknown root flag":       {[]string{"--nonsense"}, "unknown flag: --nonsense"},
		"unknown engine":          {[]string{"apiserver", "--engine=mvcc"}, "must be strata or upstream"},
		"unknown gate":            {[]string{"apiserver", "--strata-feature-gates=NoSuchGate=true"}, "NoSuchGate"},
		"unknown Kubernetes gate": {[]string{"apiserver", "--feature-gates=NoSuchGate=true"}, "NoSuchGate"},
		"locked Kubernetes gate":  {[]string{"apiserver", "--feature-gates=ConsistentListFromCache=false"}, "ConsistentListFromCache"},
		"bad value":               {[]string{"apiserver", "--secure-port=https"}, "--secure-port"},
		"missing value":           {[]string{"apiserver", "--etcd-servers"}, "--etcd-servers"},
		"argument to apiserver":   {[]string{"apiserver", "now"}, "takes flags only"},
		"missing flag":            {[]string{"etcd"}, "data-dir"},
		"history of nothing":      {[]string{"history", "get"}, "no resource is given: name one"},
		"two moments":             {[]string{"history", "get", "pods", "--at=5m", "--at-revision=5"}, "--at and --at-revision exclude each other: set one of them"},
		"moment":                  {[]string{"history", "get", "pods", "--at=yesterday"}, `--at: "yesterday" is neither a duration ago`},
		"format":                  {[]string{"history", "top", "--output=xml"}, `--output "xml" does not exist: use one of json`},
		"format of objects":       {[]string{"history", "get", "pods", "--output=xml"}, `--output "xml": unable to match a printer`},
		"standing replay":         {[]string{"history", "replay", "--speed=0x"}, "give a factor such as 10x, or --serve"},
		"address of a replay":     {[]string{"history", "replay", "--serve", "--listen=0.0.0.0:0"}, "--listen 0.0.0.0:0 is no loopback address"},
		"top of a namespace":      {[]string{"history", "top", "-n", "web"}, `--namespace "web": top counts the objects of all namespaces`},
		"time of a request":       {[]string{"history", "top", "--request-timeout=x"}, `--request-timeout "x": must be a duration such as 30s`},
		"argument to version":     {[]string{"version", "now"}, `unknown command "now"`},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := strata(t, tc.args...)
			if code != cli.Misused {
				t.Errorf("exit code %d, want %d", code, cli.Misused)
			}
			if stdout != "" {
				t.Errorf("standard output is %q, want nothing", stdout)
			}
			line := strings.TrimSuffix(stderr, "\n")
			if !strings.HasPrefix(line, "strata: ") || strings.Contains(line, "\n") || !strings.Contains(line, tc.want) || !strings.HasSuffix(line, "--help)") {
				t.Errorf("standard error is %q, want one line with %q and the help of a command", stderr, tc.want)
			}
		})
	}
}

// Errors of flag combinations are reported after the first log messages of the server.
func TestAPIServer_MissingFlag_EndsWithOneLine(t *testing.T) {
	_, stderr, code := strata(t, "apiserver", "--cert-dir="+t.TempDir())
	if code != cli.Misused {
		t.Errorf("exit code %d, want %d", code, cli.Misused)
	}
	lines := strings.Split(strings.TrimSpace(stderr), "\n")
	if last := lines[len(lines)-1]; !strings.HasPrefix(last, "strata: ") || !strings.Contains(last, "--etcd-servers must be specified") {
		t.Errorf("last line is %q, want it to ask for --etcd-servers", last)
	}
}

// Failures of history without a server name the cause, the server or the file, and the next step,
// in one line.
func TestHistory_Failures_NameNextStep(t *testing.T) {
	dir := t.TempDir()
	damaged := filepath.Join(dir, "damaged")
	testcheck.NoError(t, os.WriteFile(damaged, []byte("garbage"), 0o600))
	reserved, err := loopback.Reserve() // refuses connections
	testcheck.NoError(t, err)
	defer reserved.Release()
	dead := "https://" + reserved.Address()
	for name, tc := range map[string]struct {
		args []string
		want string
	}{
		"no server":          {[]string{"get", "pods", "--kubeconfig=" + os.DevNull, "--server=" + dead}, dead + " cannot be reached: connection refused; check that the server is running"},
		"no server, all":     {[]string{"replay", "--kubeconfig=" + os.DevNull, "--server=" + dead}, "check that the server is running, and its address: --kubeconfig, --context, --server"},
		"no server, top":     {[]string{"top", "--kubeconfig=" + os.DevNull, "--server=" + dead}, "check that the server is running"},
		"no kubeconfig":      {[]string{"get", "pods", "--kubeconfig=" + filepath.Join(dir, "none")}, "no such file or directory; name one with --kubeconfig or KUBECONFIG"},
		"damaged kubeconfig": {[]string{"get", "pods", "--kubeconfig=" + damaged}, "damaged\": the file is not a kubeconfig; name one with --kubeconfig or KUBECONFIG"},
		"no context":         {[]string{"get", "pods", "--kubeconfig=" + os.DevNull, "--context=none"}, "context \"none\" does not exist; `kubectl config get-contexts` lists its contexts"},
	} {
		t.Run(name, func(t *testing.T) {
			stdout, stderr, code := strata(t, append([]string{"history", "--cache-dir=" + dir}, tc.args...)...)
			if code != cli.Failed || stdout != "" || strings.Count(stderr, "\n") != 1 || !strings.HasPrefix(stderr, "strata: ") || !strings.Contains(stderr, tc.want) {
				t.Errorf("exit code %d, standard output %q, standard error %q; want %d, and one line with %q", code, stdout, stderr, cli.Failed, tc.want)
			}
		})
	}
}

func TestVersion_NamesAllComponents(t *testing.T) {
	for _, args := range [][]string{{"version"}, {"--version"}} {
		stdout, stderr, code := strata(t, args...)
		if code != 0 || stderr != "" {
			t.Errorf("strata %v: exit code %d, standard error %q", args, code, stderr)
		}
		for _, want := range []string{"strata ", "kubernetes  v1.37.2\n", "apiserver   v0.36 and v0.37 ", "etcd        v3.", "go          go1."} {
			if !strings.Contains(stdout, want) {
				t.Errorf("strata %v prints %q without %q", args, stdout, want)
			}
		}
	}
}

func TestAPIServer_Version_IsKubernetesRelease(t *testing.T) {
	stdout, _, code := strata(t, "apiserver", "--version")
	if code != 0 || !strings.HasPrefix(stdout, "Kubernetes v1.37.2+strata.") {
		t.Errorf("exit code %d, output %q, want 0 and Kubernetes v1.37.2+strata.*", code, stdout)
	}
}

func TestHelp_ListsCommandsAndFlags(t *testing.T) {
	stdout, _, code := strata(t, "--help")
	if code != 0 {
		t.Errorf("exit code %d", code)
	}
	for _, command := range []string{"up", "kubectl", "apiserver", "version"} {
		if !strings.Contains(stdout, "\n  "+command+" ") {
			t.Errorf("help does not list %s:\n%s", command, stdout)
		}
	}
	if strings.Contains(stdout, "\n  etcd ") {
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

func TestSignals_FirstCancelsContext_SecondKills(t *testing.T) {
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), runEnv+"="+runStubborn)
	stdout, err := cmd.StdoutPipe()
	testcheck.NoError(t, err)
	testcheck.NoError(t, cmd.Start())
	defer cmd.Process.Kill()
	lines := bufio.NewScanner(stdout)
	if !lines.Scan() || lines.Text() != "running" {
		t.Fatalf("first line %q, want running", lines.Text())
	}
	signal := func() { _ = cmd.Process.Signal(os.Interrupt) }
	signal()
	if !lines.Scan() || lines.Text() != "context ended" {
		t.Fatalf("line after the first signal %q, want that the context ended", lines.Text())
	}
	exited := make(chan error, 1)
	go func() { exited <- cmd.Wait() }()
	// Signals get their default effect back shortly after the context has ended.
	for deadline := time.After(time.Minute); ; {
		signal()
		select {
		case <-exited:
			if status := cmd.ProcessState.Sys().(syscall.WaitStatus); !status.Signaled() || status.Signal() != syscall.SIGINT {
				t.Errorf("ended with %v, want by SIGINT", cmd.ProcessState)
			}
			return
		case <-deadline:
			t.Fatal("further signals do not end the process")
		case <-time.After(20 * time.Millisecond):
		}
	}
}
