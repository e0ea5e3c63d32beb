package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// passedOn is the row with the number of reads that Strata's byte read path passed on to upstream's
// handlers.
const passedOn = "reads passed on"

// passedOnReasons lists the reads passed on in all runs, for example "cbor 2, table 5"; "" means
// none.
func passedOnReasons(runs []Observation) string {
	total := map[string]float64{}
	for _, run := range runs {
		for reason, n := range run.PassedOn {
			total[reason] += n
		}
	}
	var reasons []string
	for _, reason := range slices.Sorted(maps.Keys(total)) {
		reasons = append(reasons, fmt.Sprintf("%s %.0f", reason, total[reason]))
	}
	return strings.Join(reasons, ", ")
}
