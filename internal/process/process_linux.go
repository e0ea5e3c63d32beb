package process

import (
	"errors"
	"fmt"
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// tieToParent makes the kernel kill the process when this one dies, and keeps the terminal's
// signals from it.
func tieToParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// startPrepared starts a process and calls prepare, unless it is nil, before the first instruction
// of the program. The caller has locked its goroutine to its thread, to which the kernel ties the
// child and its tracing.
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

// cpuTime reads the CPU-time clock of a process, in nanoseconds; /proc counts ticks of 10 ms. The
// clock's number is the result of clock_getcpuclockid(3): the inverted process id above three bits
// with the value 2 (CPUCLOCK_SCHED), which selects the scheduled time of all threads.
func cpuTime(pid int) (time.Duration, error) {
	const cpuclockSched = 2
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|cpuclockSched), &used); err != nil {
		return 0, err
	}
	return time.Duration(used.Nano()), nil
}
