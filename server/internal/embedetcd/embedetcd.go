// Package embedetcd runs a single-member etcd inside the process, and as the hidden command `strata etcd`.
//
// The etcd has no peer listener and elects itself. Clients reach it over a unix socket in its own directory (mode 0700), or over a TCP
// URL that the caller chooses; over plain TCP every local user can reach it, so that is meant for tests and measurements.
package embedetcd

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"sync"
	"time"

	"go.etcd.io/bbolt"
	bbolterrors "go.etcd.io/bbolt/errors"
	"go.etcd.io/etcd/client/pkg/v3/fileutil"
	"go.etcd.io/etcd/client/pkg/v3/transport"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"go.uber.org/zap/zapcore"
	"google.golang.org/grpc"
)

// ErrLocked: another process (or another Server of this one) uses the directory. Nothing has been changed in it.
var ErrLocked = errors.New("in use by another process")

const (
	// defaultQuotaBytes is the size at which etcd refuses writes. 8 GiB is the largest that etcd's documentation recommends.
	defaultQuotaBytes = 8 << 30

	// A member that is alone elects itself one election timeout after its start, and no network can delay its heartbeats. etcd's
	// defaults (100 ms, 1 s) are made for several members and would make a start take 0.45 s; these make it 0.15 s. Shorter ones would
	// gain another 0.1 s and cost an idle etcd 1% of a core in ticks.
	heartbeat = 50 * time.Millisecond
	election  = 250 * time.Millisecond

	memberName = "strata"

	// closeGrace is how long Close lets requests end by themselves. Watches never do, and etcd alone would wait 5 s for them.
	closeGrace = 500 * time.Millisecond

	// lockProbe is how long Start waits for a foreign etcd to give up the database file. It only has to cover the time between two
	// attempts of bbolt (50 ms).
	lockProbe = 100 * time.Millisecond
)

// Config says where an etcd keeps its data and how it serves. Only Dir is required.
type Config struct {
	// Dir holds the data. It is made with mode 0700; if it exists, its mode is set to that when it holds the socket.
	Dir string

	// ClientURL is what clients connect to: "" for a unix socket that only this user can reach, "http://127.0.0.1:0" for a free
	// port, or any other URL that etcd can listen on. https needs CertFile and KeyFile.
	ClientURL string

	// CertFile and KeyFile (PEM) serve https. TrustedCAFile, if set, demands a client certificate signed by it.
	CertFile, KeyFile, TrustedCAFile string

	// UnsafeNoFsync acknowledges writes before they are on disk. A crash of the machine then loses data.
	UnsafeNoFsync bool

	// QuotaBytes bounds the size of the database; 0 means 8 GiB.
	QuotaBytes int64

	// ProgressNotifyInterval is how often watches that asked for progress are told about it; 0 leaves etcd's default of 10 minutes.
	// etcd raises anything below 100 ms to that.
	ProgressNotifyInterval time.Duration

	// Logger receives etcd's log; nil means errors only, to standard error.
	Logger *zap.Logger
}

// Server is a running etcd. Its methods may be called concurrently.
type Server struct {
	etcd      *embed.Etcd
	endpoint  string
	lock      *fileutil.LockedFile
	logLevel  zap.AtomicLevel
	socketDir string // directory made for the socket because Dir's path does not fit into one; "" if none
	closeOnce sync.Once

	grpc struct {
		sync.Mutex
		servers []*grpc.Server
	}
}

// Start starts an etcd and returns when it can serve. It gives up when ctx ends first; ctx does not stop the etcd later, Close does.
//
// Errors: ErrLocked (wrapped) if the directory is in use; any other names the directory or the URL that is at fault.
func Start(ctx context.Context, cfg Config) (server *Server, err error) {
	s := &Server{}
	defer func() {
		if err != nil {
			s.Close()
		}
	}()

	if err := s.lockDir(cfg.Dir); err != nil {
		return nil, err
	}
	clientURL, err := s.clientURL(cfg)
	if err != nil {
		return nil, err
	}

	ec := embed.NewConfig()
	ec.Name = memberName
	ec.InitialCluster = ec.InitialClusterFromName(ec.Name)
	ec.Dir = cfg.Dir
	ec.ListenPeerUrls = nil
	ec.ListenClientUrls = []url.URL{*clientURL}
	ec.AdvertiseClientUrls = []url.URL{advertised(clientURL)}
	ec.ClientTLSInfo = transport.TLSInfo{
		CertFile:       cfg.CertFile,
		KeyFile:        cfg.KeyFile,
		TrustedCAFile:  cfg.TrustedCAFile,
		ClientCertAuth: cfg.TrustedCAFile != "",
	}
	ec.TickMs = uint(heartbeat.Milliseconds())
	ec.ElectionMs = uint(election.Milliseconds())
	ec.EnableGRPCGateway = false
	ec.UnsafeNoFsync = cfg.UnsafeNoFsync
	ec.QuotaBackendBytes = cfg.QuotaBytes
	if ec.QuotaBackendBytes == 0 {
		ec.QuotaBackendBytes = defaultQuotaBytes
	}
	ec.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration // left 0, every request is logged as slow
	ec.WatchProgressNotifyInterval = cfg.ProgressNotifyInterval
	ec.ServiceRegister = func(g *grpc.Server) {
		s.grpc.Lock()
		defer s.grpc.Unlock()
		s.grpc.servers = append(s.grpc.servers, g)
	}
	logger := cfg.Logger
	if logger == nil {
		if logger, err = quietLogger(); err != nil {
			return nil, err
		}
	}
	s.logLevel = zap.NewAtomicLevelAt(logger.Level())
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger.WithOptions(
		zap.IncreaseLevel(s.logLevel),
		zap.WrapCore(dropExpected),
		zap.WithFatalHook(zapcore.WriteThenPanic), // startEtcd makes an error of it
	))

	if s.etcd, err = startEtcd(ec); err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	}
	s.endpoint = endpoint(clientURL, s.etcd.Clients[0].Addr())

	select {
	case <-s.etcd.Server.ReadyNotify():
		return s, nil
	case err := <-s.etcd.Err():
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	case <-ctx.Done():
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, context.Cause(ctx))
	}
}

// Endpoint is the URL for --etcd-servers and for clientv3.Config.Endpoints, with the port that was chosen.
func (s *Server) Endpoint() string { return s.endpoint }

// Err reports that the etcd stopped serving by itself: it yields the reason, and it is closed by Close.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// Close stops the etcd and returns when its files are closed and its locks are released. Requests get a moment to end; watches are cut.
// Calling it again does nothing.
func (s *Server) Close() {
	s.closeOnce.Do(func() {
		if s.etcd != nil {
			s.logLevel.SetLevel(zap.FatalLevel) // embed reports every listener that it closes as an error
			cut := time.AfterFunc(closeGrace, func() {
				s.grpc.Lock()
				defer s.grpc.Unlock()
				for _, g := range s.grpc.servers {
					g.Stop()
				}
			})
			s.etcd.Close()
			cut.Stop()
		}
		if s.socketDir != "" {
			os.RemoveAll(s.socketDir)
		}
		if s.lock != nil {
			s.lock.Close()
		}
	})
}

// lockDir makes dir, takes its lock, and makes sure that no foreign etcd holds the database: etcd itself would wait for it without end.
func (s *Server) lockDir(dir string) error {
	if dir == "" {
		return errors.New("the etcd data directory is not set")
	}
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("etcd data directory: %w", err)
	}
	lockPath := filepath.Join(dir, "lock")
	lock, err := fileutil.TryLockFile(lockPath, os.O_RDWR|os.O_CREATE, 0o600)
	switch {
	case errors.Is(err, fileutil.ErrLocked):
		return fmt.Errorf("etcd data directory %s is %w", dir, ErrLocked)
	case err != nil:
		return fmt.Errorf("etcd data directory: %w", err)
	}
	s.lock = lock

	dbPath := filepath.Join(dir, "member", "snap", "db")
	if _, err := os.Stat(dbPath); err != nil {
		if errors.Is(err, os.ErrNotExist) {
			return nil
		}
		return fmt.Errorf("etcd data directory: %w", err)
	}
	db, err := bbolt.Open(dbPath, 0o600, &bbolt.Options{ReadOnly: true, Timeout: lockProbe})
	switch {
	case errors.Is(err, bbolterrors.ErrTimeout):
		return fmt.Errorf("etcd data directory %s is %w", dir, ErrLocked)
	case err != nil:
		return fmt.Errorf("etcd database %s: %w", dbPath, err)
	}
	return db.Close()
}

// clientURL returns the URL to listen on. For a unix socket that is Dir/client.sock, or a file in a new directory of its own if that
// path is longer than a socket address can be or has characters that a comma-separated list of endpoints cannot carry.
func (s *Server) clientURL(cfg Config) (*url.URL, error) {
	if cfg.ClientURL != "" {
		return parseClientURL(cfg.ClientURL)
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("etcd data directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { // whoever reaches the socket reads and writes everything
		return nil, fmt.Errorf("etcd data directory: %w", err)
	}
	path := filepath.Join(dir, "client.sock")
	if !fitsSocketAddress(path) {
		if s.socketDir, err = os.MkdirTemp("", "strata-etcd-"); err != nil {
			return nil, fmt.Errorf("directory for etcd's socket: %w", err)
		}
		path = filepath.Join(s.socketDir, "client.sock")
	}
	return &url.URL{Scheme: "unix", Path: path}, nil
}

func parseClientURL(raw string) (*url.URL, error) {
	u, err := url.Parse(raw)
	if err != nil {
		return nil, fmt.Errorf("etcd client URL: %w", err)
	}
	switch u.Scheme {
	case "http", "https":
		if net.ParseIP(u.Hostname()) != nil && u.Port() != "" {
			return u, nil
		}
	case "unix", "unixs":
		if u.Host+u.Path != "" {
			return u, nil
		}
	}
	return nil, fmt.Errorf("etcd client URL %q: want http or https with an IP address and a port, or unix with a path", raw)
}

// maxSocketPath is the longest path of a unix socket on all systems: macOS and the BSDs have 104 bytes including the final zero.
const maxSocketPath = 103

func fitsSocketAddress(path string) bool {
	for _, r := range path {
		switch {
		case 'a' <= r && r <= 'z', 'A' <= r && r <= 'Z', '0' <= r && r <= '9':
		case r == '/', r == '.', r == '_', r == '-':
		default:
			return false
		}
	}
	return len(path) <= maxSocketPath
}

// advertised is the URL in the member list. Nobody follows it, since there is one member and clients are told the endpoint; etcd
// demands that it has a host and a port.
func advertised(clientURL *url.URL) url.URL {
	if clientURL.Scheme == "unix" || clientURL.Scheme == "unixs" {
		return url.URL{Scheme: clientURL.Scheme, Host: "localhost:0"}
	}
	return *clientURL
}

func endpoint(clientURL *url.URL, bound net.Addr) string {
	if clientURL.Scheme == "unix" || clientURL.Scheme == "unixs" {
		return clientURL.String()
	}
	_, port, err := net.SplitHostPort(bound.String())
	if err != nil {
		return clientURL.String()
	}
	return (&url.URL{Scheme: clientURL.Scheme, Host: net.JoinHostPort(clientURL.Hostname(), port)}).String()
}

// startEtcd is embed.StartEtcd with its panics as errors: etcd panics, or logs a fatal entry, on files that it cannot read.
func startEtcd(cfg *embed.Config) (e *embed.Etcd, err error) {
	defer func() {
		if p := recover(); p != nil {
			e, err = nil, fmt.Errorf("etcd cannot read its files: %v", p)
		}
	}()
	return embed.StartEtcd(cfg)
}
