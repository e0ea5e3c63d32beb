package restart

import (
	"context"
	"fmt"
	"regexp"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
)

// The resources that informers follow with selectors.
var (
	gizmos = schema.GroupVersionResource{Group: gizmoGroup, Version: "v1", Resource: "gizmos"}
	maps   = informer.Core("configmaps")
	others = informer.Core("secrets")
	pods   = informer.Core("pods")
)

// follows returns the objects of n informers: resources with many and without any writes, all
// objects and selective selectors, full objects and metadata only.
func follows(n int) []informer.Follow {
	var all []informer.Follow
	for i := range n {
		k := i / 15 // index within its kind
		all = append(all, [...]informer.Follow{
			{GroupVersionResource: maps},
			{GroupVersionResource: maps, Labels: "shard=" + shard(k)},
			{GroupVersionResource: maps, Labels: "shard notin (" + shard(k) + ")"},
			{GroupVersionResource: maps, Namespace: namespace(k)},
			{GroupVersionResource: maps, Namespace: namespace(k), Fields: fmt.Sprintf("metadata.name=seed-%d", k)},
			{GroupVersionResource: maps, Labels: "shard=" + shard(k), Metadata: true},
			{GroupVersionResource: others},
			{GroupVersionResource: others, Labels: "shard=" + shard(k)},
			{GroupVersionResource: others, Metadata: true},
			{GroupVersionResource: informer.Core("limitranges")},
			{GroupVersionResource: pods, Fields: "spec.nodeName=" + node(k%30)},
			{GroupVersionResource: pods, Fields: "spec.nodeName=" + node((k+15)%30)},
			{GroupVersionResource: gizmos},
			{GroupVersionResource: gizmos, Labels: "shard=" + shard(k)},
			{GroupVersionResource: gizmos, Labels: "shard=" + shard(k), Metadata: true},
		}[i%15])
	}
	return all
}

const (
	informerCount      = 300
	informersPerClient = 5 // that share a connection, like those of one controller
	restartTestTimeout = 12 * time.Minute

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

// newFleet returns informers of the first server.
func (s *scene) newFleet(t *testing.T, all []informer.Follow) (fleet informer.Fleet) {
	t.Helper()
	perConnection := harness.Pick(informersPerClient, longPerClient)
	var clients informer.Clients
	for i, follow := range all {
		if i%perConnection == 0 {
			config := s.config()
			if harness.Long() {
				config = oneConnection(t, config)
			}
			clients = informer.NewClients(t, config)
		}
		fleet = append(fleet, informer.New(clients, follow))
	}
	return fleet
}

// outcomeOf returns the counts of informers since the start of the restarts.
func outcomeOf(fleet informer.Fleet, before []informer.Counts) outcome {
	o := outcome{byFollow: map[string]int{}}
	for n, counts := range fleet.Counts() {
		i, counts := fleet[n], counts.Since(before[n])
		if counts.Lists > 0 {
			o.lists += counts.Lists
			o.byFollow[fmt.Sprintf("%s labels=%v fields=%v metadata=%v", i.Resource, i.Labels != "", i.Fields != "", i.Metadata)]++
		}
		o.gone += counts.Gone
	}
	return o
}

// relisted returns the number of informers that have relisted.
func (o outcome) relisted() (n int) {
	for _, informers := range o.byFollow {
		n += informers
	}
	return n
}

// logErrors writes the errors of requests to the test's log.
func logErrors(t *testing.T, fleet informer.Fleet) {
	t.Helper()
	kinds := map[string]int{}
	for text, n := range fleet.Errors() {
		kinds[number.ReplaceAllString(text, "N")] += n
	}
	for text, n := range kinds {
		t.Logf("%d times: %s", n, text)
	}
}

var number = regexp.MustCompile(`[0-9]+`)

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
			all = append(all, informer.Follow{GroupVersionResource: pods, Fields: "spec.nodeName=" + node(i)})
		}
	}
	fleet := s.newFleet(t, all)
	fleet.Start(t, ctx)

	t.Run("gates on", func(t *testing.T) {
		o := s.restartUnder(t, ctx, fleet, func(w *writers, seen func(string)) {
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
		o := s.restartUnder(t, ctx, fleet, func(w *writers, seen func(string)) {
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
func (s *scene) restartUnder(t *testing.T, ctx context.Context, fleet informer.Fleet,
	restarts func(w *writers, seen func(string))) outcome {
	t.Helper()
	began := time.Now()
	step := func(name string) {
		t.Helper()
		t.Logf("%5.1f s: %s", time.Since(began).Seconds(), name)
	}
	before := fleet.Counts()
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
	fleet.AwaitSettled(t, ctx)
	step(fmt.Sprintf("%d informers watch", len(fleet)))
	seen := func(name string) {
		t.Helper()
		fleet.AwaitSettled(t, ctx)
		o := outcomeOf(fleet, before)
		step(fmt.Sprintf("%s: %d informers have listed again (%d lists), %d answers were 410; %d writes, %d failed",
			name, o.relisted(), o.lists, o.gone, w.writes.Load(), w.failed.Load()))
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
	fleet.AwaitEqual(t, ctx, s.etcd.Client())
	seen("all informers have the state of etcd")
	fleet.RequireHistory(t, ctx, s.history)

	o, now := outcomeOf(fleet, before), s.audit(t)
	logErrors(t, fleet)
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
