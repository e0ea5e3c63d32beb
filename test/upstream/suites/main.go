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

	"golang.org/x/sync/errgroup"
)

// all are the suites, in the order of the document.
var all = []Suite{
	kubernetesSuite,
	extensionsSuite,
	controllerRuntimeSuite,
	operatorsSuite,
	conformanceSuite,
	robustnessSuite,
	informerSuite,
	peersSuite,
}

type options struct {
	suites, units *regexp.Regexp
	tests         []string // nil: all
	quick, write  bool
	document      bool
	keep          bool
	jobs          int // units that run at once
}

func main() {
	env := &Env{}
	o := options{}
	suites := flag.String("suites", "", "run only the suites whose name this `regexp` matches")
	units := flag.String("units", "", "run only the units (packages) whose name this `regexp` matches")
	tests := flag.String("tests", "", "run only these top-level tests, `names` with commas in between, and write nothing")
	flag.BoolVar(&o.quick, "quick", false, "run only the subset that every change must pass, and write nothing")
	flag.BoolVar(&o.write, "write", true, "write test/upstream/suites/results.json and docs/conformance.md")
	flag.BoolVar(&o.document, "document", false, "run nothing, and write docs/conformance.md from test/upstream/suites/results.json")
	flag.IntVar(&o.jobs, "jobs", 2, "how many units run at once; builds run one by one beside them")
	flag.BoolVar(&o.keep, "keep", false, "keep the test binaries in bin/suites")
	flag.StringVar(&env.Root, "root", "../../..", "the `directory` of the repository")
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

// run runs the selected units. The results of each unit are written when it has ended, so that an
// interrupted run leaves those of the units before.
func run(ctx context.Context, env *Env, o options) error {
	s := &session{
		options: o, env: env, started: time.Now(), slots: make(chan struct{}, o.jobs),
		resultsFile:  filepath.Join(env.Root, "test/upstream", "suites", "results.json"),
		documentFile: filepath.Join(env.Root, "docs", "conformance.md"),
	}
	var err error
	if s.results, err = readResults(s.resultsFile); err != nil {
		return err
	}
	if o.document {
		return s.writeDocument()
	}
	if err := os.MkdirAll(filepath.Join(env.Bin, "logs"), 0o755); err != nil {
		return err
	}
	defer func() { // also of a run that was interrupted
		for _, p := range s.problems {
			fmt.Println("FAILED ", p)
		}
	}()
	for _, suite := range all {
		if o.quick && !suite.Quick || !o.suites.MatchString(suite.Name) {
			continue
		}
		if err := s.suite(ctx, &suite); err != nil {
			return errors.Join(err, s.running.Wait())
		}
	}
	if err := s.running.Wait(); err != nil {
		return err
	}
	return s.verdict()
}

// session is one run of suites.
type session struct {
	options
	env                       *Env
	resultsFile, documentFile string

	started time.Time
	ran     int           // units that were run
	slots   chan struct{} // one element for each running unit
	running errgroup.Group

	mu       sync.Mutex // guards problems, results and the files
	problems []string
	results  results
}

// suite prepares a suite and starts its units. It returns when the last one has been started.
func (s *session) suite(ctx context.Context, suite *Suite) error {
	fmt.Printf("%s: preparing\n", suite.Name)
	units, err := suite.Prepare(ctx, s.env)
	if err != nil {
		return fmt.Errorf("%s: %w", suite.Name, err)
	}
	if err := s.prepared(suite, units); err != nil {
		return err
	}
	for _, unit := range units {
		if s.selects(unit) {
			if err := s.start(ctx, suite, unit); err != nil {
				return err
			}
		}
	}
	return nil
}

// prepared checks test/upstream/suites/known.go against the units, and drops the results of other
// versions.
func (s *session) prepared(suite *Suite, units []Unit) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, withoutUnit(known, idle, suite.Name, units)...)
	if !s.write || !s.results.dropStale(suite.Name, units) {
		return nil
	}
	return s.writeLocked()
}

// selects reports whether the options select the unit.
func (s *session) selects(unit Unit) bool {
	return (!s.quick || unit.Quick != nil) && s.units.MatchString(unit.Name)
}

// start builds a unit and runs it in the background, once there is a slot. The error is that of
// ctx.
func (s *session) start(ctx context.Context, suite *Suite, unit Unit) error {
	s.slots <- struct{}{}
	s.ran++
	if err := build(ctx, suite, unit); err != nil {
		<-s.slots
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.problem(suite, unit, err)
		return nil
	}
	s.running.Go(func() error {
		defer func() { <-s.slots }()
		return s.record(ctx, suite, unit)
	})
	return nil
}

// record runs a unit and records its result.
func (s *session) record(ctx context.Context, suite *Suite, unit Unit) error {
	result, found, err := runUnit(ctx, s.env, suite, unit, s.options)
	s.mu.Lock()
	defer s.mu.Unlock()
	s.problems = append(s.problems, found...)
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		s.problem(suite, unit, err)
		return nil
	}
	if !s.write {
		return nil
	}
	if s.results[suite.Name] == nil {
		s.results[suite.Name] = map[string]outcome{}
	}
	s.results[suite.Name][unit.Name] = result
	return s.writeLocked()
}

// problem records an error of a unit. The caller holds s.mu.
func (s *session) problem(suite *Suite, unit Unit, err error) {
	s.problems = append(s.problems, fmt.Sprintf("%s %s: %v", suite.Name, unit.Name, err))
}

// writeLocked writes the results and the document.
func (s *session) writeLocked() error {
	return errors.Join(s.results.write(s.resultsFile), s.writeDocument())
}

func (s *session) writeDocument() error {
	return os.WriteFile(s.documentFile, []byte(document(all, s.results)), 0o644)
}

// verdict returns an error unless the run is complete and without a problem. All units have ended.
func (s *session) verdict() error {
	if s.ran == 0 {
		return errors.New("nothing matches -suites and -units")
	}
	if len(s.problems) > 0 {
		return fmt.Errorf("%d problems in %d units", len(s.problems), s.ran)
	}
	fmt.Printf("%d units, no unexplained difference, %.0f s\n", s.ran, time.Since(s.started).Seconds())
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
