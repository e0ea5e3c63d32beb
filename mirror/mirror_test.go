package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const root = "/registry/"

func quiet() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }

type state = map[string]string // key to value and revision, as describe prints them

func describe(e *mirror.Entry) string { return fmt.Sprintf("%s@%d", e.Value(), e.ModRevision()) }

// model is the expected content of etcd: the state at every revision.
type model struct {
	store *memory.Store
	at    map[mirror.Revision]state
}

func (md *model) txn(ops ...memory.Op) {
	old := md.at[md.store.Revision()]
	rev := md.store.Txn(ops...)
	if _, ok := md.at[rev]; ok {
		return
	}
	next := maps.Clone(old)
	for _, op := range ops {
		if op.Delete {
			delete(next, op.Key)
		} else {
			next[op.Key] = fmt.Sprintf("%s@%d", op.Value, rev)
		}
	}
	md.at[rev] = next
}

func (md *model) want(rev mirror.Revision, prefix string) state {
	out := state{}
	for k, v := range md.at[rev] {
		if len(k) >= len(prefix) && k[:len(prefix)] == prefix {
			out[k] = v
		}
	}
	return out
}

func read(s mirror.Snapshot) state {
	out := state{}
	for e := range s.All("", "") {
		out[e.Key()] = describe(e)
	}
	return out
}

func diff(got, want state) string {
	s := ""
	for k, v := range want {
		if got[k] != v {
			s += fmt.Sprintf(" %s is %q, want %q;", k, got[k], v)
		}
	}
	for k, v := range got {
		if want[k] == "" {
			s += fmt.Sprintf(" %s is %q, want none;", k, v)
		}
	}
	return s
}

// follower applies the events of a cursor to its own state.
type follower struct {
	prefix string
	cur    *mirror.Cursor
	held   state
	last   mirror.Revision
}

// drain reads all due events and checks them against the model: Ordered, Unique, Reliable and
// Bookmarkable at once, because at its position the follower must have exactly etcd's state.
func (f *follower) drain(t *rapid.T, want func(mirror.Revision, string) state, limit int) error {
	for {
		evs, err := f.cur.Next(nil, limit)
		if err != nil {
			return err
		}
		for _, e := range evs {
			if e.Rev < f.last {
				t.Fatalf("event of %d after %d", e.Rev, f.last)
			}
			f.last = e.Rev
			if e.Prev != nil {
				if f.held[e.Key()] != describe(e.Prev) {
					t.Fatalf("%s at %d: previous %s, held %s", e.Key(), e.Rev, describe(e.Prev), f.held[e.Key()])
				}
				delete(f.held, e.Key())
			} else if f.held[e.Key()] != "" {
				t.Fatalf("%s at %d: created, but held", e.Key(), e.Rev)
			}
			if e.Entry != nil {
				f.held[e.Key()] = describe(e.Entry)
			}
		}
		if len(evs) < limit {
			if want := want(f.cur.Position(), f.prefix); !maps.Equal(f.held, want) {
				t.Fatalf("at %d the follower of %s holds %v, want %v", f.cur.Position(), f.prefix, f.held, want)
			}
			return nil
		}
	}
}

// bubble hides Deadline, which must not be called inside a synctest bubble.
type bubble struct{ testing.TB }

var (
	walkPrefixes = []string{"/registry/a/", "/registry/b/", walkInner, "/registry/c/"}
	walkKeys     = rapid.Custom(func(t *rapid.T) string {
		return rapid.SampledFrom(walkPrefixes).Draw(t, "prefix") + string(rune('a'+rapid.IntRange(0, 8).Draw(t, "key")))
	})
	walkOps = rapid.Custom(func(t *rapid.T) memory.Op {
		value := strings.Repeat(rapid.StringN(0, 30, -1).Draw(t, "value"), rapid.SampledFrom([]int{1, 20, 20}).Draw(t, "times"))
		return memory.Op{Key: walkKeys.Draw(t, "key"), Value: value, Delete: rapid.IntRange(0, 2).Draw(t, "delete") == 0}
	})
)

const walkOuter, walkInner = "/registry/b/", "/registry/b/inner/" // a resource, and one inside it

// randomWalk is a store, a mirror of it, and clients of the mirror. Its methods with a rapid.T are
// the steps of a random walk.
type randomWalk struct {
	*model
	m                 *mirror.Mirror
	claimed, excluded map[string]*mirror.Resource
	// walkInner was claimed once, and its keys are not compared as part of walkOuter since
	divided bool
	inner   []*mirror.Resource // all claims of walkInner
	stalled bool               // the feed is stalled
	// an event was lost, and some resources have not detected it
	lossy bool

	followers  []*follower
	frozen     []mirror.Snapshot // I2
	frozenWant []state
}

// newRandomWalk returns a mirror of a store with some keys. The caller closes the mirror.
func newRandomWalk(t *rapid.T) *randomWalk {
	w := &randomWalk{model: newModel(), claimed: map[string]*mirror.Resource{}, excluded: map[string]*mirror.Resource{}}
	for i := range rapid.IntRange(0, 40).Draw(t, "initial") {
		w.txn(memory.Op{Key: fmt.Sprintf("/registry/%c/i%02d", 'a'+i%3, i), Value: "i"})
	}
	var err error
	w.m, err = mirror.New(mirror.Options{
		Prefix: root, Source: w.store, Logger: quiet(),
		Window:           mirror.Window{MaxAge: 20 * time.Second, MaxBytes: rapid.Int64Range(500, 1<<20).Draw(t, "window")},
		UnclaimedBytes:   rapid.Int64Range(1, 400).Draw(t, "unclaimed"),
		CheckpointEvents: rapid.IntRange(1, 20).Draw(t, "checkpoint"),
	})
	testcheck.NoError(t, err)
	return w
}

// want is the model's state of a resource, without the keys of a resource inside it.
func (w *randomWalk) want(rev mirror.Revision, prefix string) state {
	out := w.model.want(rev, prefix)
	maps.DeleteFunc(out, func(k, _ string) bool {
		return w.divided && prefix == walkOuter && strings.HasPrefix(k, walkInner)
	})
	return out
}

// settle returns true when the mirror has caught up and every claim is ready, false if the feed is
// stalled.
func (w *randomWalk) settle(t *rapid.T) bool {
	if w.stalled {
		synctest.Wait()
		return false
	}
	synctest.Wait() // faults have taken effect
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	if err := w.m.Wait(ctx, w.store.Revision()); err != nil {
		t.Fatalf("the mirror stays at %d, etcd is at %d", w.m.PublishedRevision(), w.store.Revision())
	}
	for p, r := range w.claimed {
		if err := r.WaitReady(ctx); err != nil {
			t.Fatalf("%s does not become ready", p)
		}
	}
	return true
}

func (w *randomWalk) write(t *rapid.T) {
	w.txn(rapid.SliceOfNDistinct(walkOps, 1, 5, func(o memory.Op) string { return o.Key }).Draw(t, "ops")...)
}

func (w *randomWalk) burst(t *rapid.T) {
	for i := range rapid.IntRange(1, 60).Draw(t, "n") {
		w.txn(memory.Op{Key: walkPrefixes[i%len(walkPrefixes)] + "x", Value: fmt.Sprint(i)})
	}
}

// claim claims or excludes a resource.
func (w *randomWalk) claim(t *rapid.T) {
	p := rapid.SampledFrom(walkPrefixes).Draw(t, "prefix")
	exclude := rapid.IntRange(0, 3).Draw(t, "exclude") == 0
	if w.claimed[p] == nil && w.excluded[p] == nil {
		w.claimPrefix(t, p, exclude)
	}
}

// claimPrefix claims or excludes the resource, which is neither.
func (w *randomWalk) claimPrefix(t *rapid.T, p string, exclude bool) {
	claims, how := w.claimed, w.m.Claim
	if exclude {
		claims, how = w.excluded, w.m.Exclude
	}
	r, err := how(p)
	testcheck.NoError(t, err)
	claims[p] = r
	if p == walkInner {
		w.inner = append(w.inner, r)
	}
	if p == walkInner && !w.divided {
		w.divided = true
		for _, f := range w.followers {
			if f.prefix == walkOuter {
				f.cur = nil
			}
		}
		if err := w.m.Check(); err != nil { // the claim has been executed
			t.Fatal(err)
		}
	}
}

func (w *randomWalk) release(t *rapid.T) {
	w.releasePrefix(rapid.SampledFrom(walkPrefixes).Draw(t, "prefix"))
}

func (w *randomWalk) releasePrefix(p string) {
	for _, claims := range []map[string]*mirror.Resource{w.claimed, w.excluded} {
		if r := claims[p]; r != nil {
			delete(claims, p)
			r.Release()
		}
	}
}

// recreate releases resources and deletes their keys, so that the mirror removes them. It claims
// one of them again after other writes and a compaction. Followers begin at the floor of its log.
func (w *randomWalk) recreate(t *rapid.T) {
	if !w.settle(t) {
		return
	}
	prefixes := rapid.SliceOfNDistinct(rapid.SampledFrom(walkPrefixes), 1, 2, rapid.ID[string]).Draw(t, "prefixes")
	for _, p := range prefixes {
		w.releasePrefix(p)
		var ops []memory.Op
		for _, key := range slices.Sorted(maps.Keys(w.model.want(w.store.Revision(), p))) {
			ops = append(ops, memory.Op{Key: key, Delete: true})
		}
		w.txn(ops...)
		w.settle(t)
		// the maintenance runs once a second
		time.Sleep(time.Duration(rapid.SampledFrom([]int{2, 2, 0}).Draw(t, "s")) * time.Second)
	}
	for i := range rapid.IntRange(0, 3).Draw(t, "elsewhere") {
		w.txn(memory.Op{Key: root + "elsewhere", Value: fmt.Sprint(i)})
	}
	w.settle(t)
	if rapid.Bool().Draw(t, "compacted") {
		now := w.store.Revision()
		w.compactTo(rapid.Int64Range(max(1, now-5), now).Draw(t, "rev"))
	}
	w.claimPrefix(t, prefixes[0], false)
	w.settle(t)
	w.follow(t)
}

// compress compresses all values of claimed resources.
func (w *randomWalk) compress(*rapid.T) { w.m.CompressAll() }

func (w *randomWalk) stall(*rapid.T) { w.stalled = !w.stalled; w.store.Stall(w.stalled) }

func (w *randomWalk) compact(t *rapid.T) {
	w.compactTo(rapid.Int64Range(1, w.store.Revision()).Draw(t, "rev"))
}

func (w *randomWalk) compactTo(rev mirror.Revision) {
	w.store.Compact(rev)
	w.m.Compact(rev)
}

// lose writes op without an event for its first change, and returns the number of changes due on
// the feed, the lost one included.
func (w *randomWalk) lose(t *rapid.T, op memory.Op) (n int) {
	w.store.DropIf(func(driver.Change) bool { n++; return n == 1 })
	w.txn(op)
	w.settle(t)
	w.store.DropIf(nil)
	return n
}

// loseAndWrite loses an event, and writes every key, so that the loss is detected.
func (w *randomWalk) loseAndWrite(t *rapid.T) {
	if !w.settle(t) {
		return
	}
	w.lossy = true
	w.lose(t, walkOps.Draw(t, "lost"))
	// The next event of the key reveals the loss, at the latest.
	for _, p := range walkPrefixes {
		for c := 'a'; c <= 'i'; c++ {
			w.txn(memory.Op{Key: p + string(c), Value: "again"})
		}
		w.txn(memory.Op{Key: p + "x", Value: "again"})
	}
	w.settle(t)
	w.lossy = false
	for _, f := range w.followers { // they may have missed the event, like the mirror
		f.cur = nil
	}
	w.frozen, w.frozenWant = nil, nil
}

// compare compares claimed resources with the store at any time: no check finds a difference.
func (w *randomWalk) compare(t *rapid.T) {
	for p, r := range w.claimed {
		if c, err := r.Check(context.Background(), nil); err == nil && c.Count > 0 {
			t.Fatalf("%s: %+v", p, c.Differences)
		}
	}
}

// loseAndCompare loses an event, which a check finds and repairs.
func (w *randomWalk) loseAndCompare(t *rapid.T) {
	if len(w.claimed) == 0 || !w.settle(t) {
		return
	}
	p := rapid.SampledFrom(slices.Sorted(maps.Keys(w.claimed))).Draw(t, "prefix")
	lost := walkOps.Draw(t, "lost")
	lost.Key = p + lost.Key[len(lost.Key)-1:]
	n := w.lose(t, lost)
	c, err := w.claimed[p].Check(context.Background(), nil)
	if err != nil || c.Count > 1 || c.Count == 1 && c.Differences[0].Key != lost.Key || (n > 0) != (c.Count > 0) {
		t.Fatalf("%s: %+v, %v; %d changes were lost", p, c, err, n)
	}
	for p, r := range w.claimed {
		if c, err := r.Check(context.Background(), nil); err != nil || c.Count > 0 || r.Inconsistent() {
			t.Fatalf("%s after the repair: %+v, %v", p, c, err)
		}
	}
	// Two inconsistent resources make the mirror relist the whole prefix at the next event.
	w.txn(memory.Op{Key: "/registry/c/x", Value: "v"})
	w.settle(t)
	for i, f := range w.followers {
		if c.Count > 0 && f.prefix == p {
			w.followers[i].cur = nil // it may have missed the event, like the mirror
		}
	}
}

// freeze keeps a snapshot until the end of the walk.
func (w *randomWalk) freeze(s mirror.Snapshot) {
	w.frozen = append(w.frozen, s)
	w.frozenWant = append(w.frozenWant, read(s))
}

func (w *randomWalk) freezeAll(*rapid.T) {
	for _, r := range w.claimed {
		if s, err := r.Latest(); err == nil {
			w.freeze(s)
		}
	}
}

// readHistory reads the same revisions repeatedly, in any order.
func (w *randomWalk) readHistory(t *rapid.T) {
	if w.lossy || !w.settle(t) {
		return
	}
	for _, p := range slices.Sorted(maps.Keys(w.claimed)) {
		r := w.claimed[p]
		oldest, _, err := r.Oldest()
		testcheck.NoError(t, err)
		revs := rapid.SliceOfN(rapid.Int64Range(oldest, w.m.PublishedRevision()), 1, 25).Draw(t, "revisions")
		for _, rev := range append(revs, revs...) {
			if s, ok := w.requireAt(t, p, r, rev); ok {
				w.freeze(s)
			}
		}
	}
}

// requireAt fails unless the resource at rev is as in the model, or compacted, for which it returns
// false.
func (w *randomWalk) requireAt(t *rapid.T, prefix string, r *mirror.Resource, rev mirror.Revision) (s mirror.Snapshot, ok bool) {
	s, err := r.At(rev)
	if errors.Is(err, mirror.ErrCompacted) {
		return s, false // the window moved
	} else if err != nil {
		t.Fatal(err)
	}
	if got, want := w.read(s, prefix), w.want(rev, prefix); !maps.Equal(got, want) {
		t.Fatalf("%s at %d: %s", prefix, rev, diff(got, want))
	}
	return s, true
}

// absorbed reports whether walkInner has ever been removed because it had no claim and no keys. Its
// keys belong to walkOuter since then, in a history that was restored after that also before then.
func (w *randomWalk) absorbed() bool {
	return slices.ContainsFunc(w.inner, (*mirror.Resource).Removed)
}

// read returns the state of a snapshot, without keys of walkInner of which it is not determined
// whether they are in walkOuter.
func (w *randomWalk) read(s mirror.Snapshot, prefix string) state {
	got := read(s)
	if prefix == walkOuter && w.absorbed() {
		maps.DeleteFunc(got, func(k, _ string) bool { return strings.HasPrefix(k, walkInner) })
	}
	return got
}

// follow starts followers of each resource: from its newest snapshot, from the floor of its log,
// and from a revision in the past or the future. Below the oldest snapshot, a follower has the
// state of the model.
func (w *randomWalk) follow(t *rapid.T) {
	for _, p := range slices.Sorted(maps.Keys(w.claimed)) {
		r := w.claimed[p]
		s, err := r.Latest()
		if err != nil {
			continue
		}
		w.followers = append(w.followers, &follower{prefix: p, cur: s.Cursor("", ""), held: read(s), last: s.Rev})
		oldest, floor, err := r.Oldest()
		if err != nil {
			continue
		}
		for _, rev := range []mirror.Revision{floor, rapid.Int64Range(floor, s.Rev+3).Draw(t, "rev")} {
			c, err := r.CursorAfter(rev, "", "")
			if err != nil {
				continue
			}
			if then, err := r.At(rev); err == nil {
				w.followers = append(w.followers, &follower{prefix: p, cur: c, held: read(then), last: rev})
			} else if rev < oldest {
				w.followers = append(w.followers, &follower{prefix: p, cur: c, held: w.want(rev, p), last: rev})
			}
		}
	}
}

// check runs after every step: it checks the mirror, each resource at every revision, and drains
// the followers.
func (w *randomWalk) check(t *rapid.T) {
	testcheck.NoError(t, w.m.Check())
	if !w.settle(t) {
		return
	}
	for p, r := range w.excluded {
		if s, err := r.Latest(); !errors.Is(err, mirror.ErrNotReady) {
			t.Fatalf("%s is excluded, but reads as %v, %v", p, read(s), err)
		}
	}
	for p, r := range w.claimed {
		w.checkResource(t, p, r)
	}
	kept := w.followers[:0]
	for _, f := range w.followers {
		if f.cur == nil || f.prefix == walkOuter && w.absorbed() {
			continue
		}
		if err := f.drain(t, w.want, rapid.IntRange(1, 9).Draw(t, "limit")); err == nil {
			kept = append(kept, f)
		} else if !errors.Is(err, mirror.ErrCompacted) {
			t.Fatal(err)
		}
	}
	w.followers = kept
}

// checkResource compares the resource with the model at every revision of its window, and reads
// outside of the window.
func (w *randomWalk) checkResource(t *rapid.T, prefix string, r *mirror.Resource) {
	s, err := r.Latest()
	testcheck.NoError(t, err)
	oldest, floor, err := r.Oldest()
	testcheck.NoError(t, err)
	for rev := oldest; rev <= s.Rev && !w.lossy; rev++ {
		w.requireAt(t, prefix, r, rev)
	}
	// A restore may join history below the floor at any time.
	restoring := w.m.Stats().Restoring > 0
	_, atErr := r.At(oldest - 1)
	_, cursorErr := r.CursorAfter(floor-1, "", "")
	oldestNow, floorNow, err := r.Oldest()
	testcheck.NoError(t, err)
	if !errors.Is(atErr, mirror.ErrCompacted) && oldestNow == oldest {
		t.Fatalf("%s below the oldest version %d: %v", prefix, oldest, atErr)
	}
	if !errors.Is(cursorErr, mirror.ErrCompacted) && floorNow == floor && !(restoring && errors.Is(cursorErr, mirror.ErrNotReady)) {
		t.Fatalf("cursor below the floor: %v", cursorErr)
	}
	if _, err := r.At(s.Rev + 1); !errors.Is(err, mirror.ErrFutureRevision) {
		t.Fatalf("%s above the published revision: %v", prefix, err)
	}
	if got, want := w.read(s, prefix), w.want(s.Rev, prefix); !maps.Equal(got, want) {
		t.Fatalf("%s now: %s", prefix, diff(got, want))
	}
}

// TestMirror_RandomSteps_EqualsEtcdAtEveryRevision runs random steps of a store, of the mirror's
// environment and of its clients, and compares all reads with the model.
func TestMirror_RandomSteps_EqualsEtcdAtEveryRevision(t *testing.T) {
	t.Parallel()
	for _, prefix := range walkPrefixes {
		makeDictionary(t, prefix)
	}
	synctest.Test(t, func(t *testing.T) {
		rapid.Check(bubble{t}, func(t *rapid.T) {
			w := newRandomWalk(t)
			defer w.m.Close()
			t.Repeat(map[string]func(*rapid.T){
				"txn":                      w.write,
				"burst":                    w.burst,
				"claim":                    w.claim,
				"release":                  w.release,
				"recreate":                 w.recreate,
				"stall":                    w.stall,
				"break":                    func(*rapid.T) { w.store.Break() },
				"sleep":                    func(t *rapid.T) { time.Sleep(time.Duration(rapid.IntRange(1, 15).Draw(t, "s")) * time.Second) },
				"compact":                  w.compact,
				"lose an event":            w.loseAndWrite,
				"check":                    w.compare,
				"lose an event, and check": w.loseAndCompare,
				"freeze":                   w.freezeAll,
				"read history":             w.readHistory,
				"compress":                 w.compress,
				"follow":                   w.follow,
				"":                         w.check,
			})
			for i, s := range w.frozen { // I2
				if got := read(s); !maps.Equal(got, w.frozenWant[i]) {
					t.Fatalf("the snapshot of %d moved: %v, was %v", s.Rev, got, w.frozenWant[i])
				}
			}
		})
	})
}
