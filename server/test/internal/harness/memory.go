package harness

import (
	"fmt"

	"github.com/prometheus/procfs"
)

// Resident returns how many bytes of memory the process holds (VmRSS). It is an error where there is no /proc.
func (p *Process) Resident() (bytes int64, err error) {
	proc, err := procfs.NewProc(p.cmd.Process.Pid)
	if err != nil {
		return 0, fmt.Errorf("memory of %s: %w", p.name, err)
	}
	status, err := proc.NewStatus()
	if err != nil {
		return 0, fmt.Errorf("memory of %s: %w", p.name, err)
	}
	return int64(status.VmRSS), nil
}

// Resident is Process.Resident of the etcd's process.
func (e *Etcd) Resident() (bytes int64, err error) { return e.p.Resident() }

// Peak returns the most memory that the process has ever held (VmHWM), which the kernel keeps. It is an error where there is no /proc.
func (p *Process) Peak() (bytes int64, err error) {
	proc, err := procfs.NewProc(p.cmd.Process.Pid)
	if err != nil {
		return 0, fmt.Errorf("memory of %s: %w", p.name, err)
	}
	status, err := proc.NewStatus()
	if err != nil {
		return 0, fmt.Errorf("memory of %s: %w", p.name, err)
	}
	return int64(status.VmHWM), nil
}
