package faulty

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testrequire"
	"github.com/stratakube/strata/test/harness"
)

// asWatch is the environment variable of a process that prints the time.
const asWatch = "FAULTY_TEST_TELL_THE_TIME"

func TestMain(m *testing.M) {
	if os.Getenv(asWatch) != "" {
		began := time.Now()
		for lines := bufio.NewScanner(os.Stdin); lines.Scan(); {
			fmt.Println(time.Now().Unix(), int64(time.Since(began)))
		}
		return
	}
	os.Exit(m.Run())
}

// TestClock_Shift_ChangesWallClockOnly sets the clock of a running process forward and back. The
// durations that it measures stay right.
func TestClock_Shift_ChangesWallClockOnly(t *testing.T) {
	if err := ClockError(); err != nil {
		testrequire.Missing(t, "ptrace", err.Error())
	}
	c := &Clock{}
	defer c.Close()
	c.Shift(72 * time.Hour)
	in, ask, err := os.Pipe()
	harness.Check(t, err)
	defer in.Close()
	defer ask.Close()
	began := time.Now()
	p, err := process.Start(process.Spec{
		Name: "clock", Path: os.Args[0], Env: append(os.Environ(), asWatch+"=1"), Stdin: in, Lines: true,
		Log: filepath.Join(t.TempDir(), "log"), Prepare: c.Prepare,
	})
	harness.Check(t, err)
	defer p.Kill()
	answers := 0
	for _, shift := range []time.Duration{72 * time.Hour, -time.Hour, 0, 10 * time.Second} {
		c.Shift(shift)
		if _, err := io.WriteString(ask, "send the time\n"); err != nil {
			t.Fatal(err)
		}
		var now, passed int64
		var answer string
		answer, answers, err = p.WaitLine(t.Context(), answers, " ")
		harness.Check(t, err)
		if _, err := fmt.Sscan(answer, &now, &passed); err != nil {
			t.Fatal(err)
		}
		latest := time.Now().Add(shift).Unix()
		if earliest := began.Add(shift).Unix(); now < earliest || now > latest {
			t.Errorf("set by %v, it is %d in the process, want %d to %d", shift, now, earliest, latest)
		}
		if passed < 0 || time.Duration(passed) > time.Since(began) {
			t.Errorf("set by %v, %v have passed in the process, and %v here", shift, time.Duration(passed), time.Since(began))
		}
	}
	ask.Close()
	if err := p.ExitError(); err != nil {
		t.Error(err)
	}
}
