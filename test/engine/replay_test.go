package enginetest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// ample are bounds that are never reached.
var ample = driver.ReplayBounds{Revisions: 1 << 40, Bytes: 1 << 40}

// line formats a change as text.
func line(c *driver.Change) string {
	return fmt.Sprintf("%d %s=%q deleted=%v created=%d version=%d", c.ModRevision, c.Key, c.Value, c.Deleted, c.CreateRevision, c.Version)
}

// watchEvents returns, as text, the events of a single client watch on the prefix after a revision
// and through an existing one.
func watchEvents(t testing.TB, client *clientv3.Client, prefix string, after, through mirror.Revision) (lines []string) {
	t.Helper()
	ctx, cancel := context.WithCancel(contextFor(t))
	defer cancel()
	ctx = clientv3.WithRequireLeader(ctx) // a separate stream from the rest of the test
	responses := client.Watch(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(after+1), clientv3.WithFragment())
	ask := time.NewTicker(20 * time.Millisecond)
	defer ask.Stop()
	for {
		select {
		case r, ok := <-responses:
			if !ok || r.Err() != nil {
				t.Fatalf("watch after %d: %v", after, r.Err())
			}
			for _, e := range r.Events {
				if e.Kv.ModRevision > through {
					return lines
				}
				c := driver.Change{KV: driver.KV{Key: e.Kv.Key, Value: e.Kv.Value, CreateRevision: e.Kv.CreateRevision,
					ModRevision: e.Kv.ModRevision, Version: e.Kv.Version}, Deleted: e.Type == clientv3.EventTypeDelete}
				lines = append(lines, line(&c))
			}
			if r.IsProgressNotify() && r.Header.Revision >= through {
				return lines
			}
		case <-ask.C:
			testcheck.NoError(t, client.RequestProgress(ctx))
		}
	}
}

// failer is the common interface of testing.TB and rapid.T.
type failer interface {
	Helper()
	Fatalf(format string, args ...any)
}

// replayed returns, as text, the changes that Replay delivers. It checks that each batch has
// complete revisions that follow the previous batch.
func replayed(t failer, s *etcdsource.Source, prefix string, after driver.Header, through mirror.Revision) (lines []string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	defer cancel()
	at := after.Revision
	err := s.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
		if len(b.Changes) == 0 || b.Through > through || b.Through != b.Changes[len(b.Changes)-1].ModRevision {
			t.Fatalf("a batch of %d changes through %d, want through at most %d", len(b.Changes), b.Through, through)
		}
		last := at + 1
		for i := range b.Changes {
			c := &b.Changes[i]
			if c.ModRevision < last {
				t.Fatalf("%s after %d", line(c), last)
			}
			last = c.ModRevision
			lines = append(lines, line(c))
		}
		at = b.Through
		return nil
	})
	if err != nil {
		t.Fatalf("replay after %d through %d: %v", after.Revision, through, err)
	}
	return lines
}

func requireEqual(t failer, got, want []string) {
	t.Helper()
	for i := range min(len(got), len(want)) {
		if got[i] != want[i] {
			t.Fatalf("event %d is\n\t%s, want\n\t%s", i, got[i], want[i])
		}
	}
	if len(got) != len(want) {
		t.Fatalf("%d events, want %d", len(got), len(want))
	}
}

// writeHistory writes about n revisions of all kinds: inside and outside the prefix, with one and
// with many keys, deletions of ranges, and keys with a lease.
func writeHistory(t testing.TB, client *clientv3.Client, prefix string, rnd *rand.Rand, n int) {
	t.Helper()
	ctx := t.Context() // thousands of transactions have no common bound
	key := func() string { return fmt.Sprintf("%s%02d", prefix, rnd.IntN(40)) }
	for range n {
		var ops []clientv3.Op
		switch k := rnd.IntN(100); {
		case k < 70:
			ops = []clientv3.Op{clientv3.OpPut(key(), strings.Repeat("v", rnd.IntN(20)))}
		case k < 80:
			ops = []clientv3.Op{clientv3.OpDelete(key())}
		case k < 82:
			ops = []clientv3.Op{clientv3.OpDelete(prefix, clientv3.WithPrefix())}
		case k < 94:
			ops = []clientv3.Op{clientv3.OpPut("/elsewhere"+prefix, "v")}
		case k < 99:
			for i := range 2 + rnd.IntN(30) {
				ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s%02d", prefix, i), fmt.Sprint(rnd.IntN(100))))
			}
		default:
			lease, err := client.Grant(ctx, 600)
			testcheck.NoError(t, err)
			for i := range 1 + rnd.IntN(30) {
				ops = append(ops, clientv3.OpPut(fmt.Sprintf("%sleased%02d", prefix, i), "v", clientv3.WithLease(lease.ID)))
			}
			if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
				t.Fatal(err)
			}
			if _, err := client.Revoke(ctx, lease.ID); err != nil {
				t.Fatal(err)
			}
			continue
		}
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
}

// TestReplay_AnySegments_EqualsWatch: a replay equals the events of a watch, for all segment sizes
// and range bounds, with concurrent writers.
func TestReplay_AnySegments_EqualsWatch(t *testing.T) {
	t.Parallel()
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	began := header(t, s)
	// Several times the number of revisions that etcd sends in one response.
	writeHistory(t, client, prefix, rand.New(rand.NewPCG(1, 2)), 3500)
	now := header(t, s)
	want := watchEvents(t, client, prefix, began.Revision, now.Revision)

	stop := make(chan struct{})
	gone := make(chan struct{})
	go func() {
		defer close(gone)
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			default:
				put(t, client, fmt.Sprintf("%sbeside%d", prefix, i%7), "v")
			}
		}
	}()
	defer func() { close(stop); <-gone }()

	between := func(after, through mirror.Revision) []string {
		revision := func(s string) (rev mirror.Revision) { _, _ = fmt.Sscan(s, &rev); return rev }
		return slices.DeleteFunc(slices.Clone(want), func(s string) bool {
			return revision(s) <= after || revision(s) > through
		})
	}
	requireEqual(t, replayed(t, s, prefix, began, now.Revision), want)
	n := 0
	rapid.Check(t, func(rt *rapid.T) {
		if n++; n > testrace.Count(12, 4) { // each takes a few rounds of 100 ms in etcd
			return
		}
		after := rapid.Int64Range(began.Revision, now.Revision).Draw(rt, "after")
		through := rapid.Int64Range(after, now.Revision).Draw(rt, "through")
		segments := s.WithSegments(rapid.Int64Range(20, 1500).Draw(rt, "segment"), rapid.IntRange(1, 40).Draw(rt, "watches"))
		got := replayed(rt, segments, prefix, driver.Header{ClusterID: now.ClusterID, Revision: after}, through)
		requireEqual(rt, got, between(after, through))
	})
}

// TestReplay_FromFirstRevision_EqualsEtcd: a replay of an etcd that was never compacted matches
// etcd's own state at each revision.
func TestReplay_FromFirstRevision_EqualsEtcd(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	s := etcdsource.New(client, t.Name(), prefix+"probe").WithSegments(100, 8)
	first := header(t, s)
	if oldest := oldestOf(t, s, prefix, ample); oldest != first.Revision {
		t.Errorf("the oldest revision of a new etcd is %d, want %d", oldest, first.Revision)
	}
	writeHistory(t, client, prefix, rand.New(rand.NewPCG(3, 4)), 300)
	now := header(t, s)
	oldest := oldestOf(t, s, prefix, ample)
	if oldest != 1 {
		t.Fatalf("the oldest revision is %d, want 1", oldest)
	}
	if h, all := pages(t, s, prefix, oldest); h.Revision != 1 || len(all) > 1 {
		t.Errorf("listed at %d: %d pages", h.Revision, len(all))
	}
	held := state{}
	at := oldest
	err := s.Replay(contextFor(t), prefix, driver.Header{ClusterID: now.ClusterID, Revision: oldest}, now.Revision, func(b driver.Batch) error {
		for i := range b.Changes {
			c := &b.Changes[i]
			if delete(held, string(c.Key)); !c.Deleted {
				held[string(c.Key)] = fmt.Sprintf("%s@%d,%d", c.Value, c.ModRevision, c.CreateRevision)
			}
		}
		at = b.Through
		want, err := readEtcd(t, client, prefix, at)
		if err == nil && !maps.Equal(held, want) {
			err = fmt.Errorf("at %d:%s", at, diff(held, want))
		}
		return err
	})
	testcheck.NoError(t, err)
}

// oldestOf is Oldest at the current header.
func oldestOf(t testing.TB, s *etcdsource.Source, prefix string, bounds driver.ReplayBounds) mirror.Revision {
	t.Helper()
	oldest, err := s.Oldest(contextFor(t), prefix, header(t, s), bounds)
	testcheck.NoError(t, err)
	return oldest
}

// TestReplay_DifficultSegmentBorders_IsComplete places difficult revisions at segment borders:
// several segments without events, a lease that deletes 1,000 keys in one revision, a transaction
// of many keys, and, at the end, only writes outside the prefix.
func TestReplay_DifficultSegmentBorders_IsComplete(t *testing.T) {
	t.Parallel()
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	ctx := contextFor(t)
	const segment, leased = 10, 1000
	began := header(t, s)
	border := func() bool { return (header(t, s).Revision-began.Revision)%segment == 0 }
	pad := func(key string) {
		for put(t, client, key, "v"); !border(); {
			put(t, client, key, "v")
		}
	}
	many := func(value string, opts ...clientv3.OpOption) {
		var ops []clientv3.Op
		for i := range leased {
			ops = append(ops, clientv3.OpPut(fmt.Sprintf("%s%04d", prefix, i), value, opts...))
		}
		if _, err := client.Txn(ctx).Then(ops...).Commit(); err != nil {
			t.Fatal(err)
		}
	}
	end := func() {
		lease, err := client.Grant(ctx, 600)
		testcheck.NoError(t, err)
		many("leased", clientv3.WithLease(lease.ID))
		if _, err := client.Revoke(ctx, lease.ID); err != nil {
			t.Fatal(err)
		}
	}
	pad(prefix + "a")
	many("first of a segment")
	pad(prefix + "a")
	for range segment - 1 {
		put(t, client, prefix+"a", "v")
	}
	many("last of a segment")
	pad("/elsewhere" + prefix)
	pad("/elsewhere" + prefix) // a segment without events
	end()                      // written first, deleted second in its segment
	pad(prefix + "a")
	for range segment - 1 {
		put(t, client, prefix+"a", "v")
	}
	end() // written last, deleted first in the next
	pad(prefix + "a")
	last := put(t, client, prefix+"a", "the last")
	for range 4 { // segments
		pad("/elsewhere" + prefix)
	}
	now := header(t, s)
	want := watchEvents(t, client, prefix, began.Revision, now.Revision)
	if len(want) < 6*leased {
		t.Fatalf("%d events; the test has no effect", len(want))
	}
	for _, segment := range []int64{segment, 1, segment + 1, 3 * segment} {
		for _, through := range []mirror.Revision{now.Revision, last, last - 1, began.Revision + 1} {
			got := replayed(t, s.WithSegments(segment, 6), prefix, began, through)
			requireEqual(t, got, want[:len(got)])
			if through == now.Revision {
				requireEqual(t, got, want)
			}
		}
	}
	// Only revisions outside the prefix.
	if got := replayed(t, s.WithSegments(segment, 6), prefix, driver.Header{ClusterID: now.ClusterID, Revision: last}, now.Revision); len(got) != 0 {
		t.Errorf("after the last write: %v", got)
	}
}

// TestReplay_FragmentedResponse_IsComplete: a response may exceed the size of an etcd message, with
// one revision and with many.
func TestReplay_FragmentedResponse_IsComplete(t *testing.T) {
	t.Parallel()
	client, prefix := open(t)
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	began := header(t, s)
	// Long keys rather than many keys: etcd 3.7 computes the size of the whole fragment for each
	// added event.
	long := prefix + strings.Repeat("k", 3000)
	fill(t, client, long, "v", 600)
	if _, err := client.Delete(contextFor(t), prefix, clientv3.WithPrefix()); err != nil {
		t.Fatal(err)
	}
	value := strings.Repeat("v", 100_000)
	for i := range 60 {
		put(t, client, prefix+"large", value+fmt.Sprint(i))
	}
	now := header(t, s)
	want := watchEvents(t, client, prefix, began.Revision, now.Revision)
	requireEqual(t, replayed(t, s, prefix, began, now.Revision), want)
	requireEqual(t, replayed(t, s.WithSegments(7, 3), prefix, began, now.Revision), want)
}

// TestOldest_StaysWithinReplayBounds: Oldest respects the bounds on revisions and bytes, and etcd's
// compacted revision.
func TestOldest_StaysWithinReplayBounds(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	value := strings.Repeat("v", 1000)
	writeMany(t, client, prefix, value, 12_000)
	now := header(t, s)
	for _, revisions := range []int64{1, 100, 5000, 11_000} {
		if got := oldestOf(t, s, prefix, driver.ReplayBounds{Revisions: revisions, Bytes: 1 << 40}); got != now.Revision-revisions {
			t.Errorf("at most %d revisions: %d, want %d", revisions, got, now.Revision-revisions)
		}
	}
	const each = 1100 // bytes of an event, approximately
	for _, want := range []int64{200, 2000, 9000} {
		got := now.Revision - oldestOf(t, s, prefix, driver.ReplayBounds{Revisions: 1 << 40, Bytes: want * each})
		if got < want*8/10 || got > want*12/10 {
			t.Errorf("at most %d bytes: %d revisions, want about %d", want*each, got, want)
		}
	}
	// No answer of etcd takes as little as a nanosecond, and none takes an hour. Without a measured
	// time, 10,000 revisions are restored.
	for pause, want := range map[time.Duration]mirror.Revision{time.Nanosecond: now.Revision - 10_000, time.Hour: 1} {
		if got := oldestOf(t, s, prefix, driver.ReplayBounds{Revisions: 1 << 40, Bytes: 1 << 40, Pause: pause}); got != want {
			t.Errorf("a pause of at most %v: oldest revision %d, want %d", pause, got, want)
		}
	}
	if got := oldestOf(t, s, prefix, driver.ReplayBounds{Revisions: -1, Bytes: 1}); got != now.Revision {
		t.Errorf("no history: %d, want %d", got, now.Revision)
	}
	if got := oldestOf(t, s.WithoutProgress(), prefix, ample); got != now.Revision {
		t.Errorf("source without progress: oldest revision %d, want %d", got, now.Revision)
	}
	// Revisions without a key of the prefix count no bytes.
	if got := oldestOf(t, s, "/other/", driver.ReplayBounds{Revisions: 1 << 40, Bytes: 1000}); got != 1 {
		t.Errorf("of a prefix without keys: %d, want 1", got)
	}

	floor := now.Revision - 3000
	if _, err := client.Compact(contextFor(t), floor); err != nil {
		t.Fatal(err)
	}
	for _, bounds := range []driver.ReplayBounds{ample, {Revisions: 3001, Bytes: 1 << 40}, {Revisions: 1 << 40, Bytes: 4000 * each}} {
		if got := oldestOf(t, s, prefix, bounds); got != floor {
			t.Errorf("compacted to %d: %d", floor, got)
		}
	}
	pages(t, s, prefix, floor) // works
	got := replayed(t, s, prefix, driver.Header{ClusterID: now.ClusterID, Revision: floor}, now.Revision)
	requireEqual(t, got, watchEvents(t, client, prefix, floor, now.Revision))
	if len(got) != 3000 {
		t.Errorf("%d events after %d, want 3000", len(got), floor)
	}
	old := driver.Header{ClusterID: now.ClusterID, Revision: floor - 1}
	if _, err := s.Oldest(contextFor(t), prefix, old, ample); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("from a revision that was compacted: %v", err)
	}
	for what, h := range map[string]driver.Header{
		"another cluster":     {ClusterID: now.ClusterID + 1, Revision: now.Revision},
		"of a later revision": {ClusterID: now.ClusterID, Revision: now.Revision + 100},
	} {
		if _, err := s.Oldest(contextFor(t), prefix, h, ample); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("%s: %v", what, err)
		}
	}
}

// writeMany writes n revisions of one key each with the value, with several writers.
func writeMany(t testing.TB, client *clientv3.Client, prefix, value string, n int) {
	t.Helper()
	concurrently(t, n, func(i int) error {
		_, err := client.Put(context.Background(), fmt.Sprintf("%s%05d", prefix, i%5000), value)
		return err
	})
}

// concurrently calls do for 0 to n-1 from as many goroutines as keep an etcd busy.
func concurrently(t testing.TB, n int, do func(i int) error) {
	t.Helper()
	const callers = 64
	done := make(chan error, callers)
	for c := range callers {
		go func() {
			for i := c; i < n; i += callers {
				if err := do(i); err != nil {
					done <- err
					return
				}
			}
			done <- nil
		}()
	}
	for range callers {
		testcheck.NoError(t, <-done)
	}
}

// TestReplay_Failure_ReturnsError: a compaction before or during the replay, another cluster, an
// error of deliver, and cancellation.
func TestReplay_Failure_ReturnsError(t *testing.T) {
	t.Parallel()
	e := newEtcd(t)
	e.run(t)
	client := connect(t, e.socket())
	const prefix = "/registry/"
	s := etcdsource.New(client, t.Name(), prefix+"probe")
	writeMany(t, client, prefix, "v", 6000)
	now := header(t, s)
	first := driver.Header{ClusterID: now.ClusterID, Revision: 1}
	none := func(driver.Batch) error { return nil }

	mine := errors.New("enough")
	if err := s.Replay(contextFor(t), prefix, first, now.Revision, func(driver.Batch) error { return mine }); !errors.Is(err, mine) {
		t.Errorf("deliver's error: %v", err)
	}
	ctx, cancel := context.WithCancel(contextFor(t))
	if err := s.Replay(ctx, prefix, first, now.Revision, func(driver.Batch) error { cancel(); return nil }); !errors.Is(err, context.Canceled) {
		t.Errorf("Replay with a canceled context: %v, want Canceled", err)
	}
	for what, h := range map[string]driver.Header{
		"another cluster": {ClusterID: now.ClusterID + 1, Revision: 1},
	} {
		if err := s.Replay(contextFor(t), prefix, h, now.Revision, none); !errors.Is(err, mirror.ErrRestored) {
			t.Errorf("%s: %v", what, err)
		}
	}
	if err := s.Replay(contextFor(t), prefix, first, now.Revision+1000, none); !errors.Is(err, mirror.ErrRestored) {
		t.Errorf("to a revision that etcd does not have: %v", err)
	}
	// One watch at a time: most of the history is not requested yet when the first part arrives.
	n := 0
	err := s.WithSegments(1000, 1).Replay(contextFor(t), prefix, first, now.Revision, func(driver.Batch) error {
		if n++; n == 1 {
			if _, err := client.Compact(contextFor(t), now.Revision); err != nil {
				t.Error(err)
			}
		}
		return nil
	})
	if !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("compaction overtakes it: %v after %d batches", err, n)
	}
	if err := s.Replay(contextFor(t), prefix, first, now.Revision, none); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("replay of compacted revisions: %v, want ErrCompacted", err)
	}
}
