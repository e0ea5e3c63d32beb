package up

import (
	"context"
	"fmt"
	"io"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/kube/kubestorage"
)

// stepPrinter prints the steps of startup and shutdown for the user, one line each, with the time
// since the start. Its methods may be called concurrently.
type stepPrinter struct {
	line  *statusline.Line
	start time.Time
}

func newStepPrinter(out io.Writer) *stepPrinter {
	return &stepPrinter{line: statusline.NewLine(out), start: time.Now()}
}

func (p *stepPrinter) step(format string, args ...any) {
	p.line.Print(p.text(format, args...))
}

func (p *stepPrinter) text(format string, args ...any) string {
	return fmt.Sprintf("%7.2fs  %s", time.Since(p.start).Seconds(), fmt.Sprintf(format, args...))
}

// waiting shows a step that lasts until stop is called.
func (p *stepPrinter) waiting(state func() string) (stop func()) {
	return p.line.Watch(func(time.Duration) string { return p.text("%s", state()) })
}

// loading is the state of an API server that starts. The zero value is one that has not begun to
// load.
type loading struct {
	state atomic.Pointer[func(context.Context) kubestorage.LoadState]
}

// begin sets the function that returns the state of the load.
func (l *loading) begin(state func(context.Context) kubestorage.LoadState) { l.state.Store(&state) }

// text returns the state for the user; log is the path of the log.
func (l *loading) text(ctx context.Context, log string) string {
	if state := l.state.Load(); state != nil {
		if s := (*state)(ctx); s.Loading {
			return fmt.Sprintf("API server: loading objects from etcd: %s, at %s", statusline.Count(s.Objects, s.Total), s.Resource)
		}
	}
	return "API server: not ready yet; see " + log
}
