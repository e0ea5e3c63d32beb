package mirror

import (
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/eventlog"
)

// TestTopics_Await_WakesOnce when all events below the number are posted.
func TestTopics_Await_WakesOnce(t *testing.T) {
	var ts topics
	awaiting := map[uint64]*topic{3: {owner: &ts}, 5: {owner: &ts}, 6: {owner: &ts}}
	woken := map[uint64]<-chan struct{}{}
	await := func(seq uint64) {
		woken[seq] = awaiting[seq].changed.next()
		ts.await(awaiting[seq], seq)
	}
	for seq := range awaiting {
		await(seq)
	}
	for _, step := range []struct {
		posted uint64
		want   []uint64
		left   int
	}{{2, nil, 3}, {3, []uint64{3}, 2}, {4, nil, 2}, {6, []uint64{5, 6}, 0}, {7, nil, 0}} {
		ts.notify(step.posted)
		var got []uint64
		for seq, changed := range woken {
			select {
			case <-changed:
				got = append(got, seq)
				woken[seq] = awaiting[seq].changed.next()
			default:
			}
		}
		if slices.Sort(got); !slices.Equal(got, step.want) || len(ts.awaited) != step.left || ts.waiting.Load() != int64(step.left) {
			t.Errorf("%d events are posted: woke those at %d, want %d; %d are waiting", step.posted, got, step.want, len(ts.awaited))
		}
	}
	if await(6); len(ts.awaited) > 0 {
		t.Error("awaits posted events")
	}
}

// TestTopics_Trim_BoundsStaleNumbers: as many events as there are topics leave the log before the
// numbers are dropped.
func TestTopics_Trim_BoundsStaleNumbers(t *testing.T) {
	ts := topics{log: eventlog.New[Event, *Event](0)}
	for _, name := range []string{"a", "b", "c"} {
		x := &topic{owner: &ts, name: name}
		ts.add(x)
		for seq := range uint64(100) {
			ts.postLocked(x, seq, 0)
		}
	}
	for _, step := range []struct{ first, trimmed uint64 }{{2, 0}, {3, 3}, {5, 3}, {99, 99}} {
		if ts.trimLocked(step.first); ts.trimmed != step.trimmed {
			t.Errorf("the log begins at %d: trimmed at %d, want %d", step.first, ts.trimmed, step.trimmed)
		}
	}
	for _, x := range ts.byName {
		if n := x.postings.Len(); n > 2 {
			t.Errorf("%d numbers of one event", n)
		}
	}
}

// TestWatchIndexCheck_TopicsContradictEvents_ReturnsError: one event, of the value "x", was sorted.
func TestWatchIndexCheck_TopicsContradictEvents_ReturnsError(t *testing.T) {
	unposted := func(s *indexedEvents) { s.byName["x"] = &topic{owner: &s.topics, name: "x"} }
	for name, c := range map[string]struct {
		change func(s *indexedEvents)
		says   string // empty: no error
	}{
		"correct":      {func(*indexedEvents) {}, ""},
		"not posted":   {func(s *indexedEvents) { s.posted.Store(0) }, "posted up to 0"},
		"no topic":     {func(s *indexedEvents) { delete(s.byName, "x") }, `value "x" has no topic`},
		"later topics": {func(s *indexedEvents) { s.from = s.next; delete(s.byName, "x") }, ""},
		"missing":      {unposted, `missing in topic "x"`},
		"later topic":  {func(s *indexedEvents) { unposted(s); s.byName["x"].from = s.next }, ""},
		"dropped":      {func(s *indexedEvents) { unposted(s); s.log.Drop(2, nil) }, ""},
		"not decodable": {func(s *indexedEvents) {
			unposted(s)
			s.revision[0].decodable = false
		}, `missing in topic "x"`},
		"set": {func(s *indexedEvents) {
			unposted(s)
			s.covers = func(set, value string) bool { return set == value }
		}, `missing in topic "x"`},
		"other set": {func(s *indexedEvents) {
			unposted(s)
			s.covers = func(string, string) bool { return false }
		}, ""},
		"cursors": {func(s *indexedEvents) { s.cursors = 1 }, "recorded 1 cursors"},
	} {
		ev := &Event{Rev: 2, Entry: newEntry(&driver.KV{Key: []byte("/registry/a/x"), ModRevision: 2}, true)}
		s := &indexedEvents{topics: topics{log: eventlog.New[Event, *Event](1), keep: true}}
		s.log.Append(ev)
		s.next, s.revision = s.log.End(), []indexedEvent{{ev: ev, seq: s.log.First(), now: "x", decodable: true}}
		s.post()
		c.change(s)
		if err := s.check(); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: %v, want %q", name, err, c.says)
		}
	}
}
