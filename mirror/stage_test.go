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
	"github.com/stratakube/strata/mirror/driver"
)

const busy, quietOne, elsewhere = "/registry/busy/", "/registry/quiet/", "/elsewhere/"

// stage is a mirror on an etcd that is stepped, with readers and followers. A test determines the
// order of writes, deliveries of the watch, progress, revision reads and replies. check detects
// violations.
type stage struct {
	etcd *stepped
	md   *model
	m    *mirror.Mirror
	res  []*mirror.Resource // the busy one and the quiet one

	// overtakes: etcd has the bug, and its watch may send progress ahead of events.
	overtakes bool
	// unmoved: etcd sends no progress to a watch while there were no writes since its start
	// revision, as etcd 3.6.2 and later.
	unmoved    bool
	eventsOnly bool // the mirror's option

	began     int       // readers begun so far
	readers   []*reader // readers that have not been seen to have returned
	answered  int       // readers that returned a result
	inGap     int       // of them, those that returned during a gap
	gaps      bool      // there has been a gap
	early     []string  // of them, those that returned too early, with the fault of the result
	follows   []*follower
	ended     int // followers that had to start over
	published mirror.Revision
	story     []string // the steps so far
}

// newStage returns a stage on which the mirror has two keys of each resource and is up to date.
func newStage(change func(*mirror.Options)) (*stage, error) {
	g := &stage{md: newModel()}
	g.etcd = &stepped{Store: g.md.store}
	for _, prefix := range []string{busy, quietOne} {
		put(g.md, prefix, "0", 2)
	}
	// the stage controls the feed
	opts := mirror.Options{Prefix: root, Source: g.etcd, Logger: quiet(), FeedPatience: -1}
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
	if err := g.m.Check(); err != nil { // the claims have been executed
		return nil, err
	}
	return g, g.check()
}

// close closes the mirror and ends the remaining readers.
func (g *stage) close() {
	g.m.Close()
	synctest.Wait()
}

// reader is one read. Its goroutine writes the fields from rev on.
type reader struct {
	name      string
	key       string          // of a GET; empty for a LIST
	atLeast   mirror.Revision // the requested minimum revision; 0: a consistent read
	seen      mirror.Revision // etcd's revision when it began, which the result must include
	cancel    context.CancelFunc
	cancelled bool

	rev       mirror.Revision // the revision that it waits for; 0 during the revision read
	since     time.Time       // the beginning of the wait
	done      chan struct{}   // closed when it has returned; the fields below are then set
	err       error
	published mirror.Revision
	snaps     []mirror.Snapshot
	got       string
}

func (rd *reader) read(ctx context.Context, m *mirror.Mirror, res []*mirror.Resource) (err error) {
	rev := rd.atLeast
	if rev == 0 {
		if rev, err = m.ReadRevision(ctx); err != nil {
			return err
		}
	}
	rd.rev, rd.since = rev, time.Now()
	if err := m.Wait(ctx, rev); err != nil {
		return err
	}
	rd.published = m.PublishedRevision()
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

// step is a possible next step.
type step struct {
	name string
	do   func()
}

// begin begins a reader: a consistent LIST, a consistent GET if a key is given, or a read at a
// minimum revision if one is given.
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

// take executes the step and waits until all goroutines are idle.
func (g *stage) take(s step) {
	g.story = append(g.story, s.name)
	s.do()
	synctest.Wait()
}

// write is a transaction. It is acknowledged at once, which is the strictest case for the reads
// that begin after it.
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

// deliveries are the batches that the watch can deliver next: of one revision, and of up to most
// revisions.
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

// progress returns the progress steps between two revisions, which are never below earlier
// progress.
func (g *stage) progress(from, to mirror.Revision) (steps []step) {
	st := g.etcd.now().stream
	if st == nil {
		return nil
	}
	from = max(from, st.reported)
	if g.unmoved {
		from = max(from, st.after+1)
	}
	for rev := from; rev <= to; rev++ {
		steps = append(steps, step{fmt.Sprintf("progress %d", rev), func() { g.etcd.progress(rev) }})
	}
	return steps
}

// furthest returns the highest revision that the watch may report as progress.
func (g *stage) furthest() mirror.Revision {
	if g.overtakes {
		return g.etcd.Revision()
	}
	return g.etcd.inStep()
}

// revisionReads returns the possible steps of the revision read in flight.
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

// check checks the visible state. It adds reads that returned a wrong result since the last check
// to early, and returns all other violations as an error.
func (g *stage) check() error {
	synctest.Wait()
	now := g.m.PublishedRevision()
	if now < g.published {
		return fmt.Errorf("published revision went from %d to %d", g.published, now) // I1
	}
	g.published = now
	if g.eventsOnly && g.etcd.now().requests > 0 {
		return errors.New("progress was requested with EventsOnly")
	}
	if st := g.etcd.now().stream; st != nil {
		want := st.reported
		if g.eventsOnly {
			want = st.sent
		}
		if now != want {
			return fmt.Errorf("published revision is %d, the watch is at %d", now, want)
		}
	}
	g.gaps = g.gaps || g.gap()
	var left []*reader
	for _, rd := range g.readers {
		if g.isDue(rd) {
			time.Sleep(time.Millisecond) // it may be in a pause of Latest if it met the writer
			synctest.Wait()
		}
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

// follow drains a follower of each resource up to the published revision, where it must have etcd's
// state (I4): a bookmark asserts this to a client. During a gap the state is unknown.
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
		if f.cur.Position() != g.published {
			return fmt.Errorf("a follower of %s is at %d, published revision is %d", f.prefix, f.cur.Position(), g.published)
		}
		if want := g.md.want(g.published, f.prefix); !maps.Equal(f.held, want) && !g.gap() {
			return fmt.Errorf("at %d a follower:%s", g.published, diff(f.held, want))
		}
	}
	return nil
}

// checkReturned returns an error if a reader returned an unexplained error, and otherwise checks
// its result.
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
	case errors.Is(rd.err, errNoLeader), errors.Is(rd.err, context.DeadlineExceeded):
		// of its revision read
	default:
		return fmt.Errorf("%s: %w", rd.name, rd.err)
	}
	return nil
}

// isDue reports whether what a reader waits for can be read, and it has not returned.
func (g *stage) isDue(rd *reader) bool {
	select {
	case <-rd.done:
		return false
	default:
		return rd.rev != 0 && g.published >= rd.rev && g.res[0].Ready() && g.res[1].Ready()
	}
}

// checkWaiting returns an error if a reader that has not returned should have, or makes no
// progress.
func (g *stage) checkWaiting(rd *reader) error {
	waits := rd.rev != 0
	switch {
	case rd.cancelled:
		return fmt.Errorf("%s does not return though it was cancelled", rd.name)
	case g.isDue(rd):
		return fmt.Errorf("%s waits for %d and is not woken at %d", rd.name, rd.rev, g.published)
	case g.eventsOnly || !waits || g.published >= rd.rev:
		return nil
	}
	patience := 100 * time.Millisecond
	if g.etcd.now().hang != nil {
		patience += time.Second // after which a request is abandoned
	}
	asked := g.etcd.now().asked
	if rd.since.After(asked) {
		asked = rd.since
	}
	if ago := time.Since(asked); ago > patience {
		return fmt.Errorf("%s waits for %d, the last progress request was %v ago", rd.name, rd.rev, ago)
	}
	return nil
}

// wrong describes the fault of a reader's result, if any: it must be of an allowed revision (I6),
// which the published revision had reached, and exactly etcd's state at that revision.
func (g *stage) wrong(rd *reader) string {
	d := ""
	if rd.published < rd.rev || rd.rev < rd.seen {
		d += fmt.Sprintf(" answered at %d after a wait for %d;", rd.published, rd.rev)
	}
	for i, s := range rd.snaps {
		if s.Rev < rd.seen || s.Rev < rd.published {
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

// gap reports whether the published revision has passed an event that the watch has yet to deliver.
func (g *stage) gap() bool {
	if g.etcd.now().stream == nil {
		return false
	}
	due := g.etcd.due()
	return len(due) > 0 && due[0].ModRevision <= g.published
}

// settle delivers everything, answers all requests of the mirror from then on, and returns an error
// unless every reader has returned a tenth of a second later.
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
	for _, rd := range g.readers { // readers that wait for future revisions
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
			if g.etcd.now().stream == nil { // the delivered events contradicted earlier ones
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

// explain returns the steps, the reads that were answered too early, and err.
func (g *stage) explain(err error) string {
	return fmt.Sprintf("%v\nanswered too early: %s\nafter:\n\t%s", err, strings.Join(g.early, "\n\t"), strings.Join(g.story, "\n\t"))
}

// differences compares the keys and mod revisions of the resource's latest snapshot with etcd's
// list at the same revision, without values, and returns the keys that differ: the result of a
// scheduled check.
func differences(source driver.Source, r *mirror.Resource) ([]string, error) {
	s, err := r.Latest()
	if err != nil {
		return nil, err
	}
	etcd := map[string]mirror.Revision{}
	_, err = source.List(context.Background(), r.Prefix(), s.Rev, func(page []driver.KV) error {
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
