package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"sync"

	"github.com/onsi/ginkgo/v2/types"
)

// discover runs each candidate that is not in specs.txt, and that focus selects unless it is nil,
// in a process of its own, and returns an error that names the passed ones, unless it may write the
// catalogue. Run it with the engine upstream, whose verdicts decide.
func discover(ctx context.Context, o options, c *cluster, focus *regexp.Regexp, all []string) error {
	specs, excluded := map[string]bool{}, map[string]bool{}
	var candidates []string
	for _, text := range all {
		switch {
		case !isCandidate(text):
		case slices.Contains(catalogue(specsFile), text):
			specs[text] = true
		default:
			excluded[text] = true
			if focus == nil || focus.MatchString(text) {
				candidates = append(candidates, text)
			}
		}
	}
	fmt.Printf("%d specs, each at most %v\n", len(candidates), o.bound)
	var mu sync.Mutex
	var found []error
	next := make(chan int)
	var wg sync.WaitGroup
	for range o.processes {
		wg.Go(func() {
			for i := range next {
				text := candidates[i]
				report, err := c.runTests(ctx, fmt.Sprintf("discover-%d", i), exactly([]string{text}), nil,
					"--ginkgo.timeout="+o.bound.String(), "--ginkgo.grace-period=5s")
				passed := err == nil && slices.ContainsFunc(report.SpecReports, func(r types.SpecReport) bool {
					return r.FullText() == text && r.State.Is(types.SpecStatePassed)
				})
				mu.Lock()
				fmt.Printf("%d of %d: passed=%-5t %s\n", i+1, len(candidates), passed, text)
				if passed {
					found = append(found, fmt.Errorf("%s: passes and is not in test/upstream/conformance/specs.txt", text))
					delete(excluded, text)
					specs[text] = true
				}
				mu.Unlock()
			}
		})
	}
	for i := range candidates {
		select {
		case next <- i:
		case <-ctx.Done():
		}
	}
	close(next)
	wg.Wait()
	if err := ctx.Err(); err != nil {
		return err
	}
	if !o.update {
		return errors.Join(found...)
	}
	return errors.Join(os.WriteFile("test/upstream/conformance/specs.txt", []byte(file(specs)), 0o644),
		os.WriteFile("test/upstream/conformance/excluded.txt", []byte(file(excluded)), 0o644))
}
