package faulty

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// asWatch is the environment variable of a process that tells the time.
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

// TestAClockIsSet sets the clock of a process that runs, forward and back. What it measures stays right.
func TestAClockIsSet(t *testing.T) {
	if err := ClockError(); err != nil {
		harness.Missing(t, "ptrace", err.Error())
	}
	c := &Clock{}
	defer c.Close()
	c.Shift(72 * time.Hour)
	cmd := exec.Command(os.Args[0])
	cmd.Env = append(os.Environ(), asWatch+"=1")
	in, ask := io.Pipe()
	answers, out := io.Pipe()
	cmd.Stdin, cmd.Stdout = in, out
	ended := make(chan error)
	go func() { ended <- harness.RunPrepared(cmd, c.Prepare) }()
	began := time.Now()
	for _, shift := range []time.Duration{72 * time.Hour, -time.Hour, 0, 10 * time.Second} {
		c.Shift(shift) // the first time perhaps before the process is there
		if _, err := io.WriteString(ask, "what time is it?\n"); err != nil {
			t.Fatal(err)
		}
		var now, passed int64
		if _, err := fmt.Fscan(answers, &now, &passed); err != nil {
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
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
