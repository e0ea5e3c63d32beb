// Package statusline shows how far long work is. Work that ends within two seconds shows nothing.
// After that, the status is one line that is updated on a terminal, and otherwise a line every five
// seconds. There are three forms:
//
//	Every   calls a function, for log messages
//	Line    a line of a caller's text, between other lines of the same stream
//	Steps   a line of steps with counts: "reading pods: 1500 of 30000, 4s"
package statusline

import (
	"fmt"
	"io"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

const (
	// After is the duration of work that shows no progress.
	After = 2 * time.Second
	// Interval is the time between two lines, or messages, that stay.
	Interval = 5 * time.Second
	// update is the time between two updates of a line on a terminal.
	update = 500 * time.Millisecond
)

// IsTerminal reports whether a stream is a terminal.
func IsTerminal(stream any) bool {
	f, ok := stream.(*os.File)
	if !ok {
		return false
	}
	info, err := f.Stat()
	if err != nil || info.Mode()&os.ModeCharDevice == 0 {
		return false
	}
	null, err := os.Stat(os.DevNull)
	return err != nil || !os.SameFile(info, null)
}

// Every calls report when the work takes longer than After, and then once an Interval, until report
// returns false or stop is called. stop returns when no call is running or will follow; a second
// call has no effect. elapsed is the time since the call of Every.
func Every(report func(elapsed time.Duration) bool) (stop func()) { return every(Interval, report) }

func every(interval time.Duration, report func(elapsed time.Duration) bool) (stop func()) {
	began := time.Now()
	stopped, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		wait := time.NewTimer(After)
		defer wait.Stop()
		for {
			select {
			case <-stopped:
				return
			case <-wait.C:
			}
			if !report(time.Since(began)) {
				return
			}
			wait.Reset(interval)
		}
	}()
	return sync.OnceFunc(func() {
		close(stopped)
		<-ended
	})
}

// Line writes lines to a stream, and below them, while Watch runs, a status line. Its methods may
// be called concurrently.
type Line struct {
	w        io.Writer
	terminal bool

	mu    sync.Mutex // held while writing
	shown bool       // the last line on the terminal is a status line, without its end
}

// NewLine returns a Line on w.
func NewLine(w io.Writer) *Line { return &Line{w: w, terminal: IsTerminal(w)} }

// Print writes a line that stays.
func (l *Line) Print(text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.clearLocked()
	fmt.Fprintln(l.w, text)
}

func (l *Line) clearLocked() {
	if l.shown {
		fmt.Fprint(l.w, "\r\x1b[K")
		l.shown = false
	}
}

// Watch shows text as status line until stop is called, which removes the line from a terminal. An
// empty text is not shown. At most one Watch of a Line may run.
func (l *Line) Watch(text func(elapsed time.Duration) string) (stop func()) {
	interval := Interval
	if l.terminal {
		interval = update
	}
	end := every(interval, func(elapsed time.Duration) bool {
		current := text(elapsed)
		if current == "" {
			return true
		}
		l.mu.Lock()
		defer l.mu.Unlock()
		l.clearLocked()
		if l.shown = l.terminal; l.shown {
			fmt.Fprint(l.w, current)
		} else {
			fmt.Fprintln(l.w, current)
		}
		return true
	})
	return func() {
		end()
		l.mu.Lock()
		defer l.mu.Unlock()
		l.clearLocked()
	}
}

// Steps is the status line of work in steps, each of which counts. Its methods may be called
// concurrently.
type Steps struct {
	step atomic.Pointer[step]
	end  func()
}

type step struct {
	text         string
	count, total atomic.Int64
}

// Start shows steps on w until Stop.
func Start(w io.Writer) *Steps {
	s := &Steps{}
	s.end = NewLine(w).Watch(s.text)
	return s
}

func (s *Steps) text(elapsed time.Duration) string {
	current := s.step.Load()
	if current == nil {
		return ""
	}
	text, count, total := current.text, current.count.Load(), current.total.Load()
	if count > 0 || total > 0 {
		text += ": " + Count(count, total)
	}
	return fmt.Sprintf("%s, %s", text, elapsed.Round(time.Second))
}

// Count returns the text of a count, and of its total unless that is unknown: 0, or less than the
// count.
func Count(n, total int64) string {
	if total < n || total == 0 {
		return fmt.Sprintf("%d so far", n)
	}
	return fmt.Sprintf("%d of %d", n, total)
}

// Next begins a step, such as "reading pods". Its total is unknown until Of is called.
func (s *Steps) Next(format string, args ...any) {
	s.step.Store(&step{text: fmt.Sprintf(format, args...)})
}

// Of sets the total of the step.
func (s *Steps) Of(total int) {
	if current := s.step.Load(); current != nil {
		current.total.Store(int64(total))
	}
}

// Add adds to the count of the step.
func (s *Steps) Add(n int) {
	if current := s.step.Load(); current != nil {
		current.count.Add(int64(n))
	}
}

// Set sets the count of the step.
func (s *Steps) Set(n int) {
	if current := s.step.Load(); current != nil {
		current.count.Store(int64(n))
	}
}

// Stop removes the line from a terminal, and returns when nothing more is written. A second call
// has no effect.
func (s *Steps) Stop() { s.end() }
