package up

import (
	"bufio"
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/server/internal/testbin"
)

// timeout bounds every wait that has failed. A start takes 3 s and a stop 2 s on two cores.
const timeout = 2 * time.Minute

// process is a running `strata up`, in a directory of its own.
type process struct {
	dir string // where it was called; the data is in strata-data below it
	cmd *exec.Cmd

	up   chan struct{} // closed when it has printed what to type next
	done chan struct{} // closed when it has ended

	mu     sync.Mutex
	output bytes.Buffer // standard output and error
}

// start calls `strata up` on a free port in dir and returns at once, with an umask that takes nothing from anybody. When the test ends the
// process is killed if it still runs.
func start(t *testing.T, dir string, args ...string) *process {
	t.Helper()
	p := &process{
		dir:  dir,
		cmd:  exec.Command("sh", append([]string{"-c", `umask 000; exec "$0" "$@"`, testbin.Strata(t), "up", "--secure-port=0"}, args...)...),
		up:   make(chan struct{}),
		done: make(chan struct{}),
	}
	p.cmd.Dir = dir
	p.cmd.Env = environment(dir)
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p.cmd.Stdout, p.cmd.Stderr = write, write
	err = p.cmd.Start()
	write.Close()
	if err != nil {
		t.Fatal(err)
	}
	go p.follow(read)
	t.Cleanup(func() {
		p.cmd.Process.Kill()
		<-p.done
		if t.Failed() {
			t.Logf("strata up in %s printed:\n%s", dir, p.printed())
		}
	})
	return p
}

func (p *process) follow(read *os.File) {
	defer close(p.done)
	defer read.Close()
	for lines := bufio.NewScanner(read); lines.Scan(); {
		p.mu.Lock()
		p.output.WriteString(lines.Text() + "\n")
		p.mu.Unlock()
		if strings.Contains(lines.Text(), "export KUBECONFIG=") {
			close(p.up)
		}
	}
	p.cmd.Wait() // the tests look at ProcessState
}

func (p *process) printed() string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.output.String()
}

func (p *process) requireUp(t *testing.T) {
	t.Helper()
	select {
	case <-p.up:
	case <-p.done:
		t.Fatal("strata up ended")
	case <-time.After(timeout):
		t.Fatal("strata up is not up")
	}
}

// requireStop sends a signal and demands a clean end.
func (p *process) requireStop(t *testing.T, signal os.Signal) {
	t.Helper()
	p.requireStopWithin(t, signal, timeout)
}

func (p *process) requireStopWithin(t *testing.T, signal os.Signal, limit time.Duration) {
	t.Helper()
	if err := p.cmd.Process.Signal(signal); err != nil {
		t.Fatal(err)
	}
	select {
	case <-p.done:
	case <-time.After(limit):
		t.Fatalf("strata up goes on after %v", signal)
	}
	if code := p.cmd.ProcessState.ExitCode(); code != 0 {
		t.Fatalf("strata up ended with code %d after %v", code, signal)
	}
}

func (p *process) kill(t *testing.T) {
	t.Helper()
	if err := p.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	<-p.done
}

// config returns the administrator's connection.
func (p *process) config(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(p.dir, "strata-data", "kubeconfig"))
	if err != nil {
		t.Fatal(err)
	}
	return config
}

// kubectl calls `strata kubectl` where p was called, so that it has to find the kubeconfig, and demands success.
func (p *process) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, code := p.tryKubectl(t, "", args...)
	if code != 0 {
		t.Fatalf("kubectl %s ended with code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

func (p *process) tryKubectl(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runStrata(t, p.dir, stdin, append([]string{"kubectl"}, args...)...)
}

// runStrata calls strata in dir and returns what it did.
func runStrata(t *testing.T, dir, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runCommand(t, stdin, prepare(t, dir, args...))
}

// prepare returns a call of strata in dir that is killed if it takes too long.
func prepare(t *testing.T, dir string, args ...string) *exec.Cmd {
	t.Helper()
	program := testbin.Strata(t) // which may take longer than timeout, the first time
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	t.Cleanup(cancel)
	cmd := exec.CommandContext(ctx, program, args...)
	cmd.Dir = dir
	cmd.Env = environment(dir)
	return cmd
}

func runCommand(t *testing.T, stdin string, cmd *exec.Cmd) (stdout, stderr string, code int) {
	t.Helper()
	var out, errOut bytes.Buffer
	cmd.Stdin, cmd.Stdout, cmd.Stderr = strings.NewReader(stdin), &out, &errOut
	if err := cmd.Run(); cmd.ProcessState == nil {
		t.Fatal(err)
	}
	return out.String(), errOut.String(), cmd.ProcessState.ExitCode()
}

// environment is that of a user who has no kubeconfig anywhere.
func environment(dir string) []string {
	return []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir()}
}

// terminate is what a supervisor sends, interrupt what Ctrl-C does.
const (
	terminate = syscall.SIGTERM
	interrupt = syscall.SIGINT
)
