// Package process runs programs, such as servers, as child processes of a test, a benchmark or
// `strata up --ha`: it starts a program, waits until it is ready, reads its output and its cost in
// CPU time and memory, and stops it by its own process id.
//
// On Linux the kernel kills a child when its parent dies, for any reason. A child also has its own
// process group there: a Ctrl-C reaches the parent alone, which then stops its children in order.
// On other systems a child may outlive its parent, and CPU, Memory, ResetPeak, LimitMemory and
// Spec.Prepare do not work.
package process

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"time"
)

// Spec describes a child process. Name, Path and Log are required.
type Spec struct {
	Name  string   // of the process, in errors
	Path  string   // of the executable, or its name in $PATH
	Args  []string // without the executable's name
	Dir   string   // working directory; "" is the parent's
	Env   []string // the whole environment; nil is the parent's
	Stdin *os.File // standard input; nil is an empty one
	// path of a file, created or truncated, that receives standard output and standard error
	Log string
	// writes the file Log in place of this package, unless nil; with Lines, concurrently
	Out   io.Writer
	Tee   io.Writer // receives a copy of both, unless nil; with Lines, concurrently
	Lines bool      // keep the lines of standard output in memory, for WaitLine and Lines

	// Prepare, unless nil, is called before the first instruction of the program. If it returns an
	// error the process is killed, and Start returns that error.
	Prepare func(pid int) error
}

// Child is a process that Start started. Its methods may be called concurrently.
type Child struct {
	name string
	log  string
	cmd  *exec.Cmd
	out  lines
	// closed when the process has ended and its output is complete; err is set before
	done chan struct{}
	err  error
}

// Start starts a process and does not wait until it is ready. The caller must Stop or Kill it, or
// wait for Done. Until then it costs an OS thread and, with Out, Tee or Lines, goroutines that copy
// its output; otherwise the process writes to the log by itself. Errors: the log cannot be created,
// the program cannot be started, or Prepare failed.
func Start(spec Spec) (*Child, error) {
	output, log := spec.Out, io.Closer(io.NopCloser(nil))
	if output == nil {
		file, err := os.Create(spec.Log)
		if err != nil {
			return nil, fmt.Errorf("log of %s: %w", spec.Name, err)
		}
		output, log = file, file
	}
	c := &Child{name: spec.Name, log: spec.Log, cmd: exec.Command(spec.Path, spec.Args...), done: make(chan struct{})}
	c.out.changed = make(chan struct{})
	c.cmd.Dir, c.cmd.Env = spec.Dir, spec.Env
	if spec.Stdin != nil { // a nil *os.File is no nil io.Reader
		c.cmd.Stdin = spec.Stdin
	}
	if spec.Tee != nil {
		output = io.MultiWriter(output, spec.Tee)
	}
	c.cmd.Stdout, c.cmd.Stderr = output, output
	if spec.Lines {
		c.cmd.Stdout = io.MultiWriter(output, &c.out)
	}
	tieToParent(c.cmd)

	started := make(chan error)
	go func() {
		defer close(c.done)
		defer log.Close()
		// The kernel ties a child to the thread that started it, so the thread must last as long as
		// the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := startPrepared(c.cmd, spec.Prepare)
		started <- err
		if err == nil {
			c.err = c.cmd.Wait()
			c.out.end()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	return c, nil
}

// Name returns the name in the Spec.
func (c *Child) Name() string { return c.name }

// PID returns the process id. Another process may have it once this one has ended.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done is closed when the process has ended and its output is complete.
func (c *Child) Done() <-chan struct{} { return c.done }

// Wait waits until the process has ended, or ctx is done, and returns the exit code: -1 after a
// signal. A code other than 0 is no error; that ctx is done is one.
func (c *Child) Wait(ctx context.Context) (code int, err error) {
	select {
	case <-c.done:
		return c.cmd.ProcessState.ExitCode(), nil
	case <-ctx.Done():
		return 0, fmt.Errorf("%s still runs: %w", c.name, context.Cause(ctx))
	}
}

// ExitError waits for the end of the process and returns nil if its exit code is 0, otherwise an
// *exec.ExitError.
func (c *Child) ExitError() error {
	<-c.done
	return c.err
}

// Ended returns nil while the process runs, afterwards an error with its exit status and Tail, also
// for exit code 0.
func (c *Child) Ended() error {
	select {
	case <-c.done:
	default:
		return nil
	}
	status := c.err
	if status == nil {
		status = errors.New("exit status 0")
	}
	return fmt.Errorf("%s ended (%w); %s", c.name, status, c.logEnd())
}

// Signal sends a signal. It returns os.ErrProcessDone once the process has ended: another process
// with the same id receives no signal.
func (c *Child) Signal(sig os.Signal) error {
	if err := c.cmd.Process.Signal(sig); err != nil {
		return fmt.Errorf("send %v to %s: %w", sig, c.name, err)
	}
	return nil
}

// Stop sends sig and returns when the process has ended. If the signal cannot be sent, or the
// process still runs after grace, it kills the process and returns an error. The exit code is no
// error, and neither is a process that has ended before.
func (c *Child) Stop(sig os.Signal, grace time.Duration) error {
	if err := c.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		c.Kill()
		return err
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-c.done:
		return nil
	case <-timer.C:
		c.Kill()
		return fmt.Errorf("%s did not end within %v of %v and was killed; %s", c.name, grace, sig, c.logEnd())
	}
}

// Kill sends SIGKILL and returns when the process has ended.
func (c *Child) Kill() {
	_ = c.cmd.Process.Kill() // fails only if it has ended
	<-c.done
}

// Await calls ready until it returns nil: at once, and again a pause after each error. Errors:
// Ended if the process ends, the cause of ctx and the last error of ready if ctx is done. Both also
// cancel the context of ready.
func (c *Child) Await(ctx context.Context, pause time.Duration, ready func(context.Context) error) error {
	attempt, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-c.done:
			cancel()
		case <-attempt.Done():
		}
	}()
	var last error
	for {
		err := ready(attempt)
		if err == nil {
			return nil
		}
		if last == nil || attempt.Err() == nil {
			// keeps the last error from before the context was cancelled
			last = err
		}
		select {
		case <-time.After(pause):
		case <-c.done:
			return c.Ended()
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w (%w); %s", c.name, context.Cause(ctx), last, c.logEnd())
		}
	}
}

// WaitLine waits for a line of standard output that contains text, after the first `after` lines,
// and returns it without its line feed, and its number, counted from 1. Errors: Ended if the
// process ends without such a line, the cause of ctx if ctx is done. The Spec must have Lines.
func (c *Child) WaitLine(ctx context.Context, after int, text string) (line string, number int, err error) {
	for {
		ended := c.Ended() // before the lines are read, which are then all
		lines, changed := c.out.get()
		for ; after < len(lines); after++ {
			if strings.Contains(lines[after], text) {
				return lines[after], after + 1, nil
			}
		}
		if ended != nil {
			return "", 0, fmt.Errorf("no line of %s contains %q: %w", c.name, text, ended)
		}
		select {
		case <-changed:
		case <-c.done:
		case <-ctx.Done():
			return "", 0, fmt.Errorf("%s did not print %q: %w; %s", c.name, text, context.Cause(ctx), c.logEnd())
		}
	}
}

// Lines returns the lines of standard output so far. The caller must not change them. The Spec must
// have Lines.
func (c *Child) Lines() []string {
	lines, _ := c.out.get()
	return lines
}

// Log returns the output so far.
func (c *Child) Log() (string, error) {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return "", fmt.Errorf("log of %s: %w", c.name, err)
	}
	return string(data), nil
}

// Tail returns the last 25 lines of Log, or its error.
func (c *Child) Tail() string { return Tail(c.log) }

func (c *Child) logEnd() string { return fmt.Sprintf("the end of %s:\n%s", c.log, c.Tail()) }

// Tail returns the last 25 lines of a file, or the error of reading it.
func Tail(path string) string { return TailFrom(path, 0) }

// TailFrom is Tail without the first bytes of the file. A shorter file is a new one, of a rotation.
func TailFrom(path string, from int64) string {
	const maxLines = 25
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	if from <= int64(len(data)) {
		data = data[from:]
	}
	lines := strings.Split(string(bytes.TrimSpace(data)), "\n")
	return strings.Join(lines[max(0, len(lines)-maxLines):], "\n")
}

// lines is a writer that splits its input into lines of any length.
type lines struct {
	mu      sync.Mutex    // leaf; guards the fields below
	all     []string      // complete lines, without line feeds
	rest    []byte        // the beginning of the next line
	changed chan struct{} // closed and replaced when all grows
}

func (l *lines) Write(data []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.rest = append(l.rest, data...)
	for {
		line, rest, ok := bytes.Cut(l.rest, []byte("\n"))
		if !ok {
			return len(data), nil
		}
		l.all, l.rest = append(l.all, string(line)), rest
		close(l.changed)
		l.changed = make(chan struct{})
	}
}

// end completes a last line without a line feed. It is called after the last Write.
func (l *lines) end() {
	if len(l.rest) > 0 {
		_, _ = l.Write([]byte("\n"))
	}
}

// get returns the lines so far and a channel that is closed when there are more.
func (l *lines) get() (all []string, changed <-chan struct{}) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.all, l.changed
}
