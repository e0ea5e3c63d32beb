package harness

import (
	"context"
	"fmt"
	"os"
	"strings"
	"syscall"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/loopback"
)

// Etcd is an etcd with a process of its own. It can be stopped and started again with the same URL
// and data.
type Etcd struct {
	URL string // with several members: separated by commas

	env     *Env
	program string // "" for the strata command
	name    string // of the process of a program
	args    []string
	tls     transport.TLSInfo // the zero value for plain TCP
	p       *Process
}

// fsyncEnv makes etcds sync their writes to the disk: slower, with the delays of a real one.
const fsyncEnv = "STRATA_TEST_FSYNC"

// Fsync reports whether etcds sync their writes: STRATA_TEST_FSYNC=1. By default they do not, since
// these tests do not crash the machine.
func Fsync() bool { return os.Getenv(fsyncEnv) == "1" }

// fsyncFlag returns the flag of an etcd for Fsync.
func fsyncFlag() string { return fmt.Sprintf("--unsafe-no-fsync=%t", !Fsync()) }

// Etcd starts an empty etcd, without fsync unless Fsync.
func (e *Env) Etcd() *Etcd { return e.etcd(transport.TLSInfo{}) }

// SyncedEtcd starts an empty etcd with fsync, for measurements. Its data is on the disk of the
// directory for temporary files ($TMPDIR).
func (e *Env) SyncedEtcd() *Etcd { return e.etcd(transport.TLSInfo{}, "--unsafe-no-fsync=false") }

// EtcdTLS starts an empty etcd that serves with a certificate of ca and requires client
// certificates of ca.
func (e *Env) EtcdTLS(ca *Authority) *Etcd {
	server, client := ca.Issue("etcd"), ca.Issue("etcd-client")
	etcd := e.etcd(transport.TLSInfo{CertFile: client.CertFile, KeyFile: client.KeyFile, TrustedCAFile: ca.CertFile},
		"--cert-file="+server.CertFile, "--key-file="+server.KeyFile, "--trusted-ca-file="+ca.CertFile)
	return etcd
}

// As returns the etcd of EtcdTLS for flags and clients with another client certificate.
func (e *Etcd) As(client Certificate) *Etcd {
	other := *e
	other.tls.CertFile, other.tls.KeyFile = client.CertFile, client.KeyFile
	return &other
}

func (e *Env) etcd(info transport.TLSInfo, more ...string) *Etcd {
	scheme := "http"
	if info.CertFile != "" {
		scheme = "https"
	}
	etcd := &Etcd{
		URL: fmt.Sprintf("%s://127.0.0.1:%d", scheme, e.port()), // a fixed port, for restarts
		env: e,
		tls: info,
	}
	etcd.args = append([]string{"etcd", "--data-dir=" + e.Dir("etcd"), "--listen-client-url=" + etcd.URL, fsyncFlag()}, more...)
	etcd.Start()
	return etcd
}

// Start starts the etcd again after Stop.
func (e *Etcd) Start() {
	ctx, cancel := ready()
	defer cancel()
	if e.program != "" {
		e.Launch()
		e.env.check(e.Await(ctx))
		return
	}
	e.p = e.env.start("etcd", e.args...)
	_, _, err := e.p.WaitLine(ctx, 0, "ready ")
	e.env.check(err)
}

// Stop stops the etcd.
func (e *Etcd) Stop() { e.env.check(e.p.Stop()) }

// Kill ends the etcd as a crash would (SIGKILL). It can be started again.
func (e *Etcd) Kill() { e.p.Kill() }

// Pause suspends the etcd's process (SIGSTOP) until Continue: its connections stay open, without
// answers. It returns when all threads are stopped; where there is no /proc, without waiting for
// them.
func (e *Etcd) Pause() {
	ctx, cancel := ready()
	defer cancel()
	e.env.check(e.p.Signal(syscall.SIGSTOP))
	e.env.check(Poll(ctx, func(context.Context) (bool, error) { return e.p.stopped() }))
}

// Continue ends Pause.
func (e *Etcd) Continue() { e.env.check(e.p.Signal(syscall.SIGCONT)) }

// CPU returns the CPU time that the etcd has used so far.
func (e *Etcd) CPU() (time.Duration, error) { return e.p.CPU() }

// ServerFlags returns kube-apiserver's flags for this etcd.
func (e *Etcd) ServerFlags() []string {
	flags := []string{"--etcd-servers=" + e.URL}
	if e.tls.CertFile != "" {
		flags = append(flags, "--etcd-certfile="+e.tls.CertFile, "--etcd-keyfile="+e.tls.KeyFile, "--etcd-cafile="+e.tls.TrustedCAFile)
	}
	return flags
}

// Client returns a client of this etcd for the environment's lifetime.
func (e *Etcd) Client() *clientv3.Client {
	config := clientv3.Config{Endpoints: strings.Split(e.URL, ","), DialTimeout: 10 * time.Second, Logger: zap.NewNop()}
	if e.tls.CertFile != "" {
		tlsConfig, err := e.tls.ClientConfig()
		e.env.check(err)
		config.TLS = tlsConfig
	}
	client, err := clientv3.New(config)
	e.env.check(err)
	e.env.AtEnd(func() { client.Close() })
	return client
}

// ProgramEtcd starts another etcd: the program at path, with etcd's own flags.
func (e *Env) ProgramEtcd(path string) *Etcd {
	client, peer := e.FreeURL(), e.FreeURL()
	etcd := e.EtcdProgram("old-etcd", client, path,
		"--data-dir="+e.Dir("etcd"), "--listen-client-urls="+client, "--advertise-client-urls="+client,
		"--listen-peer-urls="+peer, "--initial-advertise-peer-urls="+peer, "--initial-cluster=default="+peer)
	etcd.Start()
	return etcd
}

// EtcdProgram returns an etcd that serves clients on url once it is started: the program at path
// with args. Its process may exit with any code when it is stopped. The name is used for its log,
// and has to end with "etcd".
func (e *Env) EtcdProgram(name, url, path string, args ...string) *Etcd {
	return &Etcd{URL: url, env: e, program: path, name: name, args: args}
}

// Launch is Start without the wait, for an etcd of EtcdProgram.
func (e *Etcd) Launch() {
	e.p = e.env.StartProgram(e.name, e.program, e.args...)
	e.p.anyEnd.Store(true) // it exits by the signal it receives
}

// Await returns nil when the etcd answers a linearizable read.
func (e *Etcd) Await(ctx context.Context) error {
	client := e.Client()
	return Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := client.Get(ctx, "ready")
		return err == nil, err
	})
}

// Endpoints returns one etcd with the URLs of several members, for flags and clients. The members
// are stopped and started individually.
func Endpoints(members ...*Etcd) *Etcd {
	all := *members[0]
	all.URL, all.p = "", nil
	for i, m := range members {
		if i > 0 {
			all.URL += ","
		}
		all.URL += m.URL
	}
	return &all
}

// FreeURL returns the URL of a port on loopback that is reserved for a server of the environment.
// Without a listener, connections are refused.
func (e *Env) FreeURL() string { return fmt.Sprintf("http://127.0.0.1:%d", e.port()) }

// port reserves a port until the end of the environment, for a server that keeps its address across
// restarts.
func (e *Env) port() int {
	port, err := loopback.Reserve()
	e.check(err)
	e.AtEnd(func() { _ = port.Release() })
	return port.Number()
}
