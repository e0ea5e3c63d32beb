package faulty

import (
	"fmt"
	"os"
	"sync"
	"time"
)

// Clock is the wall clock of processes, which it sets forward or back, also while they run. What they see of the time that
// passes (the monotonic clock, timers) stays right, as on a machine whose clock somebody sets. Its methods may be called
// concurrently.
//
// Prepare gives a process such a clock: the kernel has mapped a page of code into it that reads the clocks (the vDSO), and
// Prepare puts other code there, which asks the kernel and adds to what it says of the wall clock.
type Clock struct {
	mu      sync.Mutex // leaf
	shift   time.Duration
	offsets []offset // of processes; those that have ended stay
}

// offset is where the code in a process finds by how many seconds it is to lie.
type offset struct {
	memory *os.File // /proc/PID/mem
	at     int64
}

// Shift sets the clock by whole seconds from what is true, for the processes that have it and those that will.
func (c *Clock) Shift(by time.Duration) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.shift = by
	for _, o := range c.offsets {
		_ = o.set(by) // fails if the process has ended
	}
}

// Prepare gives a process the clock. It must have been stopped by ptrace, before it has run its first instruction.
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

// Close lets go of the processes. Their clocks stay as they are.
func (c *Clock) Close() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, o := range c.offsets {
		_ = o.memory.Close()
	}
	c.offsets = nil
}
