package main

import (
	_ "embed"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strings"

	"github.com/onsi/ginkgo/v2/types"
)

// The catalogue of specs: full texts, one in each line, sorted. Together they are all specs that
// isCandidate selects.
var (
	//go:embed specs.txt
	specsFile string // the specs that run; upstream passes them
	//go:embed excluded.txt
	// the specs that do not run: upstream fails them here, because they need running containers or
	// a scheduler
	excludedFile string
)

// areas are containers of which all specs are candidates, including specs that are not part of
// Kubernetes' conformance.
var areas = []string{
	"[sig-api-machinery] API Streaming (aka. WatchList) [FeatureGate:WatchList]",
	"[sig-api-machinery] Servers with support for Table transformation",
}

// isCandidate reports whether a spec belongs to the catalogue.
func isCandidate(text string) bool {
	return strings.Contains(text, "[Conformance]") || slices.ContainsFunc(areas, func(area string) bool { return strings.HasPrefix(text, area+" ") })
}

// catalogue returns the specs of a file of the catalogue.
func catalogue(file string) []string {
	return strings.FieldsFunc(file, func(r rune) bool { return r == '\n' })
}

// exactly selects the specs with these texts. Ginkgo matches the name of the suite, a space and the
// text.
func exactly(specs []string) *regexp.Regexp {
	quoted := make([]string, len(specs))
	for i, s := range specs {
		quoted[i] = regexp.QuoteMeta(s)
	}
	return regexp.MustCompile(`(^| )(` + strings.Join(quoted, "|") + `)$`)
}

// isSerial reports whether a spec must run alone.
func isSerial(text string) bool { return strings.Contains(text, "[Serial]") }

// shards distributes specs over at most n runs that may be simultaneous, and returns serial specs
// separately.
func shards(specs []string, n int) (simultaneous [][]string, alone []string) {
	simultaneous = make([][]string, n)
	i := 0
	for _, s := range specs {
		if isSerial(s) {
			alone = append(alone, s)
			continue
		}
		simultaneous[i%n] = append(simultaneous[i%n], s)
		i++
	}
	return slices.DeleteFunc(simultaneous, func(s []string) bool { return len(s) == 0 }), alone
}

// verdict is the outcome of the specs that focus selects, as a table to print and as problems.
// Without a problem all of them passed.
type verdict struct {
	lines    []string
	problems []string
	passed   int
}

// judge reports whether each wanted spec ran and passed. wanted is nil if the user has chosen a
// focus: then at least one spec must have run, and all that did must have passed. all are the texts
// of all specs that exist; the catalogue must agree with them.
func judge(reports []types.SpecReport, wanted, all []string) verdict {
	var v verdict
	seen := map[string]bool{}
	for _, r := range reports {
		text := r.FullText()
		if r.LeafNodeType != types.NodeTypeIt {
			if !r.State.Is(types.SpecStatePassed) {
				v.problems = append(v.problems, strings.TrimSpace(fmt.Sprintf("%s %s: %s", r.LeafNodeType, text, outcome(r))))
			}
			continue
		}
		seen[text] = true
		v.lines = append(v.lines, fmt.Sprintf("%-8s %7.1f s  %s", r.State, r.RunTime.Seconds(), text))
		if r.State.Is(types.SpecStatePassed) {
			v.passed++
		} else {
			v.problems = append(v.problems, text+": "+outcome(r))
		}
	}
	for _, spec := range wanted {
		if !seen[spec] {
			v.problems = append(v.problems, spec+": did not run")
		}
	}
	if len(seen) == 0 {
		v.problems = append(v.problems, "no spec ran")
	}
	slices.Sort(v.lines)
	v.problems = append(v.problems, disagreements(catalogue(specsFile), catalogue(excludedFile), all)...)
	return v
}

// disagreements compares the catalogue with all specs that exist.
func disagreements(specs, excluded, all []string) (problems []string) {
	exists := map[string]bool{}
	for _, text := range all {
		exists[text] = true
	}
	in := map[string]int{}
	for _, text := range slices.Concat(specs, excluded) {
		if in[text]++; in[text] > 1 {
			problems = append(problems, text+": is in the catalogue twice")
		}
		if !exists[text] {
			problems = append(problems, text+": is in the catalogue and does not exist")
		}
	}
	for text := range exists {
		if isCandidate(text) && in[text] == 0 {
			problems = append(problems, text+": is not in the catalogue; run -discover")
		}
	}
	slices.Sort(problems)
	return problems
}

// file returns the text of a file of the catalogue.
func file(specs map[string]bool) string {
	var b strings.Builder
	for _, s := range slices.Sorted(maps.Keys(specs)) {
		b.WriteString(s + "\n")
	}
	return b.String()
}

// outcome describes in one line why a spec did not pass.
func outcome(r types.SpecReport) string {
	if r.Failure.Message == "" {
		return r.State.String()
	}
	const maxBytes = 300
	message := strings.Join(strings.Fields(r.Failure.Message), " ")
	if len(message) > maxBytes {
		message = strings.ToValidUTF8(message[:maxBytes], "") + "..."
	}
	return r.State.String() + ": " + message
}
