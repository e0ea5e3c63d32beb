package up

import (
	"context"
	"errors"
	"fmt"
)

// component is a part of the control plane that runs until it is stopped.
type component struct {
	name   string
	cancel context.CancelFunc
	done   chan struct{} // closed when run has returned
	err    error         // what run returned; valid when done is closed
}

// launch calls run on a goroutine of its own, with a context that only stop cancels.
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

// stop ends the component and returns when it has ended, with what went wrong. Calling it again returns the same.
func (c *component) stop() error {
	c.cancel()
	<-c.done
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return nil
}

// ended returns why a component ended that nobody stopped. It may be called when done is closed.
func (c *component) ended() error {
	if c.err != nil {
		return fmt.Errorf("%s: %w", c.name, c.err)
	}
	return fmt.Errorf("%s: %w", c.name, errEnded)
}

var errEnded = errors.New("ended by itself")
