package kubestorage

import (
	"context"
	"encoding/json"
	"fmt"
	"hash/fnv"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"
	cachermetrics "k8s.io/apiserver/pkg/storage/cacher/metrics"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/metrics/testutil"

	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// lossy is a source whose watches lose every change while it is armed.
type lossy struct {
	driver.Source
	armed atomic.Bool
	keys  atomic.Int64 // requested without values
	hang  bool         // such requests are not answered
	hung  atomic.Int64 // unanswered requests
	each  func()       // called before each page of them; nil: no call
}

func (l *lossy) through(o *options) {
	o.source = func(etcd driver.Source) driver.Source { l.Source = etcd; return l }
}

func (l *lossy) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	return l.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		if l.armed.Load() {
			b.Changes = nil
		}
		return deliver(b)
	})
}

func (l *lossy) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	if l.each != nil {
		l.each()
	}
	if l.hang {
		l.hung.Add(1)
		<-ctx.Done()
		return driver.Header{}, ctx.Err()
	}
	return l.Source.Keys(ctx, prefix, at, most, func(kvs []driver.KV) error {
		l.keys.Add(int64(len(kvs)))
		return page(kvs)
	})
}

// lose calls do, whose changes memory does not receive, and returns when memory's revision is
// later.
func (l *lossy) lose(t *testing.T, f *fixture, do func()) {
	t.Helper()
	f.catchUp(t)
	l.armed.Store(true)
	do()
	f.catchUp(t)
	l.armed.Store(false)
}

// counts returns the number of checks of a resource by outcome.
func counts(t *testing.T, r schema.GroupResource) (success, failure, failed int) {
	t.Helper()
	for status, n := range map[string]*int{"success": &success, "failure": &failure, "error": &failed} {
		v, err := testutil.GetCounterMetricValue(cachermetrics.StorageConsistencyCheckTotal.WithLabelValues(r.Group, r.Resource, status))
		if err != nil {
			t.Fatal(err)
		}
		*n = int(v)
	}
	return
}

// asEngine returns an engine with the fixture's cluster, for its reports.
func asEngine(f *fixture) *Engine { return &Engine{clusters: map[string]*cluster{"": f.cluster}} }

// onDemand disables the schedule of checks.
func onDemand(o *options) { o.engine.ConsistencyCheckInterval = -1 }

// checkedPods is a resource with the pods a, b and c, compared with etcd on demand.
type checkedPods struct {
	f        *fixture
	feed     *lossy
	resource schema.GroupResource
	pods     []*example.Pod
	log      syncBuffer
}

func newCheckedPods(t *testing.T) *checkedPods {
	t.Helper()
	c := &checkedPods{feed: &lossy{}, resource: schema.GroupResource{Group: "consistency", Resource: "checked"}}
	c.f = setup(t, c.feed.through, onDemand, func(o *options) {
		o.store.GroupResource = c.resource
		o.engine.Logger = slog.New(slog.NewTextHandler(&c.log, nil))
	})
	c.pods = c.f.create(t, newPod("a"), newPod("b"), newPod("c"))
	c.f.catchUp(t)
	return c
}

func (c *checkedPods) check(t *testing.T) consistency.Result {
	t.Helper()
	all, err := c.f.cluster.checker.Check(contextFor(t), &c.resource)
	if err != nil || len(all) != 1 {
		t.Fatalf("%+v, %v", all, err)
	}
	return all[0]
}

// loseChanges creates a pod, deletes a and changes b in etcd. Memory receives none of these events.
func (c *checkedPods) loseChanges(t *testing.T) {
	t.Helper()
	c.feed.lose(t, c.f, func() {
		c.f.create(t, newPod("lost"))
		if err := c.f.Delete(contextFor(t), podKey(c.pods[0]), &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
			t.Fatal(err)
		}
		c.f.update(t, c.pods[1], "1")
	})
	if got := podNames(c.f.list(t, everything())); got != "a b c" {
		t.Fatalf("no event was lost: %s", got)
	}
}

// requireMismatch fails unless the result and the log report the three lost changes and the repair.
func (c *checkedPods) requireMismatch(t *testing.T, got consistency.Result) {
	t.Helper()
	ns := c.pods[0].Namespace + "/"
	if got.Status != consistency.Failure || !got.Repaired || got.Differences != 3 || !slices.Equal(got.Missing, []string{ns + "lost"}) ||
		!slices.Equal(got.Extra, []string{ns + "a"}) || !slices.Equal(got.Differing, []string{ns + "b"}) || got.Hash == got.EtcdHash || got.EtcdHash == "" {
		t.Fatalf("%+v", got)
	}
	for _, want := range []string{ns + "lost", ns + "a", ns + "b", "level=ERROR", got.EtcdHash} {
		if !strings.Contains(c.log.String(), want) {
			t.Errorf("the log lacks %q: %s", want, c.log.String())
		}
	}
}

// requireExpired fails unless the watch ends, with no event but an expired error.
func requireExpired(t *testing.T, w watch.Interface) {
	t.Helper()
	for ev := range w.ResultChan() { // closed after the last event
		if st, ok := ev.Object.(*metav1.Status); ev.Type == watch.Error && (!ok || st.Reason != metav1.StatusReasonExpired) {
			t.Errorf("the watch ended with %v", ev.Object)
		} else if ev.Type != watch.Error {
			t.Errorf("the watch received %v", ev.Object)
		}
	}
}

// listExactly returns the pods at the resource version, and whether they were read from etcd
// because memory was inconsistent.
func (c *checkedPods) listExactly(t *testing.T, resourceVersion string) (names string, fromEtcd bool) {
	t.Helper()
	inconsistent := func() float64 {
		n, _ := series(t, "strata_lists_total", c.resource, "source", metrics.SourceEtcd, "reason", metrics.ReasonDifference)
		return n
	}
	opts := everything()
	opts.ResourceVersion, opts.ResourceVersionMatch = resourceVersion, metav1.ResourceVersionMatchExact
	before := inconsistent()
	names = podNames(c.f.list(t, opts))
	return names, inconsistent() == before+1
}

// TestConsistencyCheck_LostChanges_AreFoundAndRepaired: lost changes are found, logged, counted and
// repaired; lists of the past come from etcd until the next check finds no difference.
func TestConsistencyCheck_LostChanges_AreFoundAndRepaired(t *testing.T) {
	c := newCheckedPods(t)
	f, pods := c.f, c.pods
	success, failure, failed := counts(t, c.resource)
	if got := c.check(t); got.Status != consistency.Success || got.Keys != 3 || got.Hash == "" || got.EtcdHash != "" || got.Resource != "checked" {
		t.Fatalf("%+v", got)
	}
	w := f.watchPods(t, storage.ListOptions{Predicate: storage.Everything, Recursive: true, ResourceVersion: pods[2].ResourceVersion})
	c.loseChanges(t)
	c.requireMismatch(t, c.check(t))
	if s, fail, e := counts(t, c.resource); s != success+1 || fail != failure+1 || e != failed {
		t.Errorf("counted %d, %d, %d", s, fail, e)
	}
	requireExpired(t, w)
	if got := podNames(f.list(t, everything())); got != "b c lost" {
		t.Fatalf("the list has %s", got)
	}
	b := &example.Pod{}
	if err := f.Get(contextFor(t), podKey(pods[1]), storage.GetOptions{ResourceVersion: "0"}, b); err != nil || b.Annotations["value"] != "1" {
		t.Errorf("%v, %v", b.Annotations, err)
	}

	// Lists of the past, old and new, come from etcd; the present does not.
	now := f.list(t, everything()).ResourceVersion
	for _, want := range []struct{ rv, names string }{{pods[2].ResourceVersion, "a b c"}, {now, "b c lost"}} {
		if names, fromEtcd := c.listExactly(t, want.rv); names != want.names || !fromEtcd {
			t.Errorf("at %s: %s, from etcd: %t", want.rv, names, fromEtcd)
		}
	}
	if asked := f.requests.during(func() { f.list(t, everything()) }); asked.Ranges != 0 {
		t.Errorf("list of the latest state: requests to etcd %+v, want no ranges", asked)
	}
	if got := c.check(t); got.Status != consistency.Success {
		t.Fatalf("%+v", got)
	}
	if names, fromEtcd := c.listExactly(t, now); names != "b c lost" || fromEtcd {
		t.Errorf("after a clean check: %s, from etcd: %t", names, fromEtcd)
	}
}

// TestConsistencyCheck_Hash_IsOfKEP4988: the hash is KEP-4988's, of the objects of a list.
func TestConsistencyCheck_Hash_IsOfKEP4988(t *testing.T) {
	f := setup(t, onDemand)
	f.create(t, newPod("a"), newPod("b"), newPod("c"))
	f.catchUp(t)
	before := f.list(t, everything())
	f.update(t, &before.Items[0], "1")
	after := f.list(t, everything())
	for _, list := range []*example.PodList{before, after} {
		h := fnv.New64()
		for _, p := range list.Items {
			fmt.Fprintf(h, "%s/%s/%s", p.Namespace, p.Name, p.ResourceVersion)
		}
		rev := parseRevision(t, list.ResourceVersion)
		got := f.cluster.checker.Hashes(rev, nil)
		if want := fmt.Sprintf("%x", h.Sum64()); len(got) != 1 || got[0].Hash != want || got[0].Keys != 3 || got[0].Revision != rev {
			t.Errorf("at %d: %+v, want the hash %s", rev, got, want)
		}
	}
}

// TestConsistencyCheck_Schedule_IsOnePerResource: each resource is checked by one schedule, however
// many storages it has, until the last one is closed; with the gate off there are no checks.
func TestConsistencyCheck_Schedule_IsOnePerResource(t *testing.T) {
	f := setup(t, func(o *options) { o.engine.ConsistencyCheckInterval = 20 * time.Millisecond })
	s := f.engine(t)
	second := f.cluster.checker.Add(s.resource, s.group)
	k := f.cluster.checker
	if n := len(k.Hashes(0, nil)); n != 1 {
		t.Errorf("%d resources are checked", n)
	}
	before, _, _ := counts(t, s.group)
	eventually(t, "three checks", func() bool { n, _, _ := counts(t, s.group); return n >= before+3 })
	second()
	if n := len(k.Hashes(0, nil)); n != 1 {
		t.Errorf("%d resources are checked, though one storage is left", n)
	}
	f.destroy()
	if n := len(k.Hashes(0, nil)); n != 0 {
		t.Errorf("%d resources are checked after the last storage was destroyed", n)
	}
	k.Close() // returns

	gates := featuregate.NewFeatureGate()
	if err := gates.Add(Gates()); err != nil {
		t.Fatal(err)
	}
	if err := gates.SetFromMap(map[string]bool{string(DetectCacheInconsistency): false}); err != nil {
		t.Fatal(err)
	}
	l := &lossy{}
	off := setup(t, l.through, withGates(gates), func(o *options) { o.engine.ConsistencyCheckInterval = time.Millisecond })
	if _, err := off.cluster.checker.Check(contextFor(t), nil); err != consistency.ErrOff {
		t.Errorf("error %v", err)
	}
	off.create(t, newPod("a"))
	off.catchUp(t)
	if n := l.keys.Load(); n != 0 {
		t.Errorf("%d keys were requested, want 0", n)
	}
}

// TestConsistencyCheck_ConcurrentChanges_AreNoDifference: a compaction during a check makes it an
// error, and a change of all objects meanwhile is no difference.
func TestConsistencyCheck_ConcurrentChanges_AreNoDifference(t *testing.T) {
	l := &lossy{}
	f := setup(t, l.through, onDemand)
	k := f.cluster.checker
	pods := f.create(t, newPod("a"), newPod("b"))
	f.catchUp(t)
	change := func() {
		f.update(t, pods[0], fmt.Sprint(time.Now()))
		f.create(t, newPod(fmt.Sprintf("n%d", time.Now().UnixNano())))
	}
	var once sync.Once
	l.each = func() { once.Do(change) }
	all, err := k.Check(contextFor(t), nil)
	if err != nil || len(all) != 1 || all[0].Status != consistency.Success || all[0].Keys != 2 {
		t.Fatalf("%+v, %v", all, err)
	}
	f.catchUp(t)
	once = sync.Once{}
	l.each = func() {
		once.Do(func() {
			change()
			f.compact(contextFor(t), t, f.list(t, everything()).ResourceVersion)
		})
	}
	all, err = k.Check(contextFor(t), nil)
	if err != nil || len(all) != 1 || all[0].Status != consistency.Error || !strings.Contains(all[0].Error, "compacted") {
		t.Fatalf("%+v, %v", all, err)
	}
	if f.engine(t).resource.Inconsistent() {
		t.Error("the resource is inconsistent")
	}
}

// TestConsistencyCheck_EtcdHangs_ReturnsErrorInTime: a check on demand returns the error before its
// request ends and counts it; a second one in the remaining time sends no request to etcd.
func TestConsistencyCheck_EtcdHangs_ReturnsErrorInTime(t *testing.T) {
	l := &lossy{}
	of := schema.GroupResource{Group: "consistency", Resource: "hanging"}
	f := setup(t, l.through, onDemand, func(o *options) { o.store.GroupResource = of })
	k := f.cluster.checker
	f.create(t, newPod("a"))
	f.catchUp(t)
	l.hang = true
	// On a busy machine a check may not reach etcd in its time, or its result may come after the
	// request has ended: such an attempt shows nothing, and the next one has twice the time.
	for budget := 200 * time.Millisecond; ; budget *= 2 {
		ctx, cancel := context.WithTimeout(t.Context(), time.Second+budget)
		defer cancel()
		_, _, before := counts(t, of)
		asked := l.hung.Load()
		all, err := k.Check(ctx, nil)
		if l.hung.Load() == asked || ctx.Err() != nil {
			if budget > patience {
				t.Fatalf("no answer in %v: %+v, %v", budget, all, err)
			}
			continue
		}
		if err != nil || len(all) != 1 || all[0].Status != consistency.Error {
			t.Errorf("%+v, %v", all, err)
		}
		if _, _, n := counts(t, of); n != before+1 {
			t.Errorf("counted %d, want 1", n-before)
		}
		asked = l.hung.Load()
		if all, err = k.Check(ctx, nil); err != consistency.ErrLate || len(all) != 0 {
			t.Errorf("in the time left: %+v, %v", all, err)
		}
		if l.hung.Load() != asked {
			t.Error("etcd received a request in the remaining time")
		}
		return
	}
}

// TestConsistencyCheck_FailureWithEnvironmentSet_Panics if the environment variable requests it.
func TestConsistencyCheck_FailureWithEnvironmentSet_Panics(t *testing.T) {
	l := &lossy{}
	f := setup(t, l.through, onDemand)
	s := f.engine(t)
	l.lose(t, f, func() { f.create(t, newPod("lost")) })
	var failures []consistency.Result
	k := consistency.New(consistency.Options{Interval: -1, VerifiesVersions: f.cluster.mirror.VerifiesVersions,
		OnFailure: func(r consistency.Result) { failures = append(failures, r) }, Logger: slog.New(slog.DiscardHandler)})
	defer k.Close()
	defer k.Add(s.resource, s.group)()
	if _, err := k.Check(contextFor(t), nil); err != nil || len(failures) != 1 {
		t.Fatalf("%d failures, %v", len(failures), err)
	}
	t.Setenv(panicEnv, "true")
	defer func() {
		if p := fmt.Sprint(recover()); !strings.Contains(p, "KUBE_WATCHCACHE_CONSISTENCY_CHECKER") || !strings.Contains(p, "/lost") {
			t.Errorf("panic: %s", p)
		}
	}()
	onInconsistency(failures[0])
	t.Error("nothing has happened")
}

// TestConsistencyHandler_Requests_ReturnChecks sends the requests of operators and tests.
func TestConsistencyHandler_Requests_ReturnChecks(t *testing.T) {
	f := setup(t, onDemand)
	f.create(t, newPod("a"))
	f.catchUp(t)
	rv := f.list(t, everything()).ResourceVersion
	h := consistency.Handler(asEngine(f).Checkers)
	ask := func(method, query string, want int) (items []consistency.Result) {
		t.Helper()
		w := httptest.NewRecorder()
		h.ServeHTTP(w, httptest.NewRequest(method, consistency.Path+query, nil))
		if w.Code != want {
			t.Fatalf("%s %s: %d %s", method, query, w.Code, w.Body)
		}
		if want != http.StatusOK {
			return nil
		}
		var answer struct{ Items []consistency.Result }
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil || answer.Items == nil {
			t.Fatalf("%s %s: %s: %v", method, query, w.Body, err)
		}
		return answer.Items
	}
	if got := ask("GET", "", 200); len(got) != 0 {
		t.Errorf("before the first check: %+v", got)
	}
	made := ask("POST", "?resource=pods", 200)
	if len(made) != 1 || made[0].Status != consistency.Success || made[0].Keys != 1 {
		t.Errorf("%+v", made)
	}
	if got := ask("GET", "?resource=pods", 200); len(got) != 1 || got[0].Hash != made[0].Hash || got[0].Status != consistency.Success {
		t.Errorf("the last: %+v", got)
	}
	if got := ask("GET", "?revision="+rv, 200); len(got) != 1 || got[0].Hash != made[0].Hash || got[0].Status != "" {
		t.Errorf("the hash at %s: %+v", rv, got)
	}
	if got := ask("GET", "?revision=9999999", 200); len(got) != 1 || got[0].Hash != "" || got[0].Error == "" {
		t.Errorf("the hash of the future: %+v", got)
	}
	ask("GET", "?resource=unknown.group", 404)
	ask("GET", "?revision=x", 400)
	ask("GET", "?revision=0", 400)
	ask("POST", "?revision=1", 400)
	ask("DELETE", "", 405)
}
