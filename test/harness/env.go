package harness

import (
	"cmp"
	"context"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
)

// readyTimeout bounds the start of a server, which takes about 4 s on two cores, and minutes beside
// a load of 20 on them.
const readyTimeout = 5 * time.Minute

// outside begins the message of a failure that is of no test. tools/testrun reports it as one of
// the package.
const outside = "outside of the tests:"

// Env owns a directory and the processes that were started in it. Its methods end the test (or, for
// Main, the whole test binary) when a process cannot be started. They may be called concurrently,
// but not from goroutines that outlive the test.
type Env struct {
	dir    string
	shared bool // of all tests of the binary: see use
	// defaultGC: see DefaultGC
	defaultGC bool
	fail      func(error)

	servingOnce sync.Once
	servingCA   *Authority // see serving

	mu struct {
		sync.Mutex
		processes []*Process
		servers   []*Server
		ends      []func()
		checks    []func() error
		observe   func(server, path, query string) func(Event)
	}
}

// New returns an environment that lasts until the test ends. Its processes then have to stop
// cleanly.
func New(t testing.TB) *Env {
	t.Helper()
	e := &Env{dir: t.TempDir(), fail: func(err error) { t.Helper(); t.Fatal(err) }}
	t.Cleanup(func() {
		for _, err := range append(e.runChecks(), e.stop()...) {
			t.Error(err)
		}
		if t.Failed() {
			t.Log(e.tails())
		}
	})
	return e
}

// DefaultGC makes the servers of the environment collect garbage as users have it, for a test that
// measures memory. Other servers collect less often: a third of the CPU of a start is collection.
// It returns e.
func (e *Env) DefaultGC() *Env {
	e.defaultGC = true
	return e
}

// Main runs the tests of a package with shared servers, which start starts. It ends the process.
func Main(m *testing.M, start func(*Env)) {
	os.Exit(func() int {
		dir, err := os.MkdirTemp("", "strata-test-")
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		defer os.RemoveAll(dir)
		e := &Env{dir: dir, shared: true}
		e.fail = func(err error) {
			fmt.Fprintln(os.Stderr, outside, err)
			e.stop()
			os.RemoveAll(dir)
			os.Exit(1)
		}
		start(e)
		code := m.Run()
		checked := e.runChecks()
		if len(checked) > 0 {
			fmt.Fprintln(os.Stderr, e.tails())
		}
		for _, err := range append(checked, e.stop()...) {
			fmt.Fprintln(os.Stderr, outside, err)
			code = 1
		}
		return code
	}())
}

// AtEnd makes the environment call f after its processes have been stopped.
func (e *Env) AtEnd(f func()) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.ends = append(e.mu.ends, f)
}

// BeforeEnd makes the environment call f after the tests and before the processes are stopped. An
// error is a failure.
func (e *Env) BeforeEnd(f func() error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.checks = append(e.mu.checks, f)
}

// runChecks is called after the tests and before the processes are stopped. It checks the
// consistency of servers with etcd first, as checks of tests may change data.
func (e *Env) runChecks() (errs []error) {
	e.mu.Lock()
	checks, servers := e.mu.checks, e.mu.servers
	e.mu.checks, e.mu.servers = nil, nil
	e.mu.Unlock()
	found := make([]error, len(servers))
	var group sync.WaitGroup
	for i, s := range servers {
		if !s.unchecked && engineOf(s.args) == Strata {
			group.Go(func() { found[i] = s.RequireConsistent() })
		}
	}
	group.Wait()
	for _, err := range found {
		if err != nil {
			errs = append(errs, err)
		}
	}
	for _, f := range checks {
		if err := f(); err != nil {
			errs = append(errs, err)
		}
	}
	return errs
}

// ObserveWatches makes API.Watch call f for each watch that a server (identified by its URL) has
// accepted, and then f's result for each of its events, in order, before the test receives them; f
// may return nil. There is at most one f.
func (e *Env) ObserveWatches(f func(server, path, query string) func(Event)) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.observe = f
}

func (e *Env) watchObserver() func(server, path, query string) func(Event) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.mu.observe
}

// Dir creates a new directory in the environment's and returns its path.
func (e *Env) Dir(name string) string {
	dir, err := os.MkdirTemp(e.dir, name+"-")
	e.check(err)
	return dir
}

// WriteFile writes a file in a new directory and returns its path.
func (e *Env) WriteFile(name string, content []byte) string {
	path := filepath.Join(e.Dir("file"), name)
	e.check(os.WriteFile(path, content, 0o600))
	return path
}

func (e *Env) check(err error) {
	if err != nil {
		e.fail(err)
	}
}

// start starts the strata command as a process of this environment.
func (e *Env) start(name string, args ...string) *Process {
	path, err := Binary()
	e.check(err)
	return e.StartProgram(name, path, args...)
}

// startServer is start for an API server, with a function to call before the process runs, which
// may be nil. Unless it is unchecked, the server panics at a difference between its cache and etcd.
// The program is the path of a stock kube-apiserver, or "" for the strata command.
func (e *Env) startServer(name, program string, unchecked bool, prepare func(pid int) error, args []string) *Process {
	path := program
	if path == "" {
		var err error
		path, err = Binary()
		e.check(err)
	}
	environ := e.environ()
	if !unchecked && engineOf(args) == Strata {
		environ = append(environ, panicEnv+"=true")
	}
	// not once a minute, for which tests would wait
	environ = append(environ, "STRATA_TEST_ENCRYPTION_POLL=1s")
	if !e.defaultGC && os.Getenv("GOGC") == "" && os.Getenv("GOMEMLIMIT") == "" {
		environ = append(environ, "GOGC=300")
	}
	return e.startProcess(name, path, environ, prepare, args)
}

// StartProgram starts any program as a process of this environment.
func (e *Env) StartProgram(name, path string, args ...string) *Process {
	return e.startProcess(name, path, e.environ(), nil, args)
}

func (e *Env) startProcess(name, path string, environ []string, prepare func(pid int) error, args []string) *Process {
	log := filepath.Join(e.Dir(name), name+".log")
	child, err := process.Start(process.Spec{
		Name: name, Path: path, Args: args, Dir: e.dir, Env: environ, Prepare: prepare, Lines: true, Log: log,
	})
	e.check(err)
	p := &Process{Child: child, logs: []string{log}}
	e.mu.Lock()
	e.mu.processes = append(e.mu.processes, p)
	e.mu.Unlock()
	return p
}

func (e *Env) addServer(s *Server) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.mu.servers = append(e.mu.servers, s)
}

// environ returns the environment variables of children: kubectl keeps its caches in the
// environment's directory, and uses no kubeconfig except a given one. A server exports a trace
// after 200 ms, not after 5 s, for which tests would wait.
func (e *Env) environ() []string {
	environ := slices.DeleteFunc(os.Environ(), func(v string) bool {
		name, _, _ := strings.Cut(v, "=")
		return name == "KUBECONFIG" || name == "STRATA_DATA" || name == "HOME" || name == panicEnv
	})
	return append(environ, "HOME="+e.dir, "OTEL_BSP_SCHEDULE_DELAY=200")
}

// stop stops the running processes, last started first but each etcd after all its possible
// clients, and returns their errors.
func (e *Env) stop() []error {
	e.mu.Lock()
	processes, ends := slices.Clone(e.mu.processes), e.mu.ends
	e.mu.ends = nil
	e.mu.Unlock()
	slices.Reverse(processes)
	slices.SortStableFunc(processes, func(a, b *Process) int { return cmp.Compare(a.isEtcd(), b.isEtcd()) })
	var errs []error
	for _, p := range processes {
		if err := p.Stop(); err != nil {
			errs = append(errs, err)
		}
	}
	for _, end := range ends {
		end()
	}
	return errs
}

// tails returns the ends of each process's logs.
func (e *Env) tails() (text string) {
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, p := range e.mu.processes {
		text += p.ends(nil)
	}
	return text
}

// ready returns a context that bounds the start of a server.
func ready() (context.Context, context.CancelFunc) {
	return context.WithTimeoutCause(context.Background(), readyTimeout, fmt.Errorf("not ready after %v", readyTimeout))
}
