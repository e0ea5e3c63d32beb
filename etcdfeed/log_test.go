package etcdfeed

import (
	"fmt"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"pgregory.net/rapid"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// change returns the write of a key of a few bytes at a revision.
func change(rev mirror.Revision, key string) driver.Change {
	return driver.Change{KV: driver.KV{Key: []byte(key), Value: []byte("value"), ModRevision: rev, CreateRevision: rev, Version: 1}}
}

// TestLog_RandomSteps_EqualsSliceWithFloor: after appends, repeated batches, joined history and
// trimming, a read from each revision returns exactly the later events, in whole revisions, or
// reports that it is below the floor.
func TestLog_RandomSteps_EqualsSliceWithFloor(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		const start = 100
		l := newLog(5000)
		l.begin(driver.Header{ClusterID: 1, Revision: start}, true)
		all := map[mirror.Revision]int{} // events by revision
		joined := false
		t.Repeat(map[string]func(*rapid.T){
			"append": func(t *rapid.T) {
				end := l.state().end
				b := driver.Batch{Through: end}
				for range rapid.IntRange(0, 4).Draw(t, "revisions") {
					b.Through += rapid.Int64Range(1, 3).Draw(t, "gap")
					for i := range rapid.IntRange(1, 3).Draw(t, "keys") {
						b.Changes = append(b.Changes, change(b.Through, fmt.Sprint(i)))
						all[b.Through]++
					}
				}
				b.Through += rapid.Int64Range(0, 2).Draw(t, "progress")
				l.append(b)
			},
			"repeat": func(*rapid.T) {
				st := l.state()
				l.resume(driver.Header{ClusterID: 1, Revision: max(st.floor, st.end-2)})
				if again := l.state(); again.epoch != st.epoch || again.end != st.end {
					t.Fatalf("resumed after %d: epoch %d, end %d, was epoch %d, end %d", st.end-2, again.epoch, again.end, st.epoch, st.end)
				}
				l.append(driver.Batch{Through: st.end, Changes: []driver.Change{change(st.end, "repeated")}})
			},
			"join": func(t *rapid.T) {
				if joined || l.state().floor != start {
					t.Skip()
				}
				joined = true
				floor := rapid.Int64Range(90, start).Draw(t, "floor")
				var events []*mvccpb.Event
				for rev := floor + 1; rev <= start; rev++ {
					c := change(rev, "past")
					events = append(events, eventOf(&c))
					all[rev]++
				}
				l.join(floor, driver.Header{ClusterID: 1, Revision: start}, events)
				if l.state().restoring() {
					t.Fatal("history is awaited after it was joined")
				}
			},
			"": func(t *rapid.T) { checkLog(t, l, all) },
		})
	})
}

// checkLog reads the log from each revision, with small reads.
func checkLog(t *rapid.T, l *log, all map[mirror.Revision]int) {
	st := l.state()
	var bytes int64
	for _, e := range l.events {
		bytes += sizeOf(e)
	}
	if bytes != st.bytes {
		t.Fatalf("%d bytes, counted %d", bytes, st.bytes)
	}
	if n := len(l.events); bytes > l.maxBytes && l.events[0].Kv.ModRevision != l.events[n-1].Kv.ModRevision {
		t.Fatalf("%d bytes of several revisions, bound %d", bytes, l.maxBytes)
	}
	if _, _, _, whole := l.read(st.floor-1, 1); whole {
		t.Fatal("a read below the floor is whole")
	}
	for from := st.floor; from <= st.end; from++ {
		got := map[mirror.Revision]int{}
		for pos := from; pos < st.end; {
			events, through, _, whole := l.read(pos, 300)
			if !whole || through <= pos {
				t.Fatalf("read after %d: whole %v, through %d", pos, whole, through)
			}
			for _, e := range events {
				if e.Kv.ModRevision <= pos || e.Kv.ModRevision > through {
					t.Fatalf("read after %d through %d has revision %d", pos, through, e.Kv.ModRevision)
				}
				got[e.Kv.ModRevision]++
			}
			pos = through
		}
		for rev := from + 1; rev <= st.end; rev++ {
			if got[rev] != all[rev] {
				t.Fatalf("read after %d has %d events of revision %d, want %d", from, got[rev], rev, all[rev])
			}
		}
	}
}

// TestLog_OtherHistory_BeginsAnotherRun: a watch after a revision that the log has not reached, of
// another cluster, or from below its floor begins another epoch, and wakes the readers.
func TestLog_OtherHistory_BeginsAnotherRun(t *testing.T) {
	for name, after := range map[string]driver.Header{
		"gap": {ClusterID: 1, Revision: 30}, "cluster": {ClusterID: 2, Revision: 20}, "older": {ClusterID: 1, Revision: 5},
	} {
		t.Run(name, func(t *testing.T) {
			l := newLog(1000)
			l.begin(driver.Header{ClusterID: 1, Revision: 10}, true)
			l.append(driver.Batch{Through: 20, Changes: []driver.Change{change(15, "key")}})
			before := l.state()
			l.resume(after)
			st := l.state()
			if st.epoch == before.epoch || st.floor != after.Revision || st.end != after.Revision || st.bytes != 0 || st.restoring() {
				t.Errorf("state %+v after %+v", st, after)
			}
			select {
			case <-before.changed:
			case <-time.After(time.Minute):
				t.Error("readers were not woken")
			}
			l.join(1, driver.Header{ClusterID: 1, Revision: 10}, nil) // of the epoch before
			if st := l.state(); st.floor != after.Revision {
				t.Errorf("floor %d, want %d", st.floor, after.Revision)
			}
		})
	}
}

// TestLog_RestoreOfEarlierEpoch_HasNoEffect: the etcd was listed again while history was read. The
// end of that read does not end the wait for the history before the second list.
func TestLog_RestoreOfEarlierEpoch_HasNoEffect(t *testing.T) {
	l := newLog(1000)
	before, now := driver.Header{ClusterID: 1, Revision: 10}, driver.Header{ClusterID: 1, Revision: 20}
	l.begin(before, true)
	l.begin(now, true)
	l.expectHistory(before, historyTimeout, 8)
	l.join(1, before, nil)
	if st := l.state(); !st.restoring() || st.awaited != 0 || st.floor != now.Revision {
		t.Errorf("after the end of the earlier restore: %+v", st)
	}
	l.expectHistory(now, historyTimeout, 5)
	if st := l.state(); st.awaited != 5 {
		t.Errorf("history after %d is awaited, want 5", st.awaited)
	}
	past := change(18, "key")
	l.join(5, now, []*mvccpb.Event{eventOf(&past)})
	if events, _, st, whole := l.read(5, 1000); st.restoring() || !whole || len(events) != 1 {
		t.Errorf("%d events, whole %t, %+v; want the joined one", len(events), whole, st)
	}
}

// TestLog_NearlyFull_OffersRevisionThatRemains: the offered revision is the floor while there is
// room, and otherwise so far above it that it remains above the floor while a quarter of the log is
// written.
func TestLog_NearlyFull_OffersRevisionThatRemains(t *testing.T) {
	l := newLog(100_000)
	l.begin(driver.Header{ClusterID: 1, Revision: 10}, false)
	size := int64(0)
	add := func() {
		c := change(l.state().end+1, "key")
		size = sizeOf(eventOf(&c))
		l.append(driver.Batch{Through: c.ModRevision, Changes: []driver.Change{c}})
	}
	for l.state().bytes+size <= l.maxBytes*3/4 {
		add()
		if got := l.offered(); got != 10 {
			t.Fatalf("with %d bytes %d is offered, want the floor", l.state().bytes, got)
		}
	}
	for range 1000 {
		add()
		offered := l.offered()
		st := l.state()
		if below := (offered - st.floor) * size; below > l.maxBytes/4+size || st.bytes-below > l.maxBytes*3/4 {
			t.Fatalf("offered %d, floor %d, %d bytes", offered, st.floor, st.bytes)
		}
	}
	for offered, room := l.offered(), l.maxBytes/4-size; room > 0; room -= size {
		add()
		if floor := l.state().floor; floor > offered {
			t.Fatalf("floor %d with %d bytes left, offered was %d", floor, room, offered)
		}
	}
}

// TestLog_OneLargeRevision_OffersFloor: a single revision above the bound is offered.
func TestLog_OneLargeRevision_OffersFloor(t *testing.T) {
	l := newLog(100)
	l.begin(driver.Header{ClusterID: 1, Revision: 10}, false)
	if got := l.offered(); got != 10 {
		t.Errorf("an empty log offers %d, want 10", got)
	}
	l.append(driver.Batch{Through: 11, Changes: []driver.Change{change(11, "a"), change(11, "b")}})
	if got := l.offered(); got != 10 {
		t.Errorf("offers %d, want 10", got)
	}
}
