package harness

import (
	"context"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"go.etcd.io/etcd/client/pkg/v3/transport"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
)

// Etcd is an etcd with a process of its own. It can be stopped and started again: the URL and the data stay.
type Etcd struct {
	URL string

	env     *Env
	program string // "" for the strata command
	args    []string
	tls     transport.TLSInfo // the zero value for plain TCP
	p       *Process
}

// Etcd starts an empty etcd. It does not wait for the disk: these tests crash no machine.
func (e *Env) Etcd() *Etcd { return e.etcd(transport.TLSInfo{}) }

// EtcdTLS starts an empty etcd that serves with the certificates of ca and demands client certificates of it.
func (e *Env) EtcdTLS(ca *Authority) *Etcd {
	server, client := ca.Issue("etcd"), ca.Issue("etcd-client")
	etcd := e.etcd(transport.TLSInfo{CertFile: client.CertFile, KeyFile: client.KeyFile, TrustedCAFile: ca.CertFile},
		"--cert-file="+server.CertFile, "--key-file="+server.KeyFile, "--trusted-ca-file="+ca.CertFile)
	return etcd
}

func (e *Env) etcd(info transport.TLSInfo, more ...string) *Etcd {
	scheme := "http"
	if info.CertFile != "" {
		scheme = "https"
	}
	etcd := &Etcd{
		URL: fmt.Sprintf("%s://127.0.0.1:%d", scheme, e.freePort()), // a fixed port, for a second start
		env: e,
		tls: info,
	}
	etcd.args = append([]string{"etcd", "--data-dir=" + e.Dir("etcd"), "--listen-client-url=" + etcd.URL, "--unsafe-no-fsync"}, more...)
	etcd.Start()
	return etcd
}

// Start starts the etcd again after Stop.
func (e *Etcd) Start() {
	ctx, cancel := ready()
	defer cancel()
	if e.program != "" {
		e.startProgram(ctx)
		return
	}
	e.p = e.env.start("etcd", e.args...)
	_, _, err := e.p.WaitLine(ctx, 0, "ready ")
	e.env.check(err)
}

// Stop stops the etcd.
func (e *Etcd) Stop() { e.env.check(e.p.Stop()) }

// ServerFlags returns kube-apiserver's flags for this etcd.
func (e *Etcd) ServerFlags() []string {
	flags := []string{"--etcd-servers=" + e.URL}
	if e.tls.CertFile != "" {
		flags = append(flags, "--etcd-certfile="+e.tls.CertFile, "--etcd-keyfile="+e.tls.KeyFile, "--etcd-cafile="+e.tls.TrustedCAFile)
	}
	return flags
}

// Client returns a client of this etcd that lasts as long as the environment is used.
func (e *Etcd) Client() *clientv3.Client {
	config := clientv3.Config{Endpoints: []string{e.URL}, DialTimeout: 10 * time.Second, Logger: zap.NewNop()}
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
	client, peer := fmt.Sprintf("http://127.0.0.1:%d", e.freePort()), fmt.Sprintf("http://127.0.0.1:%d", e.freePort())
	etcd := &Etcd{URL: client, env: e, program: path, args: []string{
		"--data-dir=" + e.Dir("etcd"), "--listen-client-urls=" + client, "--advertise-client-urls=" + client,
		"--listen-peer-urls=" + peer, "--initial-advertise-peer-urls=" + peer, "--initial-cluster=default=" + peer}}
	etcd.Start()
	return etcd
}

func (e *Etcd) startProgram(ctx context.Context) {
	e.p = e.env.startProgram("old-etcd", e.program, e.args...)
	e.p.mu.Lock()
	e.p.mu.waited = true // it ends itself with the signal that it was sent
	e.p.mu.Unlock()
	client := e.Client()
	e.env.check(Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		defer cancel()
		_, err := client.Get(ctx, "ready")
		return err == nil, err
	}))
}

// freePort returns a port that was free a moment ago. Servers that are to be found again need one that they do not choose
// themselves.
func (e *Env) freePort() int {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	e.check(err)
	defer l.Close()
	_, port, _ := strings.Cut(l.Addr().String(), ":")
	n, err := strconv.Atoi(port)
	e.check(err)
	return n
}
