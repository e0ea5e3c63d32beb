package main

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
)

// specName returns the name of a spec with this text: a slash would make it a subtest. Several
// specs may have the same text; the names of all but the first end with a number.
func specName(text string) string { return strings.ReplaceAll(text, "/", "_") }

var specNumber = regexp.MustCompile(` #\d+$`)

// withoutNumber returns the names that specs have whose texts are those of the named ones.
func withoutNumber(names []string) []string {
	texts := make([]string, len(names))
	for i, name := range names {
		texts[i] = specNumber.ReplaceAllString(name, "")
	}
	return texts
}

// specFocus returns a pattern for -ginkgo.focus that matches the specs with these names.
func specFocus(names []string) string {
	patterns := make([]string, len(names))
	for i, name := range withoutNumber(names) {
		patterns[i] = strings.ReplaceAll(regexp.QuoteMeta(name), "_", "[_/]")
	}
	return "(^| )(" + strings.Join(patterns, "|") + ")$"
}

// specVerdicts returns the verdicts of the specs in a JSON report of ginkgo, and that of mainTest
// if another node failed, such as BeforeSuite. If only is not nil, other specs were not to be run.
func specVerdicts(report string, only []string) (Verdicts, error) {
	text, err := os.ReadFile(report)
	if err != nil {
		return nil, err
	}
	var suites []struct {
		SpecReports []struct {
			ContainerHierarchyTexts           []string
			LeafNodeType, LeafNodeText, State string
		}
	}
	if err := json.Unmarshal(text, &suites); err != nil {
		return nil, fmt.Errorf("%s: %w", report, err)
	}
	selected := withoutNumber(only)
	verdicts := Verdicts{}
	for _, suite := range suites {
		for _, spec := range suite.SpecReports {
			verdict := map[string]Verdict{"passed": Pass, "skipped": Skip, "pending": Skip}[spec.State]
			if verdict == "" {
				verdict = Fail
			}
			if spec.LeafNodeType != "It" {
				if verdict == Fail {
					verdicts[mainTest] = Fail
				}
				continue
			}
			name := specName(strings.TrimSpace(strings.Join(append(spec.ContainerHierarchyTexts, spec.LeafNodeText), " ")))
			if only != nil && !slices.Contains(selected, name) {
				continue
			}
			for unique, n := name, 2; ; n++ {
				if _, ok := verdicts[unique]; !ok {
					verdicts[unique] = verdict
					break
				}
				unique = fmt.Sprintf("%s #%d", name, n)
			}
		}
	}
	return verdicts, nil
}

var runSpecs = regexp.MustCompile(`(?s)\nfunc (Test\w+)\(\w+ \*testing\.T\) \{[^}]*RunSpecs\(`)

// specRunner returns the name of the test that runs the specs of the package in dir, "" if it has
// no specs.
func specRunner(dir string) (string, error) {
	files, err := filepath.Glob(filepath.Join(dir, "*_test.go"))
	if err != nil {
		return "", err
	}
	for _, file := range files {
		text, err := os.ReadFile(file)
		if err != nil {
			return "", err
		}
		if found := runSpecs.FindSubmatch(text); found != nil {
			return string(found[1]), nil
		}
	}
	return "", nil
}
