//go:build linux

package process

import (
	"bytes"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

func start(t *testing.T, script string) *Child {
	t.Helper()
	c, err := Start(Spec{Name: "script", Path: "/bin/sh", Args: []string{"-c", script}, Log: filepath.Join(t.TempDir(), "log")})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { c.Stop(0) })
	return c
}

func requireEnd(t *testing.T, c *Child) {
	t.Helper()
	select {
	case <-c.Done():
	case <-time.After(30 * time.Second):
		t.Fatal("the process has not ended")
	}
}

func TestEndedTellsStatusAndLog(t *testing.T) {
	c := start(t, "echo first; echo last words >&2; exit 3")
	requireEnd(t, c)
	err := c.Ended()
	if err == nil || !strings.Contains(err.Error(), "exit status 3") || !strings.Contains(err.Error(), "last words") {
		t.Fatalf("got %v", err)
	}
}

func TestRunningProcessHasNotEnded(t *testing.T) {
	if err := start(t, "exec sleep 60").Ended(); err != nil {
		t.Fatal(err)
	}
}

func TestStopKillsWhatIgnoresSIGTERM(t *testing.T) {
	// The shell says when it ignores the signal; before that it would die of it.
	read := make(chan struct{})
	c, err := Start(Spec{
		Name: "script", Path: "/bin/sh", Args: []string{"-c", `trap "" TERM; echo trapped; while :; do sleep 0.1; done`},
		Log: filepath.Join(t.TempDir(), "log"), Stdout: closeOnWrite{read},
	})
	if err != nil {
		t.Fatal(err)
	}
	<-read
	c.Stop(10 * time.Millisecond)
	if err := c.Ended(); err == nil || !strings.Contains(err.Error(), "killed") {
		t.Fatalf("got %v", err)
	}
	c.Stop(time.Minute) // again, and at once
}

type closeOnWrite struct{ c chan struct{} }

func (w closeOnWrite) Write(p []byte) (int, error) {
	if bytes.Contains(p, []byte("trapped")) {
		close(w.c)
	}
	return len(p), nil
}

func TestMissingExecutable(t *testing.T) {
	if _, err := Start(Spec{Name: "nothing", Path: "/nonexistent", Log: filepath.Join(t.TempDir(), "log")}); err == nil {
		t.Fatal("started")
	}
}

func TestCPUAndMemoryAreRead(t *testing.T) {
	c := start(t, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; exec sleep 60")
	deadline := time.Now().Add(30 * time.Second)
	for {
		cpu, err := c.CPU()
		if err != nil {
			t.Fatal(err)
		}
		if cpu > 0 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal("a process that counts to 300,000 uses no CPU time")
		}
		time.Sleep(10 * time.Millisecond)
	}
	m, err := c.Memory()
	if err != nil {
		t.Fatal(err)
	}
	if m.Resident == 0 || m.Peak < m.Resident {
		t.Fatalf("memory is %+v", m)
	}
}

func TestLimitMemoryKills(t *testing.T) {
	c := start(t, "exec sleep 60")
	c.LimitMemory(t.Context(), 1)
	requireEnd(t, c)
}
