package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/stratakube/strata/test/bench/internal/target"
)

const (
	// profileSlack is the time by which a profile may exceed its requested duration.
	profileSlack = 30 * time.Second

	// profileStart is the time that a server takes to begin a profile (a guess; it takes a millisecond).
	profileStart = 50 * time.Millisecond

	// profileTime is the measured time of a profile: with a sample every 10 ms on each busy core, less time has too few samples.
	profileTime = 4 * time.Second

	// profileSamples bounds the runs for a profile.
	profileSamples = 8

	// profileFunctions is the number of functions shown of a profile.
	profileFunctions = 15
)

// cpuProfile is the CPU profile of the measured time of one sample.
type cpuProfile struct {
	engine  *target.Engine
	seconds int
	cancel  context.CancelFunc
	done    chan struct{} // closed when data and err are set
	data    []byte
	err     error
	heap    []byte // nil unless the sample kept it
}

// begin starts the profile, which lasts p.seconds.
func (p *cpuProfile) begin(ctx context.Context) {
	ctx, p.cancel = context.WithTimeout(ctx, time.Duration(p.seconds)*time.Second+profileSlack)
	p.done = make(chan struct{})
	go func() {
		defer close(p.done)
		p.data, p.err = p.engine.Profile(ctx, fmt.Sprintf("profile?seconds=%d", p.seconds))
	}()
	select {
	case <-p.done:
	case <-time.After(profileStart):
	}
}

// end returns when the profile is complete.
func (p *cpuProfile) end() error {
	defer p.cancel()
	<-p.done
	return p.err
}

// Profile contains the first functions of a workload's profile.
type Profile struct {
	Workload, Engine string
	Top              string // as pprof -top prints it
}

// profile runs a workload some times more and stores the CPU profile of the measured times and the heap profile after them. Samples
// of the table are never profiled.
func (b *bench) profile(ctx context.Context, w Workload, spec target.EngineSpec) error {
	runs := b.observed[w.Name][spec.Label]
	if b.config.ProfileDir == "" || !b.config.profiled(spec) || b.failed[w.Name][spec.Label] != nil || len(runs) == 0 || runs[0].Elapsed == 0 {
		return nil
	}
	b.progress.step("%-14s %-10s profile", w.Name, spec.Label)
	took := runs[0].Elapsed
	seconds := min(int((took+profileStart)/time.Second)+1, 30)
	name := filepath.Join(b.config.ProfileDir, w.Name+"-"+spec.Label)
	var parts []string
	var heap []byte // nil unless a sample kept it
	defer func() {
		for _, part := range parts {
			os.Remove(part)
		}
	}()
	for profiled := time.Duration(0); len(parts) == 0 || profiled < profileTime && len(parts) < profileSamples; profiled += took {
		if w.Change != nil {
			if err := b.change(ctx, w); err != nil {
				return err
			}
		}
		if w.Alone && len(parts) > 0 {
			break // the first request of an engine occurs once
		}
		engine, err := b.engine(ctx, w.variant(spec))
		if err != nil {
			return err
		}
		profile := &cpuProfile{engine: engine, seconds: seconds}
		if _, err := b.sample(ctx, w, spec, false, profile); err != nil {
			return err
		}
		heap = profile.heap
		part := fmt.Sprintf("%s.cpu.%d.pprof", name, len(parts))
		parts = append(parts, part)
		if err := os.WriteFile(part, profile.data, 0o644); err != nil {
			return fmt.Errorf("keep a profile: %w", err)
		}
	}
	engine, err := b.engine(ctx, w.variant(spec))
	if err != nil {
		return err
	}
	if heap == nil {
		heap, err = engine.Profile(ctx, "heap")
	}
	if err == nil {
		err = errors.Join(os.WriteFile(name+".heap.pprof", heap, 0o644), merge(ctx, parts, name+".cpu.pprof"))
	}
	if err != nil {
		return fmt.Errorf("keep a profile: %w", err)
	}
	for _, kind := range []string{"cpu", "heap"} {
		top, err := pprofTop(ctx, name+"."+kind+".pprof")
		if err != nil {
			return err
		}
		if err := os.WriteFile(name+"."+kind+".txt", []byte(top), 0o644); err != nil {
			return fmt.Errorf("keep a profile: %w", err)
		}
		if kind == "cpu" {
			b.profiles = append(b.profiles, Profile{Workload: w.Title, Engine: spec.Label, Top: top})
		}
	}
	b.progress.done("%s.{cpu,heap}.{pprof,txt}", name)
	return engine.ResetPeak()
}

// merge adds profiles up.
func merge(ctx context.Context, parts []string, to string) error {
	output, err := exec.CommandContext(ctx, "go", append([]string{"tool", "pprof", "-proto", "-output=" + to}, parts...)...).CombinedOutput()
	if err != nil {
		return fmt.Errorf("merge profiles: %w\n%s", err, output)
	}
	return nil
}

// pprofTop returns the first functions of a profile.
func pprofTop(ctx context.Context, file string) (string, error) {
	top, err := exec.CommandContext(ctx, "go", "tool", "pprof", "-top", fmt.Sprintf("-nodecount=%d", profileFunctions), file).Output()
	if err != nil {
		return "", fmt.Errorf("summarize %s: %w", file, err)
	}
	return string(top), nil
}

// writeProfiles writes profiles as Markdown, a section each, without the lines that name their files.
func writeProfiles(w io.Writer, profiles []Profile) error {
	var b strings.Builder
	for _, p := range profiles {
		fmt.Fprintf(&b, "### %s: %s\n\n```\n", p.Workload, p.Engine)
		for line := range strings.Lines(p.Top) {
			name, _, _ := strings.Cut(line, ":")
			switch name {
			case "File", "Build ID", "Type", "Time":
			default:
				b.WriteString(strings.TrimRight(line, " \n") + "\n")
			}
		}
		b.WriteString("```\n\n")
	}
	_, err := io.WriteString(w, b.String())
	return err
}
