package stratatest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
)

const (
	// startTimeout bounds a start, and the wait for definitions, on a machine that is busy with
	// other tests; it takes a second on an idle one.
	startTimeout = 2 * time.Minute
	// stopTimeout bounds a stop, which takes some 10 ms.
	stopTimeout = 30 * time.Second
)

// Option configures a control plane.
type Option func(*options)

type options struct {
	crds  []string
	flags []string
}

// WithCRDs creates the CustomResourceDefinitions in YAML or JSON files, and in the files of
// directories, and waits until the API serves them. Objects of other kinds are ignored.
func WithCRDs(paths ...string) Option {
	return func(o *options) { o.crds = append(o.crds, paths...) }
}

// WithFlags adds flags of kube-apiserver, in the form --name=value. Control planes with equal
// values of feature gates, emulated versions and log flags share a process of the strata program.
func WithFlags(flags ...string) Option {
	return func(o *options) { o.flags = append(o.flags, flags...) }
}

// Start starts a control plane and returns an administrator's configuration for clients. The
// control plane is ready, and is stopped when the test and its subtests have ended; its data is
// deleted. An error ends the test.
func Start(t testing.TB, opts ...Option) *rest.Config {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), startTimeout)
	defer cancel()
	p, err := New(ctx, opts...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := p.Stop(); err != nil {
			t.Error(err)
		}
	})
	return p.Config()
}

// User returns a configuration with the credentials of another user of the control plane of cfg,
// which Start or New returned. The user has no rights but those that RBAC gives to the name and the
// groups. An error ends the test.
func User(t testing.TB, cfg *rest.Config, name string, groups ...string) *rest.Config {
	t.Helper()
	p, err := controlPlaneOf(cfg)
	if err == nil {
		cfg, err = p.User(name, groups...)
	}
	if err != nil {
		t.Fatal(err)
	}
	return cfg
}

// Kubeconfig writes cfg to a kubeconfig in a temporary directory of the test, for programs that
// tests run, and returns its path. It has the address, the authority and the client certificate of
// cfg, as Start and User return it, and nothing else. An error ends the test.
func Kubeconfig(t testing.TB, cfg *rest.Config) string {
	t.Helper()
	const name = "stratatest"
	config := clientcmdapi.NewConfig()
	config.Clusters[name] = &clientcmdapi.Cluster{Server: cfg.Host, CertificateAuthorityData: cfg.CAData}
	config.AuthInfos[name] = &clientcmdapi.AuthInfo{ClientCertificateData: cfg.CertData, ClientKeyData: cfg.KeyData}
	config.Contexts[name] = &clientcmdapi.Context{Cluster: name, AuthInfo: name}
	config.CurrentContext = name
	path := filepath.Join(t.TempDir(), "kubeconfig")
	if err := clientcmd.WriteToFile(*config, path); err != nil {
		t.Fatalf("stratatest: write a kubeconfig: %v", err)
	}
	return path
}

// ControlPlane is a running control plane. Its methods may be called concurrently.
type ControlPlane struct {
	server *testServer
	name   string // in requests to the test server
	config *rest.Config
}

// New starts a control plane for code that has no test, such as TestMain, and returns when it is
// ready. The caller stops it; otherwise it ends with the process.
func New(ctx context.Context, opts ...Option) (*ControlPlane, error) {
	var o options
	for _, opt := range opts {
		opt(&o)
	}
	definitions, err := readDefinitions(o.crds)
	if err != nil {
		return nil, fmt.Errorf("stratatest: %w", err)
	}
	g, err := acquire(ctx, ofProcess(o.flags))
	if err != nil {
		return nil, fmt.Errorf("stratatest: start a process of strata: %w", err)
	}
	r, err := g.call(ctx, request{Start: &startRequest{Flags: slices.DeleteFunc(slices.Clone(o.flags), isOfProcess)}})
	if err != nil {
		return nil, fmt.Errorf("stratatest: start a control plane: %w", err)
	}
	p := &ControlPlane{server: g, name: r.ControlPlane, config: newConfig(r.URL, r.CA, r.Cert, r.Key)}
	controlPlanes.Store(p.config.Host, p)
	if err := install(ctx, p.config, definitions); err != nil {
		return nil, errors.Join(fmt.Errorf("stratatest: %w", err), p.Stop())
	}
	return p, nil
}

// controlPlanes has the running control planes, *ControlPlane by URL.
var controlPlanes sync.Map

func controlPlaneOf(cfg *rest.Config) (*ControlPlane, error) {
	p, ok := controlPlanes.Load(cfg.Host)
	if !ok {
		return nil, fmt.Errorf("stratatest: no control plane of this process has the address %q; it was not started by stratatest, or was stopped", cfg.Host)
	}
	return p.(*ControlPlane), nil
}

// newConfig returns a configuration whose clients are not throttled noticeably, as envtest's.
func newConfig(url string, ca, cert, key []byte) *rest.Config {
	return &rest.Config{
		Host:            url,
		TLSClientConfig: rest.TLSClientConfig{CAData: ca, CertData: cert, KeyData: key},
		QPS:             1000,
		Burst:           2000,
	}
}

// Config returns an administrator's configuration. The caller may change it.
func (p *ControlPlane) Config() *rest.Config { return rest.CopyConfig(p.config) }

// User returns a configuration with the credentials of another user.
func (p *ControlPlane) User(name string, groups ...string) (*rest.Config, error) {
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	r, err := p.server.call(ctx, request{User: &userRequest{ControlPlane: p.name, Name: name, Groups: groups}})
	if err != nil {
		return nil, fmt.Errorf("stratatest: add user %q: %w", name, err)
	}
	return newConfig(p.config.Host, p.config.CAData, r.Cert, r.Key), nil
}

// Stop closes the connections of all clients, stops the control plane, and deletes its data. A
// second call has no effect.
func (p *ControlPlane) Stop() error {
	if _, running := controlPlanes.LoadAndDelete(p.config.Host); !running {
		return nil
	}
	ctx, cancel := context.WithTimeout(context.Background(), stopTimeout)
	defer cancel()
	if _, err := p.server.call(ctx, request{Stop: &stopRequest{ControlPlane: p.name}}); err != nil {
		return fmt.Errorf("stratatest: stop the control plane at %s: %w", p.config.Host, err)
	}
	return nil
}

// processFlags are flags of kube-apiserver that apply to the whole process.
var processFlags = []string{
	"allow-privileged", "contention-profiling", "emulated-version", "feature-gates", "log-flush-frequency", "log-json-info-buffer-size",
	"log-json-split-stream", "log-text-info-buffer-size", "log-text-split-stream", "logging-format", "max-connection-bytes-per-sec",
	"min-compatibility-version", "v", "vmodule",
}

func isOfProcess(flag string) bool {
	name, _, _ := strings.Cut(strings.TrimLeft(flag, "-"), "=")
	return slices.Contains(processFlags, strings.ReplaceAll(name, "_", "-"))
}

// ofProcess returns the flags that apply to the whole process.
func ofProcess(flags []string) []string {
	return slices.DeleteFunc(slices.Clone(flags), func(flag string) bool { return !isOfProcess(flag) })
}

// findBinary returns the path of the strata program.
func findBinary() (string, error) {
	if path := os.Getenv(binaryEnv); path != "" {
		info, err := os.Stat(path)
		if err != nil {
			return "", fmt.Errorf("$%s: %w", binaryEnv, err)
		}
		if info.IsDir() || info.Mode()&0o111 == 0 {
			return "", fmt.Errorf("$%s: %s is not a program; set it to the path of the strata program", binaryEnv, path)
		}
		return filepath.Abs(path)
	}
	path, err := exec.LookPath("strata")
	if err != nil {
		return "", fmt.Errorf("no strata program: $%s is not set, and $PATH has none; install a release, see docs/testing.md of github.com/stratakube/strata", binaryEnv)
	}
	return path, nil
}

// binaryEnv is the environment variable with the path of the strata program.
const binaryEnv = "STRATA_BINARY"

// quoted returns a sorted key for a set of flags.
func quoted(flags []string) string {
	return strings.Join(slices.Sorted(slices.Values(flags)), "\n")
}
