package faulty

import (
	"fmt"
	"os"
	"sync"
	"time"
)

// Clock is the wall clock of processes, which it sets forward or back, also while they run. The
// passage of time in them (the monotonic clock, timers) is not affected, as on a machine whose
// clock is set. Its methods may be called concurrently.
//
// Prepare gives a process such a clock: the kernel has mapped a page of code into it that reads the
// clocks (the vDSO), and Prepare replaces this code with a system call that adds an offset to the
// wall clock.
type Clock struct {
	mu      sync.Mutex // leaf
	shift   time.Duration
	offsets []offset // of processes, including ended ones
}

// offset is the address of a process's clock offset in seconds.
type offset struct {
	memory *os.File // /proc/PID/mem
	at     int64
}

// Shift sets the offset from the true time, in whole seconds, for current and future processes of
// the clock.
func (c *Clock) Shift(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shift = by
	for _, o := range c.offsets {
		_ = o.set(by) // fails if the process has ended
	}
}

// Prepare gives a process the clock. The process must be stopped by ptrace, before its first
// instruction.
func (c *Clock) Prepare(pid int) error {
	o, err := plant(pid)
	if err != nil {
		return fmt.Errorf("set the clock of process %d: %w", pid, err)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.offsets = append(c.offsets, o)
	return o.set(c.shift)
}

// Close releases the processes. Their clocks keep their offsets.
func (c *Clock) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.offsets {
		_ = o.memory.Close()
	}
	c.offsets = nil
}
