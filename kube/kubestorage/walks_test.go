package kubestorage

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"math/rand/v2"
	"os"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/client/v3/kubernetes"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/apiserver/pkg/storage/storagebackend"
	"k8s.io/apiserver/pkg/storage/storagebackend/factory"
	"k8s.io/component-base/featuregate"

	"github.com/stratakube/strata/internal/test/testetcd"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/upstream"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// replica is one engine on the shared etcd.
type replica struct {
	mu      sync.RWMutex // held for reading during use of the storage
	engine  *Engine
	storage storage.Interface
	destroy factory.DestroyFunc
	opens   int // number of starts
}

// walksWorld is an etcd, two replicas, and their users. It runs in rounds: the actions of a round
// are drawn from the seed before, and run concurrently.
type walksWorld struct {
	client   *kubernetes.Client // bypasses all engines
	wrap     func(storage.Interface) storage.Interface
	replicas [2]*replica
	acked    atomic.Int64 // revision of the newest acknowledged write
	states   sync.Map     // of []podState by revision

	floor  mirror.Revision // compacted; every replica refuses older revisions
	floorC mirror.Revision // compacted in this round, or floor
	turn   int64           // of compact_rev_key
	pagers []*pager
	writes int
	rounds int

	complete, continued, expired, exact, refused, compactions, restarts, pages, sealed, plain atomic.Int64
}

// walkResource has metrics of its own.
var walkResource = schema.GroupResource{Group: "walks", Resource: "pods"}

var walkNamespaces = []string{"ns", "ns-1", "ns-10"} // not in the order of their keys

// run runs so many rounds, then continues until the walks have ended, and returns the first
// violation.
func (w *walksWorld) run(ctx context.Context, seed uint64, rounds int) error {
	rnd := rand.New(rand.NewPCG(seed, 0))
	for i := range w.replicas {
		w.replicas[i] = &replica{}
		if err := w.restart(w.replicas[i], rnd.Uint64()); err != nil {
			return err
		}
	}
	defer func() {
		for _, r := range w.replicas {
			if r.engine != nil {
				r.destroy()
				r.engine.Close()
			}
		}
	}()
	if err := w.write(ctx, rnd.Uint64(), 150); err != nil {
		return err
	}
	w.floor = 1
	ending := 0 // rounds without a new walk
	for i := 0; ending < 50; i++ {
		// A walk must be overtaken by a compaction, which happens late with some seeds.
		more := i < rounds || i < 10*rounds && w.expired.Load() == 0
		if !more {
			if ending++; !w.pinned() {
				return nil
			}
		}
		if err := w.round(ctx, rnd, more); err != nil {
			return fmt.Errorf("round %d: %w", i, err)
		}
	}
	return errors.New("walks do not end")
}

// pinned reports whether walks that must complete are still running.
func (w *walksWorld) pinned() bool {
	return slices.ContainsFunc(w.pagers, func(p *pager) bool { return p.pin > 0 })
}

// round lets all users act once. Without more it starts no new walks, and running ones end.
func (w *walksWorld) round(ctx context.Context, rnd *rand.Rand, more bool) error {
	present := w.acked.Load()
	for more && len(w.pagers) < 16 {
		p := &pager{world: w, rnd: rand.New(rand.NewPCG(rnd.Uint64(), 0))}
		p.begin(present)
		w.pagers = append(w.pagers, p)
	}
	// The revision of a walk that must complete is not compacted.
	target := present
	for _, p := range w.pagers {
		if p.pin > 0 {
			target = min(target, p.pin)
		}
	}
	w.rounds++
	compacts := (rnd.IntN(4) == 0 || w.rounds%16 == 0) && target > w.floor
	w.floorC = w.floor
	if compacts {
		w.floorC = w.floor + 1 + rnd.Int64N(target-w.floor)
	}

	var group sync.WaitGroup
	var mu sync.Mutex
	var first error
	start := func(what string, f func() error) {
		group.Go(func() {
			if err := f(); err != nil {
				mu.Lock()
				defer mu.Unlock()
				if first == nil {
					first = fmt.Errorf("%s: %w", what, err)
				}
			}
		})
	}
	seed, n := rnd.Uint64(), rnd.IntN(12)
	start("write", func() error { return w.write(ctx, seed, n) })
	for _, p := range w.pagers {
		p.last = !more
		start(fmt.Sprintf("walk of %+v", p.extent), func() error { return p.page(ctx) })
	}
	for range 3 {
		seed := rnd.Uint64()
		start("exact read", func() error { return w.readExactly(ctx, seed, present) })
	}
	if compacts {
		start("compact", func() error { return w.compact(ctx) })
	}
	if r, seed := w.replicas[rnd.IntN(2)], rnd.Uint64(); rnd.IntN(10) == 0 || w.rounds%20 == 0 {
		start("restart", func() error { return w.restart(r, seed) })
	}
	group.Wait()
	if first != nil {
		return first
	}
	w.pagers = slices.DeleteFunc(w.pagers, func(p *pager) bool { return p.done })
	if compacts {
		w.floor = w.floorC
		for _, r := range w.replicas {
			if err := w.awaitExpired(ctx, r); err != nil {
				return err
			}
		}
	}
	return nil
}

// restart ends a replica's engine and starts another, with a random amount of history.
func (w *walksWorld) restart(r *replica, seed uint64) error {
	rnd := rand.New(rand.NewPCG(seed, 0))
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.engine != nil {
		r.destroy()
		r.engine.Close()
		w.restarts.Add(1)
	}
	opts := Options{Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	switch rnd.IntN(4) {
	case 0:
		opts.Window = mirror.Window{MaxAge: time.Hour, MaxBytes: 10_000}
	case 1:
		opts.Replay = driver.ReplayBounds{Revisions: -1}
	}
	gates := featuregate.NewFeatureGate()
	// Replicas with and without sealed tokens read each other's tokens.
	seal := rnd.IntN(2) == 0
	if r.opens == 0 {
		seal = r == w.replicas[0]
	}
	seal = seal && w.wrap == nil // faults change tokens
	if err := errors.Join(gates.Add(Gates()), gates.SetFromMap(map[string]bool{string(SealedContinueTokens): seal})); err != nil {
		return err
	}
	opts.Gates = gates
	r.engine = New(opts)
	config := &storagebackend.ConfigForResource{
		GroupResource: walkResource,
		Config: storagebackend.Config{
			Prefix:               "/registry",
			Transport:            storagebackend.TransportConfig{ServerList: w.client.Endpoints()},
			Codec:                testCodec(),
			DBMetricPollInterval: time.Hour,
			LeaseManagerConfig:   etcd3.NewDefaultLeaseManagerConfig(),
		},
	}
	var err error
	r.storage, r.destroy, err = upstream.Open(r.engine.Decorator(), config, "/pods/", newExamplePod, newExamplePodList, podAttrs, nil)
	if err == nil && w.wrap != nil {
		r.storage = w.wrap(r.storage)
	}
	r.opens++
	return err
}

// list sends the list to a random replica, and retries while the answer has a Retry-After.
func (w *walksWorld) list(ctx context.Context, rnd *rand.Rand, p extent, opts storage.ListOptions) (*example.PodList, error) {
	key := "/pods"
	if p.namespace != "" {
		key += "/" + p.namespace
	}
	if rnd.IntN(2) == 0 {
		key += "/"
	}
	for end := time.Now().Add(patience); ; {
		r := w.replicas[rnd.IntN(len(w.replicas))]
		list := &example.PodList{}
		r.mu.RLock()
		err := r.storage.GetList(ctx, key, opts, list)
		r.mu.RUnlock()
		late := apierrors.IsTooManyRequests(err) ||
			storage.IsTooLargeResourceVersion(err) && opts.ResourceVersionMatch == metav1.ResourceVersionMatchNotOlderThan
		if !late || time.Now().After(end) {
			return list, err
		}
		time.Sleep(5 * time.Millisecond) // shorter than Retry-After
	}
}

// write writes n times: transactions of many keys past all replicas, and single objects through
// them.
func (w *walksWorld) write(ctx context.Context, seed uint64, n int) error {
	rnd := rand.New(rand.NewPCG(seed, 0))
	for range n {
		if rnd.IntN(3) > 0 {
			if err := w.transact(ctx, rnd); err != nil {
				return err
			}
			continue
		}
		pod, key := w.draw(rnd)
		r := w.replicas[rnd.IntN(len(w.replicas))]
		out := &example.Pod{}
		r.mu.RLock()
		var err error
		switch rnd.IntN(3) {
		case 0:
			err = r.storage.Create(ctx, key, pod, out, 0)
		case 1:
			err = r.storage.Delete(ctx, key, out, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{})
		default:
			err = r.storage.GuaranteedUpdate(ctx, key, out, true, nil, storage.SimpleUpdate(func(runtime.Object) (runtime.Object, error) {
				return pod.DeepCopyObject(), nil
			}), nil)
		}
		r.mu.RUnlock()
		if storage.IsExist(err) || storage.IsNotFound(err) {
			continue
		}
		if err != nil {
			return err
		}
		if s, err := stateOf(out); err == nil {
			w.acknowledge(s.revision)
		}
	}
	return nil
}

func (w *walksWorld) acknowledge(rev mirror.Revision) {
	for {
		held := w.acked.Load()
		if rev <= held || w.acked.CompareAndSwap(held, rev) {
			return
		}
	}
}

// draw returns a pod and its key.
func (w *walksWorld) draw(rnd *rand.Rand) (*example.Pod, string) {
	w.writes++ // there is one writer
	pod := newPod(fmt.Sprintf("pod-%d", rnd.IntN(90)))
	pod.Namespace = walkNamespaces[rnd.IntN(len(walkNamespaces))]
	pod.Labels = map[string]string{"shard": fmt.Sprint(rnd.IntN(4))}
	switch rnd.IntN(8) {
	case 0:
		pod.Labels["rare"] = []string{"x", "y"}[rnd.IntN(2)]
	case 1:
		pod.Labels = nil
	}
	pod.Annotations = map[string]string{"write": fmt.Sprint(w.writes)}
	pod.Spec.NodeName = fmt.Sprintf("node-%d", rnd.IntN(5))
	return pod, podKey(pod)
}

// transact changes several pods at one revision.
func (w *walksWorld) transact(ctx context.Context, rnd *rand.Rand) error {
	ops := map[string]clientv3.Op{}
	for range 1 + rnd.IntN(6) {
		pod, key := w.draw(rnd)
		key = "/registry" + key
		if rnd.IntN(3) == 0 {
			ops[key] = clientv3.OpDelete(key)
			continue
		}
		value, err := runtime.Encode(testCodec(), pod)
		if err != nil {
			return err
		}
		ops[key] = clientv3.OpPut(key, string(value))
	}
	var all []clientv3.Op
	for _, op := range ops {
		all = append(all, op)
	}
	resp, err := w.client.Client.Txn(ctx).Then(all...).Commit()
	if err == nil {
		w.acknowledge(resp.Header.Revision)
	}
	return err
}

// state returns all pods in etcd at a revision.
func (w *walksWorld) state(ctx context.Context, rev mirror.Revision) ([]podState, error) {
	if s, ok := w.states.Load(rev); ok {
		return s.([]podState), nil
	}
	resp, err := w.client.Client.Get(ctx, "/registry/pods/", clientv3.WithPrefix(), clientv3.WithRev(rev))
	if err != nil {
		return nil, err
	}
	var state []podState
	for _, kv := range resp.Kvs {
		pod := &example.Pod{}
		if err := runtime.DecodeInto(testCodec(), kv.Value, pod); err != nil {
			return nil, err
		}
		pod.ResourceVersion = fmt.Sprint(kv.ModRevision)
		s, err := stateOf(pod)
		if err != nil {
			return nil, err
		}
		state = append(state, s)
	}
	w.states.Store(rev, state)
	return state, nil
}

// compact compacts etcd as the compactor of an API server does.
func (w *walksWorld) compact(ctx context.Context) error {
	w.compactions.Add(1)
	turn, _, _, err := etcd3.Compact(ctx, w.client.Client, w.turn, w.floorC)
	if err == nil && turn != w.turn+1 { // the first call returned the current turn
		w.turn = turn
		turn, _, _, err = etcd3.Compact(ctx, w.client.Client, w.turn, w.floorC)
	}
	w.turn = turn
	return err
}

// awaitExpired returns when a replica refuses compacted revisions.
func (w *walksWorld) awaitExpired(ctx context.Context, r *replica) error {
	opts := exactly(extent{}, w.floor-1)
	for end := time.Now().Add(patience); ; time.Sleep(5 * time.Millisecond) {
		err := r.storage.GetList(ctx, "/pods/", opts, &example.PodList{})
		if apierrors.IsResourceExpired(err) {
			return nil
		}
		if time.Now().After(end) {
			return fmt.Errorf("%d is compacted, and a list at %d: %v", w.floor, w.floor-1, err)
		}
	}
}

func exactly(p extent, rev mirror.Revision) storage.ListOptions {
	return storage.ListOptions{Recursive: true, Predicate: p.predicate(), ResourceVersion: fmt.Sprint(rev), ResourceVersionMatch: metav1.ResourceVersionMatchExact}
}

// labelSelectors have all operators, on a label that most pods have and on one that few have.
var labelSelectors = []string{
	"shard=0", "shard=3", "shard!=1", "shard in (0,2)", "shard notin (0,1,2)", "shard>1", "shard", "!shard",
	"rare=x", "rare!=x", "rare in (x,y)", "rare", "!rare", "shard=2,rare", "shard in (1,2),rare notin (y)",
}

func drawExtent(rnd *rand.Rand) extent {
	var p extent
	if rnd.IntN(2) == 0 {
		p.namespace = walkNamespaces[rnd.IntN(len(walkNamespaces))]
	}
	if rnd.IntN(3) > 0 {
		p.labels = labelSelectors[rnd.IntN(len(labelSelectors))]
	}
	if rnd.IntN(4) == 0 {
		p.node = fmt.Sprintf("node-%d", rnd.IntN(6)) // one has no pods
	}
	return p
}

// readExactly lists at revisions between the compacted one and the present, below, and in the
// future.
func (w *walksWorld) readExactly(ctx context.Context, seed uint64, present mirror.Revision) error {
	rnd := rand.New(rand.NewPCG(seed, 0))
	p := drawExtent(rnd)
	switch rnd.IntN(10) {
	case 0:
		if w.floor > 2 {
			rev := 1 + rnd.Int64N(w.floor-1)
			_, err := w.list(ctx, rnd, p, exactly(p, rev))
			if !apierrors.IsResourceExpired(err) {
				return fmt.Errorf("at %d, compacted to %d: %v, want 410", rev, w.floor, err)
			}
			w.refused.Add(1)
			return nil
		}
	case 1:
		rev := present + 1_000_000
		if _, err := w.list(ctx, rnd, p, exactly(p, rev)); !storage.IsTooLargeResourceVersion(err) {
			return fmt.Errorf("at %d, which is not yet: %v, want 504", rev, err)
		}
		return nil
	}
	rev := w.floorC + rnd.Int64N(present-w.floorC+1)
	list, err := w.list(ctx, rnd, p, exactly(p, rev))
	if err != nil {
		return fmt.Errorf("at %d, compacted to %d: %w", rev, w.floorC, err)
	}
	walk := pageWalk{extent: p}
	if err := walk.add(0, list); err != nil {
		return err
	}
	if walk.rev != rev {
		return fmt.Errorf("list revision: want %d, got %d", rev, walk.rev)
	}
	state, err := w.state(ctx, rev)
	if err != nil {
		return err
	}
	w.exact.Add(1)
	return walk.finish(state)
}

// TestWalk_PagesFromAnyReplica_EqualEtcd writes, deletes and changes pods in transactions, compacts
// etcd, and restarts replicas, while lists are walked in pages, each page from any replica, and
// read at exact revisions; some replicas seal their tokens. Each list equals etcd's contents at its
// revision; a walk that is overtaken by a compaction gets a 410 and continues in the present.
//
// STRATA_TEST_SEED repeats a run, up to the order of concurrent actions; with STRATA_TEST_LONG=1 it
// runs for some minutes.
func TestWalk_PagesFromAnyReplica_EqualEtcd(t *testing.T) {
	t.Parallel()
	rounds := 50
	if os.Getenv("STRATA_TEST_LONG") == "1" {
		rounds = 1500
	}
	w, err := walk(t, rounds, nil)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("%d walks complete, of which %d after an expiry; %d pages (%d tokens sealed, %d plain), %d expired, %d exact reads, %d of compacted revisions; %d compactions, %d restarts",
		w.complete.Load(), w.continued.Load(), w.pages.Load(), w.sealed.Load(), w.plain.Load(), w.expired.Load(), w.exact.Load(), w.refused.Load(), w.compactions.Load(), w.restarts.Load())
	for what, n := range map[string]*atomic.Int64{
		"walk completed": &w.complete, "walk expired": &w.expired, "walk completed after an expiry": &w.continued,
		"exact read": &w.exact, "read of a compacted revision": &w.refused, "restart": &w.restarts,
		"sealed token": &w.sealed, "plain token": &w.plain,
	} {
		if n.Load() == 0 {
			t.Errorf("no %s", what)
		}
	}
	if planned, _ := series(t, "strata_list_plans_total", walkResource, "plan", metrics.PlanIndex); planned < float64(w.exact.Load())/8 {
		t.Errorf("%v lists used an index, with %d exact reads", planned, w.exact.Load())
	}
}

// walk runs a world with a seed of the test.
func walk(t *testing.T, rounds int, wrap func(storage.Interface) storage.Interface) (*walksWorld, error) {
	t.Helper()
	seed := testseed.New(t)
	ctx, cancel := context.WithTimeout(t.Context(), patience+time.Duration(rounds)*5*time.Second)
	defer cancel()
	w := &walksWorld{client: startEtcd(t, testetcd.Config{}), wrap: wrap}
	return w, w.run(ctx, seed, rounds)
}
