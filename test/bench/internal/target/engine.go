package target

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"syscall"
	"time"

	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

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
	Ready time.Duration // until /readyz said so
	Began time.Time
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

// StartEngine runs an API server on an etcd and returns when it is ready. Its log goes into logDir.
func StartEngine(ctx context.Context, spec EngineSpec, etcd *Etcd, credentials *Credentials, logDir string) (*Engine, error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	port, err := loopback.Reserve()
	if err != nil {
		return nil, err
	}
	startup := Startup{Began: time.Now()}
	child, err := startServer(spec, etcd, port.Number(), credentials, logDir)
	if err != nil {
		return nil, errors.Join(err, port.Release())
	}
	e := &Engine{Child: child, EngineSpec: spec, baseURL: "https://" + port.Address(), credentials: credentials, port: port, Startup: startup}
	if err := e.awaitReady(ctx); err != nil {
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

func (e *Engine) awaitReady(ctx context.Context) error {
	conn := e.Dial()
	defer conn.Close()
	if err := e.Poll(ctx, conn, "/readyz"); err != nil {
		return err
	}
	e.Startup.Ready = time.Since(e.Startup.Began)
	return e.grant(ctx)
}

// grant gives Node and Agent the rights of an administrator, so that workloads may read as them.
func (e *Engine) grant(ctx context.Context) error {
	client, closeAll, err := e.Clientset()
	if err != nil {
		return err
	}
	defer closeAll()
	binding := &rbacv1.ClusterRoleBinding{
		ObjectMeta: metav1.ObjectMeta{Name: "bench"},
		RoleRef:    rbacv1.RoleRef{APIGroup: rbacv1.GroupName, Kind: "ClusterRole", Name: "cluster-admin"},
	}
	for _, user := range []User{Node, Agent} {
		binding.Subjects = append(binding.Subjects, rbacv1.Subject{Kind: rbacv1.UserKind, APIGroup: rbacv1.GroupName, Name: string(user)})
	}
	if _, err := client.RbacV1().ClusterRoleBindings().Create(ctx, binding, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		return fmt.Errorf("grant rights: %w", err)
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
