package up

import (
	"bytes"
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testbin"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// timeout bounds every wait that has failed. A start takes 3 s and a stop 2 s on two cores.
const timeout = 5 * time.Minute

// upProcess is a running `strata up`, in a directory of its own.
type upProcess struct {
	*process.Child
	dir string // where it was called; the data is in strata-data below it
}

// start calls `strata up` on a free port in dir and returns at once, with an umask of 0. When the
// test ends the process is killed if it still runs.
func start(t *testing.T, dir string, args ...string) *upProcess {
	t.Helper()
	child, err := process.Start(process.Spec{
		Name: "strata up", Path: "sh", Dir: dir, Env: environment(dir), Log: filepath.Join(t.TempDir(), "log"), Lines: true,
		Args: append([]string{"-c", `umask 000; exec "$0" "$@"`, testbin.Strata(t), "up", "--secure-port=0"}, args...),
	})
	testcheck.NoError(t, err)
	p := &upProcess{Child: child, dir: dir}
	t.Cleanup(func() {
		p.Kill()
		if t.Failed() {
			t.Logf("strata up in %s printed:\n%s", dir, p.printed())
		}
	})
	return p
}

// printed returns standard output and standard error so far.
func (p *upProcess) printed() string {
	log, err := p.Log()
	if err != nil {
		return err.Error()
	}
	return log
}

// requireUp returns when p has printed the commands for the user, and then that its controllers are
// ready.
func (p *upProcess) requireUp(t *testing.T) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	_, commands, err := p.WaitLine(ctx, 0, "export KUBECONFIG=")
	if err == nil {
		_, _, err = p.WaitLine(ctx, commands, "controllers:")
	}
	testcheck.NoError(t, err)
}

// requireStop sends a signal and demands a clean end.
func (p *upProcess) requireStop(t *testing.T, signal os.Signal) {
	t.Helper()
	p.requireStopWithin(t, signal, timeout)
}

func (p *upProcess) requireStopWithin(t *testing.T, signal os.Signal, limit time.Duration) {
	t.Helper()
	if err := p.Signal(signal); err != nil {
		// also if p has ended before, which is no error of Stop
		t.Fatal(err)
	}
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	if code, err := p.Wait(ctx); err != nil || code != 0 {
		t.Fatalf("strata up ended with code %d after %v (%v)", code, signal, err)
	}
}

// kill sends SIGKILL and fails the test unless p still runs.
func (p *upProcess) kill(t *testing.T) {
	t.Helper()
	testcheck.NoError(t, p.Signal(os.Kill))
	<-p.Done()
}

// config returns the administrator's connection.
func (p *upProcess) config(t *testing.T) *rest.Config {
	t.Helper()
	config, err := clientcmd.BuildConfigFromFlags("", filepath.Join(p.dir, "strata-data", "kubeconfig"))
	testcheck.NoError(t, err)
	return config
}

// kubectl calls `strata kubectl` where p was called, so that it has to find the kubeconfig, and
// demands success.
func (p *upProcess) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	stdout, stderr, code := p.tryKubectl(t, "", args...)
	if code != 0 {
		t.Fatalf("kubectl %s ended with code %d: %s", strings.Join(args, " "), code, stderr)
	}
	return stdout
}

func (p *upProcess) tryKubectl(t *testing.T, stdin string, args ...string) (stdout, stderr string, code int) {
	t.Helper()
	return runStrata(t, p.dir, stdin, append([]string{"kubectl"}, args...)...)
}

// runStrata calls strata in dir and returns its output and exit code.
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

// environment is that of a user without any kubeconfig, in a network whose proxy is down. Servers
// live for seconds: with few garbage collections, a start takes a quarter less processor time.
func environment(dir string) []string {
	const proxy = "http://127.0.0.1:1"
	return []string{"HOME=" + dir, "PATH=" + os.Getenv("PATH"), "TMPDIR=" + os.TempDir(), "HTTP_PROXY=" + proxy, "HTTPS_PROXY=" + proxy, "GOGC=300"}
}

// terminate is the signal of a supervisor, interrupt that of Ctrl-C.
const (
	terminate = syscall.SIGTERM
	interrupt = syscall.SIGINT
)
