package target

import (
	"context"
	"fmt"
)

// State contains statistics of the Go runtime of an engine after a garbage collection.
type State struct {
	Heap       uint64 // bytes in spans that hold objects
	Stacks     uint64 // bytes of goroutines' stacks
	Goroutines int
}

// State collects the engine's garbage and returns the statistics of its runtime.
func (e *Engine) State(ctx context.Context) (State, error) {
	conn := e.Dial()
	defer conn.Close()
	// The second collection frees objects that finalizers and pools kept in the first.
	for range 2 {
		if err := e.Poll(ctx, conn, "/debug/pprof/heap?gc=1"); err != nil {
			return State{}, err
		}
	}
	const heap, stacks, goroutines = "go_memstats_heap_inuse_bytes", "go_memstats_stack_inuse_bytes", "go_goroutines"
	all, err := e.series(ctx, heap, stacks, goroutines)
	values := map[string]float64{}
	for _, s := range all {
		values[s.name] = s.value
	}
	if err == nil && len(values) < 3 {
		err = fmt.Errorf("metrics of %s lack one of %s, %s and %s", e.Label, heap, stacks, goroutines)
	}
	return State{Heap: uint64(values[heap]), Stacks: uint64(values[stacks]), Goroutines: int(values[goroutines])}, err
}
