package main

import (
	"context"
	"errors"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// coresOf calls do and returns the number of cores that each process used meanwhile.
func coresOf(do func() error, children ...*process.Child) ([]float64, error) {
	before, err := cpuOf(children)
	if err != nil {
		return nil, err
	}
	began := time.Now()
	if err := do(); err != nil {
		return nil, err
	}
	return coresSince(before, began, children)
}

// coresEach calls note with the number of cores that each process used in an interval, for consecutive intervals until ctx is done.
func coresEach(ctx context.Context, interval time.Duration, note func(cores []float64), children ...*process.Child) error {
	for {
		before, err := cpuOf(children)
		if err != nil {
			return err
		}
		began := time.Now()
		if !waitUntil(ctx, began.Add(interval)) {
			return nil
		}
		cores, err := coresSince(before, began, children)
		if err != nil {
			return err
		}
		note(cores)
	}
}

func coresSince(before []time.Duration, began time.Time, children []*process.Child) ([]float64, error) {
	after, err := cpuOf(children)
	if err != nil {
		return nil, err
	}
	elapsed := time.Since(began)
	cores := make([]float64, len(children))
	for i := range cores {
		cores[i] = (after[i] - before[i]).Seconds() / elapsed.Seconds()
	}
	return cores, nil
}

func cpuOf(children []*process.Child) ([]time.Duration, error) {
	used := make([]time.Duration, len(children))
	for i, child := range children {
		cpu, err := child.CPU()
		if err != nil {
			return nil, errors.Join(err, child.Ended())
		}
		used[i] = cpu
	}
	return used, nil
}
