// Package testetcd runs the etcds of tests in a separate process, on unix sockets.
//
// All etcds of a test program share one process, and each test has an empty etcd: a start takes
// tens of milliseconds. The process has no race detector, which would multiply etcd's cost, and no
// part in the memory, goroutines and processor time of the test. `make test` builds its program,
// bin/test/etcd, before the tests; a plain `go test` builds it when the first test needs it.
package testetcd

import (
	"errors"
	"fmt"
	"net"
	"net/rpc"
	"os"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testbin"
)

// Names below an etcd's directory, and of the methods that its program serves.
const (
	DataName   = "data"
	SocketName = "client.sock"
	RPCName    = "Etcds"
)

// Config describes an etcd. The zero value is a cluster of one member.
type Config struct {
	// MaxTxnOps is the largest number of operations of a transaction; 0 is etcd's default.
	MaxTxnOps uint
	// QuotaBytes is the largest size of the database; 0 is etcd's default.
	QuotaBytes int64
	// ProgressInterval is the interval of progress notifications; 0 is etcd's default.
	ProgressInterval time.Duration
	// Name and Cluster make it a member of a cluster, as --name and --initial-cluster do. Each
	// member needs a Process of its own, because tests stop processes of members.
	Name, Cluster string
}

// Request is the argument of Start, for net/rpc.
type Request struct {
	Directory string
	Config    Config
}

// program is the path of the program, which the first test of a process builds.
var program = sync.OnceValues(func() (string, error) { return testbin.Build("test/etcd", "test", "./etcd") })

// Process is a process that runs etcds. It ends with the test program.
type Process struct {
	child *process.Child
	calls *rpc.Client
}

// shared is the process of the etcds that Start starts.
var shared = sync.OnceValues(startProcess)

// NewProcess starts a process of its own, for a test that measures or stops it. The end of the test
// kills it, with its etcds.
func NewProcess(t testing.TB) *Process {
	t.Helper()
	p, err := startProcess()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.child.Kill)
	return p
}

func startProcess() (*Process, error) {
	path, err := program()
	if err != nil {
		return nil, err
	}
	dir, err := os.MkdirTemp("", "strata-etcd-") // short: the path of a socket has a limit
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(dir) // the connection stays
	socket := filepath.Join(dir, "calls.sock")
	listener, err := net.Listen("unix", socket)
	if err != nil {
		return nil, err
	}
	defer listener.Close()
	// It logs nothing but a panic.
	child, err := process.Start(process.Spec{Name: "etcd", Path: path, Args: []string{socket}, Log: os.DevNull, Out: os.Stderr})
	if err != nil {
		return nil, err
	}
	go func() { <-child.Done(); _ = listener.Close() }() // ends Accept
	conn, err := listener.Accept()
	if err != nil {
		child.Kill()
		return nil, errors.Join(err, child.Ended())
	}
	return &Process{child: child, calls: rpc.NewClient(conn)}, nil
}

// PID returns the process id.
func (p *Process) PID() int { return p.child.PID() }

// Signal sends a signal to the process.
func (p *Process) Signal(sig os.Signal) error { return p.child.Signal(sig) }

func (p *Process) call(method string, arg any) error {
	if err := p.calls.Call(RPCName+"."+method, arg, new(bool)); err != nil {
		return errors.Join(err, p.child.Ended())
	}
	return nil
}

// Etcd is an etcd of a test. It has a directory, which the end of the test removes.
type Etcd struct {
	process *Process // nil: the shared one
	config  Config
	dir     string
	runs    bool
}

// New returns an etcd that does not run yet. The end of the test stops it.
func New(t testing.TB, config Config) *Etcd {
	t.Helper()
	e := newEtcd(t, nil, config)
	t.Cleanup(func() {
		if err := e.Stop(); err != nil {
			t.Error(err)
		}
	})
	return e
}

// New returns an etcd of the process that does not run yet.
func (p *Process) New(t testing.TB, config Config) *Etcd {
	t.Helper()
	return newEtcd(t, p, config)
}

func newEtcd(t testing.TB, p *Process, config Config) *Etcd {
	t.Helper()
	dir, err := os.MkdirTemp("", "strata-etcd-") // short: the path of a socket has a limit
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	return &Etcd{process: p, config: config, dir: dir}
}

// Start returns an etcd that runs until the end of the test.
func Start(t testing.TB, config Config) *Etcd {
	t.Helper()
	e := New(t, config)
	if err := e.Run(); err != nil {
		t.Fatal(err)
	}
	return e
}

// Run starts the etcd, with the data that its directory has, and returns when it serves.
func (e *Etcd) Run() error {
	if e.process == nil {
		p, err := shared()
		if err != nil {
			return err
		}
		e.process = p
	}
	if err := e.process.call("Start", Request{e.dir, e.config}); err != nil {
		return fmt.Errorf("start etcd: %w", err)
	}
	e.runs = true
	return nil
}

// Stop ends the etcd, and does nothing if it does not run. Run starts it again.
func (e *Etcd) Stop() error {
	if !e.runs {
		return nil
	}
	e.runs = false
	if err := e.process.call("Stop", e.dir); err != nil {
		return fmt.Errorf("stop etcd: %w", err)
	}
	return nil
}

// Directory is the etcd's directory: of its socket and its data.
func (e *Etcd) Directory() string { return e.dir }

// Data is the directory of the etcd's data.
func (e *Etcd) Data() string { return filepath.Join(e.dir, DataName) }

// Socket is the path of the socket on which the etcd serves clients.
func (e *Etcd) Socket() string { return filepath.Join(e.dir, SocketName) }

// Endpoint is Socket as clients name it.
func (e *Etcd) Endpoint() string { return "unix://" + e.Socket() }
