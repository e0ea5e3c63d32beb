// Package enginetest contains the tests of etcdsource and mirror on a real etcd. They are in this
// module because the engine's module does not depend on the etcd server.
package enginetest

import (
	"context"
	"fmt"
	"io"
	"log/slog"
	"os"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	"google.golang.org/grpc/grpclog"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// patience bounds every wait. Only a failing test waits that long.
const patience = 4 * time.Minute

func init() {
	// etcd and its clients are closed while connections are active, which would be logged.
	grpclog.SetLoggerV2(grpclog.NewLoggerV2(io.Discard, io.Discard, os.Stderr))
}

// etcd is a server in another process, on a unix socket.
type etcd struct {
	t testing.TB
	*testetcd.Etcd
}

// data is the server's data directory.
func (e *etcd) data() string { return e.Data() }

// socket is the path of the server's socket.
func (e *etcd) socket() string { return e.Socket() }

// newEtcd returns a server that is not started.
func newEtcd(t testing.TB) *etcd {
	t.Helper()
	return &etcd{t, testetcd.New(t, testetcd.Config{MaxTxnOps: 10_000})}
}

// run starts the server and returns when it serves.
func (e *etcd) run(t testing.TB) {
	t.Helper()
	testcheck.NoError(t, e.Run())
}

// stop ends the server; run starts it again with the same data.
func (e *etcd) stop() {
	e.t.Helper()
	testcheck.NoError(e.t, e.Stop())
}

// connect returns a client of the socket, which is closed when the test ends.
func connect(t testing.TB, socket string, opts ...grpc.DialOption) *clientv3.Client {
	t.Helper()
	client, err := clientv3.New(clientv3.Config{
		Endpoints:   []string{"unix://" + socket},
		DialTimeout: patience,
		DialOptions: opts,
		Logger:      zap.NewNop(),
	})
	if err != nil {
		t.Fatalf("connect to etcd: %v", err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

// shared is the etcd of all tests that do not stop etcd; each test has a separate prefix.
var shared struct {
	sync.Once
	etcd    *etcd
	runs    bool
	cleanup []func()
}

// holder lets the shared etcd outlive the first test that uses it.
type holder struct{ testing.TB }

func (h holder) Cleanup(f func()) { shared.cleanup = append(shared.cleanup, f) }

func TestMain(m *testing.M) {
	code := m.Run()
	for i := len(shared.cleanup) - 1; i >= 0; i-- {
		shared.cleanup[i]()
	}
	os.Exit(code)
}

// open returns a client of the shared etcd and a unique prefix with a trailing slash.
func open(t testing.TB, opts ...grpc.DialOption) (*clientv3.Client, string) {
	t.Helper()
	shared.Do(func() {
		shared.etcd = newEtcd(holder{t})
		shared.etcd.run(t)
		shared.runs = true
	})
	if !shared.runs {
		t.Fatal("the shared etcd did not start")
	}
	return connect(t, shared.etcd.socket(), opts...), "/" + t.Name() + "/"
}

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

// contextFor returns a context that ends with the test, or after patience.
func contextFor(t testing.TB) context.Context {
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

// put writes a key and returns the revision.
func put(t testing.TB, c *clientv3.Client, key, value string) mirror.Revision {
	t.Helper()
	resp, err := c.Put(contextFor(t), key, value)
	testcheck.NoError(t, err)
	return resp.Header.Revision
}

// fill writes n keys prefix00000.. with the value, in few transactions, and returns the last
// revision.
func fill(t testing.TB, c *clientv3.Client, prefix, value string, n int) (rev mirror.Revision) {
	t.Helper()
	ctx := contextFor(t)
	perTxn := max(1, min(5000, 1_000_000/(len(prefix)+len(value)+50)))
	for i := 0; i < n; {
		var ops []clientv3.Op
		for ; i < n && len(ops) < perTxn; i++ {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s%05d", prefix, i), value))
		}
		resp, err := c.Txn(ctx).Then(ops...).Commit()
		testcheck.NoError(t, err)
		rev = resp.Header.Revision
	}
	return rev
}

// header returns the current header of the source.
func header(t testing.TB, s *etcdsource.Source) driver.Header {
	t.Helper()
	h, err := s.ReadRevision(contextFor(t))
	testcheck.NoError(t, err)
	return h
}

// feed is a running Watch.
type feed struct {
	t       testing.TB
	batches chan driver.Batch
	ended   chan error
}

// watch starts a Watch, which is stopped when the test ends.
func watch(t testing.TB, s *etcdsource.Source, prefix string, after driver.Header) *feed {
	t.Helper()
	ctx, cancel := context.WithCancel(context.Background())
	f := &feed{t: t, batches: make(chan driver.Batch), ended: make(chan error, 1)}
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		f.ended <- s.Watch(ctx, prefix, after, func(b driver.Batch) error {
			select {
			case f.batches <- b:
				return nil
			case <-ctx.Done():
				return ctx.Err()
			}
		})
	}()
	t.Cleanup(func() { cancel(); <-gone })
	return f
}

// next returns the next batch with changes.
func (f *feed) next() driver.Batch {
	f.t.Helper()
	for {
		select {
		case b := <-f.batches:
			if len(b.Changes) > 0 {
				return b
			}
		case err := <-f.ended:
			f.t.Fatalf("the watch ended: %v", err)
		case <-time.After(patience):
			f.t.Fatal("no batch")
		}
	}
}

// end returns the error of the ended watch.
func (f *feed) end() error {
	f.t.Helper()
	deadline := time.After(patience)
	for {
		select {
		case <-f.batches:
		case err := <-f.ended:
			return err
		case <-deadline:
			f.t.Fatal("the watch did not end")
		}
	}
}
