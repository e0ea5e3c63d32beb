package harness

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
)

func dieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
}

// startPrepared starts a process and calls prepare, if it is not nil, before the process has run its first instruction. The
// caller has locked its goroutine to its thread, which is what the kernel ties all this to.
func startPrepared(cmd *exec.Cmd, prepare func(pid int) error) error {
	if prepare == nil {
		return cmd.Start()
	}
	cmd.SysProcAttr.Ptrace = true // it stops when it has become the program
	if err := cmd.Start(); err != nil {
		return err
	}
	pid := cmd.Process.Pid
	var status syscall.WaitStatus
	_, err := syscall.Wait4(pid, &status, 0, nil)
	if err == nil && !status.Stopped() {
		err = fmt.Errorf("process %d has not stopped", pid)
	}
	if err == nil {
		err = errors.Join(prepare(pid), syscall.PtraceDetach(pid))
	}
	if err != nil {
		return errors.Join(err, cmd.Process.Kill(), cmd.Wait())
	}
	return nil
}
