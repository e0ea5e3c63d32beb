package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/onsi/ginkgo/v2/reporters"
	"github.com/onsi/ginkgo/v2/types"

	"github.com/stratakube/strata/internal/process"
)

// options are the command line.
type options struct {
	strata, e2e, controllerManager string // paths of programs
	engine                         string
	compaction                     time.Duration
	reports                        string
	focus                          string
	// JSON file with texts of specs to run; "": all of the catalogue
	specs            string
	processes        int
	discover, update bool
	bound            time.Duration
	serverArgs       []string
	testArgs         []string
}

// log returns the path of the log of a process.
func (o options) log(name string) string { return filepath.Join(o.reports, name+".log") }

func main() {
	o := options{}
	flag.StringVar(&o.strata, "strata", "bin/strata", "the program `path` under test")
	flag.StringVar(&o.e2e, "e2e", "bin/e2e.test", "`path` of the tests: k8s.io/kubernetes/test/e2e, built by go test -c")
	flag.StringVar(&o.controllerManager, "controller-manager", "bin/kube-controller-manager", "`path` of kube-controller-manager")
	flag.StringVar(&o.engine, "engine", "strata", "the engine that answers reads and watches: strata or upstream")
	flag.DurationVar(&o.compaction, "compaction-interval", time.Minute,
		"how often the server compacts etcd; the slowest test takes up to twice as long (kube-apiserver's default is 5m)")
	flag.StringVar(&o.reports, "reports", "", "`directory` for junit.xml and the logs (default bin/conformance-ENGINE)")
	flag.StringVar(&o.focus, "focus", "", "run the specs that this `regexp` matches, of all that exist, instead of those of the catalogue; with -discover, only those")
	flag.StringVar(&o.specs, "specs", "", "run only the specs in this JSON `file`, an array of their texts")
	flag.IntVar(&o.processes, "processes", 4, "how many `processes` run specs at the same time")
	flag.BoolVar(&o.discover, "discover", false, "run the specs that test/upstream/conformance/specs.txt lacks, each bounded by -bound, and report those that pass and belong in the file")
	flag.BoolVar(&o.update, "update", false, "with -discover: write test/upstream/conformance/specs.txt and test/upstream/conformance/excluded.txt")
	flag.DurationVar(&o.bound, "bound", time.Minute, "how long -discover lets one spec run: a spec that waits for containers takes longer")
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
	var focus *regexp.Regexp
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
	for _, name := range []string{junitName, reportName} {
		// A report of an earlier run would be mistaken for one of this run.
		if err := os.Remove(filepath.Join(o.reports, name)); err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
	}
	dir, err := os.MkdirTemp("", "strata-conformance-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)

	all, err := existing(ctx, o, dir)
	if err != nil {
		return err
	}
	started := time.Now()
	fmt.Printf("starting etcd, strata apiserver --engine=%s and kube-controller-manager; logs are in %s\n", o.engine, o.reports)
	c, err := startCluster(ctx, o, dir)
	defer func() { err = errors.Join(err, c.stop()) }()
	if err != nil {
		return err
	}
	fmt.Printf("ready after %.1f s; etcd is compacted every %v, and the slowest test waits for that\n", time.Since(started).Seconds(), o.compaction)
	if o.discover {
		return discover(ctx, o, c, focus, all)
	}

	report, wanted, testErr := runSpecs(ctx, o, c, focus)
	if report == nil {
		return testErr
	}
	if err := write(o.reports, *report); err != nil {
		return errors.Join(testErr, err)
	}
	v := judge(report.SpecReports, wanted, all)
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
		fmt.Printf("memory of %d resources was compared with etcd every %s, and equals etcd\n", resources, checkInterval)
	}
	if testErr != nil {
		return testErr
	}
	fmt.Printf("all %d specs passed in %.0f s; report: %s\n", v.passed, time.Since(started).Seconds(), filepath.Join(o.reports, junitName))
	return nil
}

// Files in the directory of reports.
const (
	junitName  = "junit.xml"
	reportName = "report.json" // ginkgo's
)

// write writes the report for readers of either format.
func write(dir string, report types.Report) error {
	if err := reporters.GenerateJUnitReport(report, filepath.Join(dir, junitName)); err != nil {
		return fmt.Errorf("write %s: %w", junitName, err)
	}
	return reporters.GenerateJSONReport(report, filepath.Join(dir, reportName))
}

// runSpecs runs the specs that o selects: the specs of a focus in one process whose output is
// shown, or those of the catalogue, several at the same time and then, one by one, the serial ones.
// It returns one report of all, without the specs that were not selected, and the specs that must
// be in it.
func runSpecs(ctx context.Context, o options, c *cluster, focus *regexp.Regexp) (*types.Report, []string, error) {
	if focus != nil {
		report, err := c.runTests(ctx, "e2e", focus, os.Stdout, "--ginkgo.timeout=1h")
		if report != nil {
			*report = selected(*report, focus)
		}
		return report, nil, err
	}
	wanted := catalogue(specsFile)
	if o.specs != "" {
		text, err := os.ReadFile(o.specs)
		if err == nil {
			wanted = nil
			err = json.Unmarshal(text, &wanted)
		}
		if err != nil {
			return nil, nil, fmt.Errorf("-specs: %w", err)
		}
	}
	simultaneous, alone := shards(wanted, o.processes)
	var mu sync.Mutex
	var merged *types.Report
	var errs []error
	runShard := func(name string, specs []string) {
		fmt.Printf("%s: %d specs\n", name, len(specs))
		focus := exactly(specs)
		report, err := c.runTests(ctx, name, focus, nil, "--ginkgo.timeout=1h")
		mu.Lock()
		defer mu.Unlock()
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", name, err))
		}
		if report == nil {
			return
		}
		kept := selected(*report, focus)
		if merged == nil {
			merged = &kept
		} else {
			merged.SpecReports = append(merged.SpecReports, kept.SpecReports...)
			merged.SuiteSucceeded = merged.SuiteSucceeded && kept.SuiteSucceeded
		}
	}
	var wg sync.WaitGroup
	for i, specs := range simultaneous {
		wg.Go(func() { runShard(fmt.Sprintf("e2e-%d", i), specs) })
	}
	wg.Wait()
	if len(alone) > 0 {
		runShard("e2e-serial", alone)
	}
	return merged, wanted, errors.Join(errs...)
}

// selected returns the report without the specs, some 3,000, that focus does not select.
func selected(report types.Report, focus *regexp.Regexp) types.Report {
	report.SpecReports = slices.DeleteFunc(slices.Clone(report.SpecReports), func(r types.SpecReport) bool {
		return r.LeafNodeType == types.NodeTypeIt && !focus.MatchString(r.FullText())
	})
	return report
}

// runTests runs the tests that focus selects to their end and returns ginkgo's report, nil if there
// is none. Their output goes to the file NAME.log in the directory of reports, and to tee unless
// that is nil. An error says that the tests failed, or that a process that they need ended.
func (c *cluster) runTests(ctx context.Context, name string, focus *regexp.Regexp, tee io.Writer, args ...string) (*types.Report, error) {
	reportPath := filepath.Join(c.dir, name+".json")
	tests, err := process.Start(process.Spec{Name: name, Path: c.options.e2e, Log: c.options.log(name), Tee: tee, Args: slices.Concat([]string{
		"--kubeconfig=" + c.kubeconfig,
		"--kubectl-path=" + c.kubectl,
		"--provider=skeleton",
		"--e2e-output-dir=" + c.dir,
		"--ginkgo.focus=" + focus.String(),
		"--ginkgo.silence-skips",
		"--ginkgo.no-color",
		"--ginkgo.json-report=" + reportPath,
	}, args, c.options.testArgs)})
	if err != nil {
		return nil, err
	}
	var problem error
	select {
	case <-tests.Done():
		if err := tests.ExitError(); err != nil {
			problem = fmt.Errorf("the tests ended with %w", err)
		}
	case err := <-c.firstEnd():
		problem = errors.Join(err, tests.Stop(os.Interrupt, interruptTimeout))
	case <-ctx.Done():
		problem = errors.Join(errors.New("interrupted"), tests.Stop(os.Interrupt, interruptTimeout))
	}
	report, err := readReport(reportPath)
	return report, errors.Join(problem, err)
}

// readReport returns the report of one suite.
func readReport(path string) (*types.Report, error) {
	data, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("the tests left no report: %w", err)
	}
	var reports []types.Report // one per suite
	if err := json.Unmarshal(data, &reports); err != nil {
		return nil, fmt.Errorf("the tests' report: %w", err)
	}
	if len(reports) != 1 {
		return nil, fmt.Errorf("the report is about %d suites", len(reports))
	}
	return &reports[0], nil
}

// existing returns the texts of all specs that the test program has.
func existing(ctx context.Context, o options, dir string) ([]string, error) {
	path := filepath.Join(dir, "all.json")
	list, err := process.Start(process.Spec{
		Name: "list", Path: o.e2e, Log: o.log("list"),
		Args: []string{"--ginkgo.dry-run", "--ginkgo.silence-skips", "--ginkgo.no-color", "--ginkgo.json-report=" + path},
	})
	if err != nil {
		return nil, err
	}
	select {
	case <-list.Done():
	case <-ctx.Done():
		return nil, errors.Join(ctx.Err(), list.Stop(os.Interrupt, interruptTimeout))
	}
	report, err := readReport(path)
	if err != nil {
		return nil, err
	}
	var all []string
	for _, r := range report.SpecReports {
		if r.LeafNodeType == types.NodeTypeIt {
			all = append(all, r.FullText())
		}
	}
	return all, nil
}
