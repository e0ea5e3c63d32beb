package etcdcopy

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/stratakube/strata/internal/statusline"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/embedetcd"
)

// testTimeout bounds a failing test.
const testTimeout = 3 * time.Minute

// startEnd returns a running etcd.
func startEnd(t *testing.T, ctx context.Context) end {
	t.Helper()
	s, err := embedetcd.Start(ctx, embedetcd.Config{Dir: t.TempDir(), UnsafeNoFsync: true, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	t.Cleanup(s.Close)
	client, err := clientv3.New(clientv3.Config{Endpoints: []string{s.Endpoint()}, Logger: zap.NewNop()})
	testcheck.NoError(t, err)
	t.Cleanup(func() { client.Close() })
	return end{Client: client, servers: []string{s.Endpoint()}}
}

// output is that of a copier and of its status line, which write concurrently.
type output struct {
	mu   sync.Mutex
	text strings.Builder
}

func (o *output) Write(p []byte) (int, error) {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.Write(p)
}

func (o *output) String() string {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.text.String()
}

// newCopier returns a copier of a resource, which waits for no quiet time, and its output.
func newCopier(t *testing.T, name string, source, target end) (*copier, *output) {
	t.Helper()
	r, err := parseResource(name)
	testcheck.NoError(t, err)
	out := &output{}
	c := &copier{source: source, target: target, prefix: "/registry/", resource: r, out: out, shown: statusline.Start(out),
		quiet: time.Millisecond, leases: map[int64]clientv3.LeaseID{}}
	t.Cleanup(c.shown.Stop)
	return c, out
}

func put(t *testing.T, ctx context.Context, e end, key, value string, opts ...clientv3.OpOption) (revision int64) {
	t.Helper()
	r, err := e.Put(ctx, key, value, opts...)
	requireErr(t, err, "")
	return r.Header.Revision
}

func grant(t *testing.T, ctx context.Context, e end) clientv3.LeaseID {
	t.Helper()
	granted, err := e.Grant(ctx, 3600)
	requireErr(t, err, "")
	return granted.ID
}

// requireErr checks that err has a text, or is nil for "".
func requireErr(t *testing.T, err error, text string) {
	t.Helper()
	if text == "" && err != nil || text != "" && (err == nil || !strings.Contains(err.Error(), text)) {
		t.Fatalf("error %v, want %q", err, text)
	}
}

// contents returns the keys of e below /registry/, with their values, and whether they have a
// lease.
func contents(t *testing.T, ctx context.Context, e end) (all []string) {
	t.Helper()
	r, err := e.Get(ctx, "/registry/", clientv3.WithPrefix())
	requireErr(t, err, "")
	for _, kv := range r.Kvs {
		all = append(all, fmt.Sprintf("%s %q %t", kv.Key, kv.Value, kv.Lease != 0))
	}
	return all
}

// TestCopy_Resource_IsCopiedAsItIs copies keys with and without leases in several transactions, and
// again with --replace.
func TestCopy_Resource_IsCopiedAsItIs(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target := startEnd(t, ctx), startEnd(t, ctx)
	for i := range 2*pageKeys + 1 {
		put(t, ctx, source, fmt.Sprintf("/registry/services/specs/default/%04d", i), strings.Repeat("\x00k8s", i%700))
	}
	put(t, ctx, source, "/registry/services/specs/default/leased", "leased", clientv3.WithLease(grant(t, ctx, source)))
	put(t, ctx, source, "/registry/ranges/serviceips", "ranges")
	want := contents(t, ctx, source)
	put(t, ctx, target, "/registry/pods/default/other", "other")
	last := put(t, ctx, source, "/registry/services/endpoints/default/a", "not copied")

	c, out := newCopier(t, "services", source, target)
	requireErr(t, c.run(ctx, false, true), "")
	if got := contents(t, ctx, target); len(got) != 1 {
		t.Errorf("--dry-run has written %q", got)
	}
	requireErr(t, c.run(ctx, false, false), "")
	if got := contents(t, ctx, target); strings.Join(got, "\n") != strings.Join(append([]string{`/registry/pods/default/other "other" false`}, want...), "\n") {
		t.Errorf("target has %d keys, want %d", len(got), len(want)+1)
	}
	if !strings.Contains(out.String(), fmt.Sprintf("copied %d keys", len(want))) {
		t.Errorf("output\n%s", out)
	}
	r, err := target.Get(ctx, "/registry/", clientv3.WithCountOnly())
	requireErr(t, err, "")
	if r.Header.Revision <= last {
		t.Errorf("target is at revision %d, want more than %d", r.Header.Revision, last)
	}
	response := <-target.Watch(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithRev(last))
	if !errors.Is(response.Err(), rpctypes.ErrCompacted) {
		t.Errorf("a watch from a revision of source: %v, want that it is compacted", response.Err())
	}

	put(t, ctx, target, "/registry/services/specs/default/stale", "stale")
	c, _ = newCopier(t, "services", source, target)
	requireErr(t, c.run(ctx, false, false), "already has")
	requireErr(t, c.run(ctx, true, false), "")
	if got := contents(t, ctx, target); len(got) != len(want)+1 {
		t.Errorf("target has %d keys after --replace, want %d", len(got), len(want)+1)
	}
}

// TestCopy_EtcdsInUse_IsRefused before anything is written.
func TestCopy_EtcdsInUse_IsRefused(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target := startEnd(t, ctx), startEnd(t, ctx)
	c, _ := newCopier(t, "leases", source, target)
	requireErr(t, c.run(ctx, false, false), "has no keys of leases.coordination.k8s.io")
	put(t, ctx, source, "/registry/leases/default/a", "1")
	same, _ := newCopier(t, "leases", source, source)
	requireErr(t, same.run(ctx, true, false), "are the same etcd")
	if got := contents(t, ctx, source); len(got) != 1 {
		t.Errorf("a refused copy has left %q", got)
	}
	for used, want := range map[string]string{
		"/registry/leases/kube-system/apiserver-abc": "has renewed its identity lease apiserver-abc",
		"/registry/pods/default/a":                   "/registry/pods/default/a was written",
	} {
		for _, e := range []end{source, target} {
			c.quiet = testTimeout // ends at the first write
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				for {
					select {
					case <-stop:
						return
					case <-time.After(time.Millisecond):
						_, _ = e.Put(ctx, used, "")
					}
				}
			}()
			err := c.run(ctx, true, false)
			close(stop)
			<-stopped // the next run has no write of this one
			requireErr(t, err, want)
			requireErr(t, err, e.String())
		}
	}
}

// TestCopier_SourceChanges_OnlyExpiryIsAllowed: a key that expires during the copy is missing in
// target, any other change is an error.
func TestCopier_SourceChanges_OnlyExpiryIsAllowed(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), testTimeout)
	defer cancel()
	source, target := startEnd(t, ctx), startEnd(t, ctx)
	c, _ := newCopier(t, "leases", source, target)
	const prefix = "/registry/leases/"
	expiring := grant(t, ctx, source)
	put(t, ctx, source, prefix+"expiring", "1", clientv3.WithLease(expiring))
	put(t, ctx, source, prefix+"lasting", "2", clientv3.WithLease(grant(t, ctx, source)))
	at := put(t, ctx, source, prefix+"plain", "3")
	r, err := source.Get(ctx, prefix, clientv3.WithPrefix())
	requireErr(t, err, "")
	requireErr(t, c.write(ctx, r.Kvs), "")
	for _, lease := range c.leases { // all expire in target, though only one does in source
		_, err := target.Revoke(ctx, lease)
		requireErr(t, err, "")
	}
	_, err = source.Revoke(ctx, expiring)
	requireErr(t, err, "")
	requireErr(t, c.write(ctx, r.Kvs), "")
	same, err := c.compare(ctx, at)
	requireErr(t, err, "")
	if same.keys != 2 || same.expired != 1 || same.bytes != 2 {
		t.Errorf("%+v, want 2 keys of 2 bytes, and one that expired", same)
	}
	requireErr(t, c.unchanged(ctx, at), "")

	put(t, ctx, target, prefix+"plain", "changed")
	_, err = c.compare(ctx, at)
	requireErr(t, err, "the copies differ at "+prefix+"plain")
	put(t, ctx, target, prefix+"plain", "3")
	put(t, ctx, target, prefix+"zzz", "more")
	_, err = c.compare(ctx, at)
	requireErr(t, err, "has more keys")

	put(t, ctx, source, "/elsewhere", "of another program")
	requireErr(t, c.unchanged(ctx, at), "")
	_, err = source.Delete(ctx, prefix+"plain")
	requireErr(t, err, "")
	requireErr(t, c.unchanged(ctx, at), prefix+"plain was written")
}
