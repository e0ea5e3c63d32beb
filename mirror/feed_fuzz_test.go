package mirror_test

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"math"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/mirror"
)

// program is the input of a fuzzer, read byte by byte; beyond its end it is zeros.
type program []byte

func (p *program) byte() byte {
	if len(*p) == 0 {
		return 0
	}
	b := (*p)[0]
	*p = (*p)[1:]
	return b
}

// near returns n for a 0, mostly, and else something near it, or far away.
func (p *program) near(n int64) int64 {
	switch b := p.byte(); b {
	case 0x80:
		return 0
	case 0x81:
		return math.MaxInt64
	case 0x82:
		return math.MinInt64
	case 0x83:
		return n + 1<<32
	default:
		return n + int64(int8(b))
	}
}

// fuzzKeys are keys of two resources, of none, and of no resource that there could be.
var fuzzKeys = []string{
	"/registry/a/x", "/registry/a/y", "/registry/a/z", "/registry/b/x", "/registry/b/y", "/registry/c/x",
	"/registry/a/", "/registry/a", "/registry/", "", "/elsewhere/x", "/registry/a//", "/registry/a/x/y", "/registry/\x00\xff",
}

// told is a source that says what a program has it say. What it has said and may be true is what it
// lists: the truth that the mirror has to come to.
type told struct {
	mirror.Source
	program *program
	rev     mirror.Revision
	truth   map[mirror.Revision]map[string]mirror.KV
	history []mirror.Batch // what Replay delivers
	oldest  mirror.Revision
	feed    chan mirror.Batch // to Watch; closed and replaced by a break
	broken  error
	lie     atomic.Uint32 // what is wrong with the next list; lists run at the same time
}

var errTold = errors.New("as the program has it")

func (s *told) List(_ context.Context, prefix string, at mirror.Revision, page func([]mirror.KV) error) (mirror.Header, error) {
	if at == 0 {
		at = s.rev
	}
	h := mirror.Header{ClusterID: 1, Revision: at}
	var kvs []mirror.KV
	for key, kv := range s.at(at) {
		if strings.HasPrefix(key, prefix) {
			kvs = append(kvs, kv)
		}
	}
	slices.SortFunc(kvs, func(a, b mirror.KV) int { return strings.Compare(string(a.Key), string(b.Key)) })
	lie := s.lie.Swap(0)
	switch n := len(kvs); {
	case lie == 1 && n > 0:
		kvs = append(kvs, kvs[n-1]) // twice
	case lie == 2 && n > 1:
		kvs[0], kvs[n-1] = kvs[n-1], kvs[0]
	case lie == 3 && n > 0:
		kvs[0].ModRevision = at + 1
	case lie == 4:
		return mirror.Header{}, errTold
	}
	for kvs := range slices.Chunk(kvs, 3) {
		if err := page(kvs); err != nil {
			return mirror.Header{}, err
		}
	}
	return h, nil
}

// at returns what is true at a revision.
func (s *told) at(rev mirror.Revision) map[string]mirror.KV {
	var last mirror.Revision
	for r := range s.truth {
		if r <= rev {
			last = max(last, r)
		}
	}
	return s.truth[last]
}

func (s *told) state(rev mirror.Revision, prefix string) state {
	out := state{}
	for key, kv := range s.at(rev) {
		if strings.HasPrefix(key, prefix) {
			out[key] = fmt.Sprintf("%s@%d", kv.Value, kv.ModRevision)
		}
	}
	return out
}

func (s *told) Oldest(_ context.Context, _ string, now mirror.Header, _ mirror.ReplayBounds) (mirror.Revision, error) {
	return min(s.oldest, now.Revision), nil
}

func (s *told) Replay(_ context.Context, _ string, _ mirror.Header, _ mirror.Revision, deliver func(mirror.Batch) error) error {
	for _, b := range s.history {
		if err := deliver(b); err != nil {
			return err
		}
	}
	return nil
}

func (s *told) Watch(ctx context.Context, _ string, _ mirror.Header, deliver func(mirror.Batch) error) error {
	feed := s.feed
	for {
		select {
		case b, ok := <-feed:
			if !ok {
				return s.broken
			}
			if err := deliver(b); err != nil {
				return err
			}
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

func (s *told) RequestProgress(context.Context) error { return nil }

func (s *told) Current(context.Context) (mirror.Header, error) {
	return mirror.Header{ClusterID: 1, Revision: s.rev}, nil
}

// batch returns one that follows after, or almost; zeros in the program are what etcd would say.
func (s *told) batch(after mirror.Revision, held map[string]mirror.KV) mirror.Batch {
	p := s.program
	held = maps.Clone(held)
	b := mirror.Batch{Through: p.near(after + 1)}
	for range p.byte() % 6 {
		c := mirror.Change{}
		how := p.byte()
		key := fuzzKeys[int(how&0x0f)%len(fuzzKeys)]
		old, live := held[key]
		c.Key, c.Deleted = []byte(key), how&0x10 != 0
		c.ModRevision = b.Through
		c.Version, c.CreateRevision = 1, b.Through
		if live {
			c.Version, c.CreateRevision = old.Version+1, old.CreateRevision
		}
		if how&0x20 != 0 {
			c.ModRevision = p.near(c.ModRevision)
		}
		if how&0x40 != 0 {
			c.Version = p.near(c.Version)
		}
		if how&0x80 != 0 {
			c.CreateRevision = p.near(c.CreateRevision)
		}
		if c.Deleted {
			c.KV = mirror.KV{Key: c.Key, ModRevision: c.ModRevision}
			delete(held, key)
		} else {
			c.Value = binary.AppendVarint([]byte("v"), c.ModRevision)
			held[key] = c.KV
		}
		b.Changes = append(b.Changes, c)
	}
	return b
}

// inOrder reports whether a batch may follow the revision: what a source owes.
func inOrder(after mirror.Revision, b mirror.Batch) bool {
	last := after + 1
	for _, c := range b.Changes {
		if c.ModRevision < last || c.ModRevision > b.Through {
			return false
		}
		last = c.ModRevision
	}
	return len(b.Changes) > 0 || b.Through >= after
}

// take makes the batch true, and reports whether each change in it follows what was.
func (s *told) take(b mirror.Batch) (follows bool) {
	held := maps.Clone(s.at(s.rev))
	follows = true
	for _, c := range b.Changes {
		key := string(c.Key)
		old, live := held[key]
		if c.Deleted {
			follows = follows && live
			delete(held, key)
			continue
		}
		if live {
			follows = follows && uint32(c.Version-old.Version) == 1 && c.CreateRevision == old.CreateRevision
		} else {
			follows = follows && uint32(c.Version) == 1
		}
		held[key] = c.KV
	}
	s.rev = max(s.rev, b.Through)
	s.truth[s.rev] = held
	return follows
}

// breakOff ends the feed with an error.
func (s *told) breakOff(err error) {
	s.broken = err
	close(s.feed)
	s.feed = make(chan mirror.Batch)
}

// FuzzFeed has a source say anything, in its lists, its history and its feed. The mirror must not
// panic, and must tell whatever can be told from the contract of a source: events out of order,
// and events that do not follow what is held. It reports exactly these, and in any case comes to
// hold what the source lists, at the present and at every revision that it still reads.
func FuzzFeed(f *testing.F) {
	f.Add([]byte{})
	f.Add([]byte{0, 3, 0, 0, 0, 2, 0x00, 0x03, 0, 0, 1, 0x10})                 // writes, and a deletion
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0x10})                                      // a deletion of nothing
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x40, 1})                                   // a version is missing
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x80, 1})                                   // created at another revision
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x20, 0xff})                                // at the clock
	f.Add([]byte{0, 3, 0, 0, 5, 2, 0x00, 0x21, 0xfe})                          // out of order
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x20, 1})                                   // beyond the batch
	f.Add([]byte{0, 3, 0, 0, 0, 2, 0x40, 1, 0x43, 1})                          // two resources at odds
	f.Add([]byte{0, 3, 0, 1, 5, 1, 0xf0})                                      // progress, and back
	f.Add([]byte{0, 3, 0, 4, 1, 0, 0, 1, 0})                                   // a list with a key twice
	f.Add([]byte{0, 3, 0, 4, 2, 0, 0, 1, 0})                                   // a list out of order
	f.Add([]byte{0, 3, 0, 4, 3, 0, 0, 1, 0})                                   // a list that is ahead
	f.Add([]byte{0, 3, 0, 4, 4, 0, 0, 1, 0})                                   // a list that fails
	f.Add([]byte{3, 0, 2, 0x00, 0x03, 0, 1, 0x00, 0, 1, 0x10, 0, 0, 0, 1, 0})  // history
	f.Add([]byte{1, 0, 1, 0x20, 0xff, 0, 0, 0, 1, 0})                          // history that was listed
	f.Add([]byte{1, 5, 2, 0x00, 0x21, 0xfe, 0, 0, 0, 1, 0})                    // history out of order
	f.Add([]byte{2, 5, 1, 0x00, 0, 1, 0x20, 0xff, 0, 0, 0, 1, 0})              // over batches
	f.Add([]byte{1, 0, 1, 0x40, 7, 0, 0, 0, 1, 0})                             // history with a gap
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0, 3, 0xff, 2, 1, 0, 0, 1, 0, 2, 0})        // compaction, breaks
	f.Add([]byte{0, 3, 0, 0, 0, 5, 6, 7, 8, 9, 10, 0, 0, 4, 11, 12, 13, 0x1b}) // odd keys
	f.Fuzz(func(t *testing.T, input []byte) {
		if len(input) > 512 {
			return
		}
		synctest.Test(t, func(t *testing.T) { feedByProgram(t, program(input)) })
	})
}

func feedByProgram(t *testing.T, p program) {
	const begin = 10
	s := &told{program: &p, rev: begin, oldest: begin, feed: make(chan mirror.Batch),
		truth: map[mirror.Revision]map[string]mirror.KV{0: {}, begin: {}}}
	sound := true
	if n := p.byte() % 4; n > 0 {
		for range n {
			b := s.batch(s.rev, s.at(s.rev))
			s.history = append(s.history, b)
			ok := sound && inOrder(s.rev, b) && b.Through < 1<<40
			if sound = ok; ok {
				sound = s.take(b)
			}
		}
	} else {
		for i := range p.byte() % 4 {
			s.truth[begin][fuzzKeys[i]] = mirror.KV{Key: []byte(fuzzKeys[i]), Value: []byte("first"), CreateRevision: 3, ModRevision: 4, Version: 2}
		}
	}
	checkpoint := int(p.byte()%8) + 1
	m := start(t, s, func(o *mirror.Options) {
		o.CheckpointEvents = checkpoint
		o.IdleProgress, o.FeedPatience = -1, -1
	})
	defer m.Close()
	resources := []*mirror.Resource{claim(t, m, "/registry/a/"), claim(t, m, "/registry/b/")}

	settle := func() {
		t.Helper()
		synctest.Wait()
		reach(t, m, s.rev, resources...)
		barrier(t, m)
		if clock := m.Clock(); clock != s.rev {
			t.Fatalf("the clock is at %d, want %d", clock, s.rev)
		}
		for _, r := range resources {
			now := latest(t, r)
			if got, want := read(now), s.state(s.rev, r.Prefix()); !maps.Equal(got, want) {
				t.Fatalf("%s at %d:%s", r.Prefix(), now.Rev, diff(got, want))
			}
			for rev := range s.truth {
				then, err := r.At(rev)
				if err != nil {
					continue
				}
				if got, want := read(then), s.state(rev, r.Prefix()); !maps.Equal(got, want) {
					t.Fatalf("%s at %d, read at %d:%s", r.Prefix(), rev, now.Rev, diff(got, want))
				}
			}
		}
	}
	settle()
	if sound && len(s.history) > 0 && m.Stats().Divergences > 0 {
		t.Fatal("sound history was not believed")
	}
	s.history, s.oldest = nil, math.MaxInt64 // later there is none to be had
	if !sound {
		// Doubts about the whole feed are acted on at its next word.
		s.feed <- mirror.Batch{Through: s.rev}
		settle()
	}
	for range 12 {
		if len(p) == 0 {
			return
		}
		time.Sleep(11 * time.Minute) // nothing is left of the last doubt
		settle()
		var watches []*follower
		for _, r := range resources {
			now := latest(t, r)
			watches = append(watches, &follower{prefix: r.Prefix(), cur: now.Cursor("", ""), held: read(now), last: now.Rev})
		}
		before := m.Stats()
		noticed := func() bool { st := m.Stats(); return st.Divergences+st.Relists > before.Divergences+before.Relists }
		switch p.byte() % 6 {
		case 0:
			b := s.batch(s.rev, s.at(s.rev))
			if b.Through > 1<<40 { // so far away that nothing could follow
				return
			}
			ordered := inOrder(s.rev, b)
			follows := ordered && s.take(b)
			s.feed <- b
			settle()
			// Of keys that it did not ask for a source may say what it likes.
			foreign := slices.ContainsFunc(b.Changes, func(c mirror.Change) bool { return !strings.HasPrefix(string(c.Key), root) })
			if noticed() == follows && !foreign {
				t.Fatalf("noticed: %v; in order: %v, follows: %v: %+v", noticed(), ordered, follows, b)
			}
		case 1: // progress
			b := mirror.Batch{Through: p.near(s.rev)}
			if b.Through > 1<<40 {
				return
			}
			ordered := inOrder(s.rev, b)
			if ordered {
				s.take(b)
			}
			s.feed <- b
			settle()
			if noticed() == ordered {
				t.Fatalf("noticed: %v; progress to %d at %d", noticed(), b.Through, s.rev)
			}
		case 2:
			s.breakOff([]error{errTold, mirror.ErrCompacted, mirror.ErrRestored, mirror.ErrDiverged, nil}[p.byte()%5])
			settle()
		case 3:
			m.Compact(min(p.near(s.rev), s.rev))
			settle()
		case 4: // a list that is wrong, once
			s.lie.Store(uint32(p.byte() % 5))
			s.breakOff(mirror.ErrDiverged)
			settle()
		case 5:
			settle()
		}
		for _, w := range watches {
			if err := w.follow(t, s.state); err != nil && !errors.Is(err, mirror.ErrCompacted) {
				t.Fatal(err)
			}
		}
	}
}

// follow is drain for a test without rapid.
func (f *follower) follow(t *testing.T, want func(mirror.Revision, string) state) error {
	t.Helper()
	for {
		events, err := f.cur.Next(nil, 2)
		if err != nil {
			return err
		}
		for _, e := range events {
			if e.Rev < f.last {
				t.Fatalf("event of %d after %d", e.Rev, f.last)
			}
			f.last = e.Rev
			delete(f.held, e.Key())
			if e.Entry != nil {
				f.held[e.Key()] = describe(e.Entry)
			}
		}
		if len(events) < 2 {
			if want := want(f.cur.Position(), f.prefix); !maps.Equal(f.held, want) {
				t.Fatalf("at %d a watch of %s holds %v, want %v", f.cur.Position(), f.prefix, f.held, want)
			}
			return nil
		}
	}
}
