package process

import (
	"errors"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testrequire"
)

func TestCPUAndMemory_RunningProcess_AreRead(t *testing.T) {
	c := start(t, "i=0; while [ $i -lt 300000 ]; do i=$((i+1)); done; echo done; exec sleep 60")
	requireLine(t, c, "done")
	cpu, err := c.CPU()
	if err != nil || cpu == 0 {
		t.Errorf("a process that counted to 300,000 used %v of CPU time, %v", cpu, err)
	}
	m, err := c.Memory()
	if err != nil || m.Resident == 0 || m.Peak < m.Resident {
		t.Errorf("memory is %+v, %v", m, err)
	}
	if err := c.ResetPeak(); err != nil {
		t.Error(err)
	}
	if err := WaitQuiet(t.Context(), time.Millisecond, c); err != nil {
		t.Error(err)
	}
	c.Kill()
	if _, err := c.CPU(); err == nil {
		t.Error("an ended process has CPU time")
	}
	if _, err := c.Memory(); err == nil {
		t.Error("an ended process has memory")
	}
}

func TestLimitMemory_MoreResident_Kills(t *testing.T) {
	c := start(t, runsOn)
	c.LimitMemory(t.Context(), 1)
	requireEnd(t, c)
}

func TestPrepare_Fails_StartReturnsItsError(t *testing.T) {
	refused := errors.New("refused")
	prepared := 0
	_, err := Start(Spec{Name: "true", Path: "true", Log: os.DevNull, Prepare: func(pid int) error {
		prepared = pid
		return refused
	}})
	if prepared == 0 {
		testrequire.Missing(t, "ptrace", fmt.Sprintf("processes cannot be traced here: %v", err))
	}
	if !errors.Is(err, refused) {
		t.Errorf("got %v, want %v", err, refused)
	}
}
