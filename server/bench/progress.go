package main

import (
	"fmt"
	"io"
	"os"
	"sync"
	"time"
)

// progress prints a line per step, with the time since the start. On a terminal a step's line grows while it runs. Its methods
// may be called concurrently.
type progress struct {
	out      io.Writer
	terminal bool
	began    time.Time

	mu      sync.Mutex
	current string // the step that runs; "" between steps
}

func newProgress(out *os.File) *progress {
	info, err := out.Stat()
	return &progress{out: out, terminal: err == nil && info.Mode()&os.ModeCharDevice != 0, began: time.Now()}
}

func (p *progress) prefix() string {
	elapsed := time.Since(p.began)
	return fmt.Sprintf("[%3d:%02d] ", int(elapsed.Minutes()), int(elapsed.Seconds())%60)
}

// step begins a step.
func (p *progress) step(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.current = fmt.Sprintf(format, args...)
	p.showLocked("...")
}

// update prints the state of the step.
func (p *progress) update(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.showLocked(fmt.Sprintf(format, args...))
}

func (p *progress) showLocked(text string) {
	if p.terminal {
		fmt.Fprintf(p.out, "\r\033[K%s%s  %s", p.prefix(), p.current, text)
	}
}

// done ends the step with its result.
func (p *progress) done(format string, args ...any) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.terminal {
		fmt.Fprint(p.out, "\r\033[K")
	}
	fmt.Fprintf(p.out, "%s%s  %s\n", p.prefix(), p.current, fmt.Sprintf(format, args...))
	p.current = ""
}
