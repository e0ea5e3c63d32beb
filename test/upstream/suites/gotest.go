package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"time"
)

// goTest is a compiled test binary.
type goTest struct {
	binary  string
	dir     string   // of the package: tests read files beside their source
	environ []string // beside the environment of this process
	args    []string
	timeout time.Duration // of one run
	serial  bool          // run without -test.parallel, which ginkgo refuses
}

// run runs the named tests, or all, and returns their verdicts. A test of the list that did not end
// is Absent.
func (g *goTest) run(ctx context.Context, env *Env, only []string, log string) (Verdicts, error) {
	names, err := g.list(ctx)
	if err != nil {
		return nil, err
	}
	if slices.Contains(only, mainTest) {
		only = nil
	}
	if only != nil {
		for _, name := range only {
			if !slices.Contains(names, name) {
				return nil, fmt.Errorf("%s has no test %s", g.binary, name)
			}
		}
		names = only
	}
	file, err := os.Create(log)
	if err != nil {
		return nil, err
	}
	defer file.Close()

	// The binary ends by itself with a stack of each goroutine; the context is for one that does
	// not.
	ctx, cancel := context.WithTimeout(ctx, g.timeout+time.Minute)
	defer cancel()
	args := []string{"tool", "test2json", g.binary, "-test.v=test2json", "-test.count=1",
		fmt.Sprintf("-test.timeout=%s", g.timeout)}
	if !g.serial {
		args = append(args, fmt.Sprintf("-test.parallel=%d", env.Parallel))
	}
	if only != nil {
		args = append(args, "-test.run="+exactly(names))
	}
	cmd := exec.Command("go", append(args, g.args...)...)
	cmd.Dir = g.dir
	cmd.Env = append(os.Environ(), g.environ...)
	cmd.Stderr = file
	out, in := io.Pipe()
	cmd.Stdout = in
	ended := make(chan error, 1)
	go func() {
		err := runGroup(ctx, cmd)
		in.Close()
		ended <- err
	}()
	verdicts, parseErr := parseTest2JSON(out, file)
	out.CloseWithError(parseErr) // ends the binary if parsing has ended before
	runErr := <-ended
	if parseErr != nil {
		return nil, fmt.Errorf("output of %s: %w", g.binary, parseErr)
	}
	if exit := (*exec.ExitError)(nil); runErr != nil && !errors.As(runErr, &exit) && !errors.Is(runErr, context.DeadlineExceeded) {
		return nil, runErr
	}
	failed := false
	for _, name := range names {
		if _, ok := verdicts[name]; !ok {
			verdicts[name] = Absent
		}
		failed = failed || verdicts[name] == Fail || verdicts[name] == Absent
	}
	// A binary may fail though its tests pass: TestMain of the integration tests looks for leaked
	// goroutines.
	if only == nil {
		verdicts[mainTest] = Pass
		if runErr != nil && !failed {
			verdicts[mainTest] = Fail
		}
	}
	return verdicts, nil
}

// mainTest represents the binary itself. It fails if the binary fails although no test does; of
// specs also if a node that is no spec fails, and if the binary ends without their report. A retry
// of it runs all tests.
const mainTest = "TestMain"

// startedServers counts the API servers that the tests of a log have started on the engine:
// apiserver.AttachmentFromEnvironment logs a line for each.
func startedServers(log string, engine Engine) int {
	text, err := os.ReadFile(log)
	if err != nil {
		return 0
	}
	return bytes.Count(text, fmt.Appendf(nil, `"Starting a server" engine=%q`, engine))
}

// list returns the top-level tests of the binary.
func (g *goTest) list(ctx context.Context) ([]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, g.binary, "-test.list=^Test")
	cmd.Dir = g.dir
	cmd.Env = append(os.Environ(), g.environ...)
	out, err := cmd.Output()
	var names []string
	for line := range strings.Lines(string(out)) {
		if name := strings.TrimSpace(line); regexp.MustCompile(`^Test\w*$`).MatchString(name) {
			names = append(names, name)
		}
	}
	if len(names) == 0 {
		return nil, fmt.Errorf("%s -test.list: no tests (%v)", g.binary, err)
	}
	return names, nil
}

// exactly returns a pattern for -test.run that matches these top-level tests.
func exactly(names []string) string {
	return "^(" + strings.Join(names, "|") + ")$"
}

// parseTest2JSON reads events of test2json, copies the output in them to log, and returns the
// verdicts.
func parseTest2JSON(r io.Reader, log io.Writer) (Verdicts, error) {
	verdicts := Verdicts{}
	lines := bufio.NewReader(r)
	for {
		line, err := lines.ReadBytes('\n')
		if len(line) > 0 {
			var event struct{ Action, Test, Output string }
			if json.Unmarshal(line, &event) != nil {
				if _, err := log.Write(line); err != nil {
					return nil, err
				}
			} else if _, err := io.WriteString(log, event.Output); err != nil {
				return nil, err
			}
			if verdict := Verdict(event.Action); event.Test != "" && (verdict == Pass || verdict == Fail || verdict == Skip) {
				verdicts[event.Test] = verdict
			}
		}
		if errors.Is(err, io.EOF) {
			return verdicts, nil
		}
		if err != nil {
			return nil, err
		}
	}
}
