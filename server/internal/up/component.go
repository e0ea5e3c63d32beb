package up

import (
	"context"
	"errors"
	"fmt"
)

// component is a part of the control plane that runs until stop is called.
type component struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
	err    error         // the result of run; valid when done is closed
}

// launch calls run on a new goroutine, with a context that only stop cancels.
func launch(name string, run func(context.Context) error) *component {
	ctx, cancel := context.WithCancel(context.Background())
	c := &component{name: name, cancel: cancel, done: make(chan struct{})}
	go func() {
		defer close(c.done)
		defer cancel()
		c.err = run(ctx)
	}()
	return c
}

// stop ends the component, waits until it has ended, and returns its error. A second call returns
// the same error.
func (c *component) stop() error {
	c.cancel()
	<-c.done
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return nil
}

// ended returns the error of a component that ended without a call of stop. It may be called only
// when done is closed.
func (c *component) ended() error {
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return fmt.Errorf("%s: %w", c.name, errEnded)
}

var errEnded = errors.New("exited unexpectedly")
