package process

import (
	"bytes"
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// timeout bounds a wait that has failed.
const timeout = 50 * time.Second

const (
	exits3      = "echo first; echo last words >&2; exit 3"
	runsOn      = "exec sleep 60"
	endsAtTERM  = `trap "exit 0" TERM; echo ready; while :; do sleep 0.01; done`
	ignoresTERM = `trap "" TERM; echo ready; while :; do sleep 0.1; done`
	// The error comes first: it goes into the log directly, the other lines through a pipe.
	printsAndRuns = "echo error >&2; echo one; echo two; printf thr; printf 'ee\nfour'; exec sleep 60"
)

// start runs a shell script until the test ends.
func start(t *testing.T, script string) *Child {
	t.Helper()
	return startSpec(t, Spec{Args: []string{"-c", script}, Lines: true})
}

func startSpec(t *testing.T, spec Spec) *Child {
	t.Helper()
	spec.Name, spec.Path, spec.Log = "script", "/bin/sh", filepath.Join(t.TempDir(), "log")
	c, err := Start(spec)
	testcheck.NoError(t, err)
	t.Cleanup(c.Kill)
	return c
}

func requireEnd(t *testing.T, c *Child) {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(timeout):
		t.Fatal("the process has not ended")
	}
}

func requireLine(t *testing.T, c *Child, text string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if _, _, err := c.WaitLine(ctx, 0, text); err != nil {
		t.Fatal(err)
	}
}

func requireError(t *testing.T, err error, texts ...string) {
	t.Helper()
	if err == nil || slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(err.Error(), text) }) {
		t.Fatalf("got %v, want an error with %q", err, texts)
	}
}

func TestEnded_ProcessEnded_ReturnsStatusAndLog(t *testing.T) {
	c := start(t, exits3)
	requireEnd(t, c)
	requireError(t, c.Ended(), "exit status 3", "first", "last words")
	if code, err := c.Wait(t.Context()); code != 3 || err != nil {
		t.Errorf("exit code %d, %v, want 3", code, err)
	}
	requireError(t, c.ExitError(), "exit status 3")
}

func TestEnded_ProcessRuns_ReturnsNil(t *testing.T) {
	testcheck.NoError(t, start(t, runsOn).Ended())
}

func TestStart_MissingExecutable_ReturnsError(t *testing.T) {
	if _, err := Start(Spec{Name: "nothing", Path: "/nonexistent", Log: filepath.Join(t.TempDir(), "log")}); err == nil {
		t.Fatal("started")
	}
}

func TestStart_DirEnvStdinTee_AreUsed(t *testing.T) {
	dir := t.TempDir()
	in, out, err := os.Pipe()
	testcheck.NoError(t, err)
	defer in.Close()
	if _, err := out.WriteString("from stdin\n"); err != nil {
		t.Fatal(err)
	}
	out.Close()
	var tee bytes.Buffer
	c := startSpec(t, Spec{
		Args: []string{"-c", `pwd -P; echo "$A-$HOME"; cat; echo error >&2`}, Dir: dir, Env: []string{"A=b"}, Stdin: in, Tee: &tee,
	})
	requireEnd(t, c)
	if dir, err = filepath.EvalSymlinks(dir); err != nil {
		t.Fatal(err)
	}
	log, err := c.Log()
	if want := dir + "\nb-\nfrom stdin\nerror\n"; err != nil || log != want || tee.String() != want {
		t.Errorf("the log is %q (%v), the copy %q, want %q", log, err, tee.String(), want)
	}
}

func TestStop_ProcessEndsAtSignal_Twice_ReturnsNil(t *testing.T) {
	c := start(t, endsAtTERM)
	requireLine(t, c, "ready")
	for range 2 { // the second time there is nothing to stop
		if err := c.Stop(syscall.SIGTERM, time.Minute); err != nil {
			t.Error(err)
		}
	}
	requireEnd(t, c)
	if err := c.ExitError(); err != nil {
		t.Errorf("it ended with %v", err)
	}
}

func TestStop_ProcessIgnoresSignal_KillsAndReturnsError(t *testing.T) {
	c := start(t, ignoresTERM)
	requireLine(t, c, "ready") // before that it would end at the signal
	requireError(t, c.Stop(syscall.SIGTERM, 10*time.Millisecond), "was killed")
	requireError(t, c.Ended(), "signal: killed")
	if err := c.Stop(syscall.SIGTERM, time.Minute); err != nil { // again, and at once
		t.Error(err)
	}
	if err := c.Signal(syscall.SIGTERM); !errors.Is(err, os.ErrProcessDone) {
		t.Errorf("a signal to an ended process returns %v", err)
	}
}

func TestWaitLine_LinesInParts_AreNumbered(t *testing.T) {
	c := start(t, printsAndRuns)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	for after, want := range []struct {
		line   string
		number int
	}{{"one", 1}, {"two", 2}, {"three", 3}} {
		if line, number, err := c.WaitLine(ctx, after, ""); line != want.line || number != want.number || err != nil {
			t.Errorf("after %d: line %d is %q, %v, want %+v", after, number, line, err, want)
		}
	}
	if _, number, err := c.WaitLine(ctx, 0, "hree"); number != 3 || err != nil {
		t.Errorf("line %d, %v, want 3", number, err)
	}
	ctx, cancel = context.WithTimeoutCause(ctx, 10*time.Millisecond, errors.New("too late"))
	defer cancel()
	_, _, err := c.WaitLine(ctx, 3, "") // the fourth has no end yet
	requireError(t, err, "too late", "three\nfour")
	c.Kill()
	if want := []string{"one", "two", "three", "four"}; !slices.Equal(c.Lines(), want) {
		t.Errorf("lines are %q, want %q", c.Lines(), want)
	}
}

func TestOut_Writer_ReceivesOutputInPlaceOfLog(t *testing.T) {
	var out bytes.Buffer
	log := filepath.Join(t.TempDir(), "log")
	testcheck.NoError(t, os.WriteFile(log, []byte("earlier"), 0o600))
	c, err := Start(Spec{Name: "script", Path: "/bin/sh", Args: []string{"-c", exits3}, Log: log, Out: &out})
	testcheck.NoError(t, err)
	requireEnd(t, c)
	if got := out.String(); got != "first\nlast words\n" {
		t.Errorf("the writer received %q", got)
	}
	if got, err := c.Log(); err != nil || got != "earlier" {
		t.Errorf("the log is %q, %v, want unchanged", got, err)
	}
}

func TestWaitLine_ProcessEnds_ReturnsStatusAndLog(t *testing.T) {
	_, _, err := start(t, exits3).WaitLine(t.Context(), 0, "ready")
	requireError(t, err, `"ready"`, "exit status 3", "last words")
}

func TestAwait_ProcessBecomesReady_ReturnsNil(t *testing.T) {
	c := start(t, endsAtTERM)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	err := c.Await(ctx, time.Millisecond, func(context.Context) error {
		if log, err := c.Log(); err != nil || !strings.Contains(log, "ready") {
			return errors.Join(errors.New("not yet"), err)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

func TestAwait_ProcessEnds_CancelsReadyAndReturnsStatusAndLog(t *testing.T) {
	err := start(t, exits3).Await(t.Context(), time.Millisecond, func(ctx context.Context) error {
		<-ctx.Done()
		return ctx.Err()
	})
	requireError(t, err, "exit status 3", "last words")
}

func TestAwait_ContextDone_ReturnsCauseAndLastError(t *testing.T) {
	ctx, cancel := context.WithCancelCause(t.Context())
	attempts := 0
	err := start(t, runsOn).Await(ctx, time.Millisecond, func(ctx context.Context) error {
		if attempts++; attempts < 3 {
			return errors.New("not yet")
		}
		cancel(errors.New("interrupted"))
		return ctx.Err()
	})
	requireError(t, err, "interrupted", "not yet")
}
