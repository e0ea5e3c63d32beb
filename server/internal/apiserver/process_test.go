package apiserver

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
	certutil "k8s.io/client-go/util/cert"
	"k8s.io/client-go/util/keyutil"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/process"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

const (
	// readyTimeout and stopTimeout bound a wait that has failed; a server needs about 4 s and 1 s
	// on two cores.
	readyTimeout = 5 * time.Minute
	stopTimeout  = 90 * time.Second // upstream gives requests in flight 60 s

	// serveEnv makes the test binary a server: its arguments are then those of `strata apiserver`.
	serveEnv = "STRATA_TEST_SERVE"

	adminToken = "admin-token"
)

// TestMain lets the test binary stand in for the command, so that each server has a process of its
// own without linking a second binary. The process prints its URL when it is ready.
func TestMain(m *testing.M) {
	if os.Getenv(serveEnv) == "" {
		os.Exit(m.Run())
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM)
	defer stop()
	onReady := func(info Info) { fmt.Println(info.URL) }
	if err := Run(ctx, Options{Args: os.Args[1:], OnReady: onReady}); err != nil {
		fmt.Fprintln(os.Stderr, "strata:", err)
		os.Exit(1)
	}
}

// startEtcd returns the URL of an empty etcd that lives as long as the test.
func startEtcd(t *testing.T) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), readyTimeout)
	defer cancel()
	etcd, err := embedetcd.Start(ctx, embedetcd.Config{
		Dir:           t.TempDir(),
		ClientURL:     "http://127.0.0.1:0",
		UnsafeNoFsync: true,
	})
	if err != nil {
		t.Fatalf("start etcd: %v", err)
	}
	t.Cleanup(etcd.Close)
	return etcd.Endpoint()
}

// minimalFlags returns the flags that a server on etcd requires, except the port. Files go to dir.
func minimalFlags(t *testing.T, dir, etcdURL string) []string {
	t.Helper()
	flags, err := kubeAPIServerFlags(dir, etcdURL)
	testcheck.NoError(t, err)
	return flags
}

// identity returns the files that name a server, by their names: its serving certificate, and the
// keys of service accounts. All servers have the same, because some are expensive to make.
var identity = sync.OnceValues(func() (map[string][]byte, error) {
	cert, certKey, err := certutil.GenerateSelfSignedCertKey("127.0.0.1", []net.IP{{127, 0, 0, 1}}, nil)
	if err != nil {
		return nil, err
	}
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return nil, err
	}
	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	if err != nil {
		return nil, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	return map[string][]byte{
		"apiserver.crt": cert,
		"apiserver.key": certKey,
		"sa.key":        private,
		"sa.pub":        pem.EncodeToMemory(&pem.Block{Type: keyutil.PublicKeyBlockType, Bytes: public}),
		"tokens.csv":    []byte(adminToken + ",admin,admin,system:masters\n"),
	}, err
})

// kubeAPIServerFlags returns flags of kube-apiserver for a server on etcd, except the port, and
// writes the files that they name to dir.
func kubeAPIServerFlags(dir, etcdURL string) ([]string, error) {
	files, err := identity()
	if err != nil {
		return nil, err
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			return nil, err
		}
	}
	return []string{
		"--etcd-servers=" + etcdURL,
		"--bind-address=127.0.0.1",
		"--cert-dir=" + dir,
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + filepath.Join(dir, "sa.pub"),
		"--service-account-signing-key-file=" + filepath.Join(dir, "sa.key"),
		"--service-cluster-ip-range=10.0.0.0/24",
		"--authorization-mode=RBAC",
		"--token-auth-file=" + filepath.Join(dir, "tokens.csv"),
	}, nil
}

// server is a running `strata apiserver`.
type server struct {
	config *rest.Config // system:masters, without client-go's rate limit
	client kubernetes.Interface
}

// startServer starts a server with minimalFlags and more, in a process of its own, and returns when
// it is ready. When the test ends the server gets SIGTERM and has to exit with code 0.
func startServer(t *testing.T, etcdURL string, more ...string) *server {
	t.Helper()
	dir := t.TempDir()
	flags := append(minimalFlags(t, dir, etcdURL), more...)
	p := startProcess(t, dir, append(flags, fmt.Sprintf("--secure-port=%d", reservePort(t).Number()))...)
	ctx, cancel := context.WithTimeout(t.Context(), readyTimeout)
	defer cancel()
	url, _, err := p.WaitLine(ctx, 0, "") // the first line
	testcheck.NoError(t, err)
	t.Cleanup(func() { requireCleanStop(t, p) })
	return newServer(t, url, filepath.Join(dir, "apiserver.crt"))
}

func newServer(t *testing.T, url, caFile string) *server {
	t.Helper()
	config := &rest.Config{
		Host: url, BearerToken: adminToken, TLSClientConfig: rest.TLSClientConfig{CAFile: caFile},
		QPS: -1, WarningHandler: rest.NoWarnings{},
	}
	client, err := kubernetes.NewForConfig(config)
	testcheck.NoError(t, err)
	return &server{config: config, client: client}
}

// reservePort returns a port that is reserved until the test ends.
func reservePort(t *testing.T) *loopback.Port {
	t.Helper()
	port, err := loopback.Reserve()
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = port.Release() })
	return port
}

// startProcess runs Run with flags in a process that ends with the test at the latest. Its log goes
// to dir.
func startProcess(t *testing.T, dir string, flags ...string) *process.Child {
	t.Helper()
	p, err := process.Start(process.Spec{
		Name: "server", Path: os.Args[0], Args: flags, Env: append(os.Environ(), serveEnv+"=1"),
		Log: filepath.Join(dir, "log"), Lines: true,
	})
	testcheck.NoError(t, err)
	t.Cleanup(p.Kill)
	return p
}

// requireCleanStop sends SIGTERM and fails the test unless the process then exits with code 0.
func requireCleanStop(t *testing.T, p *process.Child) {
	if err := p.Stop(syscall.SIGTERM, stopTimeout); err != nil {
		t.Error(err)
	} else if err := p.ExitError(); err != nil {
		t.Errorf("after SIGTERM: %v, want exit code 0", err)
	}
	if t.Failed() {
		t.Logf("end of the server's log:\n%s", p.Tail())
	}
}

// get returns the body at path. A server that answers 429 while a cache fills is asked again when
// it says so.
func (s *server) get(t *testing.T, path string) string {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	body, err := s.client.Discovery().RESTClient().Get().RequestURI(path).DoRaw(ctx)
	if err != nil {
		t.Fatalf("%s: %v\n%s", path, err, body)
	}
	return string(body)
}

// countingProxy forwards connections to an etcd and counts the open ones.
type countingProxy struct {
	url  string
	open atomic.Int64
}

// startCountingProxy returns a proxy that lives as long as the test.
func startCountingProxy(t *testing.T, target string) *countingProxy {
	t.Helper()
	u, err := url.Parse(target)
	testcheck.NoError(t, err)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	p := &countingProxy{url: "http://" + listener.Addr().String()}
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	t.Cleanup(func() {
		cancel()
		listener.Close()
		running.Wait()
	})
	running.Go(func() {
		for {
			conn, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil {
				continue
			}
			p.open.Add(1)
			running.Go(func() {
				defer p.open.Add(-1)
				forward(ctx, conn, u.Host)
			})
		}
	})
	return p
}

// forward copies between conn and a new connection to address until either end closes or ctx is
// cancelled.
func forward(ctx context.Context, conn net.Conn, address string) {
	defer conn.Close()
	peer, err := net.Dial("tcp", address)
	if err != nil {
		return
	}
	closeBoth := func() { conn.Close(); peer.Close() }
	defer closeBoth()
	stop := context.AfterFunc(ctx, closeBoth)
	defer stop()
	var copying sync.WaitGroup
	copying.Go(func() { defer closeBoth(); _, _ = io.Copy(peer, conn) })
	copying.Go(func() { defer closeBoth(); _, _ = io.Copy(conn, peer) })
	copying.Wait()
}
