package kubestorage_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"net/http"
	"runtime/pprof"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/client-go/tools/cache"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/continuetoken"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/kube/kubestorage"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

var simScheme = runtime.NewScheme()

func init() {
	utilruntime.ErrorHandlers = nil // one of them sleeps, by a time that all tests share
	metav1.AddToGroupVersion(simScheme, metav1.SchemeGroupVersion)
	utilruntime.Must(example.AddToScheme(simScheme))
	utilruntime.Must(examplev1.AddToScheme(simScheme))
	simScheme.AddKnownTypes(example.SchemeGroupVersion, &example.PodList{})
	simScheme.AddKnownTypes(examplev1.SchemeGroupVersion, &examplev1.PodList{})
	kind := examplev1.SchemeGroupVersion.WithKind("Pod")
	utilruntime.Must(simScheme.AddFieldLabelConversionFunc(kind, func(label, value string) (string, string, error) { return label, value, nil }))
}

var (
	simCodecs = serializer.NewCodecFactory(simScheme)
	simCodec  = simCodecs.LegacyCodec(examplev1.SchemeGroupVersion)
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

// simAction is what one step does.
type simAction int

const (
	doWrite    simAction = iota // through a server
	doTxn                       // several keys in one revision, in etcd
	doGet                       //
	doList                      //
	doPage                      // the next page of an earlier list
	doWatch                     // a new watch
	doResume                    // end a watch, and go on from its last revision
	doEndWatch                  // end a watch
	doPause                     // a client does not read its watch, or reads it again
	doDeliver                   // events to a server
	doProgress                  // the answer to a request for progress
	doAnswer                    // the answer to a request to etcd
	doCalm                      // a server gets all answers at once from now on, or no longer
	doMove                      // requests of a server go to another member
	doEnd                       // the watch of a server ends
	doFail                      // requests of a server fail, or no longer
	doLag                       // a member applies the log late from now on, or at once
	doApply                     // a member applies a part of the log
	doCutOff                    // a member reaches no other from now on, or all do
	doElect                     // another leader
	doForget                    // the keys of continue tokens are deleted
	doCompact                   //
	doRestore                   // etcd from a backup
	doRestart                   // a server ends, and another process starts
	doSleep                     // time passes
	actions
)

var actionWeights = [actions]int{
	doWrite: 200, doTxn: 40, doGet: 100, doList: 100, doPage: 60, doWatch: 24, doResume: 24, doEndWatch: 8, doPause: 16,
	doDeliver: 200, doProgress: 60, doAnswer: 200, doCalm: 30, doMove: 20, doEnd: 12, doFail: 6,
	doLag: 30, doApply: 100, doCutOff: 8, doElect: 8, doForget: 1, doCompact: 8, doRestore: 1, doRestart: 6, doSleep: 40,
}

// actionNames are the names of actions in files.
var actionNames = [actions]string{
	doWrite: "write", doTxn: "txn", doGet: "get", doList: "list", doPage: "page",
	doWatch: "watch", doResume: "resume", doEndWatch: "end-watch", doPause: "pause", doDeliver: "deliver",
	doProgress: "progress", doAnswer: "answer", doCalm: "calm", doMove: "move", doEnd: "end",
	doFail: "fail", doLag: "lag", doApply: "apply", doCutOff: "cut-off", doElect: "elect",
	doForget: "forget", doCompact: "compact", doRestore: "restore", doRestart: "restart", doSleep: "sleep",
}

func (a simAction) String() string { return actionNames[a] }

// simOp is one step. The draws of a step come from its own seed, and choose among what exists then:
// any part of a list of steps is a run.
type simOp struct {
	Do   simAction
	Seed uint64
}

// simOps returns the n steps of a seed.
func simOps(seed uint64, n int) []simOp {
	rng, sum := rand.New(rand.NewPCG(seed, 1)), 0
	for _, w := range actionWeights {
		sum += w
	}
	ops := make([]simOp, n)
	for i := range ops {
		at := rng.IntN(sum)
		do := simAction(0)
		for ; at >= actionWeights[do]; do++ {
			at -= actionWeights[do]
		}
		ops[i] = simOp{do, rng.Uint64()}
	}
	return ops
}

// simItem is the state of an object: all that the simulation writes.
type simItem struct {
	Key        string // namespace/name
	Rev        int64
	Seq, Count int // number of the write; number of writes since the creation
	Tier, Node string
}

func simPod(x simItem) *example.Pod {
	namespace, name, _ := strings.Cut(x.Key, "/")
	return &example.Pod{
		ObjectMeta: metav1.ObjectMeta{Namespace: namespace, Name: name,
			Labels: map[string]string{"tier": x.Tier, "seq": strconv.Itoa(x.Seq), "count": strconv.Itoa(x.Count)}},
		Spec: example.PodSpec{NodeName: x.Node},
	}
}

func simItemOf(obj runtime.Object) simItem {
	if shared, ok := obj.(runtime.CacheableObject); ok {
		obj = shared.GetObject()
	}
	pod := obj.(*example.Pod)
	number := func(label string) int {
		n, err := strconv.Atoi(pod.Labels[label])
		if err != nil {
			return -1 // no write has it
		}
		return n
	}
	rev, _ := strconv.ParseInt(pod.ResourceVersion, 10, 64)
	return simItem{pod.Namespace + "/" + pod.Name, rev, number("seq"), number("count"), pod.Labels["tier"], pod.Spec.NodeName}
}

func simAttrs(obj runtime.Object) (labels.Set, fields.Set, error) {
	pod := obj.(*example.Pod)
	return pod.Labels, fields.Set{"metadata.name": pod.Name, "metadata.namespace": pod.Namespace, "spec.nodeName": pod.Spec.NodeName}, nil
}

// simSelector selects objects. Its zero value selects all.
type simSelector struct{ Namespace, Tier, Node, Name string }

func (s simSelector) matches(x simItem) bool {
	namespace, name, _ := strings.Cut(x.Key, "/")
	return (s.Namespace == "" || s.Namespace == namespace) && (s.Tier == "" || s.Tier == x.Tier) && (s.Node == "" || s.Node == x.Node) && (s.Name == "" || s.Name == name)
}

func (s simSelector) predicate() storage.SelectionPredicate {
	p := storage.SelectionPredicate{Label: labels.Everything(), Field: fields.Everything(), GetAttrs: simAttrs, IndexFields: []string{"spec.nodeName"}}
	if s.Tier != "" {
		p.Label = labels.SelectorFromSet(labels.Set{"tier": s.Tier})
	}
	if set := s.fields(); len(set) > 0 {
		p.Field = fields.SelectorFromSet(set)
	}
	return p
}

func (s simSelector) fields() fields.Set {
	set := fields.Set{}
	if s.Node != "" {
		set["spec.nodeName"] = s.Node
	}
	if s.Name != "" {
		set["metadata.name"] = s.Name
	}
	return set
}

func (s simSelector) key() string {
	if s.Namespace != "" {
		return "/pods/" + s.Namespace
	}
	return "/pods"
}

// simRecord is one request of a client with its result.
type simRecord struct {
	Op              int // the step that began it
	Server, Process int
	Verb            string
	HTTP, Protobuf  bool   // answered by the read path
	Key             string // of a write or GET
	Seq             int    // of a write
	RV              string // as requested
	Match           metav1.ResourceVersionMatch
	Limit           int64
	Selector        simSelector
	From            *simRecord // the list that this is the next page of
	Forged          bool       // its sealed token was changed
	Precondition    int64      // revision of the object that a write demands, 0 if any
	Final           bool       // after all faults were repaired
	// The revision of etcd at its begin and end, and the lowest revision that the process may
	// return without a step back.
	Began, Ended, Floor int64

	Done      atomic.Bool // written last
	Err       string      // class of the error, "" if there is none
	Message   string
	Rev       int64
	Items     []simItem
	Next      string // continue token
	Remaining int64  // -1 if the response has none
	Shown     bool   // the process has published the revision of this list
}

func (r *simRecord) String() string { return r.describe(r.Message) }

func (r *simRecord) describe(message string) string {
	text := fmt.Sprintf("step %d, server %d.%d: %s (HTTP %v) %s rv=%q %s limit=%d %+v", r.Op, r.Server, r.Process, r.Verb, r.HTTP, r.Key, r.RV, r.Match, r.Limit, r.Selector)
	if r.Precondition > 0 {
		text += fmt.Sprintf(" of revision %d", r.Precondition)
	}
	if r.From != nil {
		text += fmt.Sprintf(" after step %d", r.From.Op)
	}
	return text + fmt.Sprintf(": etcd at %d to %d: rev %d %s %s, %d items %v", r.Began, r.Ended, r.Rev, r.Err, message, len(r.Items), r.Items)
}

// simWatch is one watch.
type simWatch struct {
	Op              int
	Server, Process int
	RV              string
	Initial         bool // sendInitialEvents
	HTTP            bool // answered by the read path
	Bookmarks       bool
	Selector        simSelector
	Final           bool // after all faults were repaired
	Began, Floor    int64

	Ended  int64 // revision of etcd at its end
	mu     sync.Mutex
	Events []simEvent
	Err    string // of the request, or the event that ended the watch
	Detail string
	Over   bool // the stream has ended
	Closed bool // by the client
	Live   bool // still open at the end, when all had caught up

	cancel context.CancelFunc
	gate   atomic.Pointer[chan struct{}] // the client reads when it is closed; nil: now
}

func (w *simWatch) String() string { return w.describe(w.Events, w.Err, w.Detail) }

func (w *simWatch) describe(events []simEvent, err, detail string) string {
	return fmt.Sprintf("step %d, server %d.%d: watch (HTTP %v) rv=%q initial=%v bookmarks=%v %+v, etcd at %d: over %v %s %s, %d events %v",
		w.Op, w.Server, w.Process, w.HTTP, w.RV, w.Initial, w.Bookmarks, w.Selector, w.Began, w.Over, err, detail, len(events), events)
}

// simEvent is an event of a watch.
type simEvent struct {
	Type watch.EventType
	simItem
	End bool // of the initial events
}

// last returns the last revision that the watch has reported, by an event or by a bookmark.
func (w *simWatch) last(bookmarks bool) int64 {
	w.mu.Lock()
	defer w.mu.Unlock()
	last := int64(0)
	for _, e := range w.Events {
		if e.Type == watch.Bookmark && !bookmarks {
			continue
		}
		if w.Initial || w.RV == "" || w.RV == "0" {
			last = max(last, e.Rev)
		} else {
			last = e.Rev
		}
	}
	return last
}

// simHistory is what one run has recorded. A judge needs nothing else.
type simHistory struct {
	Lineages []lineage
	Records  []*simRecord
	Watches  []*simWatch
	Window   bool // history in memory is bounded tightly
	// The revision at which keys of tokens were deleted first, 0 if they were not.
	Forgotten    int64
	Transactions map[int64]bool // the revisions that no server has written
	Left         []string       // memory beyond its bound at the end
}

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

// apply makes one step.
func (s *sim) apply(t *testing.T, op simOp) {
	rng := rand.New(rand.NewPCG(op.Seed, 3))
	// No timers of two steps end at once.
	time.Sleep(time.Duration(1 + rng.IntN(int(time.Millisecond))))
	server := s.servers[rng.IntN(len(s.servers))]
	c, m := server.client, s.etcd.members[rng.IntN(simMembers)]
	switch op.Do {
	case doWrite:
		if server.number == simReplica {
			server = s.followed()
		}
		s.write(server, rng)
	case doTxn:
		s.transaction(rng)
	case doGet:
		s.read(server, &simRecord{Verb: "get", Key: s.key(rng), RV: s.revision(rng)}, "", rng)
	case doList:
		s.list(server, rng)
	case doPage:
		s.page(server, rng)
	case doWatch:
		s.watch(server, &simWatch{RV: s.revision(rng), Initial: rng.IntN(3) == 0, Bookmarks: rng.IntN(2) == 0, Selector: simSelect(rng)}, rng)
	case doResume:
		if w := s.anyWatch(rng); w != nil && w.last(!s.exact) > 0 {
			w.end()
			s.watch(server, &simWatch{RV: strconv.FormatInt(w.last(!s.exact), 10), Bookmarks: w.Bookmarks, Selector: w.Selector}, rng)
		}
	case doEndWatch:
		if w := s.anyWatch(rng); w != nil {
			w.end()
		}
	case doPause:
		if w := s.anyWatch(rng); w != nil && !s.exact {
			w.pause()
		}
	case doDeliver:
		c.deliver(s.most(1+rng.IntN(4)), 1+rng.IntN(3), rng.IntN(20) == 0)
	case doProgress:
		c.progress(int64(rng.IntN(3)))
	case doAnswer:
		c.answer(rng.IntN(4))
	case doCalm:
		c.calm = !c.calm
	case doMove:
		c.at = m
	case doEnd:
		c.at = m
		if rng.IntN(2) == 0 {
			c.end()
		} else {
			c.disconnect()
		}
	case doFail:
		c.failing = !c.failing && rng.IntN(2) == 0
	case doLag:
		m.lags = !m.lags
	case doApply:
		s.etcd.apply(m, m.applied+1+int64(rng.IntN(8)))
	case doCutOff:
		if !s.exact {
			s.etcd.cutOff(m)
		}
	case doElect:
		s.etcd.elect(m)
		for _, server := range s.servers {
			server.client.leaderChanged(func() bool { return rng.IntN(2) == 0 })
		}
	case doForget:
		s.history.Forgotten = cmp.Or(s.history.Forgotten, s.etcd.Delete("/registry/strata/continue-token-keys"))
	case doCompact:
		if rev := s.etcd.Revision(); rev > s.etcd.base+4 {
			s.etcd.compact(rev - int64(rng.IntN(int(min(rev-s.etcd.base, 40)))))
		}
	case doRestore:
		s.etcd.restore(s.etcd.Revision() - int64(rng.IntN(20)))
		for _, server := range s.servers[:simReplica] {
			server.client.disconnect()
			synctest.Wait()
			server.client.end() // no stream of the cluster before goes on
		}
	case doRestart:
		s.stop(server)
		synctest.Wait()
		s.start(t, server)
	case doSleep:
		s.sleep(time.Duration(1+rng.IntN(100)) * []time.Duration{time.Millisecond, 100 * time.Millisecond, time.Second}[rng.IntN(3)])
	}
}

// key draws a key: mostly one of a few, so that they meet.
func (s *sim) key(rng *rand.Rand) string {
	return fmt.Sprintf("ns%d/pod%d", rng.IntN(2), rng.IntN([]int{8, 8, s.names}[rng.IntN(3)]))
}

func simSelect(rng *rand.Rand) (x simSelector) {
	switch rng.IntN(8) {
	case 0:
		x.Namespace = "ns0"
	case 1:
		x.Tier = "t1"
	case 2:
		x.Node = "n1"
	case 3:
		x.Node, x.Namespace = "n2", "ns1"
	case 4:
		x.Tier, x.Node = "t0", "n0"
	case 5:
		x.Name = "pod3"
	}
	return x
}

// revision draws a resource version of a read.
func (s *sim) revision(rng *rand.Rand) string {
	now := s.etcd.Revision()
	rev := int64(0)
	switch rng.IntN(8) {
	case 0, 1, 2:
		return ""
	case 3:
		return "0"
	case 4:
		rev = now
	case 5:
		rev = s.etcd.compacted + int64(rng.IntN(4)) - 1
	case 6:
		rev = now - int64(rng.IntN(30))
	case 7:
		rev = now + int64(rng.IntN(2))
	}
	return strconv.FormatInt(max(rev, 1), 10)
}

// transaction writes up to three keys in one revision.
func (s *sim) transaction(rng *rand.Rand) {
	keys := map[string]bool{}
	var ops []memory.Op
	for range 1 + rng.IntN(3) {
		key := s.key(rng)
		if keys[key] {
			continue
		}
		keys[key] = true
		if rng.IntN(3) == 0 {
			ops = append(ops, memory.Op{Key: simRoot + key, Delete: true})
			continue
		}
		ops = append(ops, s.put(key, rng))
	}
	s.history.Transactions[s.etcd.Txn(ops...)] = true
}

// put is the write of a new object that no update counts.
func (s *sim) put(key string, rng *rand.Rand) memory.Op {
	s.seq++
	data, err := runtime.Encode(simCodec, simPod(simItem{Key: key, Seq: s.seq, Tier: simTier(rng), Node: simNode(rng), Count: -1}))
	utilruntime.Must(err)
	return memory.Op{Key: simRoot + key, Value: string(data)}
}

// fill writes an object of every name.
func (s *sim) fill(rng *rand.Rand) {
	for i := range 2 * s.names {
		s.etcd.Txn(s.put(fmt.Sprintf("ns%d/pod%d", i%2, i/2), rng))
	}
}

func simTier(rng *rand.Rand) string { return fmt.Sprintf("t%d", rng.IntN(3)) }

func simNode(rng *rand.Rand) string { return fmt.Sprintf("n%d", rng.IntN(3)) }

// begin records a request of a client, which run sends. Too many waiting requests of a server are
// not begun.
func (s *sim) begin(server *simServer, r *simRecord, run func(ctx context.Context, store *kubestorage.Store) error) {
	if server.pending.Load() >= simPending && !r.Final {
		return
	}
	r.Op, r.Server, r.Process = s.step, server.number, server.process
	r.Began, r.Floor, r.Remaining = s.etcd.Revision(), server.floor.Load(), -1
	s.history.Records = append(s.history.Records, r)
	server.pending.Add(1)
	store, process := server.store, server.process
	// Before, small pages are etcd's, and memory may be behind them.
	ready := store.ReadinessCheck() == nil
	s.clients.Go(func() {
		defer server.pending.Add(-1)
		ctx, cancel := context.WithTimeout(context.WithValue(context.Background(), simStep{}, r.Op), time.Minute)
		defer cancel()
		err := run(ctx, store)
		r.Ended = s.etcd.Revision()
		r.Err = simError(err)
		if r.Seq > 0 && (errors.Is(err, rpctypes.ErrNoLeader) || errors.Is(err, rpctypes.ErrLeaderChanged)) {
			r.Err = "unavailable" // a write returns the errors of etcd
		}
		if err != nil {
			r.Message = err.Error()
		}
		if r.Verb == "list" && err == nil && ready && r.From == nil && r.Match != metav1.ResourceVersionMatchExact && server.process == process {
			r.Shown = true
			server.floor.Store(max(server.floor.Load(), r.Rev))
		}
		r.Done.Store(true)
	})
}

// simError returns the class of an error.
func simError(err error) string {
	switch {
	case err == nil:
		return ""
	case apierrors.IsResourceExpired(err), apierrors.IsGone(err):
		return "expired"
	case storage.IsTooLargeResourceVersion(err):
		return "too large"
	case storage.IsNotFound(err), apierrors.IsNotFound(err):
		return "not found"
	case storage.IsExist(err):
		return "exists"
	case storage.IsInvalidObj(err): // an unmet precondition
		return "conflict"
	case apierrors.IsBadRequest(err):
		return "invalid"
	case apierrors.IsTooManyRequests(err), storage.IsUnreachable(err), storage.IsRequestTimeout(err),
		apierrors.IsTimeout(err), apierrors.IsServerTimeout(err), apierrors.IsServiceUnavailable(err):
		return "unavailable"
	}
	for _, cause := range []error{mirror.ErrClosed, context.Canceled, context.DeadlineExceeded} {
		if strings.Contains(err.Error(), cause.Error()) { // the status of a watch has only its text
			return "unavailable"
		}
	}
	return "other"
}

// write creates, updates or deletes an object, on condition of its revision or of none.
func (s *sim) write(server *simServer, rng *rand.Rand) {
	s.seq++
	x := simItem{Key: s.key(rng), Seq: s.seq, Tier: simTier(rng), Node: simNode(rng)}
	r := &simRecord{Verb: []string{"create", "update", "update", "delete"}[rng.IntN(4)], Seq: x.Seq}
	if r.Verb != "create" && rng.IntN(4) == 0 {
		if versions := s.etcd.Changes(simRoot+x.Key, 0); len(versions) > 0 {
			r.Precondition = versions[max(0, len(versions)-1-rng.IntN(2))].ModRevision
		}
	}
	s.send(server, r, x)
}

// send sends a write.
func (s *sim) send(server *simServer, r *simRecord, x simItem) {
	key := "/pods/" + x.Key
	r.Key = x.Key
	var pre *storage.Preconditions
	if r.Precondition > 0 {
		pre = &storage.Preconditions{ResourceVersion: new(strconv.FormatInt(r.Precondition, 10))}
	}
	s.begin(server, r, func(ctx context.Context, store *kubestorage.Store) (err error) {
		out := &example.Pod{}
		switch r.Verb {
		case "create":
			err = store.Create(ctx, key, simPod(x), out, 0)
		case "update":
			err = store.GuaranteedUpdate(ctx, key, out, false, pre, storage.SimpleUpdate(func(old runtime.Object) (runtime.Object, error) {
				next := simPod(x)
				was := simItemOf(old)
				if was.Count >= 0 {
					was.Count++
				}
				next.Labels["count"] = strconv.Itoa(was.Count)
				next.ResourceVersion = old.(*example.Pod).ResourceVersion
				return next, nil
			}), nil)
		default:
			err = store.Delete(ctx, key, out, pre, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
		}
		if err == nil {
			r.Items = []simItem{simItemOf(out)}
			r.Rev = r.Items[0].Rev
		}
		return err
	})
}

func (s *sim) list(server *simServer, rng *rand.Rand) {
	r := &simRecord{Verb: "list", RV: s.revision(rng), Selector: simSelect(rng)}
	if rng.IntN(2) == 0 {
		r.Limit = int64(1 + rng.IntN(5))
	}
	if r.RV != "" {
		switch rng.IntN(3) {
		case 0:
			r.Match = metav1.ResourceVersionMatchNotOlderThan
		case 1:
			if r.RV != "0" {
				r.Match = metav1.ResourceVersionMatchExact
			}
		}
	}
	s.read(server, r, "", rng)
}

// page reads the next page of a list that has one.
func (s *sim) page(server *simServer, rng *rand.Rand) {
	var lists []*simRecord
	for _, r := range s.history.Records {
		if r.Done.Load() && r.Next != "" {
			lists = append(lists, r)
		}
	}
	if len(lists) == 0 {
		return
	}
	lists = lists[max(0, len(lists)-20):]
	from := lists[rng.IntN(len(lists))]
	r, token := &simRecord{Verb: "list", From: from, Limit: int64(1 + rng.IntN(5)), Selector: from.Selector}, from.Next
	if continuetoken.Sealed(token) && rng.IntN(10) == 0 {
		r.Forged = true
		at := len(token) / 2
		token = token[:at] + string('A'+(token[at]-'A'+1)%26) + token[at+1:]
	}
	s.read(server, r, token, rng)
}

// read sends a GET or a list, to the storage or to the read path.
func (s *sim) read(server *simServer, r *simRecord, token string, rng *rand.Rand) {
	r.HTTP, r.Protobuf = rng.IntN(2) == 0, rng.IntN(2) == 0
	reads := server.reads
	s.begin(server, r, func(ctx context.Context, store *kubestorage.Store) error {
		if r.Verb == "get" {
			out := &example.Pod{}
			err := readEither(ctx, reads, r, storage.ListOptions{ResourceVersion: r.RV, Predicate: storage.Everything}, out, func() error {
				return store.Get(ctx, "/pods/"+r.Key, storage.GetOptions{ResourceVersion: r.RV}, out)
			})
			if err == nil {
				r.Items = []simItem{simItemOf(out)}
			}
			return err
		}
		list := &example.PodList{}
		opts := storage.ListOptions{ResourceVersion: r.RV, ResourceVersionMatch: r.Match, Predicate: r.Selector.predicate(), Recursive: true}
		opts.Predicate.Limit, opts.Predicate.Continue = r.Limit, token
		if err := readEither(ctx, reads, r, opts, list, func() error { return store.GetList(ctx, r.Selector.key(), opts, list) }); err != nil {
			return err
		}
		r.Rev, _ = strconv.ParseInt(list.ResourceVersion, 10, 64)
		for i := range list.Items {
			r.Items = append(r.Items, simItemOf(&list.Items[i]))
		}
		if r.Next = list.Continue; list.RemainingItemCount != nil {
			r.Remaining = *list.RemainingItemCount
		}
		return nil
	})
}

// readEither answers a record by the read path, or by the storage if that passes it on.
func readEither(ctx context.Context, reads http.Handler, r *simRecord, opts storage.ListOptions, out runtime.Object, fromStorage func() error) error {
	if !r.HTTP {
		return fromStorage()
	}
	namespace, name := r.Selector.Namespace, ""
	if r.Verb == "get" {
		namespace, name, _ = strings.Cut(r.Key, "/")
	}
	answered, err := simRead(ctx, reads, r.Verb, namespace, name, simQuery(r.Selector, opts), r.Protobuf, out)
	if r.HTTP = answered; !answered {
		return fromStorage()
	}
	return err
}

// anyWatch returns an open watch, nil if there is none.
func (s *sim) anyWatch(rng *rand.Rand) *simWatch {
	var open []*simWatch
	for _, w := range s.history.Watches {
		if !w.Closed {
			open = append(open, w)
		}
	}
	if len(open) == 0 {
		return nil
	}
	return open[rng.IntN(len(open))]
}

// watch opens a watch. If too many are open the oldest ends.
func (s *sim) watch(server *simServer, w *simWatch, rng *rand.Rand) {
	var open []*simWatch
	for _, other := range s.history.Watches {
		if !other.Closed {
			open = append(open, other)
		}
	}
	if len(open) >= simWatches && !w.Final {
		open[0].end()
	}
	w.HTTP = rng.IntN(2) == 0
	// upstream's default for requests of this form
	w.Initial = w.Initial || w.HTTP && w.Bookmarks && (w.RV == "" || w.RV == "0")
	w.Op, w.Server, w.Process, w.Began, w.Floor = s.step, server.number, server.process, s.etcd.Revision(), server.floor.Load()
	s.history.Watches = append(s.history.Watches, w)
	ctx, cancel := context.WithCancel(context.Background())
	w.cancel = cancel
	opts := storage.ListOptions{ResourceVersion: w.RV, Predicate: w.Selector.predicate(), Recursive: true}
	opts.Predicate.AllowWatchBookmarks = w.Bookmarks
	if w.Initial {
		opts.SendInitialEvents, opts.ResourceVersionMatch, opts.Predicate.AllowWatchBookmarks = new(true), metav1.ResourceVersionMatchNotOlderThan, true
	}
	store, reads := server.store, server.reads
	s.clients.Go(func() {
		if !w.HTTP || !w.followHTTP(ctx, reads, opts) {
			w.follow(ctx, store, opts)
		}
		w.Ended = s.etcd.Revision()
	})
}

// followHTTP records the events of the watch by the read path. It returns false if that passes the
// watch on.
func (w *simWatch) followHTTP(ctx context.Context, reads http.Handler, opts storage.ListOptions) bool {
	events, answered := make(chan watch.Event), make(chan bool, 1)
	go func() {
		answered <- simWatchHTTP(ctx, reads, w.Selector.Namespace, simQuery(w.Selector, opts), events)
		close(events)
	}()
	err := w.record(ctx, events)
	if w.HTTP = <-answered; w.HTTP {
		w.over(err)
	}
	return w.HTTP
}

// follow records the events of the watch by the storage.
func (w *simWatch) follow(ctx context.Context, store *kubestorage.Store, opts storage.ListOptions) {
	stream, err := store.Watch(ctx, w.Selector.key(), opts)
	if err != nil {
		w.over(err)
		return
	}
	defer stream.Stop()
	w.over(w.record(ctx, stream.ResultChan()))
}

// over notes the end of the watch.
func (w *simWatch) over(err error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.Over = true
	if err != nil {
		w.Err, w.Detail = simError(err), err.Error()
	}
}

// record records events until they end, and returns the error that was the last of them.
func (w *simWatch) record(ctx context.Context, events <-chan watch.Event) error {
	for {
		if gate := w.gate.Load(); gate != nil {
			select {
			case <-*gate:
			case <-ctx.Done():
				return nil
			}
		}
		e, ok := <-events
		switch {
		case !ok:
			return nil
		case e.Type == watch.Error:
			return apierrors.FromObject(e.Object)
		}
		event := simEvent{Type: e.Type, simItem: simItemOf(e.Object)}
		if e.Type == watch.Bookmark {
			event.simItem = simItem{Rev: event.Rev}
			event.End = e.Object.(*example.Pod).Annotations[metav1.InitialEventsAnnotationKey] == "true"
		}
		w.mu.Lock()
		w.Events = append(w.Events, event)
		w.mu.Unlock()
	}
}

// end ends the watch by its client.
func (w *simWatch) end() {
	w.mu.Lock()
	w.Closed = true
	w.mu.Unlock()
	w.cancel()
}

// pause makes the client read no more, or again.
func (w *simWatch) pause() {
	if w.gate.Load() == nil {
		w.gate.Store(new(make(chan struct{})))
	} else {
		w.resume()
	}
}

func (w *simWatch) resume() {
	if gate := w.gate.Swap(nil); gate != nil {
		close(*gate)
	}
}

// text is the history without what a seed does not decide: the times of bookmarks, the words of
// errors, which name the last revision that a server has heard of, and whether a server that ends
// tells its watches.
func (h *simHistory) text() string {
	var text strings.Builder
	for _, r := range h.Records {
		fmt.Fprintln(&text, r.describe(""))
	}
	for _, w := range h.Watches {
		events := slices.DeleteFunc(slices.Clone(w.Events), func(e simEvent) bool { return e.Type == watch.Bookmark && !e.End })
		err := w.Err
		if err == "unavailable" {
			err = ""
		}
		fmt.Fprintln(&text, w.describe(events, err, ""))
	}
	return text.String()
}
