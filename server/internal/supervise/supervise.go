// Package supervise runs programs as child processes and starts each again when it ends, after a
// pause that grows while it fails.
//
//	start ─▶ started ─▶ ready ─▶ (the process ends) ─▶ ended ─▶ pause ─▶ start
//
// The output of all processes of one program goes to one file, which is rotated. Another file has
// the process id while the process runs. On Linux the kernel kills the processes when this one
// dies.
package supervise

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"gopkg.in/natefinch/lumberjack.v2"

	"github.com/stratakube/strata/internal/process"
)

const (
	// A program starts again after firstPause, which is long enough to see its absence and shorter
	// than clients' patience. The pause doubles up to lastPause while processes end before they
	// have been ready for steadyAfter. Guesses.
	firstPause  = time.Second
	lastPause   = 30 * time.Second
	steadyAfter = 10 * time.Second

	// readyPause is the pause between two calls of Spec.Ready.
	readyPause = 100 * time.Millisecond

	// The log is rotated at logFileMB, and logBackups rotated files remain.
	logFileMB  = 20
	logBackups = 1
)

// Spec describes a program. Name, Path and Dir are required.
type Spec struct {
	Name string   // of the program, in events, errors and file names
	Path string   // of the executable
	Args []string // without the executable's name
	Dir  string   // directory of the files Name.log and Name.pid

	// A process is ready when it has printed a line to standard output that contains ReadyLine, and
	// Ready has then returned nil. Ready is called repeatedly. Both are optional.
	ReadyLine string
	Ready     func(context.Context) error

	// Grace is how long Stop waits between SIGTERM and SIGKILL.
	Grace time.Duration
}

// State is the state of a program.
type State int

// The states, in the order of a life.
const (
	Started State = iota + 1
	Ready
	Ended
)

// Event is a change of the state of a program.
type Event struct {
	Name  string
	State State
	PID   int           // of the process that the event concerns
	Life  int           // the number of its start, from 1
	Err   error         // Ended: the exit status, or the error of a start
	Pause time.Duration // Ended: until the next start
}

// Program is a supervised program. Its methods may be called concurrently.
type Program struct {
	spec   Spec
	notify func(Event)
	log    *lumberjack.Logger
	cancel context.CancelFunc
	done   chan struct{} // closed when no process runs and none will start
	first  chan struct{} // closed when the first process is ready, or the program is done
	err    error         // of the first process, or of Stop; valid when done is closed

	mu struct { // leaf
		sync.Mutex
		child *process.Child
	}
}

// Start starts a program and supervises it until Stop. notify is called for each event of the
// program, sequentially, by another goroutine. If the first process ends before it is ready, the
// program is not started again, and AwaitReady returns the reason.
func Start(spec Spec, notify func(Event)) *Program {
	ctx, cancel := context.WithCancel(context.Background())
	p := &Program{
		spec: spec, notify: notify, cancel: cancel, done: make(chan struct{}), first: make(chan struct{}),
		log: &lumberjack.Logger{Filename: LogPath(spec.Dir, spec.Name), MaxSize: logFileMB, MaxBackups: logBackups},
	}
	go func() {
		defer close(p.done)
		defer p.log.Close()
		p.err = p.run(ctx)
	}()
	return p
}

// LogPath returns the path of the log of the program called name.
func LogPath(dir, name string) string { return filepath.Join(dir, name+".log") }

// PIDPath returns the path of the file that has the process id of the program called name while it
// runs.
func PIDPath(dir, name string) string { return filepath.Join(dir, name+".pid") }

// PID returns the id of the newest process, 0 if none was started.
func (p *Program) PID() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.mu.child == nil {
		return 0
	}
	return p.mu.child.PID()
}

// Name returns the name in the Spec.
func (p *Program) Name() string { return p.spec.Name }

// AwaitReady waits until the first process is ready. Errors: the process has ended, with the last
// line of its log; the cause of ctx.
func (p *Program) AwaitReady(ctx context.Context) error {
	select {
	case <-p.first:
		return nil
	case <-p.done:
		if p.err == nil {
			return fmt.Errorf("%s was stopped", p.spec.Name)
		}
		return p.err
	case <-ctx.Done():
		return fmt.Errorf("%s is not ready: %w", p.spec.Name, context.Cause(ctx))
	}
}

// Stop ends supervision, sends SIGTERM and returns when the process has ended, with an error if it
// had to be killed after the grace period, or if the program has failed at its first start.
func (p *Program) Stop() error {
	p.cancel()
	<-p.done
	return p.err
}

// run starts processes until ctx ends.
func (p *Program) run(ctx context.Context) error {
	pause := time.Duration(0)
	for life := 1; ; life++ {
		steady, err := p.live(ctx, life)
		if ctx.Err() != nil {
			return err
		}
		if life == 1 && !p.wasReady() {
			p.notify(Event{Name: p.spec.Name, State: Ended, PID: p.PID(), Life: life, Err: err})
			return fmt.Errorf("%s: %w%s", p.spec.Name, err, lastMessage(p.log.Filename))
		}
		pause = nextPause(pause, steady)
		p.notify(Event{Name: p.spec.Name, State: Ended, PID: p.PID(), Life: life, Err: err, Pause: pause})
		select {
		case <-time.After(pause):
		case <-ctx.Done():
			return nil
		}
	}
}

func (p *Program) wasReady() bool {
	select {
	case <-p.first:
		return true
	default:
		return false
	}
}

// nextPause returns the pause before the next start, given the one before the last start and
// whether that process was ready for steadyAfter.
func nextPause(last time.Duration, steady bool) time.Duration {
	if steady || last == 0 {
		return firstPause
	}
	return min(2*last, lastPause)
}

// live runs one process until it ends, or stops it when ctx ends. The error is the exit status;
// after a stop, that it had to be killed. steady reports whether the process was ready for
// steadyAfter.
func (p *Program) live(ctx context.Context, life int) (steady bool, err error) {
	// an unwritable log fails the process's writes, too
	fmt.Fprintf(p.log, "--- %s, start %d, %s\n", p.spec.Name, life, time.Now().Format(time.RFC3339))
	child, err := process.Start(process.Spec{Name: p.spec.Name, Path: p.spec.Path, Args: p.spec.Args, Log: p.log.Filename, Out: p.log,
		Lines: p.spec.ReadyLine != ""})
	if err != nil {
		return false, err
	}
	p.mu.Lock()
	p.mu.child = child
	p.mu.Unlock()
	pidFile := PIDPath(p.spec.Dir, p.spec.Name)
	if err := os.WriteFile(pidFile, []byte(strconv.Itoa(child.PID())+"\n"), 0o600); err != nil {
		child.Kill()
		return false, err
	}
	defer os.Remove(pidFile)
	p.notify(Event{Name: p.spec.Name, State: Started, PID: child.PID(), Life: life})

	lifetime, cancel := context.WithCancel(ctx)
	readyAt := make(chan time.Time, 1)
	var waiting sync.WaitGroup
	waiting.Go(func() { p.awaitReady(lifetime, child, life, readyAt) })
	defer waiting.Wait()
	defer cancel()
	select {
	case <-child.Done():
		cancel()
		waiting.Wait()
		select {
		case at := <-readyAt:
			steady = time.Since(at) >= steadyAfter
		default:
		}
		return steady, status(child)
	case <-ctx.Done():
		return false, child.Stop(syscall.SIGTERM, p.spec.Grace)
	}
}

// awaitReady reports when a process is ready.
func (p *Program) awaitReady(ctx context.Context, child *process.Child, life int, readyAt chan<- time.Time) {
	if p.spec.ReadyLine != "" {
		if _, _, err := child.WaitLine(ctx, 0, p.spec.ReadyLine); err != nil {
			return
		}
	}
	if p.spec.Ready != nil && child.Await(ctx, readyPause, p.spec.Ready) != nil {
		return
	}
	readyAt <- time.Now()
	if life == 1 {
		close(p.first)
	}
	p.notify(Event{Name: p.spec.Name, State: Ready, PID: child.PID(), Life: life})
}

// errExited is the status of a process that ended without a failure.
var errExited = errors.New("exit status 0")

func status(child *process.Child) error {
	if err := child.ExitError(); err != nil {
		return err
	}
	return errExited
}

// lastMessage returns the last line of a log, for an error.
func lastMessage(path string) string {
	lines := strings.Split(process.Tail(path), "\n")
	return fmt.Sprintf(": %s; see %s", strings.TrimSpace(lines[len(lines)-1]), path)
}

// RemoveStale removes the file with the process id that a killed supervisor has left.
func RemoveStale(dir, name string) error {
	if err := os.Remove(PIDPath(dir, name)); err != nil && !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	return nil
}
