package mirror

import "fmt"

// broken returns the error of a failed check: the invariant of docs/architecture.md, and the values
// that violate it.
func broken(invariant, format string, args ...any) error {
	return fmt.Errorf("%s is broken: %w", invariant, fmt.Errorf(format, args...))
}

// checkWork is the number of entries and events that the checks visit for each batch: a guess.
// Smaller checks run after every batch, larger ones less often, so that a test with 100,000 entries
// ends.
const checkWork = 4000

// pace spaces checks by their work.
type pace struct{ saved int }

// due reports whether a check of the given work runs after this batch.
func (p *pace) due(work int) bool {
	p.saved += checkWork
	if p.saved < work {
		return false
	}
	p.saved = 0
	return true
}

// publishedReading is the published revision at a check. A restore may set the published revision
// back (I1).
type publishedReading struct {
	rev      Revision
	restores int64
}
