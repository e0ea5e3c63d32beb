// Package tour runs docs/tour.md: `strata up` in one terminal, a shell in another.
package tour

import (
	"context"
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/server/test/internal/harness"
	"github.com/stratakube/strata/server/test/internal/transcript"
)

var update = flag.Bool("update", false, "write the output of the commands of docs/tour.md into it")

const (
	document    = "../../../../docs/tour.md"
	testTimeout = 3 * time.Minute // the tour takes 25 s on two cores

	// home replaces the temporary directory in the document.
	home = "/home/user/tour"

	stopTimeout = 90 * time.Second // as in the harness
)

// TestDocument_Sessions_HaveTheirOutput runs the commands of docs/tour.md in order, and compares their output. With -update, the output
// is written into the document.
func TestDocument_Sessions_HaveTheirOutput(t *testing.T) {
	harness.OnlyStrata(t)
	terminals := newTerminals(t, harness.Context(t, testTimeout))
	transcript.Document{Path: document, Update: *update, Same: same, Run: terminals.run}.Check(t, 25)
}

// variable are the parts of the outputs of the tour that differ between two runs, besides those of transcript.Invariable.
var variable = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`(?m)^ +\d+\.\d\ds`), "SECONDS"},
	{regexp.MustCompile(`(?m)^Waiting for deployment .*\n`), ""}, // progress, on a slow machine
	{regexp.MustCompile(`hello-[0-9a-z]{6,10}-[0-9a-z]{5}\b`), "hello-POD"},
	{regexp.MustCompile(`\bnode-\d{4}\b`), "NODE"},
	{regexp.MustCompile(`\b10\.128(\.\d+){2}\b`), "IP"},
	{regexp.MustCompile(`"hash": "[0-9a-f]+"`), `"hash": HASH`},
	{regexp.MustCompile(`"seconds": [0-9.e-]+`), `"seconds": SECONDS`},
	{regexp.MustCompile(`resource version: \d+ \(\d+\)`), "resource version: N (N)"},
}

// same compares two outputs of a command. Lines of the server are compared in any order: its parts get ready in any.
func same(c transcript.Command, got string) bool {
	if strings.HasPrefix(c.Line, "strata history top") {
		return transcript.WithoutNumbers(got) == transcript.WithoutNumbers(c.Want)
	}
	return slices.Equal(lines(c, got), lines(c, c.Want))
}

func lines(c transcript.Command, text string) []string {
	for _, v := range variable {
		text = v.pattern.ReplaceAllString(text, v.with)
	}
	all := strings.Split(transcript.Invariable(text), "\n")
	if c.Terminal == "server" {
		slices.Sort(all)
	}
	return all
}

// terminals are the two of the tour: that of the server, and a shell.
type terminals struct {
	t      *testing.T
	ctx    context.Context
	dir    string
	env    []string
	server *process.Child // the last one; nil before the first

	shell  *process.Child
	stdin  *os.File
	ran    int // commands of the shell
	output int // lines of the shell that are read
}

func newTerminals(t *testing.T, ctx context.Context) *terminals {
	// Not t.TempDir, whose name is long: the path of etcd's socket has a limit.
	dir := harness.Must[string](t)(os.MkdirTemp("", "strata-tour-"))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	dir = harness.Must[string](t)(filepath.EvalSymlinks(dir))
	bin, work := filepath.Join(dir, "bin"), filepath.Join(dir, "tour")
	harness.Check(t, os.Mkdir(bin, 0o755))
	harness.Check(t, os.Mkdir(work, 0o755))
	harness.Check(t, os.Symlink(harness.Must[string](t)(harness.Binary()), filepath.Join(bin, "strata")))

	term := &terminals{t: t, ctx: ctx, dir: work}
	for _, v := range os.Environ() {
		if name, _, _ := strings.Cut(v, "="); name != "KUBECONFIG" && name != "STRATA_DATA" && name != "HOME" && name != "PATH" {
			term.env = append(term.env, v)
		}
	}
	term.env = append(term.env, "HOME="+dir, "PATH="+bin+":"+os.Getenv("PATH"))
	t.Cleanup(term.stop)

	stdin, stdinWriter, err := os.Pipe()
	harness.Check(t, err)
	defer stdin.Close()
	term.stdin = stdinWriter
	term.shell = term.start("shell", "bash", stdin)
	term.send("exec 2>&1")
	return term
}

func (term *terminals) start(name, path string, stdin *os.File, args ...string) *process.Child {
	term.t.Helper()
	return harness.Must[*process.Child](term.t)(process.Start(process.Spec{
		Name: name, Path: path, Args: args, Dir: term.dir, Env: term.env, Stdin: stdin, Lines: true,
		Log: filepath.Join(filepath.Dir(term.dir), name+".log"),
	}))
}

// stop stops both, and is called once. A server that the tour has killed is not running.
func (term *terminals) stop() {
	if term.shell != nil {
		term.stdin.Close()
		if err := term.shell.Stop(syscall.SIGTERM, stopTimeout); err != nil {
			term.t.Error(err)
		}
	}
	if term.server == nil {
		return
	}
	if err := term.server.Stop(syscall.SIGTERM, stopTimeout); err != nil {
		term.t.Error(err)
	}
	if term.t.Failed() {
		term.t.Logf("end of the server's output:\n%s\nend of its log:\n%s", term.server.Tail(), process.Tail(filepath.Join(term.dir, "strata-data", "strata.log")))
	}
}

// run runs a command of the document in its terminal.
func (term *terminals) run(c transcript.Command) (out string) {
	term.t.Helper()
	switch {
	case c.Terminal == "server":
		out = term.serve(c.Line)
	case strings.HasPrefix(c.Line, "cat "):
		// The writer of the file is still running.
		ctx, cancel := context.WithTimeout(term.ctx, 10*time.Second)
		defer cancel()
		_ = harness.Poll(ctx, func(context.Context) (bool, error) { // the caller reports a difference that remains
			out = term.send(c.Line)
			return same(c, out), nil
		})
	default:
		out = term.send(c.Line)
	}
	return strings.ReplaceAll(out, term.dir, home)
}

// serve starts a server when the one before has ended, and returns its output when all parts are ready.
func (term *terminals) serve(line string) string {
	term.t.Helper()
	if term.server != nil {
		_, err := term.server.Wait(term.ctx)
		harness.Check(term.t, err)
	}
	term.server = term.start("server", "bash", nil, "-c", "exec "+line) // with the name of the command as its first argument
	for _, part := range []string{"nodes: ready", "controllers: ready"} {
		_, _, err := term.server.WaitLine(term.ctx, 0, part)
		harness.Check(term.t, err)
	}
	return strings.Join(term.server.Lines(), "\n") + "\n"
}

// send runs a command in the shell and returns its output.
func (term *terminals) send(line string) string {
	term.t.Helper()
	term.ran++
	end := fmt.Sprintf("--- end of command %d ---", term.ran)
	// The first line break is that of the output, if it has none at its end.
	_, err := fmt.Fprintf(term.stdin, "{ %s\n} </dev/null\necho; echo '%s'\n", line, end)
	harness.Check(term.t, err)
	_, number, err := term.shell.WaitLine(term.ctx, term.output, end)
	harness.Check(term.t, err)
	out := term.shell.Lines()[term.output : number-1]
	term.output = number
	if n := len(out); n > 0 && out[n-1] == "" {
		out = out[:n-1]
	}
	if len(out) == 0 {
		return ""
	}
	return strings.Join(out, "\n") + "\n"
}
