package up

import (
	"fmt"
	"io"
	"sync"
	"time"
)

// progress prints the steps of startup and shutdown for the user, one line each, with the time since the start. Its methods may be called
// concurrently.
type progress struct {
	out   io.Writer
	start time.Time
	mu    sync.Mutex // held while writing to out
}

func (p *progress) step(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	fmt.Fprintf(p.out, "%7.2fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}
