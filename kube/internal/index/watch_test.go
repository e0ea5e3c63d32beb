package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"sync"
	"testing"

	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// watcher is a cursor that reads the events of a selector.
type watcher struct {
	*mirror.Cursor
	sel     objects.Selector
	end     func() // nil: as Follow returns it
	changed <-chan struct{}
}

// follow begins a watch of all pods after a revision.
func (f *fixture) follow(t testing.TB, rev mirror.Revision, pred storage.SelectionPredicate) *watcher {
	t.Helper()
	c, err := f.Resource.CursorAfter(rev, podtest.Root, podtest.Root[:len(podtest.Root)-1]+"0")
	testcheck.NoError(t, err)
	w := &watcher{Cursor: c, sel: f.View.CurrentGeneration().Selector(pred)}
	w.end = f.s.Follow(c, &w.sel, true)
	t.Cleanup(w.Unfollow)
	return w
}

// read returns the due events.
func (w *watcher) read(t testing.TB) []*mirror.Event {
	t.Helper()
	w.changed = w.Changed()
	events, err := w.Next(nil, 1000)
	testcheck.NoError(t, err)
	return events
}

// reach reads events until the cursor has passed the revision.
func (w *watcher) reach(t testing.TB, rev mirror.Revision) (events []*mirror.Event) {
	t.Helper()
	podtest.Eventually(t, "the watch passes the event", func() bool {
		events = append(events, w.read(t)...)
		return w.Position() >= rev
	})
	return events
}

// requireWoken fails unless the watch was woken since its last read. The event is readable before
// the watch is woken.
func (w *watcher) requireWoken(t testing.TB, what string) {
	t.Helper()
	select {
	case <-w.changed:
		w.read(t)
	case <-podtest.Context(t).Done():
		t.Fatalf("%s was not woken", what)
	}
}

// requireAsleep fails if the watch was woken before it passed the revision.
func (w *watcher) requireAsleep(t testing.TB, what string, rev mirror.Revision) {
	t.Helper()
	changed := w.changed
	w.reach(t, rev)
	select {
	case <-changed:
		t.Errorf("%s was woken", what)
	default:
	}
}

// lines describes the events that the selector selects.
func (w *watcher) lines(t testing.TB, events []*mirror.Event) (lines []string) {
	t.Helper()
	for _, ev := range events {
		before, now, err := w.sel.MatchesEvent(t.Context(), ev)
		testcheck.NoError(t, err)
		if before || now {
			lines = append(lines, fmt.Sprintf("%s@%d %t %t", ev.Key(), ev.Rev, before, now))
		}
	}
	return lines
}

// TestFollow_ByField_EqualsWatchOfAllEvents: watches of the pods of a node start, at the present
// and in the past, while pods are created, deleted and moved between nodes; each gets exactly the
// selected events of all.
func TestFollow_ByField_EqualsWatchOfAllEvents(t *testing.T) {
	f := newFixture(t)
	nodes := []string{"", "a", "b", "ab", "c"}
	begin := f.Put(t, podOn("first", "a"))
	f.CatchUp(t)
	seed := testseed.New(t)
	var writing sync.WaitGroup
	writing.Go(func() {
		rnd := rand.New(rand.NewPCG(seed, 0))
		for range 2000 {
			pod := podOn(fmt.Sprintf("pod-%02d", rnd.IntN(40)), nodes[rnd.IntN(len(nodes))])
			if rnd.IntN(5) == 0 {
				f.Etcd.Delete(podtest.Key(pod))
			} else {
				f.Put(t, pod)
			}
		}
	})
	type started struct {
		*watcher
		rev    mirror.Revision
		events []*mirror.Event
	}
	var watches []*started
	rnd := rand.New(rand.NewPCG(seed, 1))
	for i := range 100 {
		rev := begin
		if published := f.Mirror.PublishedRevision(); i%3 > 0 && published > begin {
			rev += rnd.Int64N(published - begin)
		}
		w := &started{watcher: f.follow(t, rev, onNode(t, nodes[i%len(nodes)])), rev: rev}
		w.events = w.read(t)
		watches = append(watches, w)
	}
	writing.Wait()
	for i, node := range nodes { // each watch has an event, also if it began late
		f.Put(t, podOn(fmt.Sprint("last-", i), node))
	}
	last := f.Etcd.Revision()
	f.CatchUp(t)
	for _, w := range watches {
		got := w.lines(t, append(w.events, w.reach(t, last)...))
		if want := w.lines(t, f.EventsAfter(t, w.rev)); !slices.Equal(got, want) || len(want) == 0 {
			t.Errorf("after %d of %s: %d events, want %d:\n%v\n%v", w.rev, w.sel.Predicate.Field, len(got), len(want), got, want)
		}
	}
}

// TestFollow_PodMoves_WakesBothNodesOnly: an event is read by the watches of the node that the pod
// leaves, and of the node that it moves to; no other watch is woken, or reads the event.
func TestFollow_PodMoves_WakesBothNodesOnly(t *testing.T) {
	f := newFixture(t)
	rev := f.Put(t, podOn("pod", "a"))
	f.CatchUp(t)
	var others []*watcher
	for i := range 100 {
		w := f.follow(t, rev, onNode(t, fmt.Sprint("other-", i)))
		if events := w.read(t); len(events) > 0 {
			t.Fatalf("%v", events)
		}
		others = append(others, w)
	}
	a, b := f.follow(t, rev, onNode(t, "a")), f.follow(t, rev, onNode(t, "b"))
	changed := f.Put(t, podOn("pod", "a"))
	moved := f.Put(t, podOn("pod", "b"))
	gone := f.Etcd.Delete(podtest.Key(podOn("pod", "b")))
	f.CatchUp(t)
	key := podtest.Key(podOn("pod", "a"))
	for _, w := range []struct {
		*watcher
		want []string
	}{
		{a, []string{fmt.Sprintf("%s@%d true true", key, changed), fmt.Sprintf("%s@%d true false", key, moved)}},
		{b, []string{fmt.Sprintf("%s@%d false true", key, moved), fmt.Sprintf("%s@%d true false", key, gone)}},
	} {
		if got := w.lines(t, w.reach(t, gone)); !slices.Equal(got, w.want) {
			t.Errorf("%s: %v, want %v", w.sel.Predicate.Field, got, w.want)
		}
	}
	for i, w := range others {
		select {
		case <-w.changed:
			t.Errorf("the watch of node other-%d was woken", i)
		default:
		}
		if events := w.reach(t, gone); len(events) > 0 {
			t.Errorf("the watch of node other-%d has %d events", i, len(events))
		}
	}
}

// TestFollow_UndecodableEvent_ReachesAllWatches: each watch reads it, and can retry to decode it.
func TestFollow_UndecodableEvent_ReachesAllWatches(t *testing.T) {
	f := newFixture(t, podtest.NewSwappable(podtest.Encryption(t, "1")).With)
	rev := f.Etcd.Put(podtest.Prefix+"something", "else")
	f.CatchUp(t)
	a, b := f.follow(t, rev, onNode(t, "a")), f.follow(t, rev, onNode(t, "b"))
	last := f.Seal(t, podtest.Encryption(t, "2"), podOn("unreadable", "a"))
	f.CatchUp(t)
	for _, w := range []*watcher{a, b} {
		if events := w.reach(t, last); len(events) != 1 {
			t.Errorf("%s: %d events, want the one that cannot be decoded", w.sel.Predicate.Field, len(events))
		}
	}
}

// TestFollow_MoreLabelsThanBound_ReadsEveryEvent: watches by a few labels are woken by the events
// of their values only, further ones by every event, until the others end.
func TestFollow_MoreLabelsThanBound_ReadsEveryEvent(t *testing.T) {
	f := newFixture(t)
	rev := f.Put(t, podtest.Pod("pod"))
	f.CatchUp(t)
	open := func(label string) *watcher {
		t.Helper()
		w := f.follow(t, rev, podtest.Selecting(t, label+"=x", ""))
		w.reach(t, rev)
		return w
	}
	stop := func(w *watcher) {
		w.Unfollow()
		w.end()
	}
	var watches []*watcher
	for n := range maxWatchedLabels + 1 {
		watches = append(watches, open(fmt.Sprint("label-", n)))
	}
	again := open("label-0") // shares the index
	if n := f.unindexed.Load(); n != 1 {
		t.Errorf("%d watches are counted as not indexed, want 1", n)
	}
	rev = f.Put(t, podtest.Pod("pod"))
	f.CatchUp(t)
	for n, w := range watches[:maxWatchedLabels] {
		w.requireAsleep(t, fmt.Sprintf("the watch by label %d", n+1), rev)
	}
	watches[maxWatchedLabels].requireWoken(t, "the watch by one label too many")
	again.requireAsleep(t, "the second watch by the first label", rev)
	stop(watches[0]) // again still needs the index
	beyond := open("label-beyond")
	stop(again)
	last := open("label-last")
	rev = f.Put(t, podtest.Pod("pod"))
	f.CatchUp(t)
	beyond.requireWoken(t, "the watch that began before an index was free")
	last.requireAsleep(t, "the watch that began after it", rev)
	f.Put(t, podtest.Labelled("pod", "label-last", "x"))
	last.requireWoken(t, "the watch of a label with an event of its value")
}

// TestFollow_Shards_ReadOnlyTheirEvents: an event is read by the watches of its shard only, and is
// counted for each other watch as upstream counts it. Ended watches are forgotten.
func TestFollow_Shards_ReadOnlyTheirEvents(t *testing.T) {
	for _, field := range []string{uidField, namespaceShard} {
		f := newFixture(t)
		rev := f.Etcd.Put(podtest.Prefix+"something", "else")
		f.CatchUp(t)
		var watches [4]*watcher
		for i := range watches {
			_, set := shardOf(t, field, i, len(watches))
			c, err := f.Resource.CursorAfter(rev, "", "")
			testcheck.NoError(t, err)
			watches[i] = &watcher{Cursor: c, sel: objects.Selector{Generation: f.View.CurrentGeneration(), Predicate: storage.Everything, Plain: true, Shard: set}}
			watches[i].end = f.s.Follow(c, &watches[i].sel, true)
		}
		const n = 20
		want := map[string]int{}
		for i := range n {
			pod := podtest.Pod(fmt.Sprint("pod-", i))
			pod.Namespace = fmt.Sprint(i, "-ns")
			pod.UID = types.UID(fmt.Sprint(i, "-uid"))
			for shard := range watches {
				sel, _ := shardOf(t, field, shard, len(watches))
				if ok, err := sel.Matches(pod); err != nil {
					t.Fatal(err)
				} else if ok {
					want[podtest.Key(pod)] = shard
				}
			}
			f.Put(t, pod)
		}
		last := f.Etcd.Revision()
		f.CatchUp(t)
		read := 0
		for i, w := range watches {
			for _, ev := range w.reach(t, last) {
				if read++; want[ev.Key()] != i {
					t.Errorf("%s: shard %d has read %s of shard %d", field, i, ev.Key(), want[ev.Key()])
				}
			}
		}
		if shards := slices.Collect(maps.Values(want)); slices.Min(shards) == slices.Max(shards) {
			t.Fatalf("%s: all pods are of one shard", field)
		}
		if filtered := f.filtered.Load(); read != n || filtered != n*int64(len(watches)-1) {
			t.Errorf("%s: %d events were read, want %d; %d are counted as filtered, want %d", field, read, n, filtered, n*(len(watches)-1))
		}
		of := f.s.watchesBy(watches[0].sel.Shard.Key)
		for _, w := range watches {
			w.Unfollow()
			w.end()
		}
		if of.all != 0 || len(of.bySet) != 0 {
			t.Errorf("%s: %d ended watches of %d sets are held", field, of.all, len(of.bySet))
		}
	}
}

// TestFollow_ShardOfNamespace_FollowsItsKeys: a watch of a part of the resource does not join the
// watches of shards.
func TestFollow_ShardOfNamespace_FollowsItsKeys(t *testing.T) {
	f := newFixture(t)
	rev := f.Etcd.Put(podtest.Prefix+"something", "else")
	f.CatchUp(t)
	_, set := shardOf(t, uidField, 0, 2)
	c, err := f.Resource.CursorAfter(rev, podtest.Root+"ns/", podtest.Root+"ns0")
	testcheck.NoError(t, err)
	defer c.Unfollow()
	sel := objects.Selector{Generation: f.View.CurrentGeneration(), Predicate: storage.Everything, Plain: true, Shard: set}
	if f.s.Follow(c, &sel, false) != nil {
		t.Error("a watch of a namespace follows the events of all of them")
	}
	other := podtest.Pod("other")
	other.Namespace = "other"
	last := f.Put(t, podtest.Pod("pod"), other)
	f.CatchUp(t)
	w := &watcher{Cursor: c, sel: sel}
	if events := w.reach(t, last); len(events) != 1 || events[0].Key() != podtest.Key(podtest.Pod("pod")) {
		t.Errorf("%d events, want the one of the namespace", len(events))
	}
}
