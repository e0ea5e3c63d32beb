package target

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"strconv"
	"strings"
)

// State contains statistics of the Go runtime of an engine after a garbage collection.
type State struct {
	Heap       uint64 // bytes in spans that hold objects
	Stacks     uint64 // bytes of goroutines' stacks
	Goroutines int
}

// State collects the engine's garbage and returns the statistics of its runtime.
func (e *Engine) State(ctx context.Context) (State, error) {
	var s State
	// The second collection frees objects that finalizers and pools kept in the first.
	for range 2 {
		profile, err := e.Profile(ctx, "heap?gc=1&debug=1")
		if err != nil {
			return s, err
		}
		if err := s.parseHeap(bytes.NewReader(profile)); err != nil {
			return s, fmt.Errorf("state of %s: %w", e.Label, err)
		}
	}
	profile, err := e.Profile(ctx, "goroutine?debug=1")
	if err != nil {
		return s, err
	}
	if _, err := fmt.Sscanf(string(profile), "goroutine profile: total %d", &s.Goroutines); err != nil {
		return s, fmt.Errorf("state of %s: %w", e.Label, err)
	}
	return s, nil
}

// parseHeap reads the statistics behind a heap profile in text: lines such as "# HeapInuse = 123"
// and "# Stack = 123 / 456".
func (s *State) parseHeap(r io.Reader) error {
	statistics := map[string]*uint64{"# HeapInuse = ": &s.Heap, "# Stack = ": &s.Stacks}
	found := 0
	lines := bufio.NewScanner(r)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		for prefix, value := range statistics {
			text, ok := strings.CutPrefix(lines.Text(), prefix)
			if !ok {
				continue
			}
			text, _, _ = strings.Cut(text, " ")
			var err error
			if *value, err = strconv.ParseUint(text, 10, 64); err != nil {
				return fmt.Errorf("heap profile: %q: %w", lines.Text(), err)
			}
			found++
		}
	}
	if err := lines.Err(); err != nil {
		return fmt.Errorf("heap profile: %w", err)
	}
	if found != len(statistics) {
		return fmt.Errorf("heap profile has %d of the %d statistics wanted", found, len(statistics))
	}
	return nil
}
