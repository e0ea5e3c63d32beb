package kubestorage_test

import (
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"runtime/pprof"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const (
	simRoot = "/registry/pods/"
	// The last server is a replica, which follows one of the others in place of etcd.
	simServers, simReplica = 3, 2
	// simPending bounds the requests of one server that wait, simWatches the open watches of all.
	simPending, simWatches = 4, 10
	// simLatency is the time to an answer of etcd, at which no interval of a server ends.
	simLatency = 137 * time.Microsecond
)

// sim is a running simulation.
type sim struct {
	etcd    *simEtcd
	servers []*simServer
	history *simHistory
	step    int
	seq     int
	names   int // of objects in a namespace
	// exact leaves out what a seed does not decide: the times of bookmarks and comparisons, clients
	// that do not read while a server ends, history that ends at the moment of its read, requests
	// that wait until a member is no longer cut off, and responses of several revisions, of which a
	// waiting reader may see the first alone.
	exact   bool
	clients sync.WaitGroup
	work    chan struct{} // contains a value if a request to etcd has arrived
	window  mirror.Window
	replay  driver.ReplayBounds
	sealing int           // servers that seal continue tokens
	checks  time.Duration // interval of comparisons, which has a random part
}

// simServer is one API server, of which one process runs.
type simServer struct {
	number, process int
	client          *simClient
	engine          *kubestorage.Engine
	store           *kubestorage.Store
	destroy         func()
	reads           http.Handler
	feed            *etcdfeed.Server // nil at the replica
	pending         atomic.Int32
	floor           atomic.Int64 // the highest revision of a completed list of the process
}

// simulate runs the steps and returns what it has recorded. The seed chooses the options of the
// servers. A goroutine that does not end makes the bubble panic. The trace of any panic has the
// seed as the label of its goroutine. See sim.exact.
func simulate(t *testing.T, seed uint64, ops []simOp, exact bool) (h *simHistory) {
	pprof.SetGoroutineLabels(pprof.WithLabels(t.Context(), pprof.Labels(testseed.EnvVar, strconv.FormatUint(seed, 10))))
	synctest.Test(t, func(t *testing.T) {
		rng := rand.New(rand.NewPCG(seed, 2))
		s := &sim{etcd: newSimEtcd(), history: &simHistory{Transactions: map[int64]bool{}}, names: 8, exact: exact, work: make(chan struct{}, 1)}
		s.sealing = rng.IntN(simServers + 1)
		if exact {
			s.checks = -1
		}
		if rng.IntN(4) == 0 { // more than what a list with a selector reads without an index
			s.names = 80
			s.fill(rng)
		}
		if rng.IntN(3) == 0 && !exact {
			s.history.Window = true
			s.window = mirror.Window{MaxAge: 10 * time.Second, MaxBytes: 4 << 10}
			s.replay = driver.ReplayBounds{Revisions: 10}
		}
		for i := range simServers {
			server := &simServer{number: i, client: &simClient{KVClient: s.etcd.kv, etcd: s.etcd, at: s.etcd.members[i], work: s.work, calm: true}}
			if i == simReplica {
				server.client.feed = func() *etcdfeed.Server { return s.followed().feed }
			}
			s.servers = append(s.servers, server)
			s.start(t, server)
			s.settle()
			time.Sleep(simLatency) // no timers of two servers end at once
		}
		for i, op := range ops {
			s.step = i
			s.apply(t, op)
			s.settle()
		}
		s.end()
		h = s.history
	})
	return h
}

// settle waits until all goroutines wait, and gives calm servers their answers.
func (s *sim) settle() {
	for again := true; again; {
		synctest.Wait()
		s.etcd.follow()
		again = false
		for _, server := range s.servers {
			c := server.client
			c.mu.Lock()
			c.round++
			c.mu.Unlock()
			if c.calm {
				again = c.answer(0) || c.deliver(s.most(3), 1, false) || c.progress(0) || again
			} else {
				c.current() // a watch is created at once
			}
		}
	}
}

// most bounds the revisions of one response.
func (s *sim) most(n int) int {
	if s.exact {
		return 1
	}
	return n
}

// sleep lets time pass, in which calm servers get answers.
func (s *sim) sleep(d time.Duration) {
	timer := time.NewTimer(d)
	for end := time.Now().Add(d); time.Now().Before(end); s.settle() {
		arrived := true
		select {
		case <-s.work:
		case <-timer.C:
			arrived = s.arrived() // a request may be of the same moment
		}
		if arrived {
			time.Sleep(simLatency)
			s.arrived()
		}
	}
}

// arrived reports whether a request to etcd has arrived until now.
func (s *sim) arrived() bool {
	synctest.Wait()
	select {
	case <-s.work:
		return true
	default:
		return false
	}
}

// followed returns the server that the replica follows, and sends writes to.
func (s *sim) followed() *simServer {
	return s.servers[s.servers[simReplica].client.at.number%simReplica]
}

func (s *sim) start(t *testing.T, server *simServer) {
	logger := slog.New(slog.DiscardHandler)
	if server.number != simReplica {
		server.feed = etcdfeed.New(etcdfeed.Options{LogBytes: s.window.MaxBytes, Logger: logger})
	}
	config := &storagebackend.ConfigForResource{
		Config:        storagebackend.Config{Prefix: "/registry", Codec: simCodec, Transport: storagebackend.TransportConfig{ServerList: []string{"simulated"}}},
		GroupResource: schema.GroupResource{Group: example.GroupName, Resource: "pods"},
	}
	gates := featuregate.NewFeatureGate()
	utilruntime.Must(gates.Add(kubestorage.Gates()))
	utilruntime.Must(gates.SetFromMap(map[string]bool{string(kubestorage.SealedContinueTokens): server.number < s.sealing}))
	client := server.client.client()
	source := simSource{etcdsource.New(client.Client, "simulated", "/registry/none"), server.client}
	engine, err := kubestorage.NewSimulated(client, server.client, source, config, kubestorage.Options{
		Window: s.window, Replay: s.replay, ConsistencyCheckInterval: s.checks, Gates: gates, Logger: logger,
		FeedServer: server.feed, ReadOnly: server.feed == nil,
	})
	testcheck.NoError(t, err)
	indexers := &cache.Indexers{storage.FieldIndex("spec.nodeName"): func(obj any) ([]string, error) { return []string{obj.(*example.Pod).Spec.NodeName}, nil }}
	made, destroy, err := upstream.Open(engine.Decorator(), config, "/pods", func() runtime.Object { return &example.Pod{} },
		func() runtime.Object { return &example.PodList{} }, simAttrs, indexers)
	testcheck.NoError(t, err)
	server.engine, server.store, server.destroy = engine, made.(*kubestorage.Store), destroy
	server.reads = newSimReadPath(engine, server.store)
	server.process++
	server.floor.Store(0)
}

func (s *sim) stop(server *simServer) {
	if server.feed != nil {
		server.feed.Close()
	}
	server.destroy()
	server.engine.Close()
}

// end repairs everything, waits until all have caught up, reads the state of each server, and ends.
func (s *sim) end() {
	for _, server := range s.servers {
		server.client.calm, server.client.failing = true, false
	}
	for _, m := range s.etcd.members {
		m.lags, m.cut = false, false
	}
	for _, w := range s.history.Watches {
		w.resume()
	}
	for range 20 {
		s.settle()
		s.sleep(10 * time.Second)
	}
	s.settle()
	rng := rand.New(rand.NewPCG(0, 3))
	for i, server := range s.servers {
		s.watch(server, &simWatch{Final: true, Bookmarks: true}, rng)
		s.settle()
		if i != simReplica {
			s.seq++
			s.send(server, &simRecord{Final: true, Verb: "create", Seq: s.seq}, simItem{Key: fmt.Sprintf("ns0/last%d", i), Seq: s.seq, Tier: "t1", Node: "n1"})
			s.settle()
		}
	}
	for _, server := range s.servers {
		s.read(server, &simRecord{Final: true, Verb: "list"}, "", rng)
		s.read(server, &simRecord{Final: true, Verb: "list", Selector: simSelector{Node: "n1"}}, "", rng)
		s.settle()
	}
	for _, w := range s.history.Watches {
		w.mu.Lock()
		w.Live = !w.Over && !w.Closed && w.Err == ""
		w.mu.Unlock()
		w.cancel()
	}
	for _, server := range s.servers {
		if bytes, bound := server.engine.HistoryBytes(); bytes > bound {
			s.history.Left = append(s.history.Left, fmt.Sprintf("server %d has history of %d bytes, bound %d", server.number, bytes, bound))
		}
		s.stop(server)
	}
	s.clients.Wait()
	s.history.Lineages = append(s.etcd.lineages, s.etcd.lineage())
}
