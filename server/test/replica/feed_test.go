package replica

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// chain is a replica that reads from etcd, and one that reads from it.
type chain struct {
	env          *harness.Env
	etcd         *harness.Etcd
	front        *harness.FrontProxy
	feed         *harness.Feed
	primary      *harness.Server
	upper, lower *harness.Server
}

// newChain starts the servers.
func newChain(t *testing.T) *chain { return newChainIn(harness.New(t)) }

// newChainIn is newChain in an environment, with additional flags for all servers.
func newChainIn(e *harness.Env, flags ...string) *chain {
	c := &chain{env: e, etcd: e.Etcd(), front: e.FrontProxy(), feed: e.Feed()}
	c.primary = e.APIServer(c.etcd, append(c.front.TrustFlags(), flags...)...)
	c.upper = e.Replica(c.etcd, c.front, []*harness.Server{c.primary}, append(c.feed.Flags(), flags...)...)
	c.lower = c.replica(flags...)
	return c
}

// replica starts a replica that reads from the feed.
func (c *chain) replica(flags ...string) *harness.Server {
	return c.env.Replica(c.feed.Etcd(), c.front, []*harness.Server{c.primary}, flags...)
}

// TestReplica_OfReplica_IsFresh: a read at a replica of a replica, consistent or by a watch, sees every write before it, and more such replicas add
// no watches of etcd. One more replica with a feed adds one.
func TestReplica_OfReplica_IsFresh(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	c := newChain(t)
	streams := func() (streams, watches float64) {
		t.Helper()
		streams, err := c.etcd.Metric(ctx, "etcd_debugging_mvcc_watch_stream_total")
		harness.Check(t, err)
		watches, err = c.etcd.Metric(ctx, "etcd_debugging_mvcc_watcher_total")
		harness.Check(t, err)
		return streams, watches
	}
	beforeStreams, beforeWatches := streams()
	more := []*harness.Server{c.lower, c.replica(), c.replica()}
	lower := c.lower.API()
	for i := range 50 {
		name := fmt.Sprintf("fresh-%d", i)
		created, err := c.primary.API().Create(ctx, configMaps, configMap(name, nil))
		harness.Check(t, err)
		read, err := more[i%len(more)].API().Get(ctx, configMaps+"/"+name, "")
		harness.Check(t, err)
		if read.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
			t.Fatalf("read resource version %s after the write of %s", read.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
		}
		list, err := lower.List(ctx, "/api/v1/namespaces/default/secrets", "") // of a resource that does not change
		harness.Check(t, err)
		if harness.Revision(t, list.Metadata.ResourceVersion) < harness.Revision(t, created.Metadata.ResourceVersion) {
			t.Fatalf("list at resource version %s after the write of %s", list.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
		}
	}
	created, err := lower.Create(ctx, configMaps, configMap("through-lower", nil))
	harness.Check(t, err)
	if created.Metadata.Name != "through-lower" {
		t.Errorf("created %+v", created)
	}
	if s, w := streams(); s > beforeStreams || w > beforeWatches {
		t.Errorf("etcd has %v watch streams and %v watches with three replicas below, %v and %v with one", s, w, beforeStreams, beforeWatches)
	}
	c.env.Replica(c.etcd, c.front, []*harness.Server{c.primary}, c.feed.Another().Flags()...)
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		s, w := streams()
		return s <= beforeStreams+1 && w <= beforeWatches+1, fmt.Errorf("etcd has %v watch streams and %v watches with one more feed, %v and %v before", s, w, beforeStreams, beforeWatches)
	}))
	upper := c.upper.API()
	for metric, least := range map[string]float64{"strata_replica_feed_watches": 3, "strata_replica_feed_events_total": 150, "strata_replica_feed_event_bytes_total": 150,
		"strata_replica_feed_requests_total": 1, "strata_replica_feed_log_bytes": 1} {
		n, err := upper.Sum(ctx, metric)
		harness.Check(t, err)
		if n < least {
			t.Errorf("%s is %v, want at least %v", metric, n, least)
		}
	}
}

// TestReplica_OfReplica_UpperRestarts_WatchContinues: while the replica in the middle is stopped and started again, a watch below it stays open,
// loses no event and needs no relist.
func TestReplica_OfReplica_UpperRestarts_WatchContinues(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	c := newChain(t)
	first, err := c.primary.API().Create(ctx, configMaps, configMap("first", nil))
	harness.Check(t, err)
	watch, refused, err := c.lower.API().Watch(ctx, configMaps, "resourceVersion="+first.Metadata.ResourceVersion)
	harness.Check(t, err)
	if refused != nil {
		t.Fatal(refused.Err())
	}
	defer watch.Close()
	relists := func() float64 {
		t.Helper()
		n, err := c.lower.API().Sum(ctx, "strata_mirror_relists_total")
		harness.Check(t, err)
		return n
	}
	before := relists()
	n := 0
	write := func() {
		t.Helper()
		_, err := c.primary.API().Create(ctx, configMaps, configMap(fmt.Sprintf("write-%d", n), nil))
		harness.Check(t, err)
		n++
	}
	for round := range 2 {
		for range 20 {
			write()
		}
		if round == 0 {
			harness.Check(t, c.upper.Stop())
		} else {
			c.upper.Kill()
		}
		for range 20 {
			write() // while there is no feed
		}
		c.upper.StartAgain()
		for range 20 {
			write()
		}
		harness.Check(t, c.upper.Await(ctx, "/readyz"))
	}
	for i := range n {
		event, err := watch.Next(ctx)
		harness.Check(t, err)
		if want := fmt.Sprintf("write-%d", i); event.Type != "ADDED" || event.Object.Metadata.Name != want {
			t.Fatalf("event %d is %s of %s (%s), want ADDED of %s", i, event.Type, event.Object.Metadata.Name, event.Status.Message, want)
		}
	}
	if after := relists(); after != before {
		t.Errorf("%v relists, want none", after-before)
	}
	harness.Check(t, c.lower.Await(ctx, "/readyz"))
}

// TestReplica_OfReplica_FeedIsGuarded: the feed refuses writes, keys of others, and clients without a certificate of its authorities.
func TestReplica_OfReplica_FeedIsGuarded(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	c := newChain(t)
	client := c.feed.Etcd().Client()
	_, err := client.Put(ctx, "/registry/configmaps/default/written", "value")
	if status.Code(err) != codes.PermissionDenied || !strings.Contains(err.Error(), "only reads") {
		t.Errorf("put: %v, want PermissionDenied that says so", err)
	}
	_, err = client.Get(ctx, "/other", clientv3.WithPrefix())
	if status.Code(err) != codes.PermissionDenied {
		t.Errorf("get of another prefix: %v, want PermissionDenied", err)
	}
	resp, err := client.Get(ctx, "/registry/configmaps/default/written")
	harness.Check(t, err)
	if len(resp.Kvs) > 0 {
		t.Error("the write through the feed was made")
	}
	if err := c.feed.Handshake(ctx, c.feed.Client()); err != nil {
		t.Errorf("a client with a certificate of the feed's authority: %v", err)
	}
	for name, refused := range map[string]struct {
		certificates []harness.Certificate
		alert        string
	}{
		"none":              {nil, "certificate required"},
		"another authority": {[]harness.Certificate{c.env.Authority().Issue("replica")}, "unknown certificate authority"},
	} {
		err := c.feed.Handshake(ctx, refused.certificates...)
		if err == nil || !strings.Contains(err.Error(), "remote error: tls: "+refused.alert) {
			t.Errorf("a client with a certificate of %s: %v, want the alert %q", name, err, refused.alert)
		}
	}
	for _, flags := range [][]string{c.feed.Flags()[:1], c.feed.Flags()[1:]} {
		refused := c.env.StartReplica(c.etcd, c.front, []*harness.Server{c.primary}, flags...)
		code, err := refused.Wait(ctx)
		harness.Check(t, err)
		if code == 0 || !strings.Contains(refused.Output(), "need each other") {
			t.Errorf("with %v alone: exit code %d:\n%s", flags, code, refused.Tail())
		}
	}
}

// TestReplica_OfReplica_EncryptionAtRest_PassesValuesAsStored: a feed sends the encrypted values of etcd, and a replica below, which has the keys,
// decrypts those that it lists, watches and reads one by one.
func TestReplica_OfReplica_EncryptionAtRest_PassesValuesAsStored(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	config := `{"apiVersion": "apiserver.config.k8s.io/v1", "kind": "EncryptionConfiguration", "resources": [{"resources": ["secrets"], "providers": [{"aescbc": {"keys": [
		{"name": "key1", "secret": "MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY="}]}}]}]}`
	c := newChainIn(e, "--encryption-provider-config="+e.WriteFile("encryption.json", []byte(config)))
	const path = "/api/v1/namespaces/default/secrets"
	lower := c.lower.API()
	before, err := lower.List(ctx, path, "")
	harness.Check(t, err)
	watch, refused, err := lower.Watch(ctx, path, "resourceVersion="+before.Metadata.ResourceVersion)
	harness.Check(t, err)
	if refused != nil {
		t.Fatal(refused.Err())
	}
	defer watch.Close()
	created, err := c.primary.API().Create(ctx, path, map[string]any{"metadata": map[string]any{"name": "sealed"}, "data": map[string]string{"key": "cGxhaW50ZXh0"}})
	harness.Check(t, err)
	event, err := watch.Next(ctx)
	harness.Check(t, err)
	if event.Type != "ADDED" || event.Object.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
		t.Errorf("event %s of %s (%s), want ADDED of the secret", event.Type, event.Object.Metadata.Name, event.Status.Message)
	}
	for _, query := range []string{path + "/sealed", path} {
		r, err := lower.Do(ctx, http.MethodGet, query, "", nil)
		harness.Check(t, err)
		if r.Code != http.StatusOK || !strings.Contains(string(r.Body), `"cGxhaW50ZXh0"`) {
			t.Errorf("%s: %d %.300s, want the decrypted value", query, r.Code, r.Body)
		}
	}
	const key = "/registry/secrets/default/sealed"
	fed, err := c.feed.Etcd().Client().Get(ctx, key)
	harness.Check(t, err)
	stored, err := c.etcd.Client().Get(ctx, key)
	harness.Check(t, err)
	if len(fed.Kvs) != 1 || len(stored.Kvs) != 1 || string(fed.Kvs[0].Value) != string(stored.Kvs[0].Value) || !strings.HasPrefix(string(fed.Kvs[0].Value), "k8s:enc:aescbc:v1:key1:") {
		t.Errorf("the feed has %.60q, etcd %.60q, want the same encrypted value", fed.Kvs, stored.Kvs)
	}
}

// TestReplica_OfReplica_FullLogMoves_HistoryIsRestored: a replica that starts below one whose log is full has history, though writes move the floor
// of that log all the time.
func TestReplica_OfReplica_FullLogMoves_HistoryIsRestored(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithCancel(harness.Context(t, testTimeout))
	c := newChain(t)
	etcd := c.etcd.Client()
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	write := func(n, size int) error {
		_, err := etcd.Put(ctx, fmt.Sprintf("/registry/load/%d", n%10), strings.Repeat("x", size))
		return err
	}
	for n := range 700 {
		harness.Check(t, write(n, 100<<10))
	}
	full := func(ctx context.Context) (bool, error) {
		n, err := c.upper.API().Sum(ctx, "strata_replica_feed_log_bytes")
		return n > 63<<20, fmt.Errorf("the log has %v bytes (%v)", n, err)
	}
	harness.Check(t, harness.Poll(ctx, full))
	wg.Go(func() {
		ticker := time.NewTicker(2 * time.Millisecond)
		defer ticker.Stop()
		for n := 0; ctx.Err() == nil; n++ {
			<-ticker.C
			if err := write(n, 10<<10); err != nil && ctx.Err() == nil {
				t.Error(err)
				return
			}
		}
	})
	lower := c.replica()
	failed := func() bool { return strings.Contains(lower.Output(), "History could not be restored") }
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		n, err := lower.API().Sum(ctx, "strata_mirror_replays_total")
		return n > 0 || failed(), fmt.Errorf("%v restores (%v)", n, err)
	}))
	if failed() {
		t.Error("a restore has failed")
	}
}

// TestReplica_OfReplica_WithoutEtcd_RefusesConsistentReads: while etcd does not answer, or the feed is stopped, consistent reads below are 429, and
// others are served; a second feed takes over from a stopped one.
func TestReplica_OfReplica_WithoutEtcd_RefusesConsistentReads(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	c := newChain(t)
	lower := c.lower.API()
	read := func(query string, code int) {
		t.Helper()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := lower.Do(ctx, http.MethodGet, configMaps, query, nil)
			if err != nil {
				return false, err
			}
			return r.Code == code, fmt.Errorf("%q: %w, want %d", query, r.Err(), code)
		}))
	}
	read("", http.StatusOK)
	c.etcd.Pause()
	read("", http.StatusTooManyRequests)
	read("resourceVersion=0", http.StatusOK)
	c.etcd.Continue()
	read("", http.StatusOK)
	harness.Check(t, c.upper.Stop())
	read("", http.StatusTooManyRequests)
	read("resourceVersion=0", http.StatusOK)
	c.upper.Restart()
	read("", http.StatusOK)

	other := c.feed.Another()
	c.env.Replica(c.etcd, c.front, []*harness.Server{c.primary}, other.Flags()...)
	both := c.env.Replica(c.feed.Etcd(), c.front, []*harness.Server{c.primary}, "--etcd-servers="+c.feed.Etcd().URL+","+other.Etcd().URL)
	harness.Check(t, c.upper.Stop())
	lower = both.API()
	read("", http.StatusOK)
	created, err := both.API().Create(ctx, configMaps, configMap("other-feed", nil))
	harness.Check(t, err)
	got, err := both.API().Get(ctx, configMaps+"/other-feed", "")
	harness.Check(t, err)
	if got.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
		t.Error("a read after a write is not fresh at the other feed")
	}
	c.upper.Restart()
}

// TestReplica_OfReplica_UpperBehind_LowerIsNotReady: the lag of a replica includes that of the one above it.
func TestReplica_OfReplica_UpperBehind_LowerIsNotReady(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front, feed := e.Etcd(), e.FrontProxy(), e.Feed()
	proxy := e.Proxy(etcd)
	primary := e.APIServer(etcd, front.TrustFlags()...)
	e.Replica(proxy.Etcd(), front, []*harness.Server{primary}, feed.Flags()...)
	lower := e.Replica(feed.Etcd(), front, []*harness.Server{primary})
	proxy.Stall(true)
	_, err := primary.API().Create(ctx, configMaps, configMap("not-seen", nil))
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := lower.API().Do(ctx, http.MethodGet, "/readyz", "verbose", nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusInternalServerError && strings.Contains(string(r.Body), "[-]replica-lag"), r.Err()
	}))
	if log := lower.Output(); !strings.Contains(log, "memory has been behind etcd at "+feed.Etcd().URL) {
		t.Error("the log does not name the feed")
	}
	proxy.Stall(false)
	harness.Check(t, lower.Await(ctx, "/readyz"))
	_, err = lower.API().Get(ctx, configMaps+"/not-seen", "")
	harness.Check(t, err)
}
