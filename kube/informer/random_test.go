package informer_test

import (
	"context"
	"fmt"
	"maps"
	"math/rand/v2"
	"os"
	"strconv"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/client-go/tools/cache"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestRandomWritesAndFaults_HandlersReachTheLiveState: whatever is written, lost, compacted or
// restored, the events of each handler are a sequence that client-go may deliver, and in the end
// give the live state.
func TestRandomWritesAndFaults_HandlersReachTheLiveState(t *testing.T) {
	seed := testseed.New(t)
	runs := testrace.Count(20, 5)
	if os.Getenv("STRATA_TEST_STATES") == "all" {
		runs = 60
	}
	for run := range runs {
		t.Run(strconv.Itoa(run), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { newRandomRun(t, rand.New(rand.NewPCG(seed, uint64(run)))).run() })
		})
	}
}

type randomRun struct {
	*fixture
	t        *testing.T
	rng      *rand.Rand
	in       *running
	restores bool // etcd is restored in this run
	names    []string
	handlers map[*recorder]cache.ResourceEventHandlerRegistration
	value    int
}

func newRandomRun(t *testing.T, rng *rand.Rand) *randomRun {
	r := &randomRun{
		fixture: newFixture(t, func(o *mirror.Options) {
			o.Window.MaxBytes = []int64{1, 4 << 10, 1 << 20}[rng.IntN(3)]
			if rng.IntN(2) == 0 {
				o.Replay.Revisions = -1
			}
		}),
		t: t, rng: rng,
		restores: rng.IntN(3) == 0,
		handlers: map[*recorder]cache.ResourceEventHandlerRegistration{},
	}
	for i := range 8 {
		r.names = append(r.names, fmt.Sprintf("%c/n%d", 'a'+i%3, i))
	}
	r.in = r.informer(time.Duration(rng.IntN(2))*20*time.Second, cache.Indexers{"value": byValue, cache.NamespaceIndex: cache.MetaNamespaceIndexFunc})
	return r
}

func (r *randomRun) run() {
	for range r.rng.IntN(10) {
		r.write()
	}
	for range r.rng.IntN(3) {
		r.addHandler()
	}
	r.fixture.run(r.in)
	for range 120 {
		r.step()
	}

	// Without faults, each key is written, which reveals lost events.
	r.etcd.Stall(false)
	r.etcd.DropIf(nil)
	r.etcd.FailLists(nil)
	r.etcd.Break()
	for _, name := range r.names {
		r.put(name, "last")
		if r.rng.IntN(2) == 0 {
			r.delete(name)
		}
	}
	time.Sleep(12 * time.Hour)
	r.settle()
	r.check()
	r.in.stop()
}

func (r *randomRun) step() {
	switch r.rng.IntN(24) {
	case 0:
		r.addHandler()
	case 1:
		for h, reg := range r.handlers {
			if err := r.in.RemoveEventHandler(reg); err != nil {
				r.t.Error(err)
			}
			delete(r.handlers, h)
			break
		}
	case 2:
		r.etcd.DropIf(func(c driver.Change) bool { return strings.HasSuffix(string(c.KV.Key), "1") })
	case 3:
		r.etcd.DropIf(nil)
	case 4:
		rev := r.etcd.Revision()
		r.etcd.Compact(rev)
		if r.rng.IntN(2) == 0 {
			r.mirror.Compact(rev)
		}
	case 5:
		r.etcd.Stall(r.rng.IntN(2) == 0)
	case 6:
		r.etcd.Break()
	case 7:
		if r.restores {
			keys := map[string]string{}
			for _, name := range r.names {
				if r.rng.IntN(2) == 0 {
					keys[prefix+name] = "restored"
				}
			}
			r.etcd.Restore(max(1, r.etcd.Revision()+mirror.Revision(r.rng.IntN(20)-15)), keys)
		}
	case 8:
		if r.rng.IntN(2) == 0 {
			r.etcd.FailLists(fmt.Errorf("no lists"))
		} else {
			r.etcd.FailLists(nil)
		}
	case 9:
		r.in.GetIndexer().ListIndexFuncValues("value")
	case 10, 11:
		time.Sleep(time.Duration(r.rng.IntN(3000)) * time.Millisecond)
	case 12:
		synctest.Wait()
		r.compareIndex()
	default:
		r.write()
	}
}

// compareIndex compares an index with the store, while nothing changes.
func (r *randomRun) compareIndex() {
	var indexed []string
	for _, value := range r.in.GetIndexer().ListIndexFuncValues("value") {
		objs, err := r.in.GetIndexer().ByIndex("value", value)
		if err != nil {
			r.t.Error(err)
		}
		indexed = append(indexed, describeAll(objs)...)
	}
	wantList(r.t, "index", indexed, nil, describeAll(r.in.GetStore().List())...)
}

// write writes in one transaction. Some values cannot be decoded.
func (r *randomRun) write() {
	var ops []memory.Op
	for range 1 + r.rng.IntN(3)/2 {
		r.value++
		op := memoryPut(r.names[r.rng.IntN(len(r.names))], strconv.Itoa(r.value))
		switch r.rng.IntN(8) {
		case 0, 1:
			op.Delete = true
		case 2:
			op.Value = "!"
		}
		if len(ops) == 0 || ops[0].Key != op.Key {
			ops = append(ops, op)
		}
	}
	r.etcd.Txn(ops...)
}

// addHandler adds a handler, some of which are slow. Each checks that the store is as new as its
// event.
func (r *randomRun) addHandler() {
	h := &recorder{name: fmt.Sprintf("handler %d", len(r.handlers))}
	var pause time.Duration
	if r.rng.IntN(2) == 0 {
		pause = time.Duration(r.rng.IntN(2000)) * time.Millisecond
	}
	seen := map[string]int{}
	h.during = func(call string) {
		defer time.Sleep(pause)
		if r.restores {
			return // revisions decrease
		}
		fields := strings.Fields(call)
		key, state, _ := strings.Cut(fields[len(fields)-1], "=")
		rev := revisionOf(state)
		isResync := len(fields) == 3 && fields[1] == fields[2]
		if fields[0] != "gone" && (rev < seen[key] || rev == seen[key] && !isResync) {
			r.t.Errorf("%s: %s after revision %d", h.name, call, seen[key])
		}
		seen[key] = rev
		if now := r.in.LastSyncResourceVersion(); revisionOf("@"+now) < rev {
			r.t.Errorf("%s: %s, but the store is at %s", h.name, call, now)
		}
		if fields[0] == "gone" || fields[0] == "delete" {
			return
		}
		value, _, _ := strings.Cut(state, "@")
		objs, err := r.in.GetIndexer().ByIndex("value", value)
		if err != nil {
			r.t.Error(err)
		}
		for _, obj := range objs {
			if describe(obj) == fields[len(fields)-1] {
				return
			}
		}
		if obj, ok, err := r.in.GetStore().GetByKey(key); err == nil && ok && describe(obj) == key+"="+state {
			r.t.Errorf("%s: %s, which is in the store and not in the index", h.name, call)
		}
	}
	reg, err := r.in.AddEventHandler(h)
	if err != nil {
		r.t.Fatal(err)
	}
	r.handlers[h] = reg
}

func revisionOf(state string) int {
	_, rev, _ := strings.Cut(state, "@")
	n, _ := strconv.Atoi(rev)
	return n
}

// check compares handlers, store and indexes with etcd.
func (r *randomRun) check() {
	live := map[string]string{}
	if _, err := r.etcd.List(context.Background(), prefix, 0, func(page []driver.KV) error {
		for _, kv := range page {
			live[strings.TrimPrefix(string(kv.Key), prefix)] = fmt.Sprintf("%s@%d", kv.Value, kv.ModRevision)
		}
		return nil
	}); err != nil {
		r.t.Fatal(err)
	}
	for h, reg := range r.handlers {
		if !reg.HasSynced() {
			r.t.Errorf("%s has not synced", h.name)
		}
		if !maps.Equal(h.state, live) && len(h.state)+len(live) > 0 {
			r.t.Errorf("%s has %v, etcd has %v; its calls:\n%s", h.name, h.state, live, strings.Join(h.calls, "\n"))
		}
		h.take()
		h.want(r.t)
	}
	byKey := func(objs []any, err error) map[string]string {
		if err != nil {
			r.t.Error(err)
		}
		state := map[string]string{}
		for _, obj := range objs {
			key, value := keyAndState(obj)
			state[key] = value
		}
		return state
	}
	if got := byKey(r.in.GetStore().List(), nil); !maps.Equal(got, live) {
		r.t.Errorf("store has %v, etcd has %v", got, live)
	}
	if got := byKey(r.in.GetIndexer().ByIndex("value", "last")); !maps.Equal(got, live) {
		r.t.Errorf("index has %v, etcd has %v", got, live)
	}
}
