// Package process starts the servers that a benchmark measures, stops them, and reads what they cost the machine.
package process

import (
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
	"syscall"
	"time"

	"github.com/prometheus/procfs"
)

// Spec says what to start. All fields but Env and Stdout are required.
type Spec struct {
	Name   string    // what error messages call it
	Path   string    // the executable
	Args   []string  // without the executable's name
	Env    []string  // added to this process's environment
	Log    string    // file that receives standard error, and standard output if Stdout is nil
	Stdout io.Writer // receives standard output
}

// Child is a process that this one started. It does not outlive this one: the kernel kills it when this process dies, however it dies
// (on Linux). It has a process group of its own, so that a Ctrl-C reaches this process alone, which then stops its children in order.
// Its methods may be called concurrently.
type Child struct {
	name string
	log  string
	cmd  *exec.Cmd
	done chan struct{} // closed when the process has ended; err is set before
	err  error
}

// Start starts a process. The caller must Stop it.
func Start(spec Spec) (*Child, error) {
	logFile, err := os.Create(spec.Log)
	if err != nil {
		return nil, fmt.Errorf("log of %s: %w", spec.Name, err)
	}
	defer logFile.Close() // the child has its own descriptor
	cmd := exec.Command(spec.Path, spec.Args...)
	cmd.Env = append(os.Environ(), spec.Env...)
	cmd.Stdout, cmd.Stderr = logFile, logFile
	if spec.Stdout != nil {
		cmd.Stdout = spec.Stdout
	}
	ownGroupAndDieWithParent(cmd)

	c := &Child{name: spec.Name, log: spec.Log, cmd: cmd, done: make(chan struct{})}
	started := make(chan error)
	go func() {
		// The kernel ties "die with the parent" to the thread that started the child, so that thread must last as long as the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := cmd.Start()
		started <- err
		if err == nil {
			c.err = cmd.Wait()
			close(c.done)
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", spec.Name, err)
	}
	return c, nil
}

// PID is the process id.
func (c *Child) PID() int { return c.cmd.Process.Pid }

// Done is closed when the process has ended.
func (c *Child) Done() <-chan struct{} { return c.done }

// Ended returns nil while the process runs, and afterwards how it ended with the last lines of its log.
func (c *Child) Ended() error {
	select {
	case <-c.done:
	default:
		return nil
	}
	reason := "exit status 0"
	if c.err != nil {
		reason = c.err.Error()
	}
	return fmt.Errorf("%s ended (%s); %s ends with:\n%s", c.name, reason, c.log, tail(c.log, 5))
}

// Stop asks the process to end (SIGTERM), kills it if it has not after grace, and returns when it is gone. It may be called again.
func (c *Child) Stop(grace time.Duration) {
	// Process.Signal knows whether the process was waited for, so a reused process id is never signalled.
	if err := c.cmd.Process.Signal(syscall.SIGTERM); err != nil && !errors.Is(err, os.ErrProcessDone) {
		c.cmd.Process.Kill()
	}
	timer := time.NewTimer(grace)
	defer timer.Stop()
	select {
	case <-c.done:
	case <-timer.C:
		c.cmd.Process.Kill()
		<-c.done
	}
}

// Kill ends the process without asking and returns when it is gone.
func (c *Child) Kill() {
	c.cmd.Process.Kill() // fails only if it has ended
	<-c.done
}

// Log returns what the process has logged so far.
func (c *Child) Log() (string, error) {
	data, err := os.ReadFile(c.log)
	if err != nil {
		return "", fmt.Errorf("log of %s: %w", c.name, err)
	}
	return string(data), nil
}

// CPU is the processor time that the process has used in user and kernel mode.
func (c *Child) CPU() (time.Duration, error) {
	cpu, err := cpuTime(c.PID())
	if err != nil {
		return 0, fmt.Errorf("CPU time of %s: %w", c.name, err)
	}
	return cpu, nil
}

// Memory is resident memory in bytes: now, and at its highest since the start or the last ResetPeak.
type Memory struct{ Resident, Peak uint64 }

// Memory reads the memory of the process.
func (c *Child) Memory() (Memory, error) {
	p, err := procfs.NewProc(c.PID())
	if err != nil {
		return Memory{}, fmt.Errorf("memory of %s: %w", c.name, err)
	}
	status, err := p.NewStatus()
	if err != nil {
		return Memory{}, fmt.Errorf("memory of %s: %w", c.name, err)
	}
	return Memory{Resident: status.VmRSS, Peak: status.VmHWM}, nil
}

// ResetPeak makes Memory's Peak start again from what is resident now.
func (c *Child) ResetPeak() error {
	// "5" resets the peak resident set size: proc_pid_clear_refs(5).
	err := os.WriteFile(filepath.Join("/proc", fmt.Sprint(c.PID()), "clear_refs"), []byte("5"), 0)
	if err != nil {
		return fmt.Errorf("reset the peak memory of %s: %w", c.name, err)
	}
	return nil
}

// LimitMemory kills the process when its resident memory exceeds limitBytes, and returns when the process has ended or ctx is done.
// It looks every 50 ms: a process that grows by 2 GB/s is caught 100 MB too late.
func (c *Child) LimitMemory(ctx context.Context, limitBytes uint64) {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.done:
			return
		case <-ticker.C:
		}
		if m, err := c.Memory(); err == nil && m.Resident > limitBytes {
			c.cmd.Process.Kill()
			return
		}
	}
}

// WaitQuiet returns when all children together use less than a tenth of a core, or when limit has passed or ctx is done: what ran before
// then no longer disturbs what is measured next. It takes a quarter of a second at least, or limit if that is less.
func WaitQuiet(ctx context.Context, limit time.Duration, children ...*Child) error {
	const window = 250 * time.Millisecond
	deadline := time.Now().Add(limit)
	before, err := totalCPU(children)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(window, limit)):
		}
		now, err := totalCPU(children)
		if err != nil {
			return err
		}
		if now-before < window/10 || time.Now().After(deadline) {
			return nil
		}
		before = now
	}
}

func totalCPU(children []*Child) (time.Duration, error) {
	var total time.Duration
	for _, c := range children {
		cpu, err := c.CPU()
		if err != nil {
			return 0, errors.Join(err, c.Ended())
		}
		total += cpu
	}
	return total, nil
}

// tail returns the last lines of a file, or why it cannot.
func tail(path string, lines int) string {
	data, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	data = bytes.TrimRight(data, "\n")
	all := strings.Split(string(data), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}
