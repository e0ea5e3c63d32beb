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
	"github.com/stratakube/strata/mirror/driver"
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

// near returns n for a 0, mostly, and otherwise a number near it or far away.
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

// fuzzKeys are keys of two resources, of no resource, and of no valid resource.
var fuzzKeys = []string{
	"/registry/a/x", "/registry/a/y", "/registry/a/z", "/registry/b/x", "/registry/b/y", "/registry/c/x",
	"/registry/a/", "/registry/a", "/registry/", "", "/elsewhere/x", "/registry/a//", "/registry/a/x/y", "/registry/\x00\xff",
}

// programSource is a source that sends the batches and lists of a program. It lists the valid part
// of its batches: the state that the mirror has to reach.
type programSource struct {
	driver.Source
	program *program
	rev     mirror.Revision
	truth   map[mirror.Revision]map[string]driver.KV
	history []driver.Batch // delivered by Replay
	oldest  mirror.Revision
	feed    chan driver.Batch // for Watch; closed and replaced by a break
	broken  error
	fault   atomic.Uint32 // the fault of the next list; lists run concurrently
}

var errProgram = errors.New("error of the program")

func (s *programSource) List(_ context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	if at == 0 {
		at = s.rev
	}
	h := driver.Header{ClusterID: 1, Revision: at}
	var kvs []driver.KV
	for key, kv := range s.at(at) {
		if strings.HasPrefix(key, prefix) {
			kvs = append(kvs, kv)
		}
	}
	slices.SortFunc(kvs, func(a, b driver.KV) int { return strings.Compare(string(a.Key), string(b.Key)) })
	fault := s.fault.Swap(0)
	switch n := len(kvs); {
	case fault == 1 && n > 0:
		kvs = append(kvs, kvs[n-1]) // twice
	case fault == 2 && n > 1:
		kvs[0], kvs[n-1] = kvs[n-1], kvs[0]
	case fault == 3 && n > 0:
		kvs[0].ModRevision = at + 1
	case fault == 4:
		return driver.Header{}, errProgram
	}
	for kvs := range slices.Chunk(kvs, 3) {
		if err := page(kvs); err != nil {
			return driver.Header{}, err
		}
	}
	return h, nil
}

// at returns the valid state at a revision.
func (s *programSource) at(rev mirror.Revision) map[string]driver.KV {
	var last mirror.Revision
	for r := range s.truth {
		if r <= rev {
			last = max(last, r)
		}
	}
	return s.truth[last]
}

func (s *programSource) state(rev mirror.Revision, prefix string) state {
	out := state{}
	for key, kv := range s.at(rev) {
		if strings.HasPrefix(key, prefix) {
			out[key] = fmt.Sprintf("%s@%d", kv.Value, kv.ModRevision)
		}
	}
	return out
}

func (s *programSource) GetAll(_ context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	for _, key := range keys {
		if kv, exists := s.at(at)[key]; exists {
			if err := found(kv); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *programSource) Oldest(_ context.Context, _ string, now driver.Header, _ driver.ReplayBounds) (mirror.Revision, error) {
	return min(s.oldest, now.Revision), nil
}

func (s *programSource) Replay(_ context.Context, _ string, _ driver.Header, _ mirror.Revision, deliver func(driver.Batch) error) error {
	for _, b := range s.history {
		if err := deliver(b); err != nil {
			return err
		}
	}
	return nil
}

func (s *programSource) Watch(ctx context.Context, _ string, _ driver.Header, deliver func(driver.Batch) error) error {
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

func (s *programSource) RequestProgress(context.Context) error { return nil }

func (s *programSource) ReadRevision(context.Context) (driver.Header, error) {
	return driver.Header{ClusterID: 1, Revision: s.rev}, nil
}

// batch returns a batch that follows after, or nearly does; zeros in the program produce valid
// batches.
func (s *programSource) batch(after mirror.Revision, held map[string]driver.KV) driver.Batch {
	p := s.program
	held = maps.Clone(held)
	b := driver.Batch{Through: p.near(after + 1)}
	for range p.byte() % 6 {
		c := driver.Change{}
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
			c.KV = driver.KV{Key: c.Key, ModRevision: c.ModRevision}
			delete(held, key)
		} else {
			c.Value = binary.AppendVarint([]byte("v"), c.ModRevision)
			held[key] = c.KV
		}
		b.Changes = append(b.Changes, c)
	}
	return b
}

// inOrder reports whether a batch may follow the revision: the contract of a source.
func inOrder(after mirror.Revision, b driver.Batch) bool {
	last := after + 1
	for _, c := range b.Changes {
		if c.ModRevision < last || c.ModRevision > b.Through {
			return false
		}
		last = c.ModRevision
	}
	return len(b.Changes) > 0 || b.Through >= after
}

// take applies the batch to the valid state, and reports whether each change in it follows that
// state.
func (s *programSource) take(b driver.Batch) (follows bool) {
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
		if uint32(c.Version) == 0 {
			// A store that does not count: nothing is compared.
		} else if live {
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
func (s *programSource) breakOff(err error) {
	s.broken = err
	close(s.feed)
	s.feed = make(chan driver.Batch)
}

// FuzzFeed sends arbitrary lists, history and feed batches. The mirror must not panic, and must
// detect all violations of a source's contract: events out of order, and events that do not follow
// the cached state. It reports exactly these, and always reaches the state that the source lists,
// at the newest revision and at every revision that it still serves.
func FuzzFeed(f *testing.F) {
	f.Add([]byte{})
	// writes, and a deletion
	f.Add([]byte{0, 3, 0, 0, 0, 2, 0x00, 0x03, 0, 0, 1, 0x10})
	// a deletion of an absent key
	f.Add([]byte{0, 0, 0, 0, 0, 1, 0x10})
	// a version is missing
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x40, 1})
	// created at another revision
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x80, 1})
	// at the published revision
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x20, 0xff})
	f.Add([]byte{0, 3, 0, 0, 5, 2, 0x00, 0x21, 0xfe}) // out of order
	f.Add([]byte{0, 3, 0, 0, 0, 1, 0x20, 1})          // beyond the batch
	// two resources at odds
	f.Add([]byte{0, 3, 0, 0, 0, 2, 0x40, 1, 0x43, 1})
	// progress, and backwards
	f.Add([]byte{0, 3, 0, 1, 5, 1, 0xf0})
	// a list with a key twice
	f.Add([]byte{0, 3, 0, 4, 1, 0, 0, 1, 0})
	// a list out of order
	f.Add([]byte{0, 3, 0, 4, 2, 0, 0, 1, 0})
	// a list that is ahead
	f.Add([]byte{0, 3, 0, 4, 3, 0, 0, 1, 0})
	f.Add([]byte{0, 3, 0, 4, 4, 0, 0, 1, 0})                                  // a list that fails
	f.Add([]byte{3, 0, 2, 0x00, 0x03, 0, 1, 0x00, 0, 1, 0x10, 0, 0, 0, 1, 0}) // history
	// history that was listed
	f.Add([]byte{1, 0, 1, 0x20, 0xff, 0, 0, 0, 1, 0})
	// history out of order
	f.Add([]byte{1, 5, 2, 0x00, 0x21, 0xfe, 0, 0, 0, 1, 0})
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

const firstRevision mirror.Revision = 10 // the start revision of a program

// fuzzedFeed is a mirror of a source that a program controls.
type fuzzedFeed struct {
	*programSource
	m         *mirror.Mirror
	resources []*mirror.Resource
}

func feedByProgram(t *testing.T, p program) {
	f := &fuzzedFeed{programSource: &programSource{program: &p, rev: firstRevision, oldest: firstRevision, feed: make(chan driver.Batch),
		truth: map[mirror.Revision]map[string]driver.KV{0: {}, firstRevision: {}}}}
	sound := f.begin()
	checkpoint := int(p.byte()%8) + 1
	f.m = start(t, f.programSource, func(o *mirror.Options) {
		o.CheckpointEvents = checkpoint
		o.IdleProgress, o.FeedPatience = -1, -1
	})
	defer f.m.Close()
	f.resources = []*mirror.Resource{claim(t, f.m, "/registry/a/"), claim(t, f.m, "/registry/b/")}
	f.settle(t)
	foreign := func(c driver.Change) bool { return !strings.HasPrefix(string(c.Key), "/registry/") }
	if sound && f.rev > firstRevision && !slices.ContainsFunc(f.history, func(b driver.Batch) bool { return slices.ContainsFunc(b.Changes, foreign) }) {
		for _, r := range f.resources {
			requireFloor(t, r, firstRevision) // otherwise the mirror has rejected valid history
		}
	}
	f.history, f.oldest = nil, math.MaxInt64 // no history is available later
	if !sound {
		// Divergences of the whole feed take effect with its next batch.
		f.feed <- driver.Batch{Through: f.rev}
		f.settle(t)
	}
	for range 12 {
		if len(p) == 0 {
			return
		}
		time.Sleep(11 * time.Minute) // the last divergence has expired
		f.settle(t)
		watches := f.watches(t)
		if proceed := f.step(t); !proceed {
			return
		}
		for _, w := range watches {
			if err := w.follow(t, f.state); err != nil && !errors.Is(err, mirror.ErrCompacted) {
				t.Fatal(err)
			}
		}
	}
}

// begin makes the source deliver either a history or a state without one, and reports whether the
// history is valid.
func (f *fuzzedFeed) begin() (sound bool) {
	sound = true
	if n := f.program.byte() % 4; n > 0 {
		for range n {
			b := f.batch(f.rev, f.at(f.rev))
			f.history = append(f.history, b)
			ok := sound && inOrder(f.rev, b) && b.Through < 1<<40
			if sound = ok; ok {
				sound = f.take(b)
			}
		}
	} else {
		for i := range f.program.byte() % 4 {
			f.truth[firstRevision][fuzzKeys[i]] = driver.KV{Key: []byte(fuzzKeys[i]), Value: []byte("first"), CreateRevision: 3, ModRevision: 4, Version: 2}
		}
	}
	return sound
}

// settle waits until the mirror has the valid state, and compares the two at every revision that
// the mirror still serves.
func (f *fuzzedFeed) settle(t *testing.T) {
	t.Helper()
	synctest.Wait()
	reach(t, f.m, f.rev, f.resources...)
	barrier(t, f.m)
	if published := f.m.PublishedRevision(); published != f.rev {
		t.Fatalf("published revision is %d, want %d", published, f.rev)
	}
	for _, r := range f.resources {
		now := latest(t, r)
		if got, want := read(now), f.state(f.rev, r.Prefix()); !maps.Equal(got, want) {
			t.Fatalf("%s at %d:%s", r.Prefix(), now.Rev, diff(got, want))
		}
		for rev := range f.truth {
			then, err := r.At(rev)
			if err != nil {
				continue
			}
			if got, want := read(then), f.state(rev, r.Prefix()); !maps.Equal(got, want) {
				t.Fatalf("%s at %d, read at %d:%s", r.Prefix(), rev, now.Rev, diff(got, want))
			}
		}
	}
}

// watches returns a follower of each resource that begins at the newest revision.
func (f *fuzzedFeed) watches(t *testing.T) (all []*follower) {
	t.Helper()
	for _, r := range f.resources {
		now := latest(t, r)
		all = append(all, &follower{prefix: r.Prefix(), cur: now.Cursor("", ""), held: read(now), last: now.Rev})
	}
	return all
}

// step executes the next instruction of the program, and settles. It returns false if no batch can
// follow.
func (f *fuzzedFeed) step(t *testing.T) (proceed bool) {
	t.Helper()
	switch f.program.byte() % 6 {
	case 0:
		return f.sendChanges(t)
	case 1:
		return f.sendProgress(t)
	case 2:
		f.breakOff([]error{errProgram, mirror.ErrCompacted, mirror.ErrRestored, mirror.ErrDiverged, nil}[f.program.byte()%5])
	case 3:
		f.m.Compact(min(f.program.near(f.rev), f.rev))
	case 4: // one faulty list
		f.fault.Store(uint32(f.program.byte() % 5))
		f.breakOff(mirror.ErrDiverged)
	}
	f.settle(t)
	return true
}

// detects delivers the batch, and reports whether the mirror has reported a divergence or relisted
// since.
func (f *fuzzedFeed) detects(t *testing.T, b driver.Batch) bool {
	t.Helper()
	before := f.m.Stats()
	f.feed <- b
	f.settle(t)
	st := f.m.Stats()
	return st.Divergences+st.Relists > before.Divergences+before.Relists
}

// sendChanges delivers a batch of changes. The mirror must report a divergence of exactly those
// that do not follow.
func (f *fuzzedFeed) sendChanges(t *testing.T) (proceed bool) {
	t.Helper()
	b := f.batch(f.rev, f.at(f.rev))
	if b.Through > 1<<40 { // so far away that no batch could follow
		return false
	}
	ordered := inOrder(f.rev, b)
	follows := ordered && f.take(b)
	detected := f.detects(t, b)
	// For keys outside the requested range a source may deliver any change.
	outside := slices.ContainsFunc(b.Changes, func(c driver.Change) bool { return !strings.HasPrefix(string(c.Key), root) })
	if detected == follows && !outside {
		t.Fatalf("detected: %v; in order: %v, follows: %v: %+v", detected, ordered, follows, b)
	}
	return true
}

// sendProgress delivers a batch without changes. The mirror must reject exactly progress that
// goes back.
func (f *fuzzedFeed) sendProgress(t *testing.T) (proceed bool) {
	t.Helper()
	b := driver.Batch{Through: f.program.near(f.rev)}
	if b.Through > 1<<40 {
		return false
	}
	ordered := inOrder(f.rev, b)
	if ordered {
		f.take(b)
	}
	if detected := f.detects(t, b); detected == ordered {
		t.Fatalf("detected: %v; progress to %d at %d", detected, b.Through, f.rev)
	}
	return true
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
