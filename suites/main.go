package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"
)

// all are the suites, in the order of the document.
var all = []Suite{
	kubernetesSuite,
	extensionsSuite,
	controllerRuntimeSuite,
	conformanceSuite,
	robustnessSuite,
}

type options struct {
	suites, units *regexp.Regexp
	tests         []string // nil: all
	quick, write  bool
	document      bool
	keep, missing bool
	jobs          int           // units that run at once
	period        time.Duration // after which no unit is started; 0: no limit
}

func main() {
	env := &Env{}
	o := options{}
	suites := flag.String("suites", "", "run only the suites whose name this `regexp` matches")
	units := flag.String("units", "", "run only the units (packages) whose name this `regexp` matches")
	tests := flag.String("tests", "", "run only these top-level tests, `names` with commas in between, and write nothing")
	flag.BoolVar(&o.quick, "quick", false, "run only the subset that every change must pass, and write nothing")
	flag.BoolVar(&o.write, "write", true, "write suites/results.json and docs/conformance.md")
	flag.BoolVar(&o.document, "document", false, "run nothing, and write docs/conformance.md from suites/results.json")
	flag.BoolVar(&o.missing, "missing", false, "run only the units that suites/results.json does not have for this version: goes on after an interrupted run")
	flag.IntVar(&o.jobs, "jobs", 2, "how many units run at once; builds run one by one beside them")
	flag.DurationVar(&o.period, "for", 0, "start no unit after this `time`; with -missing another run goes on from there")
	flag.BoolVar(&o.keep, "keep", false, "keep the test binaries in bin/suites")
	flag.StringVar(&env.Root, "root", "..", "the `directory` of the repository")
	flag.IntVar(&env.Parallel, "parallel", 2, "how many parallel tests of a binary run at once (-test.parallel)")
	flag.Parse()

	// The first signal ends the run in order, a second one at once.
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, restore)
	if *tests != "" {
		o.tests = strings.Split(*tests, ",")
	}
	o.write = o.write && !o.quick && o.tests == nil
	err := func() (err error) {
		if o.suites, err = regexp.Compile(*suites); err != nil {
			return fmt.Errorf("-suites: %w", err)
		}
		if o.units, err = regexp.Compile(*units); err != nil {
			return fmt.Errorf("-units: %w", err)
		}
		if env.Root, err = filepath.Abs(env.Root); err != nil {
			return err
		}
		env.Bin = filepath.Join(env.Root, "bin", "suites")
		return run(ctx, env, o)
	}()
	if err != nil {
		fmt.Fprintln(os.Stderr, "suites:", err)
		os.Exit(1)
	}
}

// run runs what o selects. The results of each unit are written when it has ended, so that an interrupted run leaves those
// of the units before.
func run(ctx context.Context, env *Env, o options) error {
	resultsFile, documentFile := filepath.Join(env.Root, "suites", "results.json"), filepath.Join(env.Root, "docs", "conformance.md")
	r, err := readResults(resultsFile)
	if err != nil {
		return err
	}
	if o.document {
		return os.WriteFile(documentFile, []byte(document(all, r)), 0o644)
	}
	if err := os.MkdirAll(filepath.Join(env.Bin, "logs"), 0o755); err != nil {
		return err
	}
	started := time.Now()
	ran, left := 0, 0
	var mu sync.Mutex // of problems, r and the files
	var problems []string
	defer func() { // also of a run that was interrupted
		for _, p := range problems {
			fmt.Println("FAILED ", p)
		}
	}()
	write := func() error {
		return errors.Join(r.write(resultsFile), os.WriteFile(documentFile, []byte(document(all, r)), 0o644))
	}
	record := func(suite *Suite, unit Unit) error {
		result, found, err := runUnit(ctx, env, suite, unit, o)
		mu.Lock()
		defer mu.Unlock()
		problems = append(problems, found...)
		if err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			problems = append(problems, fmt.Sprintf("%s %s: %v", suite.Name, unit.Name, err))
			return nil
		}
		if !o.write {
			return nil
		}
		if r[suite.Name] == nil {
			r[suite.Name] = map[string]outcome{}
		}
		r[suite.Name][unit.Name] = result
		return write()
	}
	// prepared judges suites/known.go, and drops rows that are not of the present version.
	prepared := func(suite *Suite, units []Unit) error {
		mu.Lock()
		defer mu.Unlock()
		problems = append(problems, withoutUnit(known, idle, suite.Name, units)...)
		if !o.write || !r.dropStale(suite.Name, units) {
			return nil
		}
		return write()
	}
	var running errgroup
	slots := make(chan struct{}, o.jobs)
	for _, suite := range all {
		if o.quick && !suite.Quick || !o.suites.MatchString(suite.Name) {
			continue
		}
		fmt.Printf("%s: preparing\n", suite.Name)
		units, err := suite.Prepare(ctx, env)
		if err != nil {
			return errors.Join(fmt.Errorf("%s: %w", suite.Name, err), running.Wait())
		}
		if err := prepared(&suite, units); err != nil {
			return errors.Join(err, running.Wait())
		}
		for _, unit := range units {
			mu.Lock()
			recorded := r[suite.Name][unit.Name].Source == unit.Source
			mu.Unlock()
			if o.quick && unit.Quick == nil || !o.units.MatchString(unit.Name) || o.missing && recorded {
				continue
			}
			slots <- struct{}{}
			if o.period > 0 && time.Since(started) > o.period {
				<-slots
				left++
				continue
			}
			ran++
			if err := build(ctx, &suite, unit); err != nil {
				<-slots
				if ctx.Err() != nil {
					return errors.Join(ctx.Err(), running.Wait())
				}
				mu.Lock()
				problems = append(problems, fmt.Sprintf("%s %s: %v", suite.Name, unit.Name, err))
				mu.Unlock()
				continue
			}
			running.Go(func() error {
				defer func() { <-slots }()
				return record(&suite, unit)
			})
		}
	}
	if err := running.Wait(); err != nil {
		return err
	}
	if ran == 0 && !o.missing {
		return errors.New("nothing matches -suites and -units")
	}
	if len(problems) > 0 {
		return fmt.Errorf("%d problems in %d units", len(problems), ran)
	}
	if left > 0 {
		return fmt.Errorf("%d units in time, no unexplained difference; %d units are left: go on with -missing", ran, left)
	}
	fmt.Printf("%d units, no unexplained difference, %.0f s\n", ran, time.Since(started).Seconds())
	return nil
}

// build builds a unit.
func build(ctx context.Context, suite *Suite, unit Unit) error {
	if unit.Build == nil {
		return nil
	}
	started := time.Now()
	err := unit.Build(ctx)
	if err == nil {
		fmt.Printf("%s %s: built in %.0f s\n", suite.Name, unit.Name, time.Since(started).Seconds())
	}
	return err
}

// errgroup runs functions and joins their errors.
type errgroup struct {
	sync.WaitGroup
	mu  sync.Mutex
	err error
}

func (g *errgroup) Go(f func() error) {
	g.WaitGroup.Go(func() {
		err := f()
		g.mu.Lock()
		defer g.mu.Unlock()
		g.err = errors.Join(g.err, err)
	})
}

func (g *errgroup) Wait() error {
	g.WaitGroup.Wait()
	return g.err
}
