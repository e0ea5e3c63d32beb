package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/stratakube/strata/server/bench/internal/target"
)

// profileSlack is how long a profile may take longer than asked for.
const profileSlack = 30 * time.Second

// profile runs a workload once more, or as often as fits into the time of a run, and keeps the CPU profile of that time and the heap profile
// after it. What is measured for the table is never profiled.
func (b *bench) profile(ctx context.Context, w Workload, spec target.EngineSpec) error {
	runs := b.observed[w.Name][spec.Label]
	if b.failed[w.Name][spec.Label] != nil || len(runs) == 0 || runs[0].ops() == 0 {
		return nil
	}
	b.progress.step("%-14s %-10s profile", w.Name, spec.Label)
	engine, err := b.engine(ctx, spec)
	if err != nil {
		return err
	}
	seconds := min(max(1, int(runs[0].Elapsed.Seconds()+0.5)), 30)
	profileCtx, cancel := context.WithTimeout(ctx, time.Duration(seconds)*time.Second+profileSlack)
	defer cancel()
	type outcome struct {
		data []byte
		err  error
	}
	cpu := make(chan outcome, 1)
	go func() {
		data, err := engine.Profile(profileCtx, fmt.Sprintf("profile?seconds=%d", seconds))
		cpu <- outcome{data, err}
	}()
	for {
		if _, err := b.sample(ctx, w, spec); err != nil {
			return err
		}
		select {
		case got := <-cpu:
			heap, err := engine.Profile(ctx, "heap")
			if err := errors.Join(got.err, err); err != nil {
				return err
			}
			name := filepath.Join(b.config.ProfileDir, w.Name+"-"+spec.Label)
			if err := keepProfiles(ctx, name, got.data, heap); err != nil {
				return err
			}
			b.progress.done("%s.{cpu,heap}.{pprof,txt}", name)
			return nil
		default:
		}
	}
}

// keepProfiles writes the profiles, and beside them what their first 15 functions are.
func keepProfiles(ctx context.Context, name string, cpu, heap []byte) error {
	for kind, data := range map[string][]byte{"cpu": cpu, "heap": heap} {
		file := name + "." + kind + ".pprof"
		if err := os.WriteFile(file, data, 0o644); err != nil {
			return fmt.Errorf("keep a profile: %w", err)
		}
		top, err := exec.CommandContext(ctx, "go", "tool", "pprof", "-top", "-nodecount=15", file).Output()
		if err != nil {
			return fmt.Errorf("summarize %s: %w", file, err)
		}
		if err := os.WriteFile(name+"."+kind+".txt", top, 0o644); err != nil {
			return fmt.Errorf("keep a profile: %w", err)
		}
	}
	return nil
}
