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

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/faulty"
)

// chain is a replica that reads from etcd through a link and a proxy, one that reads from its feed,
// and one that reads from this feed or from that of the scene's replica.
type chain struct {
	*scene
	link  *faulty.Link   // between the upper replica and the proxy
	proxy *harness.Proxy // between the link and etcd
	feed  *harness.Feed  // of the upper replica
	maps  string         // path of ConfigMaps

	t            *testing.T // at whose end the servers end
	upper, lower *harness.Server
	either       *harness.Server // nil before startEither
}

// TestReplica_OfReplica starts a chain, and runs its parts in order. Each can also be run alone.
func TestReplica_OfReplica(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	c := &chain{scene: s, proxy: env.Proxy(s.etcd), feed: s.feed.Another(), maps: s.maps(ctx, t), t: t}
	c.link = faulty.NewLink(t, env, c.proxy.URL())
	etcd := *c.proxy.Etcd()
	etcd.URL = c.link.URL
	c.upper = s.start(t, &etcd, []string{s.primary.URL}, c.feed.Flags()...)
	c.lower = s.start(t, c.feed.Etcd(), []string{s.primary.URL})
	t.Run("FullLogMoves_HistoryIsRestored", c.fullLogMoves) // calls startEither
	t.Run("IsFresh", c.isFresh)
	t.Run("FeedIsGuarded", c.feedIsGuarded)
	t.Run("EncryptionAtRest_PassesValuesAsStored", c.encryptionAtRest)
	t.Run("MemoryBehindEtcd_NoneIsReady", c.memoryBehindEtcd)
	t.Run("WithoutEtcd_RefusesConsistentReads", c.withoutEtcd)
	t.Run("UpperRestarts_WatchContinues", c.upperRestarts)
}

func (c *chain) startEither(t *testing.T) *harness.Server {
	t.Helper()
	if c.either == nil {
		c.either = c.launch(c.t, c.feed.Etcd(), []string{c.primary.URL}, "--etcd-servers="+c.feed.Etcd().URL+","+c.scene.feed.Etcd().URL)
		harness.Check(t, c.either.Await(harness.Context(t, testTimeout), "/readyz"))
	}
	return c.either
}

// fullLogMoves: a replica that starts below one whose log is full has history, though writes move
// the floor of that log all the time.
func (c *chain) fullLogMoves(t *testing.T) {
	ctx, cancel := context.WithCancel(harness.Context(t, testTimeout))
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
	for _, above := range []*harness.Server{c.upper, c.replica} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			n, err := above.API().Sum(ctx, "strata_replica_feed_log_bytes")
			return n > 63<<20, fmt.Errorf("the log has %v bytes (%v)", n, err)
		}))
	}
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
	started := c.startEither(t)
	failed := func() bool { return strings.Contains(started.Output(), "History could not be restored") }
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		n, err := started.API().Sum(ctx, "strata_mirror_replays_total")
		return n > 0 || failed(), fmt.Errorf("%v restores (%v)", n, err)
	}))
	if failed() {
		t.Error("a restore has failed")
	}
}

// isFresh: a consistent read at a replica of a replica sees every write before it. The replica with
// the feed has one watch of etcd, and those below add none.
func (c *chain) isFresh(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	below := []*harness.Server{c.startEither(t), c.lower}
	for range harness.Pick(0, 2) {
		below = append(below, c.start(t, c.feed.Etcd(), []string{c.primary.URL}))
	}
	least := float64(len(below) - 1) // the first one may read from the other feed
	lower := c.lower.API()
	for i := range 50 {
		name := fmt.Sprintf("fresh-%d", i)
		created, err := c.primary.API().Create(ctx, c.maps, configMap(name, nil))
		harness.Check(t, err)
		read, err := below[i%len(below)].API().Get(ctx, c.maps+"/"+name, "")
		harness.Check(t, err)
		if read.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
			t.Fatalf("read resource version %s after the write of %s", read.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
		}
		// of a resource that does not change
		list, err := lower.List(ctx, "/api/v1/namespaces/default/secrets", "")
		harness.Check(t, err)
		if harness.Revision(t, list.Metadata.ResourceVersion) < harness.Revision(t, created.Metadata.ResourceVersion) {
			t.Fatalf("list at resource version %s after the write of %s", list.Metadata.ResourceVersion, created.Metadata.ResourceVersion)
		}
	}
	created, err := lower.Create(ctx, c.maps, configMap("through-lower", nil))
	harness.Check(t, err)
	if created.Metadata.Name != "through-lower" {
		t.Errorf("created %+v", created)
	}
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		// a lost one may still be closing
		streams, watches := c.proxy.Watches()
		return streams <= 1 && watches <= 1, fmt.Errorf("the upper replica has %d watch streams and %d watches of etcd, want one", streams, watches)
	}))
	for metric, least := range map[string]float64{"strata_replica_feed_watches": least, "strata_replica_feed_events_total": 50 * least, "strata_replica_feed_event_bytes_total": 50 * least,
		"strata_replica_feed_requests_total": 1, "strata_replica_feed_log_bytes": 1} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			// a lost watch may still be opening
			n, err := c.upper.API().Sum(ctx, metric)
			return n >= least, fmt.Errorf("%s is %v (%v), want at least %v", metric, n, err, least)
		}))
	}
}

// feedIsGuarded: the feed refuses writes, keys of others, and clients without a certificate of its
// authorities.
func (c *chain) feedIsGuarded(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
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
		"another authority": {[]harness.Certificate{env.Authority().Issue("replica")}, "unknown certificate authority"},
	} {
		err := c.feed.Handshake(ctx, refused.certificates...)
		if err == nil || !strings.Contains(err.Error(), "remote error: tls: "+refused.alert) {
			t.Errorf("a client with a certificate of %s: %v, want the alert %q", name, err, refused.alert)
		}
	}
}

// encryptionAtRest: a feed sends the encrypted values of etcd, and a replica below, which has the
// keys, decrypts those that it lists, watches and reads one by one.
func (c *chain) encryptionAtRest(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	namespace := harness.Namespace(t, ctx, c.primary.API(), harness.NewName("test"))
	path, lower := "/api/v1/namespaces/"+namespace+"/secrets", c.lower.API()
	before, err := lower.List(ctx, path, "")
	harness.Check(t, err)
	watch := harness.StartWatch(t, ctx, lower, path, "resourceVersion="+before.Metadata.ResourceVersion)
	created, err := c.primary.API().Create(ctx, path, map[string]any{"metadata": map[string]any{"name": "sealed"}, "data": map[string]string{"key": "cGxhaW50ZXh0"}})
	harness.Check(t, err)
	event, err := watch.Next(ctx)
	harness.Check(t, err)
	if event.Type != "ADDED" || event.Object.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
		t.Errorf("event %s of %s (%s), want ADDED of the secret", event.Type, event.Object.Metadata.Name, event.Status.Message)
	}
	for _, query := range []string{path + "/sealed", path} {
		r, err := lower.Read(ctx, query, "", "")
		harness.Check(t, err)
		if r.Code != http.StatusOK || !strings.Contains(string(r.Body), `"cGxhaW50ZXh0"`) {
			t.Errorf("%s: %d %.300s, want the decrypted value", query, r.Code, r.Body)
		}
	}
	key := "/registry/secrets/" + namespace + "/sealed"
	fed, err := c.feed.Etcd().Client().Get(ctx, key)
	harness.Check(t, err)
	stored, err := c.etcd.Client().Get(ctx, key)
	harness.Check(t, err)
	if len(fed.Kvs) != 1 || len(stored.Kvs) != 1 || string(fed.Kvs[0].Value) != string(stored.Kvs[0].Value) || !strings.HasPrefix(string(fed.Kvs[0].Value), "k8s:enc:aescbc:v1:key1:") {
		t.Errorf("the feed has %.60q, etcd %.60q, want the same encrypted value", fed.Kvs, stored.Kvs)
	}
}

// memoryBehindEtcd: while no events arrive at the upper replica, its lag grows and its /readyz
// names the etcd. The lag below includes it, and /readyz there names the feed. All of it ends with
// the stall.
func (c *chain) memoryBehindEtcd(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	upper, lower := c.upper.API(), c.lower.API()
	lag := func(ctx context.Context) (float64, error) { return upper.Sum(ctx, "strata_replica_lag_seconds") }
	level := func(ctx context.Context) (bool, error) {
		seconds, err := lag(ctx)
		return err == nil && seconds == 0, fmt.Errorf("lag %v: %w", seconds, err)
	}
	harness.Check(t, harness.Poll(ctx, level))
	c.proxy.Stall(true)
	defer c.proxy.Stall(false)
	_, err := c.primary.API().Create(ctx, c.maps, configMap("not-seen", nil))
	harness.Check(t, err)
	for _, behind := range []struct {
		replica *harness.Server
		etcd    string
	}{{c.upper, c.link.URL}, {c.lower, c.feed.Etcd().URL}} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := behind.replica.API().Do(ctx, http.MethodGet, "/readyz", "verbose", nil)
			if err != nil {
				return false, err
			}
			return r.Code == http.StatusInternalServerError && strings.Contains(string(r.Body), "[-]replica-lag"), r.Err()
		}))
		if log := behind.replica.Output(); !strings.Contains(log, "memory has been behind etcd at "+behind.etcd) {
			t.Errorf("the log does not name %s, behind which memory is", behind.etcd)
		}
	}
	r, err := upper.Do(ctx, http.MethodGet, "/livez", "", nil)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Errorf("/livez: %v: a restart would not help", r.Err())
	}
	seconds, err := lag(ctx)
	harness.Check(t, err)
	if seconds < 5 {
		t.Errorf("lag %v s, want more than the bound of 5 s", seconds)
	}
	c.proxy.Stall(false)
	harness.Check(t, c.upper.Await(ctx, "/readyz"))
	harness.Check(t, harness.Poll(ctx, level))
	harness.Check(t, c.lower.Await(ctx, "/readyz"))
	_, err = lower.Get(ctx, c.maps+"/not-seen", "")
	harness.Check(t, err)
}

// reads waits until a replica answers a list with a code.
func (c *chain) reads(ctx context.Context, t *testing.T, from *harness.Server, query string, code int) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := from.API().Do(ctx, http.MethodGet, c.maps, query, nil)
		if err != nil {
			return false, err
		}
		return r.Code == code, fmt.Errorf("%q: %w, want %d", query, r.Err(), code)
	}))
}

// withoutEtcd: while etcd does not answer the feed, consistent reads below are 429, and others are
// served.
func (c *chain) withoutEtcd(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	c.reads(ctx, t, c.lower, "", http.StatusOK)
	c.link.Silence(true)
	defer c.link.Silence(false)
	c.reads(ctx, t, c.lower, "", http.StatusTooManyRequests)
	c.reads(ctx, t, c.lower, "resourceVersion=0", http.StatusOK)
	c.link.Silence(false)
	c.reads(ctx, t, c.lower, "", http.StatusOK)
}

// upperRestarts: while the replica in the middle is stopped and started again, a watch below it
// stays open, loses no event and needs no relist. Meanwhile consistent reads below are 429, unless
// there is another feed, and other reads are served.
func (c *chain) upperRestarts(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	maps, either := c.scene.maps(ctx, t), c.startEither(t)
	first, err := c.primary.API().Create(ctx, maps, configMap("first", nil))
	harness.Check(t, err)
	watch := harness.StartWatch(t, ctx, c.lower.API(), maps, "resourceVersion="+first.Metadata.ResourceVersion)
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
		_, err := c.primary.API().Create(ctx, maps, configMap(fmt.Sprintf("write-%d", n), nil))
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
		if round == 0 {
			c.reads(ctx, t, c.lower, "", http.StatusTooManyRequests)
			c.reads(ctx, t, c.lower, "resourceVersion=0", http.StatusOK)
			c.reads(ctx, t, either, "", http.StatusOK)
			created, err := either.API().Create(ctx, c.maps, configMap("other-feed", nil))
			harness.Check(t, err)
			got, err := either.API().Get(ctx, c.maps+"/other-feed", "")
			harness.Check(t, err)
			if got.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
				t.Error("a read after a write is not fresh at the other feed")
			}
		}
		c.upper.StartAgain()
		for range 20 {
			write()
		}
		harness.Check(t, c.upper.Await(ctx, "/readyz"))
		c.reads(ctx, t, c.lower, "", http.StatusOK)
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
