package process

import (
	"os/exec"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

func ownGroupAndDieWithParent(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGKILL}
}

// cpuTime reads the CPU-time clock of a process, in nanoseconds where /proc counts ticks of 10 ms. Its number is what clock_getcpuclockid(3)
// makes of a process id: the id inverted, above three bits, of which 2 (CPUCLOCK_SCHED) asks for all that its threads were scheduled.
func cpuTime(pid int) (time.Duration, error) {
	const cpuclockSched = 2
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^pid<<3|cpuclockSched), &used); err != nil {
		return 0, err
	}
	return time.Duration(used.Nano()), nil
}
