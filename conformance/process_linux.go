package main

import (
	"os/exec"
	"syscall"
)

// detach keeps the terminal's signals from the child, which this process stops in order, and lets the kernel kill it with this process.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}
