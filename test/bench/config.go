package main

import (
	"cmp"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/stratakube/strata/test/bench/internal/target"
)

// Config contains the values of the flags.
type Config struct {
	Quick      bool
	List       bool
	Sizes      Sizes
	Workloads  []Workload
	Runs       int
	Engines    []target.EngineSpec // Binary "" means Config.Binary
	Binary     string              // "" means that it is built
	Stock      string              // a stock kube-apiserver, for engines of kind stock
	DataDir    string
	Out        []string
	ProfileDir string   // "" means no profiles
	Profiled   []string // labels of the engines that are profiled
	ProfileMD  string   // file for the first functions of each profile, "" means none
	Timeout    time.Duration

	root string // of the repository
}

const usage = `Usage: bench [flags]

Compares engines of the API server on the same etcd data, and with a plain server that writes the same bytes from memory. Full sizes take
about an hour, the workloads of the read path half of that, -quick more than half an hour on two processors.

  make bench                                   all workloads at the sizes that docs/benchmarks.md quotes
  make bench-read                              those of the read path
  make bench-consistent                        those of consistent reads
  make bench-watch                             those of watches
  make bench-lists                             those of lists by pages and of the past
  make bench-storm                             those of a fleet of clients that wants everything at once
  make bench ARGS='-quick'                     a tenth
  make bench ARGS='-workloads list-.*,get'     some of them
  make bench ARGS='-engines strata,old=strata@/tmp/old/strata,upstream'
  make stock bench ARGS='-engines strata,stock,limit'   beside a stock kube-apiserver

Flags:
`

// parseFlags reads the flags. Messages about wrong flags go to stderr, help to stdout.
func parseFlags(args []string, stdout, stderr io.Writer) (Config, error) {
	var c Config
	root, err := repositoryRoot()
	if err != nil {
		return c, err
	}
	c.root = root
	var workloadPatterns, engines, profiled, memoryLimit string
	engineArgs := map[string][]string{}
	objects := 0

	fs := flag.NewFlagSet("bench", flag.ContinueOnError)
	fs.SetOutput(io.Discard) // the error is returned and printed once
	fs.BoolVar(&c.Quick, "quick", false, "run with a tenth of the sizes: a check that all workloads work, not for published results")
	fs.IntVar(&objects, "objects", 0, "number of ConfigMaps; there are a third as many pods (default 300000, with -quick 30000)")
	fs.StringVar(&workloadPatterns, "workloads", "", "comma-separated names or regular expressions of workloads (default all)")
	fs.BoolVar(&c.List, "list", false, "list the workloads and exit")
	fs.IntVar(&c.Runs, "runs", 5, "how often each engine is measured")
	fs.StringVar(&engines, "engines", "strata,upstream,limit",
		"comma-separated engines, the first of which is compared with the others: label[=engine][@binary]; "+
			"stock is the kube-apiserver of -stock, limit a plain Go HTTPS server that writes the same bytes")
	fs.Func("engine-arg", "label:flag, a further flag for one engine; may be repeated", func(v string) error {
		label, arg, ok := strings.Cut(v, ":")
		if !ok {
			return fmt.Errorf("want label:flag")
		}
		engineArgs[label] = append(engineArgs[label], arg)
		return nil
	})
	fs.StringVar(&c.Binary, "binary", "", "the strata executable (default: build it)")
	fs.StringVar(&c.Stock, "stock", filepath.Join(root, "bin", "stock", "kube-apiserver-1.37"), "the stock kube-apiserver, which make stock builds")
	fs.StringVar(&c.DataDir, "data", filepath.Join(root, "bench-data"), "directory for filled etcds, logs and temporary data")
	fs.Func("out", "file to write the table to: .md Markdown, .json JSON, .svg a plot of the figures with a bound, otherwise text; may be repeated", func(v string) error {
		c.Out = append(c.Out, v)
		return nil
	})
	fs.StringVar(&c.ProfileDir, "profile", "", "directory for CPU and heap profiles of each workload, taken in additional runs")
	fs.StringVar(&profiled, "profile-engines", "", "comma-separated labels of the engines that -profile is for (default the first)")
	fs.StringVar(&c.ProfileMD, "profile-md", "", "Markdown file for the first functions of each CPU profile; needs -profile")
	fs.StringVar(&memoryLimit, "memory-limit", "", "kill an engine that has more resident memory than this, for example 12Gi (default no limit)")
	fs.DurationVar(&c.Timeout, "timeout", 2*time.Hour, "stop after this time")
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

	c.Sizes = fullSizes()
	if c.Quick {
		c.Sizes = quickSizes()
	}
	if objects != 0 {
		c.Sizes.setObjects(objects)
	}
	// Updates of one sample go to different objects.
	if least := 2 * c.Sizes.Writes; c.Sizes.Objects < least {
		return c, fmt.Errorf("-objects: %d is less than the minimum of %d", c.Sizes.Objects, least)
	}
	if c.Runs < 1 {
		return c, fmt.Errorf("-runs: %d is less than 1", c.Runs)
	}
	if c.Workloads, err = selectWorkloads(workloads, workloadPatterns); err != nil {
		return c, err
	}
	if c.Engines, err = parseEngines(engines, engineArgs); err != nil {
		return c, err
	}
	if err := c.findStock(); err != nil {
		return c, err
	}
	if c.Profiled, err = selectProfiled(profiled, c.Engines); err != nil {
		return c, err
	}
	if c.ProfileMD != "" && c.ProfileDir == "" {
		return c, fmt.Errorf("-profile-md needs -profile")
	}
	if memoryLimit != "" {
		q, err := resource.ParseQuantity(memoryLimit)
		if err != nil || q.Value() <= 0 {
			return c, fmt.Errorf("-memory-limit: %q is not a size such as 12Gi", memoryLimit)
		}
		for i := range c.Engines {
			c.Engines[i].MemoryLimit = uint64(q.Value())
		}
	}
	return c, nil
}

// findStock sets the executables of the engines of kind stock.
func (c *Config) findStock() error {
	for i := range c.Engines {
		e := &c.Engines[i]
		if !e.IsStock() {
			continue
		}
		e.Binary = cmp.Or(e.Binary, c.Stock)
		if _, err := os.Stat(e.Binary); err != nil && !c.List {
			return fmt.Errorf("-engines: %s: %w (make stock builds bin/stock/kube-apiserver-1.37; -stock names another one)", e.Label, err)
		}
	}
	return nil
}

// selectProfiled reads the labels of -profile-engines; the limit cannot be profiled.
func selectProfiled(list string, engines []target.EngineSpec) ([]string, error) {
	if list == "" {
		return []string{engines[0].Label}, nil
	}
	labels := strings.Split(list, ",")
	for _, label := range labels {
		if !slices.ContainsFunc(engines, func(e target.EngineSpec) bool { return e.Label == label && !e.IsLimit() }) {
			return nil, fmt.Errorf("-profile-engines: unknown engine %q", label)
		}
	}
	return labels, nil
}

// profiled reports whether profiles of an engine are requested.
func (c *Config) profiled(spec target.EngineSpec) bool {
	return slices.Contains(c.Profiled, spec.Label)
}

// parseEngines reads "label[=engine][@binary],...".
func parseEngines(list string, args map[string][]string) ([]target.EngineSpec, error) {
	var specs []target.EngineSpec
	seen := map[string]bool{}
	for _, item := range strings.Split(list, ",") {
		name, binary, _ := strings.Cut(item, "@")
		label, engine, ok := strings.Cut(name, "=")
		if !ok {
			engine = label
		}
		if label == "" || engine == "" || strings.ContainsAny(label, "/\\") {
			return nil, fmt.Errorf("-engines: %q is not label[=engine][@binary]", item)
		}
		if seen[label] {
			return nil, fmt.Errorf("-engines: duplicate label %q", label)
		}
		if engine == target.LimitEngine && len(specs) == 0 {
			return nil, fmt.Errorf("-engines: limit cannot be the first engine, because it replays the responses of that one")
		}
		seen[label] = true
		specs = append(specs, target.EngineSpec{Label: label, Engine: engine, Binary: binary, Args: args[label]})
	}
	for label := range args {
		if !seen[label] {
			return nil, fmt.Errorf("-engine-arg: unknown engine %q", label)
		}
	}
	return specs, nil
}

// repositoryRoot is the next directory upwards that contains go.work.
func repositoryRoot() (string, error) {
	dir, err := os.Getwd()
	if err != nil {
		return "", fmt.Errorf("find the repository: %w", err)
	}
	for {
		if _, err := os.Stat(filepath.Join(dir, "go.work")); err == nil {
			return dir, nil
		}
		parent := filepath.Dir(dir)
		if parent == dir {
			return "", fmt.Errorf("find the repository: no go.work in the working directory or above it")
		}
		dir = parent
	}
}
