package main

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// passedOn is the row that shows how many reads Strata's byte read path left to upstream's handlers.
const passedOn = "reads passed on"

// passedOnReasons says what was passed on in all runs, for example "cbor 2, table 5"; "" means nothing.
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
