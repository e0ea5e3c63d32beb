//go:build !linux

package harness

import (
	"errors"
	"os/exec"
)

// dieWithParent does nothing: only Linux can tie a child to its parent. The environment stops its children either way.
func dieWithParent(*exec.Cmd) {}

// startPrepared starts a process. It can be prepared on Linux only.
func startPrepared(cmd *exec.Cmd, prepare func(pid int) error) error {
	if prepare != nil {
		return errors.New("processes can be prepared on Linux only")
	}
	return cmd.Start()
}
