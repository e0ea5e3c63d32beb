package tour

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/transcript"
)

const stopTimeout = 90 * time.Second // as in the harness

// terminals run the commands of a document: a shell, and a server in each terminal with a name.
type terminals struct {
	t    *testing.T
	ctx  context.Context
	work string // working directory of all
	own  string // directory of the terminals themselves
	env  []string
	last string // the last command of the shell

	runs  *strings.Replacer // of parts of commands, before they run
	shown *strings.Replacer // of parts of outputs, for the document

	// By terminal: a server is ready when it has printed all parts, and accepts connections at the
	// address. The document has its output only if it has parts and is not silent.
	parts     map[string][]string
	silent    map[string]bool
	addresses map[string]string

	servers map[string]*process.Child
	order   []string // of the servers' terminals

	shell *process.Child
	stdin *os.File
	ran   int // commands of the shell
	read  int // lines of its output
}

// temporary returns a directory with a shorter name than that of T.TempDir: the path of etcd's
// socket has a limit.
func temporary(t *testing.T) string {
	dir := harness.Must[string](t)(os.MkdirTemp("", "strata-tour-"))
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return harness.Must[string](t)(filepath.EvalSymlinks(dir))
}

func newTerminals(t *testing.T, ctx context.Context, work string, env ...string) *terminals {
	term := &terminals{
		t: t, ctx: ctx, work: work, own: temporary(t), runs: strings.NewReplacer(), shown: strings.NewReplacer(),
		parts: map[string][]string{}, silent: map[string]bool{}, addresses: map[string]string{}, servers: map[string]*process.Child{},
	}
	harness.Check(t, os.Symlink(harness.Must[string](t)(harness.Binary()), filepath.Join(term.own, "strata")))
	term.env = slices.DeleteFunc(os.Environ(), func(v string) bool {
		return strings.HasPrefix(v, "KUBECONFIG=") || strings.HasPrefix(v, "STRATA_DATA=")
	})
	// Programs without debugging information are linked in half the time.
	term.env = append(append(term.env, "KUBECACHEDIR="+term.own, "PATH="+term.own+":"+os.Getenv("PATH"), "GOFLAGS=-ldflags=-w -vet=off "+os.Getenv("GOFLAGS")), env...)
	t.Cleanup(term.stop)

	stdin, writer, err := os.Pipe()
	harness.Check(t, err)
	defer stdin.Close()
	term.stdin = writer
	term.shell = term.start("shell", stdin)
	term.send("exec 2>&1")
	return term
}

// start starts bash.
func (term *terminals) start(name string, stdin *os.File, args ...string) *process.Child {
	term.t.Helper()
	return harness.Must[*process.Child](term.t)(process.Start(process.Spec{
		Name: name, Path: "bash", Args: args, Dir: term.work, Env: term.env, Stdin: stdin, Lines: true, Log: filepath.Join(term.own, name+".log"),
	}))
}

// stop stops all, the server that was started last first. A server that the document has killed is
// not running.
func (term *terminals) stop() {
	if term.shell != nil {
		term.stdin.Close()
		if err := term.shell.Stop(syscall.SIGTERM, stopTimeout); err != nil {
			term.t.Error(err)
		}
	}
	for i := len(term.order) - 1; i >= 0; i-- {
		server := term.servers[term.order[i]]
		if err := server.Stop(syscall.SIGTERM, stopTimeout); err != nil {
			term.t.Error(err)
		}
		if term.t.Failed() {
			term.t.Logf("end of the output of %s:\n%s", server.Name(), server.Tail())
		}
	}
}

// run runs a command of the document in its terminal.
func (term *terminals) run(c transcript.Command) (out string) {
	term.t.Helper()
	line := term.runs.Replace(c.Line)
	switch {
	case c.Terminal != "":
		out = term.serve(c.Terminal, line)
	case strings.HasPrefix(line, "cat ") || strings.Contains(line, "timeoutSeconds=1"):
		// The writer of the file is still running, or the watch is over before its first event.
		ctx, cancel := context.WithTimeout(term.ctx, time.Minute)
		defer cancel()
		_ = harness.Poll(ctx, func(context.Context) (bool, error) {
			// the caller reports a difference that remains
			out = term.send(line)
			return same(c, out), nil
		})
	default:
		before := term.last
		out = term.send(line)
		// A GET that memory could not answer within 250 ms went to etcd, and does not count.
		for try := 0; try < 5 && !same(c, out) && strings.HasSuffix(line, "grep '^strata_readpath_requests_total'"); try++ {
			term.send(before)
			out = term.send(line)
		}
		term.last = line
	}
	return term.shown.Replace(out)
}

// serve starts a server when the one before in its terminal has ended, and returns its output when
// it is ready.
func (term *terminals) serve(terminal, line string) string {
	term.t.Helper()
	if server := term.servers[terminal]; server != nil {
		_, err := server.Wait(term.ctx)
		harness.Check(term.t, err)
	} else {
		term.order = append(term.order, terminal)
	}
	// with the name of the command as its first argument
	server := term.start(terminal, nil, "-c", "exec "+line)
	term.servers[terminal] = server
	for _, part := range term.parts[terminal] {
		_, _, err := server.WaitLine(term.ctx, 0, part)
		harness.Check(term.t, err)
	}
	if address := term.addresses[terminal]; address != "" {
		harness.Check(term.t, server.Await(term.ctx, 50*time.Millisecond, func(ctx context.Context) error {
			conn, err := (&net.Dialer{}).DialContext(ctx, "tcp", address)
			if err == nil {
				err = conn.Close()
			}
			return err
		}))
	}
	if len(term.parts[terminal]) == 0 || term.silent[terminal] {
		return ""
	}
	return strings.Join(server.Lines(), "\n") + "\n"
}

// send runs a command in the shell and returns its output.
func (term *terminals) send(line string) string {
	term.t.Helper()
	term.ran++
	end := fmt.Sprintf("--- end of command %d ---", term.ran)
	// The first line break is that of the output, if it has none at its end.
	_, err := fmt.Fprintf(term.stdin, "{ %s\n} </dev/null\necho; echo '%s'\n", line, end)
	harness.Check(term.t, err)
	_, number, err := term.shell.WaitLine(term.ctx, term.read, end)
	harness.Check(term.t, err)
	out := term.shell.Lines()[term.read : number-1]
	term.read = number
	if n := len(out); n > 0 && out[n-1] == "" {
		out = out[:n-1]
	}
	if len(out) == 0 {
		return ""
	}
	return strings.Join(out, "\n") + "\n"
}
