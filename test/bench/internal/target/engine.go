package target

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
)

// EngineSpec describes a server to start: an API server.
type EngineSpec struct {
	Label   string   // name in the table
	Engine  string   // the value of --engine, or StockEngine
	Binary  string   // the executable
	LogName string   // name of its log, without the extension; "" means Label
	Env     []string // further variables of the environment, as name=value

	// Grace is the time for an orderly end after SIGTERM; 0 means 20 s.
	Grace time.Duration
}

// StockEngine is the value of EngineSpec.Engine for a kube-apiserver as Kubernetes builds it.
// EngineSpec.Binary is its executable.
const StockEngine = "stock"

// IsStock reports whether this is a kube-apiserver as Kubernetes builds it.
func (s EngineSpec) IsStock() bool { return s.Engine == StockEngine }

// command are the arguments that precede the flags of kube-apiserver: a stock one has neither
// subcommands nor --engine.
func (s EngineSpec) command() []string {
	if s.IsStock() {
		return nil
	}
	return []string{"apiserver", "--engine=" + s.Engine}
}

// VersionArgs are the arguments with which the executable prints its version.
func (s EngineSpec) VersionArgs() []string {
	if s.IsStock() {
		return []string{"--version"}
	}
	return []string{"version"}
}

// Startup contains the durations of an engine's start, from before its process was made.
type Startup struct {
	Ready    time.Duration // until /readyz said so
	FirstGet time.Duration // until the first object was read
	Began    time.Time
	CPU      time.Duration // processor time used until then
}

// Engine is a running API server. The benchmark may use everything in it concurrently.
type Engine struct {
	*process.Child
	EngineSpec
	Startup Startup

	baseURL     string
	credentials *Credentials
	port        *loopback.Port // reserved while the engine runs
}

// StartEngine runs an API server on an etcd and returns when it is ready and has answered a GET for
// firstGet, a path. Its log goes into logDir.
func StartEngine(ctx context.Context, spec EngineSpec, etcd *Etcd, credentials *Credentials, firstGet, logDir string) (*Engine, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	port, err := loopback.Reserve()
	if err != nil {
		return nil, err
	}
	began := time.Now()
	child, err := startServer(spec, etcd, port.Number(), credentials, logDir)
	if err != nil {
		return nil, errors.Join(err, port.Release())
	}
	e := &Engine{Child: child, EngineSpec: spec, baseURL: "https://" + port.Address(), credentials: credentials, port: port}
	e.Startup.Began = began
	if err := e.awaitReady(ctx, began, firstGet); err != nil {
		e.Stop()
		return nil, err
	}
	return e, nil
}

// startServer runs `binary apiserver`, or a stock kube-apiserver with the same flags.
func startServer(spec EngineSpec, etcd *Etcd, port int, credentials *Credentials, logDir string) (*process.Child, error) {
	return process.Start(process.Spec{
		Name: spec.Label,
		Path: spec.Binary,
		Args: slices.Concat(spec.command(), []string{
			"--etcd-servers=" + etcd.Endpoint,
			"--bind-address=127.0.0.1",
			"--advertise-address=127.0.0.1",
			"--secure-port=" + fmt.Sprint(port),
			"--endpoint-reconciler-type=none", // it would repeatedly refuse loopback addresses
			"--authorization-mode=Node,RBAC",  // whose graph of nodes reads all pods
			"--token-auth-file=" + credentials.tokenFile,
			"--tls-cert-file=" + credentials.certFile,
			"--tls-private-key-file=" + credentials.keyFile,
			"--service-account-issuer=https://kubernetes.default.svc",
			"--service-account-key-file=" + credentials.keyFile,
			"--service-account-signing-key-file=" + credentials.keyFile,
			"--service-cluster-ip-range=10.0.0.0/24",
			// the benchmark compacts: at the same moments for all engines
			"--etcd-compaction-interval=0",
			// 1,000 watchers over 8 connections are 125 on each
			"--http2-max-streams-per-connection=250",
		}),
		Env: append(os.Environ(), spec.Env...),
		Log: filepath.Join(logDir, cmp.Or(spec.LogName, spec.Label)+".log"),
	})
}

// Stop ends the engine and returns when it is gone.
func (e *Engine) Stop() {
	// gone in any case, and nothing depends on the port
	_ = e.Child.Stop(syscall.SIGTERM, cmp.Or(e.Grace, stopGrace))
	_ = e.port.Release()
}

// Kill ends the engine with SIGKILL and returns when it is gone.
func (e *Engine) Kill() {
	e.Child.Kill()
	_ = e.port.Release()
}

// LogTime returns when the engine wrote the first line of its log that contains text, from the
// line's timestamp; ok is false if there is none.
func (e *Engine) LogTime(text string) (at time.Time, ok bool, err error) {
	log, err := e.Log()
	if err != nil {
		return time.Time{}, false, err
	}
	for line := range strings.Lines(log) {
		if !strings.Contains(line, text) {
			continue
		}
		at, err := klogTime(line, time.Now())
		return at, err == nil, err
	}
	return time.Time{}, false, nil
}

// klogTime reads the time at which a line such as "I0102 15:04:05.678901 ..." was written, in local
// time and in the year of now.
func klogTime(line string, now time.Time) (time.Time, error) {
	const layout = "0102 15:04:05.000000"
	if len(line) <= len(layout) {
		return time.Time{}, fmt.Errorf("log line %q does not begin with a time", line)
	}
	at, err := time.ParseInLocation(layout, line[1:1+len(layout)], time.Local)
	if err != nil {
		return time.Time{}, fmt.Errorf("log line %q: %w", line, err)
	}
	return at.AddDate(now.Year()-at.Year(), 0, 0), nil
}

func (e *Engine) awaitReady(ctx context.Context, began time.Time, firstGet string) error {
	conn := e.Dial()
	defer conn.Close()
	if err := e.Poll(ctx, conn, "/readyz"); err != nil {
		return err
	}
	e.Startup.Ready = time.Since(began)
	if err := e.Poll(ctx, conn, firstGet); err != nil {
		return err
	}
	e.Startup.FirstGet = time.Since(began)
	var err error
	if e.Startup.CPU, err = e.CPU(); err != nil {
		return err
	}
	return e.grant(ctx, conn)
}

// grant gives Node and Agent the rights of an administrator, so that workloads may read as them.
func (e *Engine) grant(ctx context.Context, conn *Conn) error {
	type object map[string]any
	subjects := []object{}
	for _, user := range []User{Node, Agent} {
		subjects = append(subjects, object{"kind": "User", "apiGroup": "rbac.authorization.k8s.io", "name": user})
	}
	body, err := json.Marshal(object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": object{"name": "bench"}, "subjects": subjects,
		"roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
	})
	if err != nil {
		return err
	}
	resp, err := conn.Send(ctx, Request{Method: http.MethodPost, Path: "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", Body: body})
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	if resp.StatusCode != http.StatusCreated && resp.StatusCode != http.StatusConflict {
		return fmt.Errorf("grant rights: %s", resp.Status)
	}
	return nil
}

// Poll requests a path until it is answered with 200, the engine has ended, or ctx is done.
func (e *Engine) Poll(ctx context.Context, conn *Conn, path string) error {
	err := e.Await(ctx, 10*time.Millisecond, func(ctx context.Context) error {
		return conn.Read(ctx, Request{Path: path}, new(bytes.Buffer))
	})
	if err != nil {
		return fmt.Errorf("%s: %w", path, err)
	}
	return nil
}

// Profile fetches a path below /debug/pprof.
func (e *Engine) Profile(ctx context.Context, path string) ([]byte, error) {
	conn := e.Dial()
	defer conn.Close()
	var body bytes.Buffer
	if err := conn.Read(ctx, Request{Path: "/debug/pprof/" + path}, &body); err != nil {
		return nil, fmt.Errorf("profile of %s: %w", e.Label, err)
	}
	return body.Bytes(), nil
}
