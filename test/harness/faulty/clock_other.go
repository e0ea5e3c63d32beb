//go:build !(linux && amd64)

package faulty

import (
	"errors"
	"time"
)

// ClockError returns the reason why this platform cannot set clocks of processes; nil if it can.
func ClockError() error { return errors.New("clocks of processes can be set on Linux on x86-64 only") }

func plant(int) (offset, error) { return offset{}, ClockError() }

func (o offset) set(time.Duration) error { return ClockError() }
