package mirror

import (
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// lineageOf returns a lineage of n keys after the given number of events, one per revision after
// the first: writes, deletions and creations in turn. want contains the entries of each revision.
func lineageOf(t *testing.T, keys, events int) (l *lineage, want map[Revision][]*Entry) {
	t.Helper()
	name := func(i int) []byte { return []byte{'/', byte('a' + i/26), byte('a' + i%26)} }
	held := make([]*Entry, keys)
	for i := range held {
		held[i] = newEntry(&driver.KV{Key: name(i), CreateRevision: 1, ModRevision: 1, Version: 1}, true)
	}
	first := &version{rev: 1, tree: btree.Build(held)}
	l = newLineage(first, nil, nil, false)
	present := func() (all []*Entry) {
		for _, e := range held {
			if e != nil {
				all = append(all, e)
			}
		}
		return all
	}
	want = map[Revision][]*Entry{1: present()}
	tree := first.tree
	for n := range events {
		rev, i := Revision(n+2), n*7%keys
		e := &Event{Rev: rev, Prev: held[i]}
		if n%3 != 0 || held[i] == nil {
			e.Entry = newEntry(&driver.KV{Key: name(i), CreateRevision: 1, ModRevision: rev, Version: int64(n)}, true)
		}
		held[i] = e.Entry
		edit := tree.Edit()
		replace(edit, e.Prev, e.Entry)
		tree = edit.Tree()
		l.log.Append(e)
		want[rev] = present()
	}
	l.head.Store(&version{rev: Revision(events + 1), tree: tree, seq: l.log.End()})
	return l, want
}

func entriesOf(v *version) []*Entry { return slices.Collect(v.tree.All("", "")) }

// TestLineage_RollForwardOrBack_ReachesEveryRevision rolls forward and backward. It also shows that
// the comparison can fail: with a wrong Prev, the tree that is rolled backward differs.
func TestLineage_RollForwardOrBack_ReachesEveryRevision(t *testing.T) {
	const events = 100
	l, want := lineageOf(t, 60, events)
	all := map[uint64]*version{}
	for rev := Revision(1); rev <= events+1; rev++ {
		v, ok := l.at(rev)
		if !ok || !slices.Equal(entriesOf(v), want[rev]) || v.seq != eventlog.Start+uint64(rev-1) {
			t.Fatalf("revision %d differs", rev)
		}
		all[v.seq] = v
	}
	for _, from := range all {
		for _, to := range all {
			got, ok := l.rebuild(from, to.seq)
			if !ok || !slices.Equal(slices.Collect(got.All("", "")), entriesOf(to)) {
				t.Fatalf("rolled from %d, %d differs", from.seq, to.seq)
			}
			if err := got.Check(); err != nil {
				t.Fatalf("rolled from %d to %d: %v", from.seq, to.seq, err)
			}
		}
	}
	head := l.head.Load()
	for name, plant := range map[string]func(*Event){
		"an older Prev": func(e *Event) { e.Prev = want[1][e.Rev%10] },
		"no Prev":       func(e *Event) { e.Prev = nil },
	} {
		seq := uint64(eventlog.Start + 50)
		for l.log.At(seq).Prev == nil || l.log.At(seq).Entry == nil {
			seq++
		}
		e := l.log.At(seq)
		right := e.Prev
		plant(e)
		got, _ := l.rebuild(head, seq)
		if slices.Equal(slices.Collect(got.All("", "")), want[Revision(seq-eventlog.Start+1)]) {
			t.Errorf("%s is not detected", name)
		}
		e.Prev = right
	}
}

// TestLineage_ReadersBetweenTwoEvents_ShareTree: readers of any revisions between the same two
// events get the same tree, also concurrently.
func TestLineage_ReadersBetweenTwoEvents_ShareTree(t *testing.T) {
	l, want := lineageOf(t, 100, 500)
	for rev := Revision(100); rev < 110; rev++ {
		const readers = 8
		got := make(chan *version, readers)
		for range readers {
			go func() {
				v, _ := l.at(rev)
				got <- v
			}()
		}
		v := <-got
		for range readers - 1 {
			if o := <-got; o != v {
				t.Fatalf("two readers of %d have different trees", rev)
			}
		}
		if !slices.Equal(entriesOf(v), want[rev]) {
			t.Fatalf("revision %d differs", rev)
		}
		if n := testing.AllocsPerRun(10, func() { l.at(rev) }); n != 0 {
			t.Errorf("the next read of %d costs %v allocations", rev, n)
		}
	}
	if n := l.versions(); n != 11 {
		t.Errorf("%d versions for ten revisions that were read and the first", n)
	}
}

// TestDropMade_LeastRecentlyUsed_IsDropped, until no version is left.
func TestDropMade_LeastRecentlyUsed_IsDropped(t *testing.T) {
	w, tb := newCheckedWriter(t)
	lin, versions := tb.lineage.Load(), []*version{}
	for _, used := range []int64{2, 1, 3} {
		v := &version{}
		v.used.Store(used)
		versions = append(versions, v)
	}
	lin.cachedVersions.Store(&versions)
	for use := range int64(3) {
		used := func(v *version) bool { return v.used.Load() <= use+1 }
		if left := lin.cachedVersions.Load(); !w.dropMade() || slices.ContainsFunc(*lin.cachedVersions.Load(), used) {
			t.Errorf("of %d versions, another than the one of use %d was dropped", len(*left), use+1)
		}
	}
	if w.dropMade() {
		t.Error("a version was dropped that was not there")
	}
}

// TestHistory_Mark_IsSetByTimeOrBytes, for events since the last one.
func TestHistory_Mark_IsSetByTimeOrBytes(t *testing.T) {
	var h history
	began := time.Now()
	for i, step := range []struct {
		fresh int64
		at    time.Duration
		marks int
	}{
		{0, 0, 0}, {1, 0, 1}, {1, markInterval - 1, 1}, {0, markInterval, 2},
		{markBytes - 1, markInterval, 2}, {1, markInterval, 3}, {0, 10 * markInterval, 3},
	} {
		h.fresh += step.fresh
		h.mark(Revision(i), began.Add(step.at))
		if len(h.marks) != step.marks {
			t.Errorf("step %d: %d marks, want %d", i, len(h.marks), step.marks)
		}
	}
}

// TestCachedVersions_LeastRecentlyUsed_IsEvicted: the least recently used version is evicted.
func TestCachedVersions_LeastRecentlyUsed_IsEvicted(t *testing.T) {
	l, want := lineageOf(t, 100, 500)
	made := func(v *version) bool { return slices.Contains(*l.cachedVersions.Load(), v) }
	pager, _ := l.at(50)
	var last *version
	for rev := Revision(100); rev < 400; rev += 2 {
		last, _ = l.at(rev)
		if !slices.Equal(entriesOf(last), want[rev]) {
			t.Fatalf("revision %d differs", rev)
		}
		pager.used.Store(driver.Now() + int64(rev)) // it was just used
		if n := len(*l.cachedVersions.Load()); n > maxCachedVersions {
			t.Fatalf("%d cached versions", n)
		}
		if !made(pager) || !made(last) {
			t.Fatalf("at %d, a version of a recent read was evicted", rev)
		}
	}
	l.oldestReadable.Store(200)
	if _, ok := l.at(199); ok {
		t.Error("a revision below the oldest is served")
	}
	if n := len(*l.cachedVersions.Load()); n != maxCachedVersions {
		t.Errorf("%d cached versions, want %d", n, maxCachedVersions)
	}
	l.log.Abandon()
	l.release()
	l.at(300) // a reader that has begun earlier
	if n := l.versions(); n != 0 {
		t.Errorf("an ended lineage caches %d versions, want 0", n)
	}
}

// TestCheckpoints_OfUnclaimedHistory_HaveUsualDistances: the checkpoints are as far apart as if the
// resource had always been claimed.
func TestCheckpoints_OfUnclaimedHistory_HaveUsualDistances(t *testing.T) {
	const events, total = 4, 5000
	l, want := lineageOf(t, 100, total)
	l.addCheckpoints(events)
	cps, end := *l.checkpoints.Load(), l.log.End()
	for i, v := range cps {
		if !slices.Equal(entriesOf(v), want[v.rev]) {
			t.Fatalf("the version at %d differs", v.rev)
		}
		if i > 0 && int(v.seq-cps[i-1].seq) > distance(end-v.seq, events) {
			t.Errorf("%d events between %d and %d", v.seq-cps[i-1].seq, cps[i-1].seq, v.seq)
		}
	}
	if last := cps[len(cps)-1]; end-last.seq > 2*events || len(cps) > total/(events<<thinLimit)+2*thinLimit {
		t.Errorf("%d versions, the last at %d", len(cps), last.seq)
	}
}

// TestPast_HistoryEndsOtherwise_PartHasError: the history of a key must end with its state in the
// list at that revision. The last event of one that does shares its entry with the list.
func TestPast_HistoryEndsOtherwise_PartHasError(t *testing.T) {
	const prefix, key = "/registry/a/", "/registry/a/key"
	entry := func(rev Revision) *Entry {
		return newEntry(&driver.KV{Key: []byte(key), CreateRevision: 2, ModRevision: rev, Version: 1}, true)
	}
	for name, c := range map[string]struct {
		listed, last *Entry
		want         error
	}{
		"as listed":           {entry(5), entry(5), nil},
		"deleted":             {nil, nil, nil},
		"deleted, but listed": {entry(5), nil, errDiverged},
		"written, not listed": {nil, entry(5), errDiverged},
		"older than listed":   {entry(5), entry(4), errDiverged},
		"newer than listed":   {entry(5), entry(6), errDiverged},
	} {
		var listed []*Entry
		if c.listed != nil {
			listed = append(listed, c.listed)
		}
		ev := &Event{Rev: 5, Entry: c.last, Prev: entry(2)}
		p := &past{events: []*Event{ev}, last: map[string]*Event{key: ev, "/registry/b/other": ev}}
		x := &part{base: btree.Build(listed)}
		p.divide(map[string]*part{prefix: x}, "/registry/")
		if !errors.Is(x.err, c.want) || (x.err == nil) != (c.want == nil) {
			t.Errorf("%s: %v, want %v", name, x.err, c.want)
		}
		if c.want == nil && ev.Entry != c.listed {
			t.Errorf("%s: the event does not share the entry of the list", name)
		}
		if !slices.Equal(x.events, p.events) {
			t.Errorf("%s: the part has the events %v", name, x.events)
		}
	}
}

// TestCompressor_Samples_AreFromAllOverResource: present values, or those before events if there
// are more events than keys. Keys without a value give none.
func TestCompressor_Samples_AreFromAllOverResource(t *testing.T) {
	for _, c := range []struct{ keys, events, least, most int }{
		{1, 0, 1, 1},
		{compressSamples / 2, 0, compressSamples / 2, compressSamples / 2},
		{compressSamples * 4, 10, compressSamples, compressSamples + 1},
		{10, 40 * compressSamples, compressSamples / 2, compressSamples},
	} {
		held := make([]*Entry, c.keys)
		for i := range held {
			name := fmt.Appendf(nil, "%04d", i)
			held[i] = newEntry(&driver.KV{Key: name, Value: name, CreateRevision: 1, ModRevision: 1, Version: 1}, true)
		}
		x := &compressing{lin: newLineage(&version{rev: 1, tree: btree.Build(held)}, nil, nil, false)}
		for i := range c.events {
			text := fmt.Appendf(nil, "before %d", i)
			prev := newEntry(&driver.KV{Key: text, Value: text, CreateRevision: 1, ModRevision: 1, Version: 1}, true)
			if i%7 == 0 {
				prev = nil // a creation
			}
			x.lin.log.Append(&Event{Rev: Revision(i + 2), Prev: prev})
		}
		values := x.samples(x.lin.head.Load().tree)
		distinct := map[string]bool{}
		for _, v := range values {
			distinct[string(v)] = true
			if fromEvent := strings.HasPrefix(string(v), "before"); fromEvent != (c.events > c.keys) {
				t.Errorf("%d keys, %d events: sample %q", c.keys, c.events, v)
			}
		}
		if n := len(values); n < c.least || n > c.most || len(distinct) != n {
			t.Errorf("%d keys, %d events: %d samples, %d of them different, want %d to %d", c.keys, c.events, n, len(distinct), c.least, c.most)
		}
	}
}
