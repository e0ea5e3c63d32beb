// Package tables sends to both engines, on one etcd, every combination of revision parameters of
// LIST, WATCH and GET, and compares all parts of each answer: code, reason, message, objects,
// resource version, continue token, events, and the reads of etcd.
//
// The meaning of a combination is defined by KEP-2340's two tables; their rows are numbered in
// docs/keps.md. Each answer of Strata is compared with its row (list_test.go, watch_test.go,
// get_test.go), and with upstream's answer. The permitted differences from upstream are in one
// table (bydesign_test.go), each entry with its place in docs/keps.md.
//
// Strata runs in several forms: reads as bytes and through upstream's handlers, gates on and off.
// The resource is secrets: only the tests write any.
package tables

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test, and the start of all servers before the first one.
const testTimeout = 10 * time.Minute

// env is shared by the whole package; its servers are started by the first test that uses them.
var env *harness.Env

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) { env = e })
}

// server is one API server under test and its own proxy in front of etcd. It gets one request at a
// time, so that reads of etcd can be attributed to requests.
type server struct {
	name      string
	memory    bool // the gates are on: cached data is not read from etcd
	watchList bool // the API's own gate of that name is on
	flags     []string

	api   *harness.API
	proxy *harness.Proxy
}

func (s *server) start(etcd *harness.Etcd) {
	s.proxy = env.Proxy(etcd)
	s.api = env.APIServer(s.proxy.Etcd(), append(quiet(), s.flags...)...).API()
}

// quiet returns flags for a server that writes nothing after its start, compacts nothing, and
// restores no history: some rows are about a revision that etcd has and memory does not.
func quiet() []string {
	return []string{
		"--strata-feature-gates=WatchHistoryRestore=false",
		"--feature-gates=APIServerIdentity=false,UnknownVersionInteroperabilityProxy=false",
		"--etcd-compaction-interval=0",
		"--disable-admission-plugins=ServiceAccount",
	}
}

// Gates of Strata whose reads etcd answers instead of memory when they are off.
const gatesOff = "--strata-feature-gates=ConsistentListFromCache=false,ConsistentGetFromCache=false,ListFromCacheSnapshot=false"

// chunkingOff is the gate without which LISTs have no pages.
const chunkingOff = "APIListChunking=false"

// startAll starts servers on one etcd.
func startAll(etcd *harness.Etcd, servers []*server) {
	var starting sync.WaitGroup
	for _, s := range servers {
		starting.Go(func() { s.start(etcd) })
	}
	starting.Wait()
}

// world is an etcd with history, and servers on it that have received only the end of the history.
type world struct {
	*history
	etcd *harness.Etcd
	// servers are all forms of Strata, and upstream's engine last.
	servers []*server
	// older are Strata and upstream's engine with an API that does not support sendInitialEvents.
	// This Strata returns no pages.
	older []*server
}

const watchListOff = "--feature-gates=WatchList=false"

// newWorld is called once; the world is shared by all tests of the package.
var newWorld = sync.OnceValues(func() (*world, error) {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	etcd := env.Etcd()
	h := newHistory(etcd.Client())
	if err := h.past(ctx); err != nil {
		return nil, fmt.Errorf("fill etcd: %w", err)
	}
	w := &world{history: h, etcd: etcd, servers: []*server{
		{name: "strata", memory: true, watchList: true, flags: []string{"--engine=" + harness.Strata}},
		{name: "strata, through upstream's handlers", memory: true, watchList: true,
			flags: []string{"--engine=" + harness.Strata, "--strata-feature-gates=ByteReadPath=false"}},
		{name: "strata, gates off", watchList: true, flags: []string{"--engine=" + harness.Strata, gatesOff}},
		{name: "upstream", memory: true, watchList: true, flags: []string{"--engine=" + harness.Upstream}},
	}, older: []*server{
		{name: "strata", memory: true, flags: []string{"--engine=" + harness.Strata, watchListOff, "--strata-feature-gates=" + chunkingOff}},
		{name: "upstream", memory: true, flags: []string{"--engine=" + harness.Upstream, watchListOff}},
	}}
	startAll(etcd, w.servers)
	startAll(etcd, w.older) // not all at once, which would take minutes on a busy machine
	h.api = w.servers[0].api
	return w, h.continueAtLatest(ctx)
})

// open returns the world with a recent history of the test's own, which every server has received,
// or ends the test. It starts the additional servers first.
func open(t *testing.T, ctx context.Context, more ...*server) *world {
	t.Helper()
	w, err := newWorld()
	harness.Check(t, err)
	startAll(w.etcd, more)
	harness.Check(t, w.recent(ctx))
	harness.Check(t, w.settle(ctx, slices.Concat(w.servers, w.older, more)))
	return w
}

// settle returns when the memory of each server is at the present revision, so that reads without a
// wait show it, too.
func (w *world) settle(ctx context.Context, servers []*server) error {
	for _, s := range servers {
		for _, version := range []string{fmt.Sprint(w.revisions[present]), ""} {
			if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				_, err := s.api.List(ctx, scopes[everywhere].path, "resourceVersion="+version)
				return err == nil, err
			}); err != nil {
				return fmt.Errorf("%s: %w", s.name, err)
			}
		}
	}
	return nil
}
