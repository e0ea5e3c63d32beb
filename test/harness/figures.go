package harness

import (
	"fmt"
	"iter"
	"slices"
	"strings"
)

// Phases yields 2*pairs phases: in each pair one of the first kind (false) and one of the second
// (true). The order changes from pair to pair, so that a drift of the machine's speed affects both
// kinds.
func Phases(pairs int) iter.Seq2[int, bool] {
	return func(yield func(pair int, second bool) bool) {
		for pair := range pairs {
			for _, second := range []bool{pair%2 == 1, pair%2 == 0} {
				if !yield(pair, second) {
					return
				}
			}
		}
	}
}

// Median returns the median of values, and the mean of the two in the middle of an even number; 0
// if there are none.
func Median(values []float64) float64 {
	n := len(values)
	if n == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(values))
	return (sorted[(n-1)/2] + sorted[n/2]) / 2
}

// Figures is a table of measured values, as in a document. Its methods must not be called
// concurrently.
type Figures struct{ rows [][]string }

// NewFigures returns a table without rows. The first column, of names, has no title.
func NewFigures(columns ...string) *Figures {
	return &Figures{rows: [][]string{append([]string{""}, columns...)}}
}

// Row adds a row with a cell for each column.
func (f *Figures) Row(name string, cells ...string) {
	f.rows = append(f.rows, append([]string{name}, cells...))
}

// String returns the table in Markdown.
func (f *Figures) String() string {
	var b strings.Builder
	for i, row := range f.rows {
		fmt.Fprintf(&b, "| %s |\n", strings.Join(row, " | "))
		if i == 0 {
			fmt.Fprintf(&b, "| ---%s |\n", strings.Repeat(" | ---:", len(row)-1))
		}
	}
	return strings.ReplaceAll(b.String(), "|  |", "| |")
}
