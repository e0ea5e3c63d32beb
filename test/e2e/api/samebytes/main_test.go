// Package samebytes fills one etcd, starts two servers on it that differ only in --engine, and
// compares their answers: status, headers and every byte of the body.
//
// The etcd is filled through a server that is stopped before the two start, and partly by direct
// writes, with objects in the form in which older releases and other configurations stored them
// (fill_*_test.go). The requests are in tables (requests_*_test.go). The permitted differences,
// with reasons, are in one table (bydesign_test.go); every other difference is a failure.
//
//	STRATA_TEST_LONG  1: every built-in resource is requested in every media type (default: those of the byte path, except for
//	                  some resources), and every case is tried for every subject (default: see partOf)
package samebytes

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test, and the start of the servers before the first one.
const testTimeout = 10 * time.Minute

// Users without administrator rights, with their bearer tokens.
const (
	tokenNoRights = "nobody-token" // may do nothing
	// may get, list and watch the ConfigMap plain-1 of namespace odd
	tokenOneName   = "one-name-token"
	tokenAnonymous = "-"                 // sends no token
	tokenUnknown   = "not-a-known-token" // rejected by authentication
)

// env is shared by the whole package; its servers are started by the first test that uses them.
var env *harness.Env

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { env = e })
}

// world is the filled etcd and the two servers on it.
type world struct {
	etcd    *harness.Etcd
	kv      *clientv3.Client
	engines [2]*engine // strata first
	// resources are all listable resources of discovery.
	resources []resource
	// compacted is a compacted revision, from before the two servers started.
	compacted int64
	// past is a later revision; objects have changed since.
	past int64
	// quiet is the revision at which the servers had stopped writing before the tests began.
	quiet int64
	// compared has the later revisions at which answers were compared, of type int64, by path.
	compared sync.Map
}

// newWorld is called once; the world is shared by all tests of the package.
var newWorld = sync.OnceValues(func() (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	etcd := env.Etcd()
	kv := etcd.Client()
	flags := serverFlags(env)

	filler := env.APIServer(etcd, append(flags, "--engine="+harness.Upstream)...)
	if err := fill(ctx, filler.API(), kv); err != nil {
		return nil, fmt.Errorf("fill etcd: %w", err)
	}
	if err := filler.Stop(); err != nil {
		return nil, err
	}
	compacted, err := compact(ctx, kv)
	if err != nil {
		return nil, err
	}

	w := &world{etcd: etcd, kv: kv, compacted: compacted}
	var starting sync.WaitGroup
	for i, name := range []string{harness.Strata, harness.Upstream} {
		starting.Go(func() { w.engines[i] = newEngine(name, env.APIServer(etcd, append(flags, "--engine="+name)...)) })
	}
	starting.Wait()
	if w.resources, err = discover(ctx, w.engines[0].server.API()); err != nil {
		return nil, err
	}
	for _, r := range w.resources {
		// upstream has the history of custom resources only from the first request on
		if err := w.awaitList(ctx, r.path()); err != nil {
			return nil, err
		}
	}
	if w.past, err = w.revision(ctx); err != nil {
		return nil, err
	}
	if err := fillLate(ctx, w.engines[1].server.API(), kv, w.resources); err != nil {
		return nil, err
	}
	if err := w.awaitQuiet(ctx); err != nil {
		return nil, err
	}
	w.quiet, err = w.revision(ctx)
	return w, err
})

// open returns the world, or ends the test.
func open(t *testing.T) *world {
	t.Helper()
	w, err := newWorld()
	if err != nil {
		t.Fatal(err)
	}
	return w
}

// serverFlags returns the flags common to all servers. Every version of every built-in resource is
// served. A server does not advance the revision by itself: it renews no lease of its own, and
// compacts nothing.
func serverFlags(e *harness.Env) []string {
	tokens := ""
	for token, user := range map[string]string{
		adminToken:    "admin,admin,system:masters",
		tokenNoRights: "nobody,nobody",
		tokenOneName:  "one-name,one-name",
	} {
		tokens += token + "," + user + "\n"
	}
	return []string{
		"--token-auth-file=" + e.WriteFile("tokens.csv", []byte(tokens)),
		"--runtime-config=api/all=true",
		"--feature-gates=APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false,ClusterTrustBundle=true,PodCertificateRequest=true,StorageVersionMigrator=true,GenericWorkload=true,ShardedListAndWatch=true",
		"--etcd-compaction-interval=0",
		// the odd objects include those that these plugins read
		"--disable-admission-plugins=ServiceAccount,Priority",
	}
}

// adminToken is that of the harness.
const adminToken = "admin-token"

// compact advances etcd by one revision and compacts it there. It returns the revision before that,
// which can no longer be read.
func compact(ctx context.Context, kv *clientv3.Client) (int64, error) {
	before, err := kv.Get(ctx, "compacted")
	if err != nil {
		return 0, err
	}
	resp, err := kv.Put(ctx, "compacted", "")
	if err != nil {
		return 0, err
	}
	_, err = kv.Compact(ctx, resp.Header.Revision, clientv3.WithCompactPhysical())
	return before.Header.Revision, err
}

// awaitQuiet returns when the revision has not changed for a while: controllers inside the servers
// write when they start.
func (w *world) awaitQuiet(ctx context.Context) error {
	const quiet = 2 * time.Second
	last, since := int64(0), time.Now()
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		rev, err := w.revision(ctx)
		if err != nil {
			return false, err
		}
		if rev != last {
			last, since = rev, time.Now()
		}
		return time.Since(since) > quiet, fmt.Errorf("the servers still write, at revision %d", rev)
	})
}

// revision returns etcd's current revision.
func (w *world) revision(ctx context.Context) (int64, error) {
	resp, err := w.kv.Get(ctx, "compacted", clientv3.WithCountOnly())
	if err != nil {
		return 0, err
	}
	return resp.Header.Revision, nil
}
