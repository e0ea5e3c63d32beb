package harness

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"syscall"
	"time"
)

// stopTimeout bounds a stop that has failed: upstream gives requests in flight 60 s.
const stopTimeout = 90 * time.Second

// Process is a child process. Its methods may be called concurrently.
type Process struct {
	name string
	cmd  *exec.Cmd
	log  string        // path of the file with standard output and standard error
	done chan struct{} // closed when the process has ended; err is set before
	err  error

	mu struct {
		sync.Mutex
		waited  bool          // a test has looked at how the process ended, or any end is right
		lines   []string      // of standard output
		changed chan struct{} // closed and replaced with each line, and when there will be no more
		ended   bool
	}
}

// start starts a process; logs go to a new file in dir. The kernel kills it when this process dies (on Linux). A function
// prepare is called before it runs; see Env.StartAPIServerPrepared.
func start(dir, name, path string, env []string, prepare func(pid int) error, args ...string) (*Process, error) {
	log, err := os.CreateTemp(dir, name+"-*.log")
	if err != nil {
		return nil, err
	}
	p := &Process{
		name: name,
		cmd:  exec.Command(path, args...),
		log:  log.Name(),
		done: make(chan struct{}),
	}
	p.mu.changed = make(chan struct{})
	p.cmd.Dir = dir
	p.cmd.Env = env
	p.cmd.Stderr = log
	stdout, stdoutWriter := io.Pipe()
	p.cmd.Stdout = io.MultiWriter(log, stdoutWriter)
	dieWithParent(p.cmd)

	read := make(chan struct{})
	go func() {
		defer close(read)
		for scan := bufio.NewScanner(stdout); scan.Scan(); {
			p.addLine(scan.Text())
		}
		_, _ = io.Copy(io.Discard, stdout) // a line too long for the scanner must not block the process
	}()
	started := make(chan error)
	go func() {
		// The kernel ties "die with the parent" to the thread that started the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := startPrepared(p.cmd, prepare)
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
		}
		stdoutWriter.Close()
		log.Close()
		<-read
		p.endLines()
		close(p.done)
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// RunPrepared runs a command to its end and calls prepare before the process has run its first instruction.
func RunPrepared(cmd *exec.Cmd, prepare func(pid int) error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	dieWithParent(cmd)
	if err := startPrepared(cmd, prepare); err != nil {
		return err
	}
	return cmd.Wait()
}

func (p *Process) addLine(line string) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.lines = append(p.mu.lines, line)
	close(p.mu.changed)
	p.mu.changed = make(chan struct{})
}

func (p *Process) endLines() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.ended = true
	close(p.mu.changed)
}

// WaitLine returns the first line of standard output after the first `after` ones that contains text, and its number.
func (p *Process) WaitLine(ctx context.Context, after int, text string) (line string, number int, err error) {
	for {
		p.mu.Lock()
		lines, ended, changed := p.mu.lines, p.mu.ended, p.mu.changed
		p.mu.Unlock()
		for ; after < len(lines); after++ {
			if strings.Contains(lines[after], text) {
				return lines[after], after + 1, nil
			}
		}
		if ended {
			return "", 0, fmt.Errorf("%s ended (%v) without printing %q; its output ends with:\n%s", p.name, p.exit(), text, p.Tail())
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return "", 0, fmt.Errorf("%s has not printed %q: %w; its output ends with:\n%s", p.name, text, context.Cause(ctx), p.Tail())
		}
	}
}

// Lines returns what the process has printed to standard output so far.
func (p *Process) Lines() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.mu.lines
}

// exit says how the process ended.
func (p *Process) exit() string {
	<-p.done
	if p.err != nil {
		return p.err.Error()
	}
	return "exit status 0"
}

// isEtcd is 1 for an etcd, otherwise 0.
func (p *Process) isEtcd() int {
	if strings.HasSuffix(p.name, "etcd") {
		return 1
	}
	return 0
}

// Done is closed when the process has ended.
func (p *Process) Done() <-chan struct{} { return p.done }

// Wait returns the exit code when the process has ended by itself. A code other than 0 is then no error for Stop.
func (p *Process) Wait(ctx context.Context) (code int, err error) {
	select {
	case <-p.done:
		p.mu.Lock()
		defer p.mu.Unlock()
		p.mu.waited = true
		return p.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("%s still runs: %w", p.name, context.Cause(ctx))
	}
}

// Stop sends SIGTERM and returns when the process has ended, with an error unless it ended in time with exit code 0.
// Calling it again returns the same.
func (p *Process) Stop() error {
	if err := p.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
	case <-time.After(stopTimeout):
		p.Kill()
		return fmt.Errorf("%s did not end within %v of SIGTERM; its output ends with:\n%s", p.name, stopTimeout, p.Tail())
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.err != nil && !p.mu.waited {
		return fmt.Errorf("%s ended with %w after SIGTERM; its output ends with:\n%s", p.name, p.err, p.Tail())
	}
	return nil
}

// Kill ends a process that has nothing to finish, such as a client. It returns when the process is gone.
func (p *Process) Kill() {
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.done
	p.mu.Lock()
	defer p.mu.Unlock()
	p.mu.waited = true
}

// signal sends a signal. Once the process has ended that is an error.
func (p *Process) signal(s syscall.Signal) error {
	if err := p.cmd.Process.Signal(s); err != nil {
		return fmt.Errorf("send %v to %s: %w", s, p.name, err)
	}
	return nil
}

// Output returns everything that the process has printed and logged.
func (p *Process) Output() string {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return err.Error()
	}
	return string(data)
}

// Tail returns the last lines of Output.
func (p *Process) Tail() string {
	const maxLines = 25
	lines := strings.Split(strings.TrimSpace(p.Output()), "\n")
	return strings.Join(lines[max(0, len(lines)-maxLines):], "\n")
}

// Result is what a command that has ended left behind.
type Result struct {
	Stdout, Stderr string
	Code           int
}

// Run runs the strata command to its end.
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
		err = nil // the exit code says it
	}
	if err != nil {
		return result, fmt.Errorf("%s %s: %w\n%s%s", filepath.Base(path), strings.Join(args, " "), err, result.Stdout, result.Stderr)
	}
	return result, nil
}
