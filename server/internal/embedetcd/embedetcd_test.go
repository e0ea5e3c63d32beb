package embedetcd

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// timeout bounds every step of these tests.
const timeout = 5 * time.Minute

func start(t *testing.T, cfg Config) *Server {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if cfg.Logger == nil {
		cfg.Logger = zap.NewNop()
	}
	s, err := Start(ctx, cfg)
	testcheck.NoError(t, err)
	t.Cleanup(s.Close)
	return s
}

func dial(t *testing.T, s *Server) *clientv3.Client {
	t.Helper()
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, DialTimeout: timeout})
	testcheck.NoError(t, err)
	t.Cleanup(func() { c.Close() })
	return c
}

func put(t *testing.T, s *Server, key, value string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	if _, err := dial(t, s).Put(ctx, key, value); err != nil {
		t.Fatal(err)
	}
}

func requireValue(t *testing.T, s *Server, key, want string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	got, err := dial(t, s).Get(ctx, key)
	testcheck.NoError(t, err)
	if len(got.Kvs) != 1 || string(got.Kvs[0].Value) != want {
		t.Fatalf("%s holds %v, want %q", key, got.Kvs, want)
	}
}

func TestStart_AfterClose_ServesSameData(t *testing.T) {
	for name, clientURL := range map[string]string{"unix socket": "", "free port": "http://127.0.0.1:0"} {
		t.Run(name, func(t *testing.T) {
			cfg := Config{Dir: filepath.Join(t.TempDir(), "etcd"), ClientURL: clientURL}
			first := start(t, cfg)
			put(t, first, "k", "v")
			first.Close()
			requireValue(t, start(t, cfg), "k", "v")
		})
	}
}

func TestStart_SocketDir_IsPrivate(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "etcd")
	testcheck.NoError(t, os.Mkdir(dir, 0o755))
	s := start(t, Config{Dir: dir})
	path, ok := strings.CutPrefix(s.Endpoint(), "unix://")
	if !ok || filepath.Dir(path) != dir {
		t.Fatalf("endpoint is %s, want a socket in %s", s.Endpoint(), dir)
	}
	if info, err := os.Stat(dir); err != nil || info.Mode().Perm() != 0o700 {
		t.Fatalf("%s: mode %v (%v), want 0700", dir, info.Mode(), err)
	}
}

func TestStart_PathUnfitForSocket_UsesTemporaryDir(t *testing.T) {
	for name, base := range map[string]string{
		"long":  strings.Repeat("long-directory-name/", 8),
		"comma": "with,comma",
		"space": "with space",
	} {
		t.Run(name, func(t *testing.T) {
			s := start(t, Config{Dir: filepath.Join(t.TempDir(), base)})
			put(t, s, "k", "v")
			requireValue(t, s, "k", "v")
			s.Close()
			if _, err := os.Stat(s.socketDir); !errors.Is(err, os.ErrNotExist) {
				t.Errorf("%s is left behind", s.socketDir)
			}
		})
	}
}

func TestStart_DirectoryInUse_ReturnsErrLocked(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	first := start(t, cfg)
	put(t, first, "k", "v")
	second, err := Start(t.Context(), cfg)
	if !errors.Is(err, ErrLocked) {
		t.Fatalf("second start: server %v, error %v; want %v", second, err, ErrLocked)
	}
	requireValue(t, first, "k", "v")
}

func TestStart_DatabaseLockedByEtcd_ReturnsErrLocked(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	first := start(t, cfg)
	put(t, first, "k", "v")
	// A stock etcd does not use this lock file, only the lock of the database.
	testcheck.NoError(t, os.Remove(filepath.Join(cfg.Dir, "lock")))
	if _, err := Start(t.Context(), cfg); !errors.Is(err, ErrLocked) {
		t.Fatalf("start with a locked directory: error %v; want %v", err, ErrLocked)
	}
	requireValue(t, first, "k", "v")
}

func TestStart_PortInUse_ReturnsErrorAndUnlocks(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	defer l.Close()
	cfg := Config{Dir: t.TempDir(), ClientURL: "http://" + l.Addr().String()}
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), "address already in use") {
		t.Fatalf("start on a port in use: error %v", err)
	}
	cfg.ClientURL = ""
	start(t, cfg) // the lock was released
}

func TestStart_InvalidClientURL_ReturnsError(t *testing.T) {
	for _, u := range []string{"foo", "http://127.0.0.1", "http://example.com:2379", "ftp://127.0.0.1:1", "unix://", "://"} {
		t.Run(u, func(t *testing.T) {
			if _, err := Start(t.Context(), Config{Dir: t.TempDir(), ClientURL: u}); err == nil || !strings.Contains(err.Error(), "etcd client URL") {
				t.Fatalf("start: error %v; want one about the client URL", err)
			}
		})
	}
}

func TestStart_UnusableDirectory_ReturnsError(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	testcheck.NoError(t, os.WriteFile(file, nil, 0o600))
	for name, dir := range map[string]string{"none": "", "a file": file, "below a file": filepath.Join(file, "etcd")} {
		t.Run(name, func(t *testing.T) {
			if _, err := Start(t.Context(), Config{Dir: dir}); err == nil {
				t.Fatal("started")
			}
		})
	}
}

func TestStart_CorruptDatabase_ReturnsError(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	s := start(t, cfg)
	put(t, s, "k", "v")
	s.Close()
	db := filepath.Join(cfg.Dir, "member", "snap", "db")
	testcheck.NoError(t, os.WriteFile(db, []byte(strings.Repeat("not a database. ", 4096)), 0o600))
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), db) {
		t.Fatalf("start on a corrupt database: error %v; want one that names %s", err, db)
	}
}

func TestStart_CorruptWAL_ReturnsError(t *testing.T) {
	cfg := Config{Dir: t.TempDir()}
	s := start(t, cfg)
	put(t, s, "k", "v")
	s.Close()
	wals, err := filepath.Glob(filepath.Join(cfg.Dir, "member", "wal", "*.wal"))
	if err != nil || len(wals) == 0 {
		t.Fatalf("write-ahead logs: %v, %v", wals, err)
	}
	testcheck.NoError(t, os.WriteFile(wals[0], []byte(strings.Repeat("not a log.......", 4096)), 0o600))
	if _, err := Start(t.Context(), cfg); err == nil || !strings.Contains(err.Error(), cfg.Dir) {
		t.Fatalf("start on a corrupt log: error %v; want one that names %s", err, cfg.Dir)
	}
}

// TestClose_OpenWatch_DoesNotBlock: a watch does not end by itself; Close must not wait for it as
// long as etcd would.
func TestClose_OpenWatch_DoesNotBlock(t *testing.T) {
	s := start(t, Config{Dir: t.TempDir()})
	w := dial(t, s).Watch(t.Context(), "k", clientv3.WithCreatedNotify())
	select {
	case <-w:
	case <-time.After(timeout):
		t.Fatal("the watch did not start")
	}
	closed := make(chan struct{})
	go func() { s.Close(); close(closed) }()
	select {
	case <-closed:
	case <-time.After(timeout):
		t.Fatal("Close waits for the watch")
	}
}

// TestStart_ProgressNotifyInterval_ReachesEtcd: an idle watch gets progress notifications at the
// interval of the configuration. Etcd's own is ten minutes, longer than the test waits.
func TestStart_ProgressNotifyInterval_ReachesEtcd(t *testing.T) {
	s := start(t, Config{Dir: t.TempDir(), ProgressNotifyInterval: 100 * time.Millisecond})
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	responses := dial(t, s).Watch(ctx, "key", clientv3.WithProgressNotify())
	for range 2 {
		resp, ok := <-responses
		if !ok || !resp.IsProgressNotify() {
			t.Fatalf("got %+v, %v; want a progress notification", resp, resp.Err())
		}
	}
}
