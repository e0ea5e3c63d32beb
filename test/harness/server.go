package harness

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/x509"
	"encoding/pem"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"
	"k8s.io/client-go/util/keyutil"
)

const adminToken = "admin-token"

// Server is a running API server with its administrator's credentials.
type Server struct {
	*Process
	URL        string
	CAFile     string
	Config     *rest.Config // system:masters, without a rate limit
	Kubeconfig string       // path of a kubeconfig for the same user

	env       *Env
	starting  sync.Mutex          // guards before and Process while StartAgain replaces them
	before    []*Process          // processes that StartAgain has replaced
	cert      Certificate         // for serving, of an API server
	program   string              // "" for the strata command under test
	args      []string            // of the program
	prepare   func(pid int) error // may be nil
	unchecked bool                // see Unchecked
}

// Up starts `strata up` in a new data directory with the engine under test and returns when it
// reports that its controllers are ready.
func (e *Env) Up(args ...string) *Server { return e.UpIn(filepath.Join(e.Dir("up"), "data"), args...) }

// UpIn is Up in the data directory dataDir, which no running server uses.
func (e *Env) UpIn(dataDir string, args ...string) *Server {
	ctx, cancel := ready()
	defer cancel()
	args = append([]string{"up", "--data-dir=" + dataDir, "--secure-port=0"}, args...)
	if !slices.Contains(args, "--") {
		args = append(args, "--")
	}
	args = append(append(args, "--engine="+Engine()), checkFlags(args, false)...)
	p := e.startServer("up", "", false, nil, args)
	p.logs = append(p.logs, filepath.Join(dataDir, "strata.log"))
	const status = "not ready yet; see" // in lines before the last one
	for line, lines := status, 0; strings.Contains(line, status); {
		var err error
		if line, lines, err = p.WaitLine(ctx, lines, "controllers:"); err != nil {
			e.fail(fmt.Errorf("%w\n%s", err, p.ends(nil)))
		}
	}
	kubeconfig := filepath.Join(dataDir, "kubeconfig")
	config, err := clientcmd.BuildConfigFromFlags("", kubeconfig)
	e.check(err)
	s := &Server{
		Process:    p,
		URL:        config.Host,
		CAFile:     e.WriteFile("ca.crt", config.CAData),
		Kubeconfig: kubeconfig,
		env:        e,
		args:       args,
	}
	s.Config = s.unlimited(config)
	e.addServer(s)
	return s
}

// unlimited removes client-go's own rate limit from config: the tests concern the server's. The
// context of a request names the test that uses the server.
func (s *Server) unlimited(config *rest.Config) *rest.Config {
	config.QPS = -1
	config.WarningHandler = rest.NoWarnings{}
	if s.env != nil && s.env.shared {
		config.Wrap(func(next http.RoundTripper) http.RoundTripper { return &observed{next, s} })
	}
	return config
}

// APIServer starts `strata apiserver` on etcd and returns when /readyz succeeds. Later flags
// override earlier ones.
func (e *Env) APIServer(etcd *Etcd, flags ...string) *Server {
	s := e.StartAPIServer(etcd, flags...)
	ctx, cancel := ready()
	defer cancel()
	e.check(s.Await(ctx, "/readyz"))
	return s
}

// StartAPIServer is APIServer without the wait.
func (e *Env) StartAPIServer(etcd *Etcd, flags ...string) *Server {
	return e.StartAPIServerPrepared(nil, etcd, flags...)
}

// StartAPIServerPrepared is StartAPIServer with a function that is called for the process, and for
// each one of StartAgain, before it executes its first instruction. This is possible on Linux only.
func (e *Env) StartAPIServerPrepared(prepare func(pid int) error, etcd *Etcd, flags ...string) *Server {
	return e.startAPIServer(launch{command: "apiserver", prepare: prepare}, etcd, flags...)
}

// previousEnv names the strata command of an earlier release.
const previousEnv = "STRATA_TEST_PREVIOUS"

// Previous returns the path of the strata command of an earlier release; "" if the environment
// names none. The caller starts one of several servers by it.
func Previous() string { return os.Getenv(previousEnv) }

// StartPrevious is StartAPIServer with the strata command of an earlier release.
func (e *Env) StartPrevious(path string, etcd *Etcd, flags ...string) *Server {
	return e.startAPIServer(launch{command: "apiserver", program: path}, etcd, flags...)
}

// launch says which program startAPIServer starts: a command of strata, or of the program at a
// path. A stock kube-apiserver has no commands.
type launch struct {
	command, program string
	withoutKeys      bool                // the server has no keys, tokens and roles of its own
	prepare          func(pid int) error // see StartAPIServerPrepared
}

// startAPIServer starts an API server on etcd.
func (e *Env) startAPIServer(l launch, etcd *Etcd, flags ...string) *Server {
	program, prepare := l.program, l.prepare
	dir := e.Dir("apiserver")
	port := e.port()
	flags, unchecked := withoutUnchecked(flags)
	var args []string
	if l.command != "" {
		args = append([]string{l.command, "--engine=" + Engine()}, checkFlags(flags, unchecked)...)
	} else {
		unchecked = true // it has no such check
	}
	args = append(args, etcd.ServerFlags()...)
	if l.withoutKeys {
		args = append(args, servingFlags(dir)...)
	} else {
		args = append(args, e.requiredFlags(dir)...)
	}
	args = append(args, fmt.Sprintf("--secure-port=%d", port))
	args = append(args, flags...)

	ca := e.serving()
	serving := ca.Issue("apiserver")
	args = append(args, "--tls-cert-file="+serving.CertFile, "--tls-private-key-file="+serving.KeyFile)
	s := &Server{
		Process:   e.startServer("apiserver", program, unchecked, prepare, args),
		cert:      serving,
		program:   program,
		args:      args,
		prepare:   prepare,
		unchecked: unchecked,
		URL:       fmt.Sprintf("https://127.0.0.1:%d", port),
		CAFile:    ca.CertFile,
		env:       e,
	}
	s.Config = s.unlimited(&rest.Config{Host: s.URL, BearerToken: adminToken, TLSClientConfig: rest.TLSClientConfig{CAFile: ca.CertFile}})
	s.Kubeconfig = s.KubeconfigFor(adminToken)
	e.addServer(s)
	return s
}

// Restart restarts a stopped server of APIServer: on the same port, with the same flags and then
// more. It returns when /readyz succeeds.
func (s *Server) Restart(more ...string) {
	s.StartAgain(more...)
	ctx, cancel := ready()
	defer cancel()
	s.env.check(s.Await(ctx, "/readyz"))
}

// AwaitProgress restarts a server until it has found that its etcds answer progress requests, for a
// test that counts on them: on a busy machine an answer may be late for the server's probe. without
// is the URL of an etcd that does not answer, "" if all do.
func (s *Server) AwaitProgress(without string) {
	for range 5 {
		late := false
		for line := range strings.Lines(s.Output()) {
			late = late || strings.Contains(line, "capability probe failed") ||
				strings.Contains(line, "does not answer progress requests") && (without == "" || !strings.Contains(line, without))
		}
		if !late {
			return
		}
		s.env.check(s.Stop())
		s.Restart()
	}
	s.env.check(errors.New("each of five starts missed the answer of etcd to a progress request"))
}

// StartAgain is Restart without the wait.
func (s *Server) StartAgain(more ...string) {
	s.args = append(s.args, more...)
	p := s.env.startServer("apiserver", s.program, s.unchecked, s.prepare, s.args)
	s.starting.Lock()
	defer s.starting.Unlock()
	s.before, s.Process = append(s.before, s.Process), p
}

// Flags returns the flags of the last start.
func (s *Server) Flags() []string {
	return slices.DeleteFunc(slices.Clone(s.args), func(arg string) bool { return !strings.HasPrefix(arg, "--") })
}

// Outputs returns the logs of all starts of the server. It must not be called concurrently with a
// restart.
func (s *Server) Outputs() (all []string) {
	for _, p := range append(slices.Clone(s.before), s.Process) {
		all = append(all, p.Output())
	}
	return all
}

// RenewServing replaces the serving certificate of an API server, in its files, by one that
// expires, or has expired, at a time.
func (s *Server) RenewServing(expires time.Time) {
	s.env.check(s.cert.Replace(s.env.serving().IssueUntil("apiserver", expires)))
}

// serving returns the authority of the serving certificates of all API servers of the environment,
// so that a client trusts all of them.
func (e *Env) serving() *Authority {
	e.servingOnce.Do(func() { e.servingCA = e.Authority() })
	return e.servingCA
}

// requiredFlags returns the flags that an API server needs on any etcd. The service account keys of
// all servers are the same, as in a cluster.
func (e *Env) requiredFlags(dir string) []string {
	keys, err := serviceAccountKeys()
	e.check(err)
	return append(servingFlags(dir),
		"--endpoint-reconciler-type=none",
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file="+e.WriteFile("sa.pub", keys.public),
		"--service-account-signing-key-file="+e.WriteFile("sa.key", keys.private),
		"--service-cluster-ip-range=10.0.0.0/24",
		"--authorization-mode=RBAC",
		"--token-auth-file="+e.WriteFile("tokens.csv", []byte(adminToken+",admin,admin,system:masters\n")),
	)
}

// servingFlags returns the flags of a server on loopback, without its identity.
func servingFlags(dir string) []string {
	return []string{
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		"--cert-dir=" + dir,
		"--shutdown-send-retry-after=true", // without these two a stop waits a minute for watches
		"--shutdown-watch-termination-grace-period=1s",
	}
}

// keyPair is a pair of keys in PEM.
type keyPair struct{ private, public []byte }

// serviceAccountKeys returns the keys of all servers of the test binary.
var serviceAccountKeys = sync.OnceValues(func() (keyPair, error) {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		return keyPair{}, err
	}
	public, err := x509.MarshalPKIXPublicKey(&key.PublicKey)
	if err != nil {
		return keyPair{}, err
	}
	private, err := keyutil.MarshalPrivateKeyToPEM(key)
	return keyPair{private: private, public: pem.EncodeToMemory(&pem.Block{Type: keyutil.PublicKeyBlockType, Bytes: public})}, err
})

// Await returns nil when path is answered with 200. It returns an error if the server exits.
func (s *Server) Await(ctx context.Context, path string) error {
	api := s.API()
	return s.Process.Await(ctx, pollInterval, func(ctx context.Context) error {
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		if err != nil {
			return err
		}
		if r.Code != http.StatusOK {
			return fmt.Errorf("%s: %d %s", path, r.Code, strings.TrimSpace(string(r.Body)))
		}
		return nil
	})
}

// KubeconfigFor writes a kubeconfig whose user has only a bearer token, and returns its path. An
// empty token is an anonymous user.
func (s *Server) KubeconfigFor(token string) string {
	config := clientcmdapi.NewConfig()
	config.Clusters["test"] = &clientcmdapi.Cluster{Server: s.URL, CertificateAuthority: s.CAFile}
	config.AuthInfos["test"] = &clientcmdapi.AuthInfo{Token: token}
	config.Contexts["test"] = &clientcmdapi.Context{Cluster: "test", AuthInfo: "test"}
	config.CurrentContext = "test"
	data, err := clientcmd.Write(*config)
	s.env.check(err)
	return s.env.WriteFile("kubeconfig", data)
}

// ConfigFor returns a client configuration whose user has only a bearer token.
func (s *Server) ConfigFor(token string) *rest.Config {
	return s.unlimited(&rest.Config{Host: s.URL, BearerToken: token, TLSClientConfig: rest.TLSClientConfig{CAFile: s.CAFile}})
}
