// Command bench compares API server engines: it runs each as a process of its own on the same etcd
// data, takes every measurement alternately on them, and prints a table with the ratios. `make
// bench` runs it; docs/benchmarks.md has its results.
//
// The workloads are declared in the files of their kinds; Workload describes how to add one.
package main

import (
	"cmp"
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

	"github.com/stratakube/strata/test/bench/internal/target"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// The first signal ends the measurement and stops the servers in order; a second one ends this
	// process, and with it the servers, at once.
	context.AfterFunc(ctx, stop)
	err := run(ctx, os.Args[1:], os.Stdout, os.Stderr)
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
	config, err := parseFlags(args, stdout)
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

// Config contains the values of the flags.
type Config struct {
	List      bool
	Scale     Scale
	Workloads []Workload
	Runs      int
	Engines   []target.EngineSpec // Binary "" means Config.Binary
	Binary    string
	DataDir   string
	Out       []string
	Timeout   time.Duration

	lived *lived // unless nil, its sequence is run
}

const usage = `Usage: bench [flags]

Compares engines of the API server on the same etcd data. It runs at the top of the repository.

  make bench                                   all workloads at the sizes that docs/benchmarks.md quotes
  make bench ARGS='-quick'                     a tenth
  make bench ARGS='-workloads list-.*,get-16'  some of them
  make bench ARGS='-engines strata,old=strata@/tmp/old/strata,upstream'
  make stock bench ARGS='-engines strata,stock'   beside a stock kube-apiserver
  make bench-lived                             a sequence on one process of each engine (-help: its flags)

Flags:
`

// parseFlags reads the flags. Help goes to stdout.
func parseFlags(args []string, stdout io.Writer) (c Config, err error) {
	all, defaultEngines, defaultTimeout, defaultRuns := workloads, "strata,upstream", 2*time.Hour, 5
	c.Scale = published
	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	if len(args) > 0 && args[0] == "lived" {
		args, c.lived = args[1:], new(lived)
		c.lived.flags(fs)
		defaultEngines, defaultTimeout, defaultRuns = "strata,stock", 12*time.Hour, 3
	}
	fs.BoolFunc("quick", "run with a tenth of the sizes: a check that all workloads work, not for published results", func(string) error {
		c.Scale = quick
		return nil
	})
	fs.SetOutput(io.Discard) // the error is returned and printed once
	patterns := fs.String("workloads", "", "comma-separated names or regular expressions of workloads (default all)")
	fs.BoolVar(&c.List, "list", false, "list the workloads and exit")
	fs.IntVar(&c.Runs, "runs", defaultRuns, "how often each engine is measured")
	engines := fs.String("engines", defaultEngines,
		"comma-separated engines, the first of which is compared with the others: label[=engine][@binary]; "+
			"stock is the kube-apiserver of -stock")
	fs.StringVar(&c.Binary, "binary", "bin/strata", "the strata executable, which make builds")
	stock := fs.String("stock", "bin/stock/kube-apiserver-1.37", "the stock kube-apiserver, which make stock builds")
	fs.StringVar(&c.DataDir, "data", "bench-data", "directory for filled etcds, logs and temporary data")
	fs.Func("out", "file to write the table to: .md Markdown, .json JSON, otherwise text; may be repeated", func(v string) error {
		c.Out = append(c.Out, v)
		return nil
	})
	fs.DurationVar(&c.Timeout, "timeout", defaultTimeout, "stop after this time")
	if err := fs.Parse(args); err != nil {
		if err == flag.ErrHelp {
			fmt.Fprint(stdout, usage)
			fs.SetOutput(stdout)
			fs.PrintDefaults()
		}
		return c, err
	}
	if fs.NArg() > 0 {
		return c, fmt.Errorf("unexpected argument %q (-help shows the flags)", fs.Arg(0))
	}
	if c.Runs < 1 {
		return c, fmt.Errorf("-runs: %d is less than 1", c.Runs)
	}
	if c.lived != nil {
		all = livedRows()
	}
	if c.Workloads, err = selectWorkloads(all, *patterns); err != nil {
		return c, err
	}
	if c.Engines, err = parseEngines(*engines); err != nil {
		return c, err
	}
	for i := range c.Engines {
		e := &c.Engines[i]
		if !e.IsStock() {
			continue
		}
		e.Binary = cmp.Or(e.Binary, *stock)
		if _, err := os.Stat(e.Binary); err != nil && !c.List {
			return c, fmt.Errorf("-engines: %s: %w (make stock builds bin/stock/kube-apiserver-1.37; -stock names another one)", e.Label, err)
		}
	}
	return c, nil
}

// parseEngines reads "label[=engine][@binary],...".
func parseEngines(list string) ([]target.EngineSpec, error) {
	var specs []target.EngineSpec
	seen := map[string]bool{}
	for item := range strings.SplitSeq(list, ",") {
		name, binary, _ := strings.Cut(item, "@")
		label, engine, ok := strings.Cut(name, "=")
		if !ok {
			engine = label
		}
		switch {
		case label == "" || engine == "" || strings.ContainsAny(label, "/\\"):
			return nil, fmt.Errorf("-engines: %q is not label[=engine][@binary]", item)
		case seen[label]:
			return nil, fmt.Errorf("-engines: duplicate label %q", label)
		}
		seen[label] = true
		specs = append(specs, target.EngineSpec{Label: label, Engine: engine, Binary: binary})
	}
	return specs, nil
}

// benchmark takes all measurements of config, writes the table, and returns when all processes have
// ended.
func benchmark(ctx context.Context, config Config, stdout io.Writer, stderr *os.File) error {
	if runtime.GOOS != "linux" {
		return errors.New("the benchmark reads the cost of processes from /proc, which only Linux has")
	}
	ctx, cancel := context.WithTimeoutCause(ctx, config.Timeout, fmt.Errorf("took longer than -timeout %v", config.Timeout))
	defer cancel()
	steps := newSteps(stderr)
	for i := range config.Engines {
		config.Engines[i].Binary = cmp.Or(config.Engines[i].Binary, config.Binary)
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

	r := &runner{config: config, credentials: credentials, runDir: runDir, steps: steps}
	runErr := r.run(ctx)
	failures := r.summarize(report)
	// Results from before an interruption are shown too.
	if len(report.Results) > 0 {
		fmt.Fprintln(stdout)
		if err := errors.Join(report.WriteText(stdout), config.writeOutputs(report)); err != nil {
			return err
		}
	}
	if ctx.Err() != nil {
		return errors.Join(context.Cause(ctx), os.RemoveAll(runDir))
	}
	if runErr != nil {
		return runErr
	}
	if len(failures) > 0 {
		return fmt.Errorf("failed, logs are in %s: %s", runDir, strings.Join(failures, "; "))
	}
	return os.RemoveAll(runDir)
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
		}
		f, err := os.Create(path)
		if err == nil {
			err = errors.Join(write(f), f.Close())
		}
		if err != nil {
			return fmt.Errorf("-out: %w", err)
		}
	}
	return nil
}

// newReport records date, machine and versions.
func newReport(ctx context.Context, config Config) (*Report, error) {
	report := &Report{
		Date: time.Now(), Go: runtime.Version(), CPUs: runtime.NumCPU(), CPU: runtime.GOARCH, Quick: config.Scale != published, Runs: config.Runs,
	}
	if config.lived != nil {
		data := config.lived.data.at(config.Scale)
		report.Data = fmt.Sprintf("%s pods on %s nodes, %s custom resources, %s ConfigMaps", grouped(data.Pods), grouped(data.Nodes), grouped(data.Things), grouped(data.ConfigMaps))
	}
	fs, err := procfs.NewDefaultFS()
	if err != nil {
		return nil, fmt.Errorf("describe the machine: %w", err)
	}
	if cpus, err := fs.CPUInfo(); err == nil && len(cpus) > 0 {
		report.CPU = cmp.Or(cpus[0].ModelName, report.CPU) // empty on some architectures
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
		output, err := exec.CommandContext(ctx, e.Binary, e.VersionArgs()...).Output()
		if err != nil {
			return nil, fmt.Errorf("%s %s: %w", e.Binary, e.VersionArgs()[0], err)
		}
		version := strings.Join(strings.Fields(string(output)), " ")
		if !versions[version] {
			versions[version] = true
			report.Versions = append(report.Versions, version)
		}
	}
	return report, nil
}
