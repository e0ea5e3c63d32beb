package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"syscall"
	"time"

	"github.com/onsi/ginkgo/v2/reporters"
	"github.com/onsi/ginkgo/v2/types"
)

// options are the command line.
type options struct {
	strata, e2e, controllerManager string // paths of programs
	engine                         string
	compaction                     time.Duration
	reports                        string
	focus                          string
	serverArgs                     []string
	testArgs                       []string
}

func main() {
	o := options{}
	flag.StringVar(&o.strata, "strata", "bin/strata", "the program `path` under test")
	flag.StringVar(&o.e2e, "e2e", "bin/e2e.test", "`path` of the tests: k8s.io/kubernetes/test/e2e, built by go test -c")
	flag.StringVar(&o.controllerManager, "controller-manager", "bin/kube-controller-manager", "`path` of kube-controller-manager")
	flag.StringVar(&o.engine, "engine", "strata", "what answers reads and watches: strata or upstream")
	flag.DurationVar(&o.compaction, "compaction-interval", time.Minute,
		"how often the server compacts etcd; the slowest test takes up to twice as long (kube-apiserver's default is 5m)")
	flag.StringVar(&o.reports, "reports", "", "`directory` for junit.xml and the logs (default bin/conformance-ENGINE)")
	flag.StringVar(&o.focus, "focus", "", "run the specs that this `regexp` matches, of all that there are, instead of the listed ones")
	flag.Func("server-arg", "one more `flag` of strata apiserver; may be given several times", func(arg string) error {
		o.serverArgs = append(o.serverArgs, arg)
		return nil
	})
	flag.Usage = func() {
		fmt.Fprintln(flag.CommandLine.Output(), "usage: conformance [flags] [-- flags of the tests, such as --ginkgo.v]")
		flag.PrintDefaults()
	}
	flag.Parse()
	o.testArgs = flag.Args()
	if o.reports == "" {
		o.reports = filepath.Join("bin", "conformance-"+o.engine)
	}

	// The first signal ends the run in order, a second one at once.
	ctx, restore := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	context.AfterFunc(ctx, restore)
	if err := run(ctx, o); err != nil {
		fmt.Fprintln(os.Stderr, "conformance:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, o options) (err error) {
	focus := areasFocus()
	if o.focus != "" {
		if focus, err = regexp.Compile(o.focus); err != nil {
			return fmt.Errorf("-focus: %w", err)
		}
	}
	// Processes run in no particular directory.
	for _, path := range []*string{&o.strata, &o.e2e, &o.controllerManager, &o.reports} {
		if *path, err = filepath.Abs(*path); err != nil {
			return err
		}
	}
	if err := os.MkdirAll(o.reports, 0o755); err != nil {
		return err
	}
	junit := filepath.Join(o.reports, "junit.xml")
	if err := os.Remove(junit); err != nil && !errors.Is(err, os.ErrNotExist) {
		return err // a report of another run would be taken for one of this
	}
	dir, err := os.MkdirTemp("", "strata-conformance-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	started := time.Now()
	fmt.Printf("starting etcd, strata apiserver --engine=%s and kube-controller-manager; logs are in %s\n", o.engine, o.reports)
	c, err := startCluster(ctx, o, dir)
	defer func() { err = errors.Join(err, c.stop()) }()
	if err != nil {
		return err
	}
	fmt.Printf("ready after %.1f s; etcd is compacted every %v, and the slow test waits for that\n", time.Since(started).Seconds(), o.compaction)

	report, testErr := runTests(ctx, o, c, focus, filepath.Join(dir, "report.json"))
	if report == nil {
		return testErr
	}
	// Without what was never asked for: some 7,000 specs.
	report.SpecReports = slices.DeleteFunc(report.SpecReports, func(r types.SpecReport) bool {
		return r.LeafNodeType == types.NodeTypeIt && !focus.MatchString(r.FullText())
	})
	if err := reporters.GenerateJUnitReport(*report, junit); err != nil {
		return errors.Join(testErr, fmt.Errorf("write %s: %w", junit, err))
	}

	v := judge(*report, focus, o.focus != "")
	fmt.Printf("\nengine %s, %d specs:\n", o.engine, len(v.lines))
	for _, line := range v.lines {
		fmt.Println(line)
	}
	for _, problem := range v.problems {
		fmt.Println("FAILED  ", problem)
	}
	if len(v.problems) > 0 {
		testErr = errors.Join(testErr, fmt.Errorf("%d of %d specs passed; %d problems", v.passed, len(v.lines), len(v.problems)))
	}
	if o.engine == "strata" {
		resources, err := c.requireConsistent(ctx)
		if testErr = errors.Join(testErr, err); err != nil {
			return testErr
		}
		fmt.Printf("memory of %d resources was compared with etcd every %s and a little more, and is what etcd has\n", resources, checkInterval)
	}
	if testErr != nil {
		return testErr
	}
	fmt.Printf("all %d specs passed in %.0f s; report: %s\n", v.passed, time.Since(started).Seconds(), junit)
	return nil
}

// runTests runs the tests to their end and returns ginkgo's report, written to the file reportPath on the way; nil if there is none. An
// error says that the tests, or a process that they need, did not end as they should.
func runTests(ctx context.Context, o options, c *cluster, focus *regexp.Regexp, reportPath string) (*types.Report, error) {
	args := []string{
		"--kubeconfig=" + c.kubeconfig,
		"--provider=skeleton",
		"--e2e-output-dir=" + filepath.Dir(reportPath),
		"--ginkgo.focus=" + focus.String(),
		"--ginkgo.silence-skips",
		"--ginkgo.no-color",
		"--ginkgo.timeout=1h",
		"--ginkgo.json-report=" + reportPath,
	}
	tests, err := start(o.reports, "e2e", os.Stdout, o.e2e, append(args, o.testArgs...)...)
	if err != nil {
		return nil, err
	}
	var problem error
	select {
	case <-tests.done:
		if tests.err != nil {
			problem = fmt.Errorf("the tests ended with %w", tests.err)
		}
	case err := <-c.firstEnd():
		problem = errors.Join(err, tests.stop(os.Interrupt, interruptTimeout))
	case <-ctx.Done():
		problem = errors.Join(errors.New("interrupted"), tests.stop(os.Interrupt, interruptTimeout))
	}

	data, err := os.ReadFile(reportPath)
	if err != nil {
		return nil, errors.Join(problem, fmt.Errorf("the tests left no report: %w", err))
	}
	var reports []types.Report // one per suite
	if err := json.Unmarshal(data, &reports); err != nil {
		return nil, errors.Join(problem, fmt.Errorf("the tests' report: %w", err))
	}
	if len(reports) != 1 {
		return nil, errors.Join(problem, fmt.Errorf("the report is about %d suites", len(reports)))
	}
	return &reports[0], problem
}
