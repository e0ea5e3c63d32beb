package mirror_test

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing/synctest"
	"time"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/mirror"
)

const busy, quietOne, elsewhere = "/registry/busy/", "/registry/quiet/", "/elsewhere/"

// stage is a mirror on an etcd that is stepped, with readers and followers on it: writes,
// what the watch brings, what it says of its progress, revisions read and replies happen
// in the order in which a test does them. check finds what must not be.
type stage struct {
	etcd *stepped
	md   *model
	m    *mirror.Mirror
	res  []*mirror.Resource // the busy one and the quiet one

	// overtakes: etcd has the bug, and its watch may tell progress ahead of events.
	overtakes bool
	// unmoved: etcd tells no progress to a watch while nothing has been written since
	// the revision it began after, as etcd 3.6.2 and later do.
	unmoved    bool
	eventsOnly bool // the mirror's option

	began    int       // readers, so far
	readers  []*reader // those that have not been found to have returned
	answered int       // those that were given something
	inGap    int       // those of them that were while there was a gap
	gaps     bool      // there has been one
	early    []string  // those of them that were given it too early, and what was wrong with it
	follows  []*follower
	ended    int // followers that were told to begin anew
	clock    mirror.Revision
	story    []string // what has happened
}

// newStage returns a stage on which the mirror holds two keys of either resource
// and is in step.
func newStage(change func(*mirror.Options)) (*stage, error) {
	g := &stage{md: newModel()}
	g.etcd = &stepped{Store: g.md.store}
	for _, prefix := range []string{busy, quietOne} {
		put(g.md, prefix, "0", 2)
	}
	opts := mirror.Options{Prefix: root, Source: g.etcd, Logger: quiet(), FeedPatience: -1} // the stage plays the feed
	if change != nil {
		change(&opts)
	}
	g.eventsOnly = opts.EventsOnly
	var err error
	opts.Replay.Revisions = -1 // the steps begin with the first list
	if g.m, err = mirror.New(opts); err != nil {
		return nil, err
	}
	for _, prefix := range []string{busy, quietOne} {
		r, err := g.m.Claim(prefix)
		if err != nil {
			return nil, err
		}
		g.res = append(g.res, r)
		g.follows = append(g.follows, nil)
	}
	if err := g.m.Check(); err != nil { // the claims have been obeyed
		return nil, err
	}
	return g, g.check()
}

// close ends the mirror and the readers that are left.
func (g *stage) close() {
	g.m.Close()
	synctest.Wait()
}

// reader is one read. Its own goroutine writes the fields from rev on.
type reader struct {
	name      string
	key       string          // of a GET; a LIST has none
	atLeast   mirror.Revision // of a read that is not older than it; 0: consistent
	seen      mirror.Revision // written when it began: what it must see
	cancel    context.CancelFunc
	cancelled bool

	rev   mirror.Revision // that it waits for; 0 while it asks for one
	since time.Time       // it has waited
	done  chan struct{}   // closed when it has returned, with what follows
	err   error
	clock mirror.Revision
	snaps []mirror.Snapshot
	got   string
}

func (rd *reader) read(ctx context.Context, m *mirror.Mirror, res []*mirror.Resource) (err error) {
	rev := rd.atLeast
	if rev == 0 {
		if rev, err = m.Current(ctx); err != nil {
			return err
		}
	}
	rd.rev, rd.since = rev, time.Now()
	if err := m.Wait(ctx, rev); err != nil {
		return err
	}
	rd.clock = m.Clock()
	for _, r := range res {
		s, err := r.Latest()
		for ; errors.Is(err, mirror.ErrNotReady); s, err = r.Latest() {
			if err := r.WaitReady(ctx); err != nil {
				return err
			}
		}
		if err != nil {
			return err
		}
		rd.snaps = append(rd.snaps, s)
		if e, ok := s.Get(rd.key); ok {
			rd.got = describe(e)
		}
	}
	return nil
}

// step is something that can happen next.
type step struct {
	name string
	do   func()
}

// begin is the begin of a reader: a consistent LIST, a consistent GET if a key is given,
// or, if a revision is, a read that is not older than that.
func (g *stage) begin(key string, atLeast mirror.Revision) step {
	rd := &reader{key: key, atLeast: atLeast, name: "LIST", done: make(chan struct{})}
	switch {
	case atLeast != 0:
		rd.name = fmt.Sprintf("LIST not older than %d", atLeast)
	case key != "":
		rd.name = "GET " + key
	}
	return step{rd.name, func() {
		g.began++
		rd.name = fmt.Sprintf("read %d (%s)", g.began, rd.name)
		var ctx context.Context
		ctx, rd.cancel = context.WithCancel(context.Background())
		if rd.seen = atLeast; rd.seen == 0 {
			rd.seen = g.etcd.Revision()
		}
		g.readers = append(g.readers, rd)
		go func() {
			defer rd.cancel()
			rd.err = rd.read(ctx, g.m, g.res)
			close(rd.done)
		}()
	}}
}

// take does the step and lets everything follow that follows from it.
func (g *stage) take(s step) {
	g.story = append(g.story, s.name)
	s.do()
	synctest.Wait()
}

// write is a transaction. It is acknowledged at once, which is the strictest case for
// the reads that begin after it.
func (g *stage) write(ops ...memory.Op) step {
	name := fmt.Sprintf("%d:", g.etcd.Revision()+1)
	for _, op := range ops {
		name += " " + op.Key
		if op.Delete {
			name += " deleted"
		}
	}
	return step{"write " + name, func() { g.md.txn(ops...) }}
}

// deliveries are the batches that the watch can bring next: of one revision, and of up
// to most together.
func (g *stage) deliveries(most int) (steps []step) {
	if g.etcd.now().stream == nil {
		return nil
	}
	revisions, last := 0, mirror.Revision(0)
	for _, c := range g.etcd.due() {
		if c.ModRevision == last {
			continue
		}
		if revisions++; revisions > most {
			break
		}
		last = c.ModRevision
		n := revisions
		steps = append(steps, step{fmt.Sprintf("events up to %d", last), func() { g.etcd.deliver(n) }})
	}
	return steps
}

// progress are the revisions from the one to the other that the watch can say it has
// come to, which is never below what it has said before.
func (g *stage) progress(from, to mirror.Revision) (steps []step) {
	st := g.etcd.now().stream
	if st == nil {
		return nil
	}
	from = max(from, st.told)
	if g.unmoved {
		from = max(from, st.after+1)
	}
	for rev := from; rev <= to; rev++ {
		steps = append(steps, step{fmt.Sprintf("progress %d", rev), func() { g.etcd.progress(rev) }})
	}
	return steps
}

// furthest returns the highest revision that the watch may say it has come to.
func (g *stage) furthest() mirror.Revision {
	if g.overtakes {
		return g.etcd.Revision()
	}
	return g.etcd.inStep()
}

// revisionReads are what can happen to the call for the revision that is in flight.
func (g *stage) revisionReads() []step {
	switch call := g.etcd.now().call; {
	case call == nil:
		return nil
	case call.rev == 0:
		return []step{{"etcd reads its revision", g.etcd.linearize}}
	default:
		return []step{{fmt.Sprintf("revision %d arrives", call.rev), g.etcd.reply}}
	}
}

// check looks at everything that can be seen: at the reads that have returned since the
// last check, of which it adds those that did not show what they must to early, and at all
// else, of which it returns what must not be.
func (g *stage) check() error {
	synctest.Wait()
	now := g.m.Clock()
	if now < g.clock {
		return fmt.Errorf("the clock went from %d to %d", g.clock, now) // I1
	}
	g.clock = now
	if g.eventsOnly && g.etcd.now().requests > 0 {
		return errors.New("progress was asked for")
	}
	if st := g.etcd.now().stream; st != nil {
		want := st.told
		if g.eventsOnly {
			want = st.sent
		}
		if now != want {
			return fmt.Errorf("the clock is at %d, the watch has come to %d", now, want)
		}
	}
	g.gaps = g.gaps || g.gap()
	var left []*reader
	for _, rd := range g.readers {
		select {
		case <-rd.done:
			if err := g.checkReturned(rd); err != nil {
				return err
			}
		default:
			if err := g.checkWaiting(rd); err != nil {
				return err
			}
			left = append(left, rd)
		}
	}
	g.readers = left
	return g.follow()
}

// follow has a follower of either resource come to the clock, where it must hold what
// etcd held (I4): a bookmark says so to a client. Nothing is known of that in a gap.
func (g *stage) follow() error {
	for i, r := range g.res {
		f := g.follows[i]
		if f == nil {
			s, err := r.Latest()
			if errors.Is(err, mirror.ErrNotReady) {
				continue
			} else if err != nil {
				return err
			}
			f = &follower{prefix: r.Prefix(), cur: s.Cursor("", ""), held: read(s)}
			g.follows[i] = f
		}
		events, err := f.cur.Next(nil, 1000)
		if errors.Is(err, mirror.ErrCompacted) {
			g.follows[i] = nil
			g.ended++
			continue
		} else if err != nil {
			return err
		}
		for _, e := range events {
			delete(f.held, e.Key())
			if e.Entry != nil {
				f.held[e.Key()] = describe(e.Entry)
			}
		}
		if f.cur.Position() != g.clock {
			return fmt.Errorf("a follower of %s is at %d, the clock at %d", f.prefix, f.cur.Position(), g.clock)
		}
		if want := g.md.want(g.clock, f.prefix); !maps.Equal(f.held, want) && !g.gap() {
			return fmt.Errorf("at %d a follower:%s", g.clock, diff(f.held, want))
		}
	}
	return nil
}

// checkReturned returns an error if a reader was given one that nothing explains, and
// looks at what it was given instead.
func (g *stage) checkReturned(rd *reader) error {
	switch {
	case rd.err == nil:
		g.answered++
		if g.gap() {
			g.inGap++
		}
		if d := g.wrong(rd); d != "" {
			g.early = append(g.early, rd.name+d)
		}
	case errors.Is(rd.err, context.Canceled) && rd.cancelled:
	case errors.Is(rd.err, errNoLeader), errors.Is(rd.err, context.DeadlineExceeded): // of its call for the revision
	default:
		return fmt.Errorf("%s: %w", rd.name, rd.err)
	}
	return nil
}

// checkWaiting returns an error if a reader that has not returned should have, or is not
// helped.
func (g *stage) checkWaiting(rd *reader) error {
	waits := rd.rev != 0
	switch {
	case rd.cancelled:
		return fmt.Errorf("%s does not return though it was cancelled", rd.name)
	case waits && g.clock >= rd.rev && g.res[0].Ready() && g.res[1].Ready():
		return fmt.Errorf("%s waits for %d and is not woken at %d", rd.name, rd.rev, g.clock)
	case g.eventsOnly || !waits || g.clock >= rd.rev:
		return nil
	}
	patience := 100 * time.Millisecond
	if g.etcd.now().hang != nil {
		patience += time.Second // after which a request is given up
	}
	asked := g.etcd.now().asked
	if rd.since.After(asked) {
		asked = rd.since
	}
	if ago := time.Since(asked); ago > patience {
		return fmt.Errorf("%s waits for %d, and progress was last asked for %v ago", rd.name, rd.rev, ago)
	}
	return nil
}

// wrong tells what is wrong with what a reader was given: it must be of a revision that
// it may be of (I6), which the clock had reached, and exactly what etcd held there.
func (g *stage) wrong(rd *reader) string {
	d := ""
	if rd.clock < rd.rev || rd.rev < rd.seen {
		d += fmt.Sprintf(" answered at %d after a wait for %d;", rd.clock, rd.rev)
	}
	for i, s := range rd.snaps {
		if s.Rev < rd.seen || s.Rev < rd.clock {
			d += fmt.Sprintf(" is of %d, must have seen %d;", s.Rev, rd.seen)
		}
		want := g.md.want(s.Rev, g.res[i].Prefix())
		if got := read(s); !maps.Equal(got, want) {
			d += fmt.Sprintf(" at %d%s", s.Rev, diff(got, want))
		}
		if strings.HasPrefix(rd.key, g.res[i].Prefix()) && rd.got != want[rd.key] {
			d += fmt.Sprintf(" GET at %d is %q, want %q;", s.Rev, rd.got, want[rd.key])
		}
	}
	return d
}

// gap reports whether the clock has passed an event that the watch has yet to deliver.
func (g *stage) gap() bool {
	if g.etcd.now().stream == nil {
		return false
	}
	due := g.etcd.due()
	return len(due) > 0 && due[0].ModRevision <= g.clock
}

// settle lets everything arrive, answers from then on what the mirror asks, and returns
// an error unless every reader has returned a tenth of a second later.
func (g *stage) settle() error {
	if g.etcd.now().hang != nil {
		g.etcd.letRequestsGo()
	}
	for begin := time.Now(); g.etcd.now().stream == nil; time.Sleep(10 * time.Millisecond) {
		if err := g.check(); err != nil {
			return err
		}
		if time.Since(begin) > 6*time.Second {
			return errors.New("the mirror does not watch any more")
		}
	}
	for _, rd := range g.readers { // those that wait for what is still to come
		for g.etcd.Revision() < max(rd.rev, rd.atLeast) {
			g.take(g.write(memory.Op{Key: elsewhere + "x"}))
		}
	}
	requests := g.etcd.now().requests
	for begin := time.Now(); ; time.Sleep(time.Millisecond) {
		for synctest.Wait(); g.etcd.now().call != nil; synctest.Wait() {
			g.take(g.revisionReads()[0])
			if err := g.check(); err != nil {
				return err
			}
		}
		if g.eventsOnly {
			g.take(g.write(memory.Op{Key: busy + "x"}))
		}
		for len(g.deliveries(1)) > 0 {
			g.take(g.deliveries(1)[0])
			if err := g.check(); err != nil {
				return err
			}
			if g.etcd.now().stream == nil { // what was delivered contradicted the past
				return nil
			}
		}
		if rev := g.etcd.Revision(); g.etcd.now().requests > requests && !(g.unmoved && rev == g.etcd.now().stream.after) {
			g.take(step{"progress is answered", func() { g.etcd.progress(rev) }})
		}
		requests = g.etcd.now().requests
		if err := g.check(); err != nil {
			return err
		}
		switch {
		case len(g.readers) == 0:
			return g.m.Check()
		case time.Since(begin) > 101*time.Millisecond:
			return fmt.Errorf("everything has arrived, progress is answered, and %s does not return", g.readers[0].name)
		}
	}
}

// explain tells what has happened, what reads were answered too early, and err.
func (g *stage) explain(err error) string {
	return fmt.Sprintf("%v\nanswered too early: %s\nafter:\n\t%s", err, strings.Join(g.early, "\n\t"), strings.Join(g.story, "\n\t"))
}

// differences compares keys and mod revisions, never a value, of what the resource shows
// now with what etcd lists at the revision of that, and returns the keys that differ:
// all that a scheduled check of a mirror needs.
func differences(source mirror.Source, r *mirror.Resource) ([]string, error) {
	s, err := r.Latest()
	if err != nil {
		return nil, err
	}
	etcd := map[string]mirror.Revision{}
	_, err = source.List(context.Background(), r.Prefix(), s.Rev, func(page []mirror.KV) error {
		for _, kv := range page {
			etcd[string(kv.Key)] = kv.ModRevision
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	var differ []string
	for e := range s.All("", "") {
		if etcd[e.Key()] != e.ModRevision() {
			differ = append(differ, e.Key())
		}
		delete(etcd, e.Key())
	}
	return slices.Sorted(slices.Values(slices.AppendSeq(differ, maps.Keys(etcd)))), nil
}
