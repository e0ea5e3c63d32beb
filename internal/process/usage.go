package process

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"time"
)

// CPU returns the processor time that the process has used in user and kernel mode. It is an error
// once the process has ended.
func (c *Child) CPU() (time.Duration, error) {
	cpu, err := cpuTime(c.PID())
	if err != nil {
		return 0, fmt.Errorf("CPU time of %s: %w", c.name, err)
	}
	return cpu, nil
}

// Memory is resident memory in bytes: now, and at its highest since the start or the last
// ResetPeak.
type Memory struct{ Resident, Peak uint64 }

// Memory reads the memory of the process from /proc. It is an error once the process has ended.
func (c *Child) Memory() (Memory, error) {
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", c.PID()))
	if err != nil {
		return Memory{}, fmt.Errorf("memory of %s: %w", c.name, err)
	}
	var m Memory
	for name, bytes := range map[string]*uint64{"VmRSS:": &m.Resident, "VmHWM:": &m.Peak} {
		_, value, _ := strings.Cut(string(status), "\n"+name)
		if _, err := fmt.Sscanf(value, "%d kB", bytes); err != nil {
			return Memory{}, fmt.Errorf("memory of %s: %s %w", c.name, name, err)
		}
		*bytes *= 1024
	}
	return m, nil
}

// ResetPeak resets Memory's Peak to the current resident memory.
func (c *Child) ResetPeak() error {
	// "5" resets the peak resident set size: proc_pid_clear_refs(5).
	if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", c.PID()), []byte("5"), 0); err != nil {
		return fmt.Errorf("reset the peak memory of %s: %w", c.name, err)
	}
	return nil
}

// LimitMemory kills the process when its resident memory exceeds limitBytes, and returns when the
// process has ended or ctx is done. It reads the memory every 50 ms: a process that grows by 2 GB/s
// is killed 100 MB too late.
func (c *Child) LimitMemory(ctx context.Context, limitBytes uint64) {
	ticker := time.NewTicker(50 * time.Millisecond)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.done:
			return
		case <-ticker.C:
		}
		if m, err := c.Memory(); err == nil && m.Resident > limitBytes {
			c.Kill()
			return
		}
	}
}

// WaitQuiet returns when all children together use less than a tenth of a core, or when limit has
// passed or ctx is done: earlier work then no longer affects the next measurement. It takes at
// least a quarter of a second, or limit if that is less. Errors: the cause of ctx, or Ended of a
// child.
func WaitQuiet(ctx context.Context, limit time.Duration, children ...*Child) error {
	const window = 250 * time.Millisecond
	deadline := time.Now().Add(limit)
	before, err := totalCPU(children)
	if err != nil {
		return err
	}
	for {
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-time.After(min(window, limit)):
		}
		now, err := totalCPU(children)
		if err != nil {
			return err
		}
		if now-before < window/10 || time.Now().After(deadline) {
			return nil
		}
		before = now
	}
}

func totalCPU(children []*Child) (time.Duration, error) {
	var total time.Duration
	for _, c := range children {
		cpu, err := c.CPU()
		if err != nil {
			return 0, errors.Join(err, c.Ended())
		}
		total += cpu
	}
	return total, nil
}
