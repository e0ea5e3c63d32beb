//go:build !linux

package process

import (
	"errors"
	"os/exec"
	"time"
)

// tieToParent does nothing: the terminal's signals reach the process, and it may outlive this one.
func tieToParent(*exec.Cmd) {}

// startPrepared starts a process. It can be prepared on Linux only.
func startPrepared(cmd *exec.Cmd, prepare func(pid int) error) error {
	if prepare != nil {
		return errors.New("preparing a process is supported on Linux only")
	}
	return cmd.Start()
}

func cpuTime(int) (time.Duration, error) { return 0, errors.ErrUnsupported }
