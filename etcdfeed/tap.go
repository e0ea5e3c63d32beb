package etcdfeed

import (
	"context"
	"errors"
	"sync/atomic"

	"go.etcd.io/etcd/api/v3/mvccpb"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// tap is a source whose watch, and whose replay of history, are also recorded in a log. Both are of
// the whole prefix, before a mirror divides them into resources, so the log is in revision order
// over all of them.
type tap struct {
	driver.Source
	prefix   string
	log      *log
	watching atomic.Bool
}

// List implements driver.Source. A list of the whole prefix while there is no watch is the state
// after which the next one begins.
func (t *tap) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	header, err := t.Source.List(ctx, prefix, at, page)
	if err == nil && prefix == t.prefix && at == 0 && !t.watching.Load() {
		t.log.begin(header, true)
	}
	return header, err
}

// Watch implements driver.Source. A batch is in the log before the mirror receives it, so the log
// is never behind the published revision.
func (t *tap) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	if prefix != t.prefix {
		return t.Source.Watch(ctx, prefix, after, deliver)
	}
	t.watching.Store(true)
	defer t.watching.Store(false)
	t.log.resume(after)
	return t.Source.Watch(ctx, prefix, after, func(b driver.Batch) error {
		t.log.append(b)
		return deliver(b)
	})
}

// Oldest implements driver.Source. It precedes a Replay, unless there is no history.
func (t *tap) Oldest(ctx context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	if prefix != t.prefix {
		return t.Source.Oldest(ctx, prefix, now, bounds)
	}
	t.log.expectHistory(now, historyTimeout, now.Revision-bounds.Revisions)
	oldest, err := t.Source.Oldest(ctx, prefix, now, bounds)
	switch {
	case errors.Is(err, mirror.ErrCompacted):
		t.log.expectHistory(now, announcedHistory, 0) // the mirror repeats the attempt
	case err == nil && oldest < now.Revision:
		t.log.expectHistory(now, announcedHistory, oldest)
	default:
		t.log.join(now.Revision, now, nil)
	}
	return oldest, err
}

// Replay implements driver.Source. After ErrCompacted the mirror calls Oldest again.
func (t *tap) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	if prefix != t.prefix {
		return t.Source.Replay(ctx, prefix, after, through, deliver)
	}
	list := driver.Header{ClusterID: after.ClusterID, Revision: through}
	t.log.expectHistory(list, historyTimeout, after.Revision)
	past := newLog(t.log.maxBytes)
	past.begin(after, false)
	err := t.Source.Replay(ctx, prefix, after, through, func(b driver.Batch) error {
		recorded := b
		recorded.Through = min(b.Through, through)
		past.append(recorded)
		return deliver(b)
	})
	switch {
	case err == nil:
		t.log.join(past.floor, list, past.events)
	case errors.Is(err, mirror.ErrCompacted): // the mirror repeats the attempt
		t.log.expectHistory(list, announcedHistory, 0)
	default:
		t.log.join(through, list, nil)
	}
	return err
}

// inRange reports whether a key is the key of a request, or in [key, end) if it has an end.
func inRange(key, start, end string) bool {
	if end == "" {
		return key == start
	}
	return key >= start && key < end
}

// selected returns the events in the range; all is true if every event of the log is.
func selected(events []*mvccpb.Event, start, end string, all bool) []*mvccpb.Event {
	if all {
		return events
	}
	var some []*mvccpb.Event
	for _, e := range events {
		if inRange(string(e.Kv.Key), start, end) {
			some = append(some, e)
		}
	}
	return some
}
