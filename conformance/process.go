package main

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
	"time"
)

// process is a child whose output goes to a file. Its methods may be called concurrently.
type process struct {
	name string
	cmd  *exec.Cmd
	log  string        // path of the file with standard output and standard error
	done chan struct{} // closed when the process has ended and all its output is written; err is set before
	err  error
}

// start starts the program at path. Its output goes to the file NAME.log in dir, and to tee unless that is nil. It is not reached by the
// terminal's Ctrl-C, and the kernel kills it when this process dies (both on Linux).
func start(dir, name string, tee io.Writer, path string, args ...string) (*process, error) {
	log, err := os.Create(filepath.Join(dir, name+".log"))
	if err != nil {
		return nil, err
	}
	p := &process{name: name, cmd: exec.Command(path, args...), log: log.Name(), done: make(chan struct{})}
	var out io.Writer = log
	if tee != nil {
		out = io.MultiWriter(log, tee)
	}
	p.cmd.Stdout, p.cmd.Stderr = out, out
	detach(p.cmd)
	started := make(chan error)
	go func() {
		defer close(p.done)
		defer log.Close()
		// The kernel ties "die with the parent" to the thread that started the child.
		runtime.LockOSThread()
		defer runtime.UnlockOSThread()
		err := p.cmd.Start()
		started <- err
		if err == nil {
			p.err = p.cmd.Wait()
		}
	}()
	if err := <-started; err != nil {
		return nil, fmt.Errorf("start %s: %w", name, err)
	}
	return p, nil
}

// stop sends a signal and returns when the process has ended, which is forced after grace. It is nothing for one that has ended.
func (p *process) stop(sig os.Signal, grace time.Duration) error {
	if err := p.cmd.Process.Signal(sig); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return fmt.Errorf("stop %s: %w", p.name, err)
	}
	select {
	case <-p.done:
		return nil
	case <-time.After(grace):
	}
	_ = p.cmd.Process.Kill() // fails only if it has ended
	<-p.done
	return fmt.Errorf("%s did not end within %v of %v and was killed; see %s", p.name, grace, sig, p.log)
}

// ended is the error of a process that was to run on.
func (p *process) ended() error {
	<-p.done
	how := "exit status 0"
	if p.err != nil {
		how = p.err.Error()
	}
	return fmt.Errorf("%s ended (%s); the end of %s:\n%s", p.name, how, p.log, p.tail())
}

func (p *process) output() []byte {
	data, err := os.ReadFile(p.log)
	if err != nil {
		return []byte(err.Error())
	}
	return data
}

// tail returns the last lines of the output.
func (p *process) tail() string {
	const maxLines = 15
	lines := strings.Split(string(bytes.TrimSpace(p.output())), "\n")
	return strings.Join(lines[max(0, len(lines)-maxLines):], "\n")
}

// await calls ready until it returns nil. It gives up with ctx, and when the process ends.
func (p *process) await(ctx context.Context, ready func(context.Context) error) error {
	const period = 100 * time.Millisecond
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	for tick := time.NewTicker(period); ; {
		err := ready(ctx)
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-p.done:
			return p.ended()
		case <-ctx.Done():
			return fmt.Errorf("%s is not ready: %w (%v); the end of %s:\n%s", p.name, err, context.Cause(ctx), p.log, p.tail())
		}
	}
}

// Upstream gives requests in flight 60 s; what takes longer has failed to stop.
const stopTimeout = 90 * time.Second

// startTimeout bounds the start of one process; the API server needs about 5 s on two cores.
const startTimeout = 2 * time.Minute
