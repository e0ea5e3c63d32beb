// Package embedetcd runs an etcd inside the process, and as the hidden command `strata etcd`.
//
// Without Peers, the etcd has no peer listener and elects itself; with them, it is a member of a
// cluster. Clients connect to a unix socket in its own directory (mode 0700), or to a TCP URL that
// the caller chooses. Plain TCP is accessible to every local user, so it is intended for tests and
// measurements.
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
	"go.etcd.io/etcd/client/pkg/v3/types"
	"go.etcd.io/etcd/server/v3/embed"
	"go.uber.org/zap"
	"google.golang.org/grpc"
)

// ErrLocked means that another process (or another Server of this process) uses the directory. The
// directory was not changed.
var ErrLocked = errors.New("in use by another process")

const (
	// defaultQuotaBytes is the database size at which etcd rejects writes. 8 GiB is the maximum
	// that etcd's documentation recommends.
	defaultQuotaBytes = 8 << 30

	// A single member elects itself one election timeout after its start, and its heartbeats are
	// not delayed by a network. etcd's defaults (100 ms, 1 s) are designed for several members;
	// with them a start takes 0.45 s, with these values 0.15 s. Shorter values would save another
	// 0.1 s and cost an idle etcd 1% of a core for ticks.
	heartbeat = 50 * time.Millisecond
	election  = 250 * time.Millisecond

	memberName = "strata"

	// closeGrace is the time that Close gives requests to complete. Watches do not complete, and
	// etcd alone would wait 5 s for them.
	closeGrace = 500 * time.Millisecond

	// lockProbe is the time that Start waits for another etcd to release the database file. It only
	// has to cover the interval between two attempts of bbolt (50 ms).
	lockProbe = 100 * time.Millisecond
)

// Config configures an etcd. Only Dir is required.
type Config struct {
	// Dir is the data directory. It is created with mode 0700; if it exists, its mode is set to
	// 0700 only if it contains the socket.
	Dir string

	// ClientURL is the URL for clients: "" for a unix socket that only this user can access,
	// "http://127.0.0.1:0" for a free port, or any other URL that etcd can listen on. https needs
	// CertFile and KeyFile.
	ClientURL string

	// CertFile and KeyFile (PEM) are used for https. If TrustedCAFile is set, clients need a
	// certificate signed by it.
	CertFile, KeyFile, TrustedCAFile string

	// UnsafeNoFsync acknowledges writes before they are on disk. A crash of the machine then loses
	// data.
	UnsafeNoFsync bool

	// QuotaBytes bounds the size of the database; 0 means 8 GiB.
	QuotaBytes int64

	// Peers makes the etcd a member of a cluster of several, unless it is nil. Start then returns
	// once a majority serves. ClientURL has to be https with a port.
	Peers *Peers

	// ProgressNotifyInterval is the interval of progress notifications for watches that request
	// them; 0 means etcd's default of 10 minutes. etcd raises values below 100 ms to 100 ms.
	ProgressNotifyInterval time.Duration

	// Logger receives etcd's log; nil means errors only, to standard error.
	Logger *zap.Logger

	// Fatal is called with the reason when a started etcd cannot continue, for example because its
	// disk is full. The process exits with code 1 afterwards: etcd's goroutines must not go on. nil
	// writes the reason to standard error.
	Fatal func(error)
}

// Peers describes a cluster of several members to one of them. All fields are required. A member
// with data ignores Cluster: the cluster is that of its data.
type Peers struct {
	// Name is the name of this member.
	Name string

	// Cluster has all members with their URLs for peers, as name=https://127.0.0.1:2380, separated
	// by commas. The URLs have IP addresses.
	Cluster string

	// CertFile and KeyFile (PEM) authenticate this member as server and client. Peers need a
	// certificate signed by TrustedCAFile.
	CertFile, KeyFile, TrustedCAFile string
}

// Server is a running etcd. Its methods may be called concurrently.
type Server struct {
	etcd     *embed.Etcd
	endpoint string
	lock     *fileutil.LockedFile
	logLevel zap.AtomicLevel
	// directory created for the socket because Dir's path does not fit into a socket address; "" if
	// none
	socketDir string
	closeOnce sync.Once

	grpc struct { // leaf
		sync.Mutex
		servers []*grpc.Server
	}
}

// Start starts an etcd and returns when it can serve, or with an error if ctx ends first. After
// Start has returned, ctx has no effect; Close stops the etcd.
//
// Errors: ErrLocked (wrapped) if the directory is in use; any other error names the invalid
// directory or URL.
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
	if cfg.Peers == nil {
		ec.TickMs = uint(heartbeat.Milliseconds())
		ec.ElectionMs = uint(election.Milliseconds())
	} else if err := cfg.Peers.apply(ec); err != nil {
		return nil, err
	}
	ec.EnableGRPCGateway = false
	ec.UnsafeNoFsync = cfg.UnsafeNoFsync
	ec.QuotaBackendBytes = cfg.QuotaBytes
	if ec.QuotaBackendBytes == 0 {
		ec.QuotaBackendBytes = defaultQuotaBytes
	}
	// with 0, every request is logged as slow
	ec.WarningUnaryRequestDuration = embed.DefaultWarningUnaryRequestDuration
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
	fatal := &fatalHook{report: cfg.Fatal}
	ec.ZapLoggerBuilder = embed.NewZapLoggerBuilder(logger.WithOptions(
		zap.IncreaseLevel(s.logLevel),
		zap.WrapCore(dropExpected),
		zap.WithFatalHook(fatal),
	))

	if s.etcd, err = startEtcd(ec); err != nil {
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	}
	fatal.started.Store(true)
	if s.endpoint = clientURL.String(); cfg.Peers == nil {
		// of several listeners, the first one is arbitrary
		s.endpoint = endpoint(clientURL, s.etcd.Clients[0].Addr())
	}

	select {
	case <-s.etcd.Server.ReadyNotify():
		return s, nil
	case err := <-s.etcd.Err():
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, err)
	case <-ctx.Done():
		return nil, fmt.Errorf("start etcd in %s: %w", cfg.Dir, context.Cause(ctx))
	}
}

// apply sets the fields of a member. The intervals of heartbeats and elections remain etcd's
// defaults.
func (p *Peers) apply(ec *embed.Config) error {
	ec.Name, ec.InitialCluster = p.Name, p.Cluster
	members, err := types.NewURLsMap(p.Cluster)
	if err != nil {
		return fmt.Errorf("etcd members %q: %w", p.Cluster, err)
	}
	own := members[p.Name]
	if len(own) == 0 {
		return fmt.Errorf("etcd members %q: no member is named %q", p.Cluster, p.Name)
	}
	ec.ListenPeerUrls, ec.AdvertisePeerUrls = own, own
	// With HTTP on the port of a TLS gRPC server, etcd does not wait for requests in flight when it
	// stops: clients of a member that ends would receive errors in place of answers.
	ec.ListenClientHttpUrls = []url.URL{{Scheme: "https", Host: "127.0.0.1:0"}}
	ec.PeerTLSInfo = transport.TLSInfo{CertFile: p.CertFile, KeyFile: p.KeyFile, TrustedCAFile: p.TrustedCAFile, ClientCertAuth: true}
	return nil
}

// Endpoint returns the URL for --etcd-servers and for clientv3.Config.Endpoints, with the actual
// port.
func (s *Server) Endpoint() string { return s.endpoint }

// Err returns a channel that yields the error if the etcd stops serving without Close. Close closes
// the channel.
func (s *Server) Err() <-chan error { return s.etcd.Err() }

// Close stops the etcd and returns when its files are closed and its locks are released. Requests
// have closeGrace to complete; watches are cut off. A second call does nothing.
func (s *Server) Close() {
	s.closeOnce.Do(func() {
		if s.etcd != nil {
			// embed reports every listener that it closes as an error
			s.logLevel.SetLevel(zap.FatalLevel)
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
			_ = os.RemoveAll(s.socketDir)
		}
		if s.lock != nil {
			_ = s.lock.Close()
		}
	})
}

// lockDir creates dir, acquires its lock, and checks that no other etcd has locked the database:
// etcd itself would wait for that lock indefinitely.
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
	if err := checkSpace(dir, freeBytes); err != nil {
		return err
	}

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

// clientURL returns the URL to listen on. For a unix socket that is Dir/client.sock, or a file in a
// new separate directory if that path is too long for a socket address or has characters that are
// not allowed in a comma-separated list of endpoints.
func (s *Server) clientURL(cfg Config) (*url.URL, error) {
	if cfg.ClientURL != "" {
		return parseClientURL(cfg.ClientURL)
	}
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("etcd data directory: %w", err)
	}
	if err := os.Chmod(dir, 0o700); err != nil { //nolint:gosec // a directory; access to the socket is access to all data
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

// maxSocketPath is the longest path of a unix socket on all systems: macOS and the BSDs have 104
// bytes including the final zero.
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

// advertised returns the URL for the member list. It is not used, since there is one member and
// clients are configured with the endpoint; etcd requires a host and a port in it.
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

// startEtcd is embed.StartEtcd with panics converted to errors: etcd panics, or logs a fatal entry,
// on files that it cannot read.
func startEtcd(cfg *embed.Config) (e *embed.Etcd, err error) {
	defer func() {
		if p := recover(); p != nil {
			e, err = nil, fmt.Errorf("etcd cannot read its files: %v", p)
		}
	}()
	return embed.StartEtcd(cfg)
}
