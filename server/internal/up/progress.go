package up

import (
	"fmt"
	"io"
	"time"
)

// progress prints the steps of startup and shutdown for the user, one line each, with the time since the start.
type progress struct {
	out   io.Writer
	start time.Time
}

func (p *progress) step(format string, args ...any) {
	fmt.Fprintf(p.out, "%7.2fs  %s\n", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}
