package history

import (
	"fmt"
	"io"
	"sync"
	"sync/atomic"
	"time"
)

// A command that takes longer than progressAfter shows its progress: on a terminal in one line, otherwise in a line every
// progressLines.
const (
	progressAfter = 2 * time.Second
	progressLines = 10 * time.Second
	progressTick  = 500 * time.Millisecond
)

// progress shows on w how far a command is, until stop. Its methods may be called concurrently.
type progress struct {
	w        io.Writer
	terminal bool
	began    time.Time
	step     atomic.Pointer[string]
	count    atomic.Int64
	end      func()
}

func startProgress(w io.Writer) *progress {
	p := &progress{w: w, terminal: isTerminal(w), began: time.Now()}
	stop, ended := make(chan struct{}), make(chan struct{})
	p.end = sync.OnceFunc(func() {
		close(stop)
		<-ended
	})
	go func() {
		defer close(ended)
		p.run(stop)
	}()
	return p
}

// next begins a step, such as "reading pods".
func (p *progress) next(format string, args ...any) {
	step := fmt.Sprintf(format, args...)
	p.count.Store(0)
	p.step.Store(&step)
}

// add counts objects or events of the step.
func (p *progress) add(n int) { p.count.Add(int64(n)) }

// set sets the count of the step.
func (p *progress) set(n int) { p.count.Store(int64(n)) }

// stop removes the line, and returns when nothing more is written.
func (p *progress) stop() { p.end() }

func (p *progress) run(stop <-chan struct{}) {
	wait := time.NewTimer(progressAfter)
	defer wait.Stop()
	shown := false
	for {
		select {
		case <-stop:
			if shown && p.terminal {
				fmt.Fprint(p.w, "\r\x1b[K")
			}
			return
		case <-wait.C:
		}
		if step := p.step.Load(); step != nil {
			shown = true
			line := fmt.Sprintf("%s: %d so far, %s", *step, p.count.Load(), time.Since(p.began).Round(time.Second))
			if p.terminal {
				fmt.Fprint(p.w, "\r\x1b[K"+line)
			} else {
				fmt.Fprintln(p.w, line)
			}
		}
		if p.terminal {
			wait.Reset(progressTick)
		} else {
			wait.Reset(progressLines)
		}
	}
}
