// Command bench compares API server engines: it runs each as a process of its own on the same etcd
// data, takes every measurement alternately on them, and prints a table with the ratios. `make
// bench` runs it; docs/benchmarks.md has its results.
//
// The workloads are declared in the files of their kinds; Workload describes how to add one.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/prometheus/procfs"

	"github.com/stratakube/strata/test/bench/internal/limit"
	"github.com/stratakube/strata/test/bench/internal/target"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// The first signal ends the measurement and stops the servers in order; a second one ends this
	// process, and with it the servers, at once.
	context.AfterFunc(ctx, stop)
	var err error
	if len(os.Args) > 1 && os.Args[1] == limit.Command {
		err = limit.Run(ctx, os.Args[2:]) // as a process of the benchmark
	} else {
		err = run(ctx, os.Args[1:], os.Stdout, os.Stderr)
	}
	switch {
	case err == nil, errors.Is(err, flag.ErrHelp):
	case ctx.Err() != nil:
		fmt.Fprintln(os.Stderr, "bench: interrupted")
		os.Exit(130)
	default:
		fmt.Fprintln(os.Stderr, "bench:", err)
		os.Exit(1)
	}
}

// run is main with its dependencies as parameters.
func run(ctx context.Context, args []string, stdout io.Writer, stderr *os.File) error {
	config, err := parseFlags(args, stdout, stderr)
	if err != nil {
		return err
	}
	if config.List {
		for _, w := range config.Workloads {
			fmt.Fprintf(stdout, "%-14s %s\n", w.Name, w.Title)
		}
		return nil
	}
	return benchmark(ctx, config, stdout, stderr)
}

// benchmark takes all measurements of config, writes the table, and returns when all processes have
// ended.
func benchmark(ctx context.Context, config Config, stdout io.Writer, stderr *os.File) error {
	if runtime.GOOS != "linux" {
		return errors.New("the benchmark reads the cost of processes from /proc, which only Linux has")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, config.Timeout, fmt.Errorf("took longer than -timeout %v", config.Timeout))
	defer cancel()
	progress := newSteps(stderr)
	if config.Binary == "" {
		if err := config.build(ctx, progress); err != nil {
			return err
		}
	}
	for i := range config.Engines {
		if config.Engines[i].Binary == "" {
			config.Engines[i].Binary = config.Binary
		}
	}
	if err := os.MkdirAll(config.DataDir, 0o755); err != nil {
		return fmt.Errorf("-data: %w", err)
	}
	runDir, release, err := newRunDir(config.DataDir)
	if err != nil {
		return fmt.Errorf("-data: %w", err)
	}
	defer release()
	credentials, err := target.NewCredentials(runDir)
	if err != nil {
		return err
	}
	report, err := newReport(ctx, config)
	if err != nil {
		return err
	}

	r := &runner{config: config, credentials: credentials, runDir: runDir, progress: progress}
	runErr := r.run(ctx)
	failures := 0
	var passed []string // workloads that Strata's byte read path did not answer
	for _, w := range config.Workloads {
		result := summarize(w, report.Engines, r.observed[w.Name], r.failed[w.Name])
		if len(result.Rows) > 0 || len(result.Notes) > 0 {
			report.Results = append(report.Results, result)
		}
		failures += len(r.failed[w.Name])
		for _, runs := range r.observed[w.Name] {
			if reasons := passedOnReasons(runs); reasons != "" && !w.PassesOn {
				passed = append(passed, fmt.Sprintf("%s (%s)", w.Name, reasons))
			}
		}
	}
	report.Results = append(report.Results, r.memory...)
	// Results from before an interruption are shown too.
	if len(report.Results) > 0 {
		fmt.Fprintln(stdout)
		if err := report.WriteText(stdout); err != nil {
			return err
		}
		if err := config.writeOutputs(report); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), os.RemoveAll(runDir))
	}
	if runErr != nil {
		return runErr
	}
	if failures > 0 {
		return fmt.Errorf("%d measurements failed; logs are in %s", failures, runDir)
	}
	if err := os.RemoveAll(runDir); err != nil {
		return fmt.Errorf("remove the logs: %w", err)
	}
	if len(passed) > 0 {
		return fmt.Errorf("reads were passed on that the byte read path must answer: %s", strings.Join(passed, "; "))
	}
	return nil
}

// build builds the command of this repository.
func (c *Config) build(ctx context.Context, progress *steps) error {
	c.Binary = filepath.Join(c.root, "bin", "strata")
	progress.step("go build -o bin/strata ./server/cmd/strata")
	cmd := exec.CommandContext(ctx, "go", "build", "-buildvcs=false", "-o", c.Binary, "./server/cmd/strata")
	cmd.Dir = c.root
	output, err := cmd.CombinedOutput()
	if err != nil {
		return fmt.Errorf("build strata: %w\n%s", err, output)
	}
	progress.done("done")
	return nil
}

// writeOutputs writes the files of -out, in the format of their extensions.
func (c *Config) writeOutputs(report *Report) error {
	for _, path := range c.Out {
		write := report.WriteText
		switch filepath.Ext(path) {
		case ".md":
			write = report.WriteMarkdown
		case ".json":
			write = report.WriteJSON
		case ".svg":
			write = report.WriteSVG
		}
		if err := writeFile(path, write); err != nil {
			return fmt.Errorf("-out: %w", err)
		}
	}
	return nil
}

func writeFile(path string, write func(io.Writer) error) error {
	f, err := os.Create(path)
	if err != nil {
		return err
	}
	return errors.Join(write(f), f.Close())
}

// newReport records date, machine and versions.
func newReport(ctx context.Context, config Config) (*Report, error) {
	report := &Report{
		Date: time.Now(), Go: runtime.Version(), CPUs: runtime.NumCPU(), CPU: runtime.GOARCH,
		Quick: config.Quick, Runs: config.Runs, Sizes: config.Sizes,
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return nil, fmt.Errorf("describe the machine: %w", err)
	}
	if cpus, err := fs.CPUInfo(); err == nil && len(cpus) > 0 && cpus[0].ModelName != "" {
		report.CPU = cpus[0].ModelName // empty on some architectures
	}
	memory, err := fs.Meminfo()
	if err != nil {
		return nil, fmt.Errorf("describe the machine: %w", err)
	}
	if memory.MemTotalBytes != nil {
		report.Memory = *memory.MemTotalBytes
	}
	versions := map[string]bool{}
	for _, e := range config.Engines {
		report.Engines = append(report.Engines, e.Label)
		if e.IsLimit() {
			continue
		}
		output, err := exec.CommandContext(ctx, e.Binary, e.VersionArgs()...).Output()
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", e.Binary, e.VersionArgs()[0], err)
		}
		version := parseVersions(string(output))
		if e.IsStock() {
			version = "stock " + strings.TrimSpace(string(output))
		}
		if !versions[version] {
			versions[version] = true
			report.Versions = append(report.Versions, version)
		}
	}
	return report, nil
}

// parseVersions makes one line of the output of `strata version`, which has a part and its version
// per line. It omits the Go version, which the report has in another field, and the versions of
// k8s.io/apiserver that the module kube supports.
func parseVersions(output string) string {
	var parts []string
	for line := range strings.Lines(output) {
		if fields := strings.Fields(line); len(fields) >= 2 && fields[0] != "go" && fields[0] != "apiserver" {
			parts = append(parts, fields[0]+" "+fields[1])
		}
	}
	return strings.Join(parts, ", ")
}
