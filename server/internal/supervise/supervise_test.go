package supervise

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// timeout bounds a wait that has failed.
const timeout = 5 * time.Minute

const (
	serves      = `echo ready; exec sleep 60`
	fails       = `echo no such file >&2; exit 3`
	ignoresTERM = `trap "" TERM; echo ready; while :; do sleep 0.1; done`
)

// program is a supervised shell script with its events.
type program struct {
	*Program
	dir    string
	events chan Event
}

func startScript(t *testing.T, script string, change func(*Spec)) *program {
	t.Helper()
	p := &program{dir: t.TempDir(), events: make(chan Event, 100)}
	spec := Spec{Name: "script", Path: "/bin/sh", Args: []string{"-c", script}, Dir: p.dir, ReadyLine: "ready", Grace: timeout}
	if change != nil {
		change(&spec)
	}
	p.Program = Start(spec, func(e Event) { p.events <- e })
	t.Cleanup(func() { _ = p.Stop() })
	return p
}

func (p *program) awaitReady(t *testing.T) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	return p.AwaitReady(ctx)
}

// next returns the next event.
func (p *program) next(t *testing.T) Event {
	t.Helper()
	select {
	case e := <-p.events:
		return e
	case <-time.After(timeout):
		t.Fatal("no event")
		return Event{}
	}
}

func (p *program) requireState(t *testing.T, state State, life int) Event {
	t.Helper()
	e := p.next(t)
	if e.State != state || e.Life != life {
		t.Fatalf("event %+v, want state %d of start %d", e, state, life)
	}
	return e
}

func TestProgram_KilledProcess_StartsAgain(t *testing.T) {
	p := startScript(t, serves, nil)
	testcheck.NoError(t, p.awaitReady(t))
	first := p.requireState(t, Started, 1).PID
	p.requireState(t, Ready, 1)
	data, err := os.ReadFile(PIDPath(p.dir, "script"))
	if err != nil || strings.TrimSpace(string(data)) != strconv.Itoa(first) || p.PID() != first {
		t.Fatalf("the file has the process id %q, %v, want %d", data, err, first)
	}
	testcheck.NoError(t, syscall.Kill(first, syscall.SIGKILL))
	if e := p.requireState(t, Ended, 1); e.PID != first || e.Pause != firstPause || e.Err == nil || e.Err.Error() != "signal: killed" {
		t.Errorf("end of the first process: %+v", e)
	}
	if second := p.requireState(t, Started, 2).PID; second == first || p.PID() != second {
		t.Errorf("the second process is %d, the newest %d, the first was %d", second, p.PID(), first)
	}
	p.requireState(t, Ready, 2)
	if err := p.Stop(); err != nil {
		t.Errorf("stop: %v", err)
	}
	if _, err := os.Stat(PIDPath(p.dir, "script")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file with the process id remains: %v", err)
	}
	log, err := os.ReadFile(LogPath(p.dir, "script"))
	if err != nil || strings.Count(string(log), "ready\n") != 2 {
		t.Errorf("the log of both processes is %q, %v", log, err)
	}
}

func TestProgram_FirstProcessFails_ReturnsLastMessage(t *testing.T) {
	p := startScript(t, fails, nil)
	err := p.awaitReady(t)
	if err == nil || !strings.HasPrefix(err.Error(), "script: exit status 3: no such file; see "+LogPath(p.dir, "script")) {
		t.Errorf("error %v", err)
	}
	p.requireState(t, Started, 1)
	if e := p.requireState(t, Ended, 1); e.Pause != 0 {
		t.Errorf("starts again after %v", e.Pause)
	}
}

func TestProgram_NoSuchExecutable_ReturnsError(t *testing.T) {
	p := startScript(t, serves, func(s *Spec) { s.Path = "/nonexistent" })
	if err := p.awaitReady(t); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("error %v", err)
	}
}

func TestProgram_ReadyFails_IsRetried(t *testing.T) {
	calls := 0
	p := startScript(t, serves, func(s *Spec) {
		s.Ready = func(context.Context) error {
			if calls++; calls < 3 {
				return errors.New("starts")
			}
			return nil
		}
	})
	testcheck.NoError(t, p.awaitReady(t))
	if err := p.Stop(); err != nil || calls != 3 {
		t.Errorf("ready after %d calls, %v", calls, err)
	}
}

func TestProgram_StopDuringPause_StartsNoProcess(t *testing.T) {
	for range 20 { // on a busy machine the pause may be over before the stop
		began := time.Now()
		p := startScript(t, "echo ready; sleep 0.2; exit 0", nil)
		p.requireState(t, Started, 1)
		for p.next(t).State != Ended { // the process may end before it is seen as ready
		}
		err := p.Stop()
		if time.Since(began) >= firstPause {
			continue
		}
		if err != nil && !strings.Contains(err.Error(), "exit status 0") {
			t.Errorf("stop: %v", err)
		}
		select {
		case e := <-p.events:
			t.Errorf("event %+v after the stop", e)
		default:
		}
		return
	}
	t.Error("no process has ended, and was stopped, within the first pause")
}

func TestProgram_IgnoresSignal_IsKilledAfterGrace(t *testing.T) {
	p := startScript(t, ignoresTERM, func(s *Spec) { s.Grace = 200 * time.Millisecond })
	testcheck.NoError(t, p.awaitReady(t))
	if err := p.Stop(); err == nil || !strings.Contains(err.Error(), "was killed") {
		t.Errorf("stop: %v", err)
	}
}

func TestNextPause_Failures_DoubleUntilSteady(t *testing.T) {
	pause := time.Duration(0)
	for _, want := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
		if pause = nextPause(pause, false); pause != want*time.Second {
			t.Errorf("pause %v, want %v", pause, want*time.Second)
		}
	}
	if pause = nextPause(pause, true); pause != firstPause {
		t.Errorf("after a steady process: %v", pause)
	}
}

func TestRemoveStale_NoFile_Succeeds(t *testing.T) {
	dir := t.TempDir()
	testcheck.NoError(t, os.WriteFile(PIDPath(dir, "script"), []byte("1\n"), 0o600))
	for range 2 {
		if err := RemoveStale(dir, "script"); err != nil {
			t.Error(err)
		}
	}
	if _, err := os.Stat(PIDPath(dir, "script")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the file remains: %v", err)
	}
}
