package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/embed"
	"go.etcd.io/etcd/server/v3/etcdserver/api/v3client"
	"go.uber.org/zap"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
)

// newMirror runs a mirror of the prefix until the test ends.
func newMirror(t testing.TB, client *clientv3.Client, prefix string, change func(*mirror.Options)) *mirror.Mirror {
	t.Helper()
	opts := mirror.Options{Prefix: prefix, Source: etcdsource.New(client, "feed", prefix+"probe"), Logger: quiet()}
	if change != nil {
		change(&opts)
	}
	m, err := mirror.New(opts)
	testcheck.NoError(t, err)
	t.Cleanup(m.Close)
	return m
}

func claim(t testing.TB, m *mirror.Mirror, prefix string) *mirror.Resource {
	t.Helper()
	r, err := m.Claim(prefix)
	testcheck.NoError(t, err)
	testcheck.NoError(t, r.WaitReady(contextFor(t)))
	return r
}

// catchUp waits until the mirror has etcd's revision, and returns it.
func catchUp(t testing.TB, m *mirror.Mirror) mirror.Revision {
	t.Helper()
	ctx := contextFor(t)
	rev, err := m.ReadRevision(ctx)
	if err == nil {
		err = m.Wait(ctx, rev)
	}
	testcheck.NoError(t, err)
	return rev
}

type state = map[string]string

func read(s mirror.Snapshot) state {
	out := state{}
	for e := range s.All("", "") {
		out[e.Key()] = fmt.Sprintf("%s@%d,%d", e.Value(), e.ModRevision(), e.CreateRevision())
	}
	return out
}

// readEtcd is read on etcd itself.
func readEtcd(t testing.TB, client *clientv3.Client, prefix string, rev mirror.Revision) (state, error) {
	resp, err := client.Get(contextFor(t), prefix, clientv3.WithPrefix(), clientv3.WithRev(rev))
	if err != nil {
		return nil, err
	}
	out := state{}
	for _, kv := range resp.Kvs {
		out[string(kv.Key)] = fmt.Sprintf("%s@%d,%d", kv.Value, kv.ModRevision, kv.CreateRevision)
	}
	return out, nil
}

func diff(got, want state) (s string) {
	for k, v := range want {
		if got[k] != v {
			s += fmt.Sprintf(" %s is %q, want %q;", k, got[k], v)
		}
	}
	for k, v := range got {
		if _, ok := want[k]; !ok {
			s += fmt.Sprintf(" %s is %q, want none;", k, v)
		}
	}
	return s
}

// proxy forwards bytes to a unix socket and can close all connections.
type proxy struct {
	listener net.Listener
	wg       sync.WaitGroup
	mu       sync.Mutex
	conns    map[net.Conn]bool
	closed   bool
}

func newProxy(t testing.TB, to string) (p *proxy, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "strata-proxy-")
	testcheck.NoError(t, err)
	socket = filepath.Join(dir, "s.sock")
	l, err := net.Listen("unix", socket)
	testcheck.NoError(t, err)
	p = &proxy{listener: l, conns: map[net.Conn]bool{}}
	p.wg.Go(func() {
		for {
			from, err := l.Accept()
			if err != nil {
				return
			}
			back, err := net.Dial("unix", to)
			if err != nil {
				_ = from.Close()
				continue
			}
			if p.keep(from) && p.keep(back) {
				p.wg.Go(func() { pass(from, back) })
				p.wg.Go(func() { pass(back, from) })
			}
		}
	})
	t.Cleanup(func() {
		_ = l.Close()
		p.cut(true)
		p.wg.Wait()
		_ = os.RemoveAll(dir)
	})
	return p, socket
}

func (p *proxy) keep(c net.Conn) bool {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.closed {
		_ = c.Close()
		return false
	}
	p.conns[c] = true
	return true
}

// cut closes all connections; new ones are accepted unless last is set.
func (p *proxy) cut(last bool) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for c := range p.conns {
		_ = c.Close()
	}
	clear(p.conns)
	p.closed = p.closed || last
}

func pass(from, to net.Conn) {
	defer from.Close()
	defer to.Close()
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, err := to.Write(buf[:n]); err != nil {
				return
			}
		}
		if err != nil {
			return
		}
	}
}

// follower maintains a state from the events of a cursor.
type follower struct {
	r    *mirror.Resource
	c    *mirror.Cursor
	held state
}

func follow(r *mirror.Resource, s mirror.Snapshot) *follower {
	return &follower{r: r, c: s.Cursor("", ""), held: read(s)}
}

// next applies at most n events.
func (f *follower) next(t *testing.T, n int) {
	t.Helper()
	evs, err := f.c.Next(nil, n)
	testcheck.NoError(t, err)
	for _, e := range evs {
		delete(f.held, e.Key())
		if e.Entry != nil {
			f.held[e.Key()] = fmt.Sprintf("%s@%d,%d", e.Entry.Value(), e.Entry.ModRevision(), e.Entry.CreateRevision())
		}
	}
}

// catchUp applies all events up to end, and compares the state with etcd's.
func (f *follower) catchUp(t *testing.T, client *clientv3.Client, end mirror.Revision) {
	t.Helper()
	for f.c.Position() < end {
		f.next(t, 100)
	}
	want, err := readEtcd(t, client, f.r.Prefix(), f.c.Position())
	testcheck.NoError(t, err)
	if !maps.Equal(f.held, want) {
		t.Errorf("a follower of %s at %d:%s", f.r.Prefix(), f.c.Position(), diff(f.held, want))
	}
}

// randomWriter writes transactions to the keys of resources.
type randomWriter struct {
	client       *clientv3.Client
	resources    []string
	rnd          *rand.Rand
	acknowledged *atomic.Int64 // the highest revision of all writers
}

// ops returns the operations of one transaction.
func (w *randomWriter) ops() []clientv3.Op {
	rnd, resources := w.rnd, w.resources
	var ops []clientv3.Op
	seen := map[string]bool{}
	for range 1 + rnd.IntN(4) {
		key := resources[rnd.IntN(len(resources))] + fmt.Sprint(rnd.IntN(12))
		if seen[key] {
			continue // etcd rejects a key twice in one transaction
		}
		seen[key] = true
		if rnd.IntN(3) == 0 {
			ops = append(ops, clientv3.OpDelete(key))
		} else {
			ops = append(ops, clientv3.OpPut(key, strings.Repeat("v", rnd.IntN(50))))
		}
	}
	if rnd.IntN(20) == 0 {
		ops = []clientv3.Op{clientv3.OpDelete(resources[rnd.IntN(len(resources))], clientv3.WithPrefix())}
	}
	return ops
}

// write commits n transactions.
func (w *randomWriter) write(n int) error {
	for range n {
		resp, err := w.client.Txn(context.Background()).Then(w.ops()...).Commit()
		if err != nil {
			return err
		}
		for {
			old := w.acknowledged.Load()
			if old >= resp.Header.Revision || w.acknowledged.CompareAndSwap(old, resp.Header.Revision) {
				break
			}
		}
	}
	return nil
}

// randomReader compares a mirror with etcd at random revisions.
type randomReader struct {
	client       *clientv3.Client
	m            *mirror.Mirror
	claimed      []*mirror.Resource
	rnd          *rand.Rand
	acknowledged *atomic.Int64
	began, last  mirror.Revision // the first and the last revision that was read
	compared     int
	followers    []*follower
}

// compare compares a resource with etcd at the latest and at a random past revision. It advances
// all followers.
func (x *randomReader) compare(t *testing.T) {
	t.Helper()
	r := x.claimed[x.rnd.IntN(len(x.claimed))]
	before := x.acknowledged.Load()
	now := catchUp(t, x.m)
	s, err := r.Latest()
	testcheck.NoError(t, err)
	if s.Rev < now || s.Rev < before || s.Rev < x.last {
		t.Fatalf("a consistent read is of %d; etcd was at %d, %d was acknowledged, the last one was of %d", s.Rev, now, before, x.last)
	}
	x.last = s.Rev
	then, err := r.At(x.began + x.rnd.Int64N(s.Rev-x.began+1))
	testcheck.NoError(t, err)
	for _, s := range []mirror.Snapshot{s, then} {
		want, err := readEtcd(t, x.client, r.Prefix(), s.Rev)
		testcheck.NoError(t, err)
		if got := read(s); !maps.Equal(got, want) {
			t.Fatalf("%s at %d:%s", r.Prefix(), s.Rev, diff(got, want))
		}
		x.compared++
	}
	if x.rnd.IntN(10) == 0 {
		x.followers = append(x.followers, follow(r, then))
	}
	for _, f := range x.followers {
		f.next(t, 1+x.rnd.IntN(200))
	}
}

// TestMirror_RandomWrites_EqualsEtcdAtRandomRevisions lets several clients write randomly while the
// mirror's connection breaks from time to time. It compares snapshots at the latest and at random
// past revisions, and states built from cursors, with etcd's responses at the same revision.
func TestMirror_RandomWrites_EqualsEtcdAtRandomRevisions(t *testing.T) {
	t.Parallel()
	seed := testseed.New(t) // draws the same writes again
	etcd, client := newRunning(t)
	const prefix = "/registry/"
	p, socket := newProxy(t, etcd.socket())
	resources := []string{prefix + "pods/", prefix + "nodes/", prefix + "leases/"}
	m := newMirror(t, connect(t, socket), prefix, func(o *mirror.Options) { o.CheckpointEvents = 20 })
	var acknowledged atomic.Int64
	x := &randomReader{client: client, m: m, rnd: rand.New(rand.NewPCG(seed, 100)), acknowledged: &acknowledged}
	for _, r := range resources {
		x.claimed = append(x.claimed, claim(t, m, r))
	}
	x.began = catchUp(t, m)
	for _, r := range x.claimed {
		s, err := r.Latest()
		testcheck.NoError(t, err)
		x.followers = append(x.followers, follow(r, s))
	}

	const writers, writes = 4, 500
	var wg sync.WaitGroup
	for w := range writers {
		writer := &randomWriter{client: client, resources: resources, rnd: rand.New(rand.NewPCG(seed, uint64(w))), acknowledged: &acknowledged}
		wg.Go(func() {
			if err := writer.write(writes); err != nil {
				t.Error(err)
			}
		})
	}
	stopped := make(chan struct{})
	go func() { wg.Wait(); close(stopped) }()

	for running := true; running || x.compared < 8; {
		select {
		case <-stopped:
			running = false
		default:
		}
		x.compare(t)
		if x.compared%40 == 4 {
			p.cut(false)
		}
	}
	end := catchUp(t, m)
	for _, f := range x.followers {
		f.catchUp(t, client, end)
	}
	until(t, "the feed has noticed a cut", func() bool { return m.Stats().Reconnects > 0 })
	st := m.Stats()
	t.Logf("%d revisions, %d comparisons, %d followers, %d reconnects, %d relists, %d divergences",
		end-x.began, x.compared, len(x.followers), st.Reconnects, st.Relists, st.Divergences)
	if st.Relists+st.Divergences > 0 {
		t.Error("the mirror relisted or found a divergence")
	}
}

// TestMirror_ConsistentReadOfQuietEtcd_ReturnsAtOnce: a consistent read of a synced mirror waits
// only for etcd's responses, also after writes outside the prefix.
func TestMirror_ConsistentReadOfQuietEtcd_ReturnsAtOnce(t *testing.T) {
	client, prefix := open(t)
	put(t, client, prefix+"a/x", "1")
	m := newMirror(t, client, prefix, nil)
	a := claim(t, m, prefix+"a/")
	began := time.Now()
	for i := range 20 {
		rev := put(t, client, "/elsewhere/"+prefix, fmt.Sprint(i))
		if got := catchUp(t, m); got < rev {
			t.Errorf("reads at %d, etcd is at %d", got, rev)
		}
		if s, err := a.Latest(); err != nil || s.Rev < rev || len(read(s)) != 1 {
			t.Errorf("at %d: %v, %v", s.Rev, read(s), err)
		}
	}
	// While a response is outstanding, the requests are repeated, soon at an interval of 100 ms.
	took := time.Since(began)
	if asked := m.Stats().ProgressRequests; asked > 100+int64(took/(50*time.Millisecond)) {
		t.Errorf("%d progress requests for 20 reads in %v", asked, took)
	}
}

// TestLateClaim_DuringWrites_EqualsEtcd: a resource is claimed and listed during writes to it.
func TestLateClaim_DuringWrites_EqualsEtcd(t *testing.T) {
	client, prefix := open(t)
	fill(t, client, prefix+"later/", "v", 2000)
	m := newMirror(t, client, prefix, func(o *mirror.Options) { o.UnclaimedBytes = 1 })
	a := claim(t, m, prefix+"a/")
	stop := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				put(t, client, fmt.Sprintf("%slater/%05d", prefix, i%2500), "w")
			}
		}
	})
	for range 5 {
		r := claim(t, m, prefix+"later/")
		rev := catchUp(t, m)
		testcheck.NoError(t, r.WaitReady(contextFor(t)))
		s, err := r.At(rev)
		if errors.Is(err, mirror.ErrCompacted) { // it was listed at a later revision
			s, err = r.Latest()
		}
		testcheck.NoError(t, err)
		want, err := readEtcd(t, client, prefix+"later/", s.Rev)
		testcheck.NoError(t, err)
		if got := read(s); !maps.Equal(got, want) {
			t.Errorf("at %d:%s", s.Rev, diff(got, want))
		}
		r.Release()
	}
	close(stop)
	wg.Wait()
	if s, err := a.Latest(); err != nil || len(read(s)) != 0 {
		t.Errorf("%v %v", read(s), err)
	}
	if got := m.Stats().Divergences; got != 0 {
		t.Errorf("%d divergences", got)
	}
}

// TestMirror_RestoredEtcd_IsDetectedWithoutReads: etcd stops, its data is replaced by a backup of
// the same member, so that even the cluster ID is the same, and it continues from an older
// revision. No client reads in between; the mirror detects the restore by itself, and its watches
// end.
func TestMirror_RestoredEtcd_IsDetectedWithoutReads(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	for i := range 10 {
		put(t, client, fmt.Sprintf("%sa/%d", prefix, i), "backed up")
	}
	e.stop()
	backup := filepath.Join(e.Directory(), "backup")
	testcheck.NoError(t, os.CopyFS(backup, os.DirFS(e.data())))
	e.run(t)
	m := newMirror(t, connect(t, e.socket()), prefix, nil)
	a := claim(t, m, prefix+"a/")
	catchUp(t, m)
	for i := range 50 {
		put(t, client, fmt.Sprintf("%sa/%d", prefix, i), "lost")
	}
	lost := catchUp(t, m)
	s, err := a.Latest()
	testcheck.NoError(t, err)
	c := s.Cursor("", "")
	changed := c.Changed()

	e.stop()
	testcheck.NoError(t, os.RemoveAll(e.data()))
	testcheck.NoError(t, os.Rename(backup, e.data()))
	e.run(t)
	select {
	case <-changed:
	case <-time.After(patience):
		t.Fatal("the mirror does not detect the change")
	}
	if _, err := c.Next(nil, 1); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("the watch of the previous lineage: %v, want ErrCompacted", err)
	}
	testcheck.NoError(t, a.WaitReady(contextFor(t)))
	now := catchUp(t, m)
	if now >= lost {
		t.Fatalf("etcd is at %d, was at %d; the test has no effect", now, lost)
	}
	s, err = a.Latest()
	testcheck.NoError(t, err)
	if got := len(read(s)); got != 10 || s.Rev != now {
		t.Errorf("holds %d keys at %d, want 10 at %d", got, s.Rev, now)
	}
	rev := put(t, client, prefix+"a/0", "again")
	catchUp(t, m)
	if s, err = a.Latest(); err != nil || !strings.HasPrefix(read(s)[prefix+"a/0"], fmt.Sprintf("again@%d,", rev)) {
		t.Errorf("at %d: %v, %v", s.Rev, read(s)[prefix+"a/0"], err)
	}
	if st := m.Stats(); st.Relists != 1 {
		t.Errorf("%d relists, want 1", st.Relists)
	}
}

// startEmbedded starts an etcd in the process of the test.
func startEmbedded(t testing.TB) *embed.Etcd {
	t.Helper()
	cfg := embed.NewConfig()
	cfg.Dir = t.TempDir()
	cfg.ListenPeerUrls = nil
	cfg.ListenClientUrls = []url.URL{{Scheme: "unix", Path: filepath.Join(newEtcd(t).Directory(), "client.sock")}}
	// not used by any client
	cfg.AdvertiseClientUrls = []url.URL{{Scheme: "unix", Host: "localhost:0"}}
	cfg.TickMs, cfg.ElectionMs = 10, 100
	cfg.UnsafeNoFsync = true
	cfg.ZapLoggerBuilder = embed.NewZapLoggerBuilder(zap.NewNop())
	server, err := embed.StartEtcd(cfg)
	testcheck.NoError(t, err)
	t.Cleanup(server.Close)
	select {
	case <-server.Server.ReadyNotify():
	case <-time.After(patience):
		t.Fatal("etcd does not get ready")
	}
	return server
}

// TestMirror_ClientInServerProcess_FollowsEtcd: a client in the server's process has no connection
// that could be lost.
func TestMirror_ClientInServerProcess_FollowsEtcd(t *testing.T) {
	const prefix = "/registry/"
	client := v3client.New(startEmbedded(t).Server)
	defer client.Close()
	requireProbe(t, client, prefix+"probe", etcdsource.ByProgress)
	put(t, client, prefix+"a/x", "1")
	m := newMirror(t, client, prefix, nil)
	a := claim(t, m, prefix+"a/")
	rev := put(t, client, prefix+"a/x", "2")
	catchUp(t, m)
	if s, err := a.Latest(); err != nil || !strings.HasPrefix(read(s)[prefix+"a/x"], fmt.Sprintf("2@%d,", rev)) {
		t.Errorf("%v, %v", read(s), err)
	}
	m.Close()
}

// TestMirror_EtcdRestarts_LosesNoEvent: no list is sent, no watch ends, and no event is lost.
func TestMirror_EtcdRestarts_LosesNoEvent(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	m := newMirror(t, connect(t, e.socket()), prefix, nil)
	a := claim(t, m, prefix+"a/")
	s, err := a.Latest()
	testcheck.NoError(t, err)
	c := s.Cursor("", "")
	for i := range 3 {
		put(t, client, prefix+"a/x", fmt.Sprint(i))
		catchUp(t, m)
		e.stop()
		e.run(t)
	}
	rev := put(t, client, prefix+"a/x", "3")
	if got := catchUp(t, m); got != rev {
		t.Errorf("at %d, etcd is at %d", got, rev)
	}
	if evs, err := c.Next(nil, 100); err != nil || len(evs) != 4 || c.Position() != rev {
		t.Errorf("%d events, %v, position %d; want 4 through %d", len(evs), err, c.Position(), rev)
	}
	if st := m.Stats(); st.Relists != 0 || st.Divergences != 0 {
		t.Errorf("%d relists, %d divergences", st.Relists, st.Divergences)
	}
}
