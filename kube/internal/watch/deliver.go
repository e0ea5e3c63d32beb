package watch

import (
	"errors"
	"fmt"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/watch"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/mirror"
)

// Sink writes a watch in the form of its client. Stream.Deliver calls its methods in order on one
// goroutine. A method that returns ErrEnded reports that the client is gone; any other error
// is reported to the client at the end.
type Sink interface {
	// Refresh is called before each batch and before an event is retried, because the keys that
	// decrypt values may have changed.
	Refresh() error
	// Runs writes runs of the initial events. The watch selects all their entries.
	Runs(runs []mirror.Run) error
	// Added writes an entry of the initial events as ADDED.
	Added(e *mirror.Entry) error
	// Listed is called once if the watch has initial events, when the last of them was written.
	Listed()
	// Event writes an event as the type. An error other than ErrEnded is a decoding or
	// encoding error: no bytes were written, and Event is called again for the same event.
	Event(t watch.EventType, ev *mirror.Event) error
	// Bookmark writes a bookmark.
	Bookmark(b Bookmark) error
	// Flush sends everything written to the client. It is called before the stream waits.
	Flush() error
}

// Deliver writes the stream to the sink until it ends: initial events, then events and bookmarks in
// revision order (I4). An event that cannot be decoded or encoded is retried and delays later
// events. Closing stop, which may be nil, ends the stream. Deliver returns the error to report to
// the client, or nil if the request, the storage or the server has ended. It must not be called
// concurrently or twice. It does not allocate per event.
func (st *Stream) Deliver(stop <-chan struct{}, sink Sink) error {
	err := st.undelivered
	if err == nil {
		err = st.deliverPending(stop, sink)
	}
	for err == nil {
		if err = st.wait(stop); err == nil {
			err = st.deliverPending(stop, sink)
		}
	}
	if errors.Is(err, ErrEnded) || st.life.ctx.Err() != nil {
		return nil
	}
	return err
}

// DeliverPending is the part of Deliver before the stream waits: it writes the initial events and
// the events so far. It may be called once before Deliver, on another goroutine. If it fails,
// Deliver returns the error.
func (st *Stream) DeliverPending(stop <-chan struct{}, sink Sink) {
	st.undelivered = st.deliverPending(stop, sink)
}

// deliverPending writes all pending batches. It returns the reason of the stream's end, or nil when
// the stream has to wait.
func (st *Stream) deliverPending(stop <-chan struct{}, sink Sink) error {
	for initial := st.phase == listing; ; {
		b, err := st.next()
		if err == nil && b.empty() {
			return sink.Flush()
		}
		if err == nil {
			select {
			case <-stop:
				return ErrEnded
			default:
			}
			err = st.deliver(sink, &b)
		}
		if err != nil {
			return err
		}
		if initial && st.phase != listing {
			initial = false
			sink.Listed()
		}
	}
}

// deliver writes one batch.
func (st *Stream) deliver(sink Sink, b *delivery) error {
	st.batches++
	if err := sink.Refresh(); err != nil {
		return err
	}
	if err := st.deliverInitial(sink, b); err != nil {
		if !st.life.deadline.IsZero() && time.Until(st.life.deadline) < time.Second && apierrors.IsTimeout(err) {
			<-st.life.ctx.Done() // a conversion waits almost as long
			return ErrEnded
		}
		return err
	}
	for _, ev := range b.events {
		err := st.event(sink, ev)
		if err != nil && !errors.Is(err, ErrEnded) {
			err = st.retry(sink, ev, err)
		}
		if err != nil {
			return err
		}
	}
	if b.bookmark.Revision != 0 {
		return sink.Bookmark(b.bookmark)
	}
	return nil
}

// deliverInitial writes the initial events of a batch that the watch selects.
func (st *Stream) deliverInitial(sink Sink, b *delivery) error {
	if b.selected {
		if st.initial.read != nil {
			n := 0
			for _, run := range b.runs {
				n += len(run.Items())
			}
			st.initial.read.add(n, n)
		}
		return sink.Runs(b.runs)
	}
	for _, run := range b.runs {
		if err := st.added(sink, run.Items()); err != nil {
			return err
		}
	}
	return st.added(sink, b.entries)
}

func (st *Stream) added(sink Sink, entries []*mirror.Entry) error {
	returned := 0
	for i, e := range entries {
		ok, err := st.selects(e)
		if err == nil && ok {
			returned++
			err = sink.Added(e)
		}
		if err != nil {
			st.initial.read.add(i+1, returned)
			return err
		}
	}
	st.initial.read.add(len(entries), returned)
	return nil
}

// event writes an event if the watch selects the object before or after it.
func (st *Stream) event(sink Sink, ev *mirror.Event) error {
	t, err := st.translate(ev)
	if err != nil || t == "" {
		return err
	}
	return sink.Event(t, ev)
}

// selects reports whether the watch selects an initial entry. The error is a decoding error;
// without a selector the entry is not decoded.
func (st *Stream) selects(e *mirror.Entry) (bool, error) {
	if st.initial.read != nil && st.initial.read.exact {
		return true, nil
	}
	ok, err := st.scope.selector.Matches(st.life.ctx, e)
	if st.scope.selector.Shard != nil && err == nil && !ok && !st.initial.counted {
		st.countFiltered(e)
	}
	return ok, err
}

// translate returns the type of an event for this watch: ADDED or MODIFIED with the object after
// it, DELETED with the object before it and the event's revision, or "" if the watch selects
// neither. Errors are decoding errors; see retry.
func (st *Stream) translate(ev *mirror.Event) (watch.EventType, error) {
	before, now, err := st.scope.selector.MatchesEvent(st.EventContext(), ev)
	if st.scope.selector.Shard != nil && err == nil {
		st.countFiltered(ev.Prev, ev.Entry)
	}
	switch {
	case err != nil:
		return "", err
	case now && before:
		return watch.Modified, nil
	case now:
		return watch.Added, nil
	case before:
		return watch.Deleted, nil
	}
	return "", nil
}

// countFiltered counts the entries of other shards than the watch's. An entry may be nil.
func (st *Stream) countFiltered(entries ...*mirror.Entry) {
	n := 0
	for _, e := range entries {
		if e == nil {
			continue
		}
		if a := st.scope.selector.Generation.KnownAttributes(e); a != nil && !st.scope.selector.Shard.Selects(a) {
			n++
		}
	}
	st.env.Metrics.Filtered(n)
}

// retry tries again, with growing pauses, to write an event that failed with err because it cannot
// be decoded, converted or encoded: sending later events first would break the order of a watch.
// Events written before are flushed first; other watches, and watches of other objects, continue.
// It returns nil on success, ErrEnded, or the error for the client: 410 at once if only
// history lacks the event's states (lost).
func (st *Stream) retry(sink Sink, ev *mirror.Event, err error) error {
	if err := sink.Flush(); err != nil {
		return err
	}
	if st.life.ctx.Err() != nil {
		return ErrEnded
	}
	corrupt := ev.Entry == nil && st.env.Lists.Gates.UnsafeDelete
	if st.lost(ev) {
		return apierrors.NewResourceExpired(fmt.Sprintf("event at revision %d can no longer be decoded: %v", ev.Rev, objects.Cause(err)))
	}
	giveUp := time.Now().Add(st.env.RetryFor)
	for backoff := 100 * time.Millisecond; err != nil; backoff = min(2*backoff, 5*time.Second) {
		if corrupt || time.Now().Add(backoff).After(giveUp) {
			if corrupt {
				err = corruptDeletion(err)
			}
			st.env.Logger.Error("Failed to decode object; closing the watch", "key", ev.Key(), "revision", ev.Rev, "err", err)
			return err
		}
		select {
		case <-time.After(backoff):
		case <-st.life.wake:
		case <-st.life.ctx.Done():
			return ErrEnded
		}
		if st.leaving() { // no event and no bookmark may follow
			return st.drained()
		}
		if err = sink.Refresh(); err == nil {
			err = st.event(sink, ev)
		}
		if errors.Is(err, ErrEnded) {
			return err
		}
	}
	return nil
}
