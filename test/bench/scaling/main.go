// Command scaling measures the coefficients of the model in test/bench/internal/scaling and compares its predictions with simulated
// clusters. `make scaling` runs it and writes the tables of docs/scaling.md.
//
// Server and etcd are processes of their own, whose CPU time is read from the kernel; etcd syncs every write. The clients are this
// program, and kwok, as a process, in one of the simulated clusters.
package main

import (
	"bufio"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"strings"
	"syscall"
	"time"

	"github.com/stratakube/strata/test/bench/internal/scaling"
	"github.com/stratakube/strata/test/bench/internal/target"
)

// config has the flags and the connections of the program with its surroundings.
type config struct {
	binary, kwok, stages, out, data, steps string
	probe, warm, window                    time.Duration

	dir         string // of this run, for data and logs
	credentials *target.Credentials
	stderr      io.Writer
}

// say reports progress.
func (c config) say(format string, args ...any) { fmt.Fprintf(c.stderr, format+"\n", args...) }

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := run(ctx, os.Args[1:], os.Stderr); err != nil && !errors.Is(err, flag.ErrHelp) {
		fmt.Fprintln(os.Stderr, "scaling:", err)
		os.Exit(1)
	}
}

// steps are the parts of a run, in order.
var steps = []struct {
	name string
	run  func(ctx context.Context, config config, out *scaling.Measured) error
}{
	{"requests", measureRequestCosts},
	{"watches", measureWatchCosts},
	{"memory", measureMemory},
	{"etcd", measureEtcd},
	{"100", check("100", scaling.Cluster{Nodes: 100, Pods: 3000, PodLifetime: 3000, SliceEndpoints: 20, Speed: 10}, false)},
	{"300", check("300", scaling.Cluster{Nodes: 300, Pods: 6000, PodLifetime: 3000, SliceEndpoints: 20, Speed: 6}, false)},
	{"1000", check("1000", scaling.Cluster{Nodes: 1000, Pods: 15000, PodLifetime: 3000, SliceEndpoints: 20, Speed: 2}, false)},
	{"kwok", check("kwok", scaling.Cluster{Nodes: 200, Pods: 4000, PodLifetime: 400, SliceEndpoints: 20, Speed: 1}, true)},
}

func check(name string, shape scaling.Cluster, kwok bool) func(context.Context, config, *scaling.Measured) error {
	return func(ctx context.Context, config config, out *scaling.Measured) error {
		result, err := simulate(ctx, config, name, shape, kwok)
		if err != nil {
			return err
		}
		out.SetCheck(result)
		predicted := out.Load(result.Rates)
		config.say("%s: server %.3f of %.3f cores, etcd %.3f of %.3f cores (predicted of measured)", name, predicted.Server, result.Measured.Server, predicted.Etcd, result.Measured.Etcd)
		return nil
	}
}

// run is main with its dependencies as parameters.
func run(ctx context.Context, args []string, stderr io.Writer) error {
	c := config{stderr: stderr}
	flags := flag.NewFlagSet("scaling", flag.ContinueOnError)
	flags.SetOutput(stderr)
	flags.StringVar(&c.binary, "binary", "bin/strata", "the program strata")
	flags.StringVar(&c.kwok, "kwok", "bin/kwok", "the program kwok, of step kwok")
	flags.StringVar(&c.stages, "stages", "", "directory of kwok's stages, kustomize/stage of its module, of step kwok")
	flags.StringVar(&c.out, "out", "test/bench/internal/scaling/measured.json", "the file of the measurements, which is read before and replaced")
	flags.StringVar(&c.data, "data", "bench-data", "directory for data and logs of the run; it should be on the disk that etcd would use")
	flags.StringVar(&c.steps, "steps", "requests,watches,memory,etcd,100,300,1000,kwok", "what to measure; everything else in -out stays")
	flags.DurationVar(&c.probe, "probe", 8*time.Second, "duration of the measurement of one cost")
	flags.DurationVar(&c.warm, "warm", 10*time.Second, "activity of a simulated cluster before it is measured")
	flags.DurationVar(&c.window, "window", time.Minute, "measured activity of a simulated cluster")
	if err := flags.Parse(args); err != nil {
		return err
	}
	if runtime.GOOS != "linux" {
		return errors.New("the CPU time of processes is read as only Linux has it")
	}
	out, err := scaling.Read(c.out)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(c.data, 0o755); err != nil {
		return fmt.Errorf("-data: %w", err)
	}
	if c.dir, err = tempDir(c.data, "scaling-"); err != nil {
		return fmt.Errorf("-data: %w", err)
	}
	if c.credentials, err = target.NewCredentials(c.dir); err != nil {
		return err
	}
	for _, name := range strings.Split(c.steps, ",") {
		if err := c.step(ctx, name, out); err != nil {
			return fmt.Errorf("step %s: %w; logs are in %s", name, err, c.dir)
		}
	}
	return os.RemoveAll(c.dir)
}

// step runs one step and writes its measurements.
func (c config) step(ctx context.Context, name string, out *scaling.Measured) error {
	for _, s := range steps {
		if s.name != name {
			continue
		}
		if err := s.run(ctx, c, out); err != nil {
			return err
		}
		out.Date, out.Machine = time.Now().Format(time.DateOnly), machine()
		return out.Write(c.out)
	}
	return fmt.Errorf("there is no such step; -steps lists them")
}

// machine describes the processors.
func machine() string {
	model := runtime.GOARCH
	if f, err := os.Open("/proc/cpuinfo"); err == nil {
		defer f.Close()
		for lines := bufio.NewScanner(f); lines.Scan(); {
			if _, name, ok := strings.Cut(lines.Text(), "model name\t: "); ok {
				model = name
				break
			}
		}
	}
	return fmt.Sprintf("%d processors (%s), %s", runtime.NumCPU(), model, runtime.Version())
}

// tempDir makes a directory with an absolute path below parent.
func tempDir(parent, prefix string) (string, error) {
	dir, err := os.MkdirTemp(parent, prefix)
	if err != nil {
		return "", err
	}
	return filepath.Abs(dir)
}
