package harness

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// stopTimeout bounds a stop that has failed: upstream gives requests in flight 60 s.
const stopTimeout = 90 * time.Second

// Process is a child process of an environment. Its methods may be called concurrently.
type Process struct {
	*process.Child
	logs   []string    // paths of its output, and of the log that `strata up` writes beside it
	anyEnd atomic.Bool // Stop accepts any exit code: a test has read it, or any is valid
}

// Wait returns the exit code when the process has exited by itself. Stop then accepts any code.
func (p *Process) Wait(ctx context.Context) (code int, err error) {
	code, err = p.Child.Wait(ctx)
	if err == nil {
		p.anyEnd.Store(true)
	}
	return code, err
}

// Stop sends SIGTERM and returns when the process has exited, with an error unless it exited within
// 90 s with exit code 0. It may be called again.
func (p *Process) Stop() error {
	if err := p.Child.Stop(syscall.SIGTERM, stopTimeout); err != nil {
		p.anyEnd.Store(true) // reported
		return err
	}
	if p.ExitError() != nil && !p.anyEnd.Load() {
		return fmt.Errorf("stop: %w", p.Ended())
	}
	return nil
}

// Kill sends SIGKILL to a process without state, such as a client. It returns when the process has
// exited.
func (p *Process) Kill() {
	p.Child.Kill()
	p.anyEnd.Store(true)
}

// stopped returns whether every thread of the process is stopped by a signal. The signal takes
// effect on each when it is scheduled, so on a busy machine some still run after it was sent.
func (p *Process) stopped() (bool, error) {
	threads, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", p.PID()))
	for _, file := range threads {
		data, readErr := os.ReadFile(file)
		if readErr != nil {
			return false, readErr
		}
		// The state follows the name in parentheses, which may itself contain parentheses.
		if i := bytes.LastIndexByte(data, ')'); !bytes.HasPrefix(data[i+1:], []byte(" T")) {
			return false, fmt.Errorf("thread not stopped: %s", data)
		}
	}
	return err == nil, err
}

// isEtcd is 1 for an etcd, otherwise 0.
func (p *Process) isEtcd() int {
	if strings.HasSuffix(p.Name(), "etcd") {
		return 1
	}
	return 0
}

// Output returns everything that the process has printed and logged.
func (p *Process) Output() string {
	log, err := p.Log()
	if err != nil {
		return err.Error()
	}
	return log
}

// sizes returns the sizes of the logs so far.
func (p *Process) sizes() []int64 {
	sizes := make([]int64, len(p.logs))
	for i, path := range p.logs {
		if info, err := os.Stat(path); err == nil {
			sizes[i] = info.Size()
		}
	}
	return sizes
}

// ends returns the ends of the logs, without what they had when their sizes were from; nil is none.
func (p *Process) ends(from []int64) (text string) {
	for i, path := range p.logs {
		var first int64
		if from != nil {
			first = from[i]
		}
		end := cmp.Or(process.TailFrom(path, first), "(no lines)")
		text += fmt.Sprintf("--- end of %s of %s ---\n%s\n", filepath.Base(path), p.Name(), end)
	}
	return text
}

// Result is the output and the exit code of a command.
type Result struct {
	Stdout, Stderr string
	Code           int
}

// Run runs the strata command and waits for its exit.
func (e *Env) Run(ctx context.Context, stdin string, args ...string) (Result, error) {
	path, err := Binary()
	if err != nil {
		return Result{}, err
	}
	var stdout, stderr bytes.Buffer
	cmd := exec.CommandContext(ctx, path, args...)
	cmd.Dir = e.dir
	cmd.Env = e.environ()
	cmd.Stdin = strings.NewReader(stdin)
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	err = cmd.Run()
	result := Result{Stdout: stdout.String(), Stderr: stderr.String(), Code: cmd.ProcessState.ExitCode()}
	var exit *exec.ExitError
	if errors.As(err, &exit) && ctx.Err() == nil {
		err = nil // Result has the exit code
	}
	if err != nil {
		return result, fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(path), strings.Join(args, " "), err, result.Stdout, result.Stderr)
	}
	return result, nil
}
