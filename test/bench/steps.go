package main

import (
	"fmt"
	"os"
	"sync"
	"time"

	"github.com/stratakube/strata/internal/statusline"
)

// steps prints a line per step, with the time since the start, and while a step runs its state. Its
// methods may be called concurrently.
type steps struct {
	line  *statusline.Line
	began time.Time

	mu      sync.Mutex
	current string // the step that runs; "" between steps
	end     func() // ends the display of current
}

func newSteps(out *os.File) *steps {
	return &steps{line: statusline.NewLine(out), began: time.Now(), end: func() {}}
}

func (s *steps) textLocked(state string) string {
	elapsed := time.Since(s.began)
	return fmt.Sprintf("[%3d:%02d] %s  %s", int(elapsed.Minutes()), int(elapsed.Seconds())%60, s.current, state)
}

// step begins a step.
func (s *steps) step(format string, args ...any) {
	s.mu.Lock()
	end := s.end
	s.current = fmt.Sprintf(format, args...)
	s.mu.Unlock()
	end() // not under the mutex, which the display takes
	end = s.line.Watch(func(time.Duration) string {
		s.mu.Lock()
		defer s.mu.Unlock()
		return s.textLocked("...")
	})
	s.mu.Lock()
	defer s.mu.Unlock()
	s.end = end
}

// done ends the step with its result.
func (s *steps) done(format string, args ...any) {
	s.mu.Lock()
	end := s.end
	s.end = func() {}
	text := s.textLocked(fmt.Sprintf(format, args...))
	s.mu.Unlock()
	end()
	s.line.Print(text)
}
