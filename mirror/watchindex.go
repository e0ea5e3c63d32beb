package mirror

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strings"
	"sync"
)

// indexFunc is a parameter of NewWatchIndex.
type indexFunc = func(*Event) (before, now string, known bool)

// WatchIndex groups the events of a resource by a value that its readers derive, such as a field of
// the object. The mirror itself never decodes values. Cursors that follow a value
// (Cursor.FollowIndex) read, and are woken by, only the events of that value. While there are such
// cursors, one goroutine follows the log for all of them; the writer is not involved. All methods
// may be called concurrently.
type WatchIndex struct {
	res            *Resource
	ctx            context.Context
	startGoroutine func(run func()) bool
	valuesOf       indexFunc
	// covers, if set, reports whether a set of values that cursors follow contains a value.
	covers func(set, value string) bool

	mu  sync.Mutex     // before topics.mu, and before the locks that start takes
	cur *indexedEvents // nil while no cursor follows a value
}

// NewWatchIndex returns an index of the events of a resource. Its goroutine calls valuesOf once for
// each event and blocks on nothing else; a slow valuesOf delays only the cursors of this index.
// startGoroutine runs a function on a goroutine, or reports false if the owner of its goroutines
// has ended. The function ends when no cursor follows a value, with the resource's lineage, and
// with ctx.
//
// valuesOf returns the values of the object before and after an event (Prev, Entry), as far as they
// exist. It reports false if they cannot be determined: the event then concerns every value.
//
// With covers, cursors follow sets of values. Sets have names and may overlap: FollowIndex takes a
// name, and covers reports whether the named set contains a value. An event costs a call of covers
// for each followed set and each of its values. A nil covers means that cursors follow single
// values.
func NewWatchIndex(ctx context.Context, r *Resource, startGoroutine func(run func()) bool, valuesOf func(*Event) (before, now string, known bool),
	covers func(set, value string) bool) *WatchIndex {
	return &WatchIndex{res: r, ctx: ctx, startGoroutine: startGoroutine, valuesOf: valuesOf, covers: covers}
}

// subscribe returns the topic of the value for a cursor, nil if the watch index has ended.
func (p *WatchIndex) subscribe(lin *lineage, value string) *topic {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.cur == nil || p.cur.lin != lin || p.cur.ended.Load() {
		// Cursors of the previous indexedEvents, if any, keep it until they leave. The new one
		// begins at the log's end. A cursor that is behind reads the log up to there by itself, so
		// that no cursor waits for the backlog of another.
		end := lin.log.End()
		s := &indexedEvents{lin: lin, res: p.res, valuesOf: p.valuesOf, covers: p.covers, from: end, next: end}
		s.log, s.idle, s.keep = lin.log, make(chan struct{}), p.covers == nil
		if lin.log.Dead() || !p.startGoroutine(func() { s.loop(p.ctx) }) {
			return nil
		}
		p.cur = s
	}
	return p.cur.join(value, p.cur.oldestLocked)
}

// unsubscribe undoes subscribe.
func (p *WatchIndex) unsubscribe(t *topic) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if t.owner.leave(t) > 0 {
		return
	}
	close(t.owner.idle)
	if p.cur != nil && &p.cur.topics == t.owner {
		p.cur = nil
	}
}

// indexedEvents contains the sorted events of one lineage from the moment at which the first cursor
// joined. Values without a cursor also have topics, as long as the log has events of theirs: a
// cursor that joins later at an older position does not visit every event again. This is the case
// when a server's clients reconnect after a restart.
type indexedEvents struct {
	topics
	lin      *lineage
	res      *Resource
	valuesOf indexFunc
	covers   func(set, value string) bool // nil: topics are of single values

	// from is where new topics begin. Topics of sets exist only while they have a cursor, so a new
	// one begins after all posted events. Guarded by topics.mu.
	from uint64

	// Owned by the goroutine.
	next     uint64
	revision []indexedEvent
	pace     pace // of the invariant checks
}

type indexedEvent struct {
	ev          *Event
	seq         uint64
	before, now string
	decodable   bool
}

// oldestLocked returns the number of the event at which a new topic begins to be complete.
func (s *indexedEvents) oldestLocked() uint64 { return max(s.from, s.trimmed) }

func (s *indexedEvents) loop(ctx context.Context) {
	defer func() {
		s.ended.Store(true)
		s.wakeAll()
	}()
	for {
		changed := s.res.changed.next()
		if !s.advance(ctx) {
			return
		}
		select {
		case <-changed:
		case <-s.idle:
			return
		case <-ctx.Done():
			return
		}
	}
}

// advance posts the new events, revision by revision. It reports false if the goroutine must end:
// the lineage is dead, the log has dropped the next event, no cursor is left, or ctx has ended.
func (s *indexedEvents) advance(ctx context.Context) bool {
	// before the log's end: the log then contains all events up to the published revision
	now := s.res.m.published.Revision()
	for end := s.log.End(); s.next < end; {
		ev := s.log.At(s.next)
		if ev == nil || s.log.Dead() || ctx.Err() != nil || s.unused() {
			return false
		}
		if ev.Rev > now {
			break
		}
		clear(s.revision)
		s.revision = s.revision[:0]
		for rev := ev.Rev; ev != nil && ev.Rev == rev; ev = s.log.At(s.next) {
			e := indexedEvent{ev: ev, seq: s.next}
			e.before, e.now, e.decodable = s.valuesOf(ev)
			s.revision = append(s.revision, e)
			s.next++
		}
		s.post()
	}
	return !s.log.Dead()
}

// unused reports whether all cursors have left.
func (s *indexedEvents) unused() bool {
	select {
	case <-s.idle:
		return true
	default:
		return false
	}
}

// post adds the events of a revision to the topics that they concern.
func (s *indexedEvents) post() {
	first := s.log.First()
	s.mu.Lock()
	for _, e := range s.revision {
		if !e.decodable {
			s.postToAllLocked(e.seq, first)
			continue
		}
		if s.covers != nil {
			s.postToSetsLocked(&e, first)
			continue
		}
		if e.ev.Prev != nil {
			s.postLocked(s.topicLocked(e.before), e.seq, first)
		}
		if e.ev.Entry != nil && (e.ev.Prev == nil || e.now != e.before) {
			s.postLocked(s.topicLocked(e.now), e.seq, first)
		}
	}
	if s.covers != nil {
		s.from = s.next
	}
	s.trimLocked(first)
	if len(s.byName) > s.cursors+maxOthers {
		s.forgetOthersLocked(s.next)
	}
	s.mu.Unlock()
	s.notify(s.next)
	s.verify()
}

// maxOthers bounds the topics of values without a cursor, of 200 to 300 bytes each (I7): a guess,
// the nodes of two of the largest clusters.
const maxOthers = 10_000

// topicLocked returns the topic of a value.
func (s *indexedEvents) topicLocked(value string) *topic {
	t := s.byName[value]
	if t == nil {
		t = &topic{owner: &s.topics, name: strings.Clone(value), from: s.oldestLocked()}
		s.add(t)
	}
	return t
}

// postToAllLocked adds an event to every topic that has a cursor; it drops the others, and new
// topics begin after the event.
func (s *indexedEvents) postToAllLocked(seq, first uint64) {
	s.forgetOthersLocked(seq + 1)
	for _, t := range s.byName {
		s.postLocked(t, seq, first)
	}
}

// postToSetsLocked adds an event to the topics of the sets that contain one of its values.
func (s *indexedEvents) postToSetsLocked(e *indexedEvent, first uint64) {
	for name, t := range s.byName {
		if e.ev.Prev != nil && s.covers(name, e.before) || e.ev.Entry != nil && s.covers(name, e.now) {
			s.postLocked(t, e.seq, first)
		}
	}
}

// forgetOthersLocked drops the topics without a cursor; new ones begin at the number from.
func (s *indexedEvents) forgetOthersLocked(from uint64) {
	maps.DeleteFunc(s.byName, func(_ string, t *topic) bool { return t.cursors == 0 })
	s.from = from
}

// verify panics if an invariant of the watch index's topics is broken. The watch index's goroutine,
// which is the poster, calls it after the events of a revision were posted. Without the build tag
// strata_invariants it does nothing.
func (s *indexedEvents) verify() {
	if !checkInvariants {
		return
	}
	if err := s.check(); err != nil {
		panic("mirror: " + s.res.prefix + ": invariant " + err.Error())
	}
}

// check returns an error if an event of the last posted revision is missing in a topic that it
// concerns, or if the topics contradict each other. With sets, each call costs O(topics). With
// single values only some calls visit all topics (pace).
func (s *indexedEvents) check() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.posted.Load() != s.next {
		return broken("I4", "posted up to %d, sorted up to %d", s.posted.Load(), s.next)
	}
	for i := range s.revision {
		if err := s.checkEventLocked(&s.revision[i]); err != nil {
			return broken("I4", "event %d of %d: %w", s.revision[i].seq, s.revision[i].ev.Rev, err)
		}
	}
	if !s.pace.due(len(s.byName) + s.log.Len()) {
		return nil
	}
	return s.checkLocked()
}

// checkEventLocked returns an error if a topic lacks an event that concerns it. The caller holds
// mu.
func (s *indexedEvents) checkEventLocked(e *indexedEvent) error {
	if e.seq < s.log.First() {
		return nil // dropped meanwhile
	}
	has := func(name string, t *topic) error {
		if e.seq < t.from {
			return nil
		}
		if seqs, ok := t.postings.From(e.seq); !ok || len(seqs) == 0 || seqs[0] != e.seq {
			return fmt.Errorf("event is missing in topic %q", name)
		}
		return nil
	}
	if e.decodable && s.covers == nil {
		for _, v := range e.values() {
			t := s.byName[v]
			if t == nil && e.seq >= s.oldestLocked() {
				return fmt.Errorf("value %q has no topic", v)
			}
			if t != nil {
				if err := has(v, t); err != nil {
					return err
				}
			}
		}
		return nil
	}
	for name, t := range s.byName {
		if !e.decodable || slices.ContainsFunc(e.values(), func(v string) bool { return s.covers(name, v) }) {
			if err := has(name, t); err != nil {
				return err
			}
		}
	}
	return nil
}

// values returns the values of the object before and after the event.
func (e *indexedEvent) values() (values []string) {
	if e.ev.Prev != nil {
		values = append(values, e.before)
	}
	if e.ev.Entry != nil {
		values = append(values, e.now)
	}
	return values
}
