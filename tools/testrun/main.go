// Command testrun runs the tests of the modules of this repository, and decides whether they
// passed. `make test` calls it. Usage, from the top of the repository:
//
//	testrun [flags] engine|kube|server|bench|stratatest|tools|./path|./path/... ...
//
// It prints a line per package, then the output of each failed test, and counts of failed and
// skipped tests. bin/test.json has all output, as `go test -json` prints it. The run passes only if
// every package passed, and no invocation of go test failed in another way: no test runs twice.
//
// One package of a run may run again once, all of it, if the race detector itself failed
// ("ThreadSanitizer: CHECK failed", of the runtime) and nothing else did: the second run decides.
package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	defer stop()
	r := &runner{out: os.Stdout}
	flag.StringVar(&r.root, "root", ".", "top of the repository")
	flag.StringVar(&r.goCommand, "go", "go", "the go command")
	flag.BoolVar(&r.race, "race", false, "the race detector on engine, kube and stratatest")
	flag.BoolVar(&r.together, "together", false, "run the modules at the same time: for tests that wait most of the time")
	timeout := flag.Duration("timeout", 15*time.Minute, "time limit of a package's tests")
	flags := flag.String("flags", "", "further flags of go test")
	flag.Parse()
	r.flags = append([]string{"-timeout=" + timeout.String()}, strings.Fields(*flags)...)
	if err := r.run(ctx, flag.Args()); err != nil {
		fmt.Fprintln(os.Stderr, "testrun:", err)
		os.Exit(1)
	}
}

// runner runs the tests of one call.
type runner struct {
	root, goCommand string
	race, together  bool
	flags           []string // of go test, for all modules
	out             io.Writer
	environ         []string // additions to the environment of tests

	mu struct {
		sync.Mutex
		log     io.Writer // bin/test.json
		results results
	}
}

// run runs the tests that the words select. An error means that the run did not pass.
func (r *runner) run(ctx context.Context, words []string) error {
	began := time.Now()
	stages, err := r.plan(words)
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(r.root, "bin"), 0o755); err != nil {
		return err
	}
	log, err := os.Create(filepath.Join(r.root, "bin", "test.json"))
	if err != nil {
		return err
	}
	defer log.Close()
	r.mu.log = log

	if err := r.buildPrograms(ctx, stages); err != nil {
		return err
	}
	var other []string // failures of go test that no package reports
	for _, stage := range stages {
		errs := make([]error, len(stage))
		var all sync.WaitGroup
		for i, inv := range stage {
			all.Go(func() { errs[i] = r.invoke(ctx, inv, &r.mu.results) })
		}
		all.Wait()
		for i, err := range errs {
			failed := r.mu.results.failed(stage[i])
			switch {
			case err == nil || errors.Is(err, errTests) && failed: // reported by package
			case failed:
				other = append(other, fmt.Sprintf("go test of %s itself: %v", stage[i].name, err))
			default:
				other = append(other, fmt.Sprintf("go test of %s: %v, and no package failed", stage[i].name, err))
			}
		}
	}
	if ctx.Err() != nil {
		other = append(other, "interrupted")
	}
	if p := r.mu.results.undecided(); p != nil && ctx.Err() == nil {
		fmt.Fprintf(r.out, "the race detector failed; once more: %s\n", p.short())
		r.decide(ctx, p)
	}
	if !report(r.out, &r.mu.results, other, time.Since(began)) {
		return fmt.Errorf("the tests did not pass; bin/test.json has all output")
	}
	return nil
}

// decide runs all tests of a package again, and replaces its result.
func (r *runner) decide(ctx context.Context, p *pkg) {
	inv := p.inv
	inv.args = append(append([]string{}, inv.args...), "-count=1")
	inv.packages = []string{p.path}
	var second results
	_ = r.invoke(ctx, inv, &second) // without an event the package has not ended, and is a failure
	*p = *second.pkg(p.inv, p.path)
	p.again = true
}

// errTests is the error of a go test that reported nothing but failures of packages. Any other
// error fails the run, also if these packages then pass.
var errTests = errors.New("exit status 1")

// harmless matches lines of the go command that report no error.
var harmless = regexp.MustCompile(`^(go: downloading |go: warning: |warning: |\s*$)`)

// verdict returns errTests if go test ended with status 1 and printed no error of its own.
func verdict(err error, stderr string) error {
	if err == nil {
		return nil
	}
	for line := range strings.Lines(stderr) {
		if !harmless.MatchString(line) {
			return fmt.Errorf("%w: %s", err, strings.TrimSpace(line))
		}
	}
	if exit, ok := errors.AsType[*exec.ExitError](err); ok && exit.ExitCode() == 1 {
		return errTests
	}
	return err
}

// invoke runs go test and adds the events to the results. It prints a line for each package that
// ends.
func (r *runner) invoke(ctx context.Context, inv invocation, into *results) error {
	args := append([]string{"test", "-json"}, inv.args...)
	cmd := exec.CommandContext(ctx, r.goCommand, append(args, inv.packages...)...)
	cmd.Dir = filepath.Join(r.root, inv.dir)
	cmd.Env = append(os.Environ(), r.environ...)
	cmd.Env = append(cmd.Env, inv.env...)
	if inv.alone {
		cmd.Env = append(cmd.Env, "GOWORK=off")
	}
	cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	cmd.WaitDelay = time.Minute
	var stderr strings.Builder
	cmd.Stderr = io.MultiWriter(os.Stderr, &stderr)
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	if err := cmd.Start(); err != nil {
		return err
	}
	lines := bufio.NewReader(stdout)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			r.record(inv, line, into)
		}
		if err != nil {
			break
		}
	}
	err = cmd.Wait() // and for the end of stderr
	return verdict(err, stderr.String())
}

func (r *runner) record(inv invocation, line []byte, into *results) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.mu.log.Write(line) // a lost line of the log changes no verdict
	var e event
	if err := json.Unmarshal(line, &e); err != nil {
		fmt.Fprintf(r.out, "%s", line) // go test itself: not an event
		return
	}
	if p := into.add(inv, e); p != nil && p.action != "skip" {
		fmt.Fprintln(r.out, p.line())
	}
}
