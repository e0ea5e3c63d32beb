package up

import (
	"fmt"
	"io"
	"time"
)

// progress shows the steps of the start and the stop to a person, one line each, with the time since the start.
type progress struct {
	out   io.Writer
	start time.Time
}

func (p *progress) step(format string, args ...any) {
	fmt.Fprintf(p.out, "%7.2fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// during runs wait, and calls remind every interval until it returns.
func during(interval time.Duration, remind func(), wait func() error) error {
	done := make(chan error, 1)
	go func() { done <- wait() }()
	ticker := time.NewTicker(interval)
	defer ticker.Stop()
	for {
		select {
		case err := <-done:
			return err
		case <-ticker.C:
			remind()
		}
	}
}
