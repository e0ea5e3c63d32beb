package restart

import (
	"context"
	"errors"
	"fmt"
	"regexp"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/watchcheck"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// follows returns the objects of n informers: resources with many and without any writes, all
// objects and selective selectors, full objects and metadata only.
func follows(n int) []follow {
	var all []follow
	for i := range n {
		k := i / 15 // index within its kind
		all = append(all, [...]follow{
			{resource: "configmaps"},
			{resource: "configmaps", labels: "shard=" + shard(k)},
			{resource: "configmaps", labels: "shard notin (" + shard(k) + ")"},
			{resource: "configmaps", namespace: namespace(k)},
			{resource: "configmaps", namespace: namespace(k), fields: fmt.Sprintf("metadata.name=seed-%d", k)},
			{resource: "configmaps", labels: "shard=" + shard(k), metadata: true},
			{resource: "secrets"},
			{resource: "secrets", labels: "shard=" + shard(k)},
			{resource: "secrets", metadata: true},
			{resource: "limitranges"},
			{resource: "pods", fields: "spec.nodeName=" + node(k%30)},
			{resource: "pods", fields: "spec.nodeName=" + node((k+15)%30)},
			{resource: "gizmos"},
			{resource: "gizmos", labels: "shard=" + shard(k)},
			{resource: "gizmos", labels: "shard=" + shard(k), metadata: true},
		}[i%15])
	}
	return all
}

const (
	informerCount      = 300
	informersPerClient = 5 // that share a connection, like those of one controller
	restartTestTimeout = 12 * time.Minute
	equalWithin        = 90 * time.Second

	// The long form also has a watcher of the pods of each node, reads of one object, and
	// compactions.
	longPerClient      = 50
	longReaders        = 4
	compactionInterval = 30 * time.Second
)

// outcome has the counts of the clients' requests and errors between two moments.
type outcome struct {
	lists, gone int
	byFollow    map[string]int // lists
}

// fleet is all informers of a test.
type fleet struct {
	informers []*informer
	before    []int64 // lists of each informer at the start of the restarts
}

// startFleet starts informers and returns when all have synced.
func (s *scene) startFleet(t *testing.T, ctx context.Context, all []follow) *fleet {
	t.Helper()
	perConnection := informersPerClient
	if harness.Long() {
		perConnection = longPerClient
	}
	f := &fleet{}
	var c clients
	for i, follow := range all {
		if i%perConnection == 0 {
			config := s.config()
			if harness.Long() {
				config = oneConnection(t, config)
			}
			c = newClients(t, config)
		}
		f.informers = append(f.informers, newInformer(t, c, follow))
	}
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	t.Cleanup(func() { cancel(); running.Wait() })
	for _, i := range f.informers {
		running.Go(func() { i.RunWithContext(ctx) })
	}
	for _, i := range f.informers {
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			return i.HasSynced(), fmt.Errorf("the informer of %v has not synced: %v", i.follow, i.errs)
		}))
	}
	return f
}

// settle returns when all informers are settled.
func (f *fleet) settle(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for _, i := range f.informers {
			if !i.settled() {
				return false, fmt.Errorf("the informer of %v has no settled watch: %v", i.follow, i.errs)
			}
		}
		return true, nil
	}))
}

// outcome returns the counts since the start of the restarts.
func (f *fleet) outcome() outcome {
	o := outcome{byFollow: map[string]int{}}
	for n, i := range f.informers {
		if lists := int(i.lists.Load() - f.before[n]); lists > 0 {
			o.lists += lists
			o.byFollow[fmt.Sprintf("%s labels=%v fields=%v metadata=%v", i.resource, i.labels != "", i.fields != "", i.metadata)]++
		}
		o.gone += int(i.gone.Load())
		for _, err := range i.sessions.Errors() {
			if isGone(err) {
				o.gone++
			}
		}
	}
	return o
}

// relisted returns the number of informers that have relisted.
func (f *fleet) relisted() (n int) {
	for k, i := range f.informers {
		if i.lists.Load() > f.before[k] {
			n++
		}
	}
	return n
}

// logErrors writes the errors of requests to the test's log.
func (f *fleet) logErrors(t *testing.T) {
	t.Helper()
	all := map[string]int{}
	for _, i := range f.informers {
		i.mu.Lock()
		for text, n := range i.errs {
			all[text] += n
		}
		i.mu.Unlock()
		for _, err := range i.sessions.Errors() {
			all["in a watch: "+err.Error()]++
		}
	}
	kinds := map[string]int{}
	for text, n := range all {
		kinds[number.ReplaceAllString(text, "N")] += n
	}
	for text, n := range kinds {
		t.Logf("%d times: %s", n, text)
	}
}

var number = regexp.MustCompile(`[0-9]+`)

// equal returns when every informer's store equals etcd. A write that a client has canceled may
// still reach etcd, so etcd is read each time.
func (s *scene) equal(t *testing.T, ctx context.Context, f *fleet) {
	t.Helper()
	ctx, cancel := context.WithTimeoutCause(ctx, equalWithin, errors.New("informers differ from etcd"))
	defer cancel()
	client := s.etcd.Client()
	selects := make([]watchcheck.Select, len(f.informers))
	for n, i := range f.informers {
		selects[n] = i.selects(t)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		stored := map[string]map[string]recorded.Item{}
		var faults []error
		for n, i := range f.informers {
			if stored[i.resource] == nil {
				items, _, err := recorded.Stored(ctx, client, under(i.resource))
				if err != nil {
					return false, err
				}
				stored[i.resource] = items
			}
			want := map[string]int64{}
			for key, item := range stored[i.resource] {
				if key = key[len(under(i.resource)):]; selects[n](key, item.Object) {
					want[key] = item.Revision
				}
			}
			if err := i.differs(want); err != nil {
				faults = append(faults, err)
			}
		}
		if len(faults) > 0 {
			return false, fmt.Errorf("%d of %d informers; the first: %w", len(faults), len(f.informers), faults[0])
		}
		return true, nil
	}))
}

// validate checks all events of the informers against the history. Their stores are already known
// to be complete.
func (s *scene) validate(t *testing.T, ctx context.Context, f *fleet) {
	t.Helper()
	history, err := s.history.Now(ctx)
	harness.Check(t, err)
	type view struct {
		*watchcheck.View
		last int64
	}
	parts := map[string]*watchcheck.History{}
	views := map[follow]view{}
	events, sessions, bookmarks, wrong := 0, 0, 0, 0
	for _, i := range f.informers {
		part := parts[i.resource]
		if part == nil {
			part = history.Under(under(i.resource))
			parts[i.resource] = part
		}
		same := i.follow
		same.metadata = false
		v, ok := views[same]
		if !ok {
			v.View = part.View(i.selects(t))
			v.last = part.From
			if n := len(part.Changes); n > 0 {
				v.last = part.Changes[n-1].Revision
			}
			views[same] = v
		}
		got, err := i.sessions.Recorded(v.last)
		harness.Check(t, err)
		for _, session := range got {
			for _, e := range session.Events {
				if e.Kind == watchcheck.Bookmark {
					bookmarks++
				} else {
					events++
				}
			}
		}
		sessions += len(got)
		if err := v.Check(got); err != nil {
			if wrong++; wrong <= 5 {
				t.Errorf("the informer of %v: %v", i.follow, err)
			}
		}
	}
	t.Logf("%d changes in etcd; %d informers got %d events and %d bookmarks in %d watches", len(history.Changes), len(f.informers), events, bookmarks, sessions)
	if wrong > 0 {
		t.Errorf("%d of %d informers were sent something wrong", wrong, len(f.informers))
	}
}

// TestRollingRestart_InformersDoNotRelist restarts the servers one after the other, all at once,
// and all at once by SIGKILL, while 300 informers and several writers run. No informer relists,
// gets a 410 or misses an event. A last restart, with the gates off, shows that this test can fail.
func TestRollingRestart_InformersDoNotRelist(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, restartTestTimeout)
	s := newScene(t, ctx)
	s.seed(t, ctx)
	all := follows(informerCount)
	if harness.Long() {
		for i := range nodes() {
			all = append(all, follow{resource: "pods", fields: "spec.nodeName=" + node(i)})
		}
	}
	f := s.startFleet(t, ctx, all)

	t.Run("gates on", func(t *testing.T) {
		o := s.restartUnder(t, ctx, f, func(w *writers, seen func(string)) {
			for i := range s.servers {
				s.restartOne(t, i)
				seen(fmt.Sprintf("server %d was restarted by SIGTERM", i))
			}
			s.restartAll(t, ctx, false)
			seen("all servers were restarted by SIGTERM")
			w.await(t, ctx, harness.Pick[int64](300, 3000)) // writes since the bookmarks of SIGTERM
			s.restartAll(t, ctx, true)
			seen("all servers were killed and started again")
		})
		switch {
		case harness.Engine() != harness.Strata && o.lists == 0:
			t.Error("no informer relisted: the detection is broken")
		case harness.Engine() == harness.Strata && (o.lists > 0 || o.gone > 0):
			t.Errorf("informers relisted %d times and got 410 %d times, want 0: %v", o.lists, o.gone, o.byFollow)
		}
	})
	t.Run("gates off", func(t *testing.T) {
		harness.OnlyStrata(t)
		o := s.restartUnder(t, ctx, f, func(w *writers, seen func(string)) {
			s.restartAll(t, ctx, false, noGates)
			seen("all servers were restarted with the gates off")
			if harness.Long() {
				s.restartAll(t, ctx, true)
				seen("all servers were killed and started again")
			}
		})
		if o.lists == 0 {
			t.Error("no informer relisted with the gates off: the detection is broken")
		}
	})
}

// restartUnder restarts the servers by restarts, under informers and writers, and returns the
// outcome. restarts calls its function after each restart. In any case the informers' stores equal
// etcd in the end, and all their events were correct.
func (s *scene) restartUnder(t *testing.T, ctx context.Context, f *fleet,
	restarts func(w *writers, seen func(string))) outcome {
	t.Helper()
	began := time.Now()
	step := func(name string) {
		t.Helper()
		t.Logf("%5.1f s: %s", time.Since(began).Seconds(), name)
	}
	f.before = nil
	for _, i := range f.informers {
		f.before = append(f.before, i.lists.Load())
	}
	audited := s.audit(t)
	w := s.startWriters(t, ctx)
	var unexpected atomic.Int64
	if harness.Long() {
		for range longReaders {
			w.readOften(s, ctx, &unexpected)
		}
		// one more after the last restart
		harness.Check(t, awaitCompactions(ctx, s.etcd.Client(), 1))
	}
	f.settle(t, ctx)
	step(fmt.Sprintf("%d informers watch", len(f.informers)))
	seen := func(name string) {
		t.Helper()
		f.settle(t, ctx)
		o := f.outcome()
		step(fmt.Sprintf("%s: %d informers have listed again (%d lists), %d answers were 410; %d writes, %d failed",
			name, f.relisted(), o.lists, o.gone, w.writes.Load(), w.failed.Load()))
	}
	restarts(w, seen)
	if harness.Long() {
		harness.Check(t, awaitCompactions(ctx, s.etcd.Client(), 1))
		seen("etcd was compacted again")
	}
	w.end()
	if n := unexpected.Load(); n > 0 {
		t.Errorf("%d reads of objects that exist failed", n)
	}
	s.equal(t, ctx, f)
	seen("all informers have the state of etcd")
	s.validate(t, ctx, f)

	o, now := f.outcome(), s.audit(t)
	f.logErrors(t)
	if lists := now.lists - audited.lists; lists != o.lists {
		// A request that did not reach a server, or was repeated, makes the counts differ: both
		// have to be zero, or neither.
		t.Logf("servers received %d lists, informers sent %d", lists, o.lists)
		if (lists == 0) != (o.lists == 0) {
			t.Errorf("servers received %d lists, informers sent %d: %v", lists, o.lists, now.paths)
		}
	}
	if gone := now.gone - audited.gone; gone > 0 {
		t.Logf("servers answered with 410 %d times", gone)
		o.gone = max(o.gone, gone)
	}
	step(fmt.Sprintf("audited: %d watches, answers %v", now.watches-audited.watches, now.codes))
	return o
}
