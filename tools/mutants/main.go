// Command mutants changes one place of the product's code at a time and runs the tests that must
// find the change. It fails if a mutation survives, if its code does not build, if its tests fail
// without it, or if its old text is not exactly once in its file. The mutations are in table.go.
// Mutated files are overlays of go's build: the working tree stays as it is.
//
// Usage: mutants [-root directory] [-only regexp]
//
//	mutants [-root directory] -score packages [-sample N] [-seed N]
//
// The second form does so for a sample of all places of packages: score.go.
package main

import (
	"bytes"
	"cmp"
	"encoding/json"
	"flag"
	"fmt"
	"go/ast"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"text/tabwriter"
	"time"
)

// mutation is a change that tests must find.
type mutation struct {
	id       string
	file     string // from the root
	old, new string // old occurs exactly once in the file, or times times if that is set
	times    int
	run      string   // regular expression of the tests
	pkg      string   // of the tests, from the root; the directory of the file if empty
	flags    []string // of go test
	// kept names a run of the simulation that is kept for the mutation. It must find the mutation,
	// and so must the first seeds.
	kept string

	from, to int      // if to is not 0, the place of new, and old is the whole file
	node     ast.Node // of that place
}

// result is the result of the tests of a mutation.
type result struct {
	outcome outcome
	by      string // the test that failed, or the reason
}

type outcome string

const (
	killed   outcome = "killed"   // a test has failed: the tests find the mutation
	survived outcome = "survived" // all tests have passed
	invalid  outcome = "invalid"  // the tests say nothing about the mutation
)

func main() {
	root := flag.String("root", ".", "the root of the repository")
	only := flag.String("only", ".*", "run only mutations whose whole id matches the regular expression")
	packages := flag.String("score", "", "packages with commas between them, from the root: try a sample of all mutations of each")
	sample := flag.Int("sample", 100, "mutations of each package of -score; 0 tries all")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "the seed of the sample")
	flag.Parse()
	selected, err := regexp.Compile("^(?:" + *only + ")$")
	dir, errRoot := filepath.Abs(*root)
	switch err = cmp.Or(err, errRoot); {
	case err != nil:
	case *packages != "":
		err = score(dir, strings.Split(*packages, ","), *sample, *seed)
	default:
		err = runAll(dir, selected)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "mutants:", err)
		os.Exit(1)
	}
}

// runAll runs the selected mutations, those of a package together, and prints a table.
func runAll(root string, selected *regexp.Regexp) error {
	temporary, err := os.MkdirTemp("", "mutants-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(temporary)
	todo := slices.DeleteFunc(slices.Clone(mutations), func(m mutation) bool { return !selected.MatchString(m.id) })
	slices.SortStableFunc(todo, func(a, b mutation) int { return strings.Compare(a.tests(), b.tests()) })
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "id\tseconds\tresult\tby\tfile")
	var bad []string
	for _, m := range todo {
		began := time.Now()
		r := m.try(root, temporary)
		fmt.Fprintf(table, "%s\t%.1f\t%s\t%s\t%s\n", m.id, time.Since(began).Seconds(), r.outcome, r.by, m.file)
		fmt.Fprintf(os.Stderr, "%s %s %s\n", m.id, r.outcome, r.by)
		if r.outcome != killed {
			bad = append(bad, m.id)
		}
	}
	_ = table.Flush()
	switch {
	case len(todo) == 0:
		return fmt.Errorf("no mutation matches %s", selected)
	case len(bad) > 0:
		return fmt.Errorf("%d of %d mutations are not killed: %s", len(bad), len(todo), strings.Join(bad, " "))
	}
	return nil
}

// tests returns the package of the tests.
func (m mutation) tests() string { return "./" + cmp.Or(m.pkg, filepath.Dir(m.file)) }

// try runs the tests without the mutation, from go's cache if they have passed before, and with it.
func (m mutation) try(root, temporary string) result {
	overlay, err := m.overlay(root, temporary)
	if err != nil {
		return result{invalid, err.Error()}
	}
	if m.kept != "" { // -short does not reduce a run that fails
		m.flags = append(m.flags, "-short", "-timeout=10m", "-failfast=false")
	}
	if r := judge(m.test(root, "")); r.outcome != survived {
		return result{invalid, failsWithout + r.by}
	}
	if m.kept != "" {
		m.run += "/^" + m.kept + "$"
	}
	const attempts = 3 // goroutines that wake at the same time decide a few simulated runs
	for attempt := 1; ; attempt++ {
		events, exit := m.test(root, overlay)
		r := judge(events, exit)
		switch missed := passes.FindSubmatch(events); {
		case m.kept == "" || r.outcome != killed || missed == nil:
			return r
		case attempt == attempts:
			return result{survived, string(missed[1]) + " passes"}
		}
	}
}

// passes matches the event of a test that passes and is no subtest.
var passes = regexp.MustCompile(`"Action":"pass".*"Test":"(\w+)"`)

// mutate returns the content of a file with the new text.
func (m mutation) mutate(content string) (string, error) {
	if m.to > 0 {
		return content[:m.from] + m.new + content[m.to:], nil
	}
	if n, want := strings.Count(content, m.old), cmp.Or(m.times, 1); n != want {
		return "", fmt.Errorf("the old text occurs %d times in the file, want %d", n, want)
	}
	return strings.ReplaceAll(content, m.old, m.new), nil
}

// overlay writes the mutated file, and returns the name of go's description of the overlay.
func (m mutation) overlay(root, temporary string) (string, error) {
	original := filepath.Join(root, m.file)
	content, err := os.ReadFile(original)
	if err != nil {
		return "", err
	}
	mutated, err := m.mutate(string(content))
	if err != nil {
		return "", err
	}
	id := strings.ReplaceAll(m.id, "/", "-")
	changed := filepath.Join(temporary, id+".go")
	description, err := json.Marshal(map[string]map[string]string{"Replace": {original: changed}})
	if err != nil {
		return "", err
	}
	name := filepath.Join(temporary, id+".json")
	return name, cmp.Or(os.WriteFile(changed, []byte(mutated), 0o600), os.WriteFile(name, description, 0o600))
}

// test returns the events and the exit of go test.
func (m mutation) test(root, overlay string) (events []byte, err error) {
	args := []string{"test", "-json", "-vet=off", "-failfast", "-timeout=1m", "-run", m.run}
	if overlay != "" {
		args = append(args, "-overlay", overlay)
	}
	cmd := exec.Command("go", append(append(args, m.flags...), m.tests())...)
	cmd.Dir = root
	cmd.Env = environment()
	if m.kept != "" {
		cmd.Env = append(cmd.Env, "STRATA_TEST_SEED=1")
	}
	cmd.Stderr = os.Stderr
	return cmd.Output()
}

// environment returns the environment in which go uses the workspace.
func environment() []string {
	return slices.DeleteFunc(os.Environ(), func(v string) bool { return strings.HasPrefix(v, "GOWORK=") })
}

// event is an event of go test -json.
type event struct{ Action, Test, Output string }

// failsWithout begins the reason of tests that fail without the mutation.
const failsWithout = "fails without the mutation: "

// judge returns the result for the events and the exit of go test. Tests that did not run, and code
// that does not build, prove nothing. A panic does: without the mutation there was none. One that
// ends another goroutine than that of the test fails no test.
func judge(events []byte, exit error) result {
	var passed, failed, panicked, last string
	for line := range bytes.Lines(events) {
		var e event
		if json.Unmarshal(line, &e) != nil {
			continue
		}
		switch {
		case e.Action == "build-fail":
			return result{invalid, "it does not build"}
		case e.Action == "pass" && e.Test != "":
			passed = e.Test
		case e.Test != "" && strings.HasPrefix(e.Output, "panic: test timed out"):
			failed = e.Test + ", which hangs"
		case strings.HasPrefix(e.Output, "panic: ") || strings.HasPrefix(e.Output, "fatal error: "):
			panicked = cmp.Or(panicked, strings.TrimSpace(e.Output))
		case e.Action == "output":
			last = cmp.Or(strings.TrimSpace(e.Output), last)
		case e.Action == "fail" && e.Test != "" && (failed == "" || strings.HasPrefix(failed, e.Test+"/")):
			failed = e.Test // a subtest fails before its test
		}
	}
	switch {
	case exit == nil && passed == "":
		return result{invalid, "no test has run"}
	case exit == nil:
		return result{survived, ""}
	case failed == "" && panicked != "":
		return result{killed, panicked}
	case failed == "":
		return result{invalid, fmt.Sprintf("no test has failed: %v: %s", exit, last)}
	}
	return result{killed, failed}
}
