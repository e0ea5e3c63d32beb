package mirror

import (
	"context"
	"errors"
	"sync/atomic"
	"time"
)

// ErrFeedSilent is the cause with which the mirror ends a Watch that tells it nothing though
// etcd has moved on: its member hangs, or is cut off. A source may begin the next one
// elsewhere.
var ErrFeedSilent = errors.New("feed is silent")

const (
	// feedQuiet is how long nothing comes before it is asked whether anything should have.
	// It is also how often an idle etcd is asked for its revision.
	feedQuiet = time.Second
	// feedTick is how often the watchdog looks, and asks a feed for progress that is behind.
	feedTick = feedQuiet / 2
	// feedPatienceLast bounds the patience that grows; see watchdog.
	feedPatienceLast = 30 * time.Second
)

// vigil is what the watchdog sees of the feed.
type vigil struct {
	feeds   atomic.Int64 // begun so far
	batches atomic.Int64 // delivered so far, by all of them
	// busy: the writer has yet to take a batch. Whatever comes after it has to wait.
	busy atomic.Bool
	// silent takes the number of a feed that is to be left.
	silent chan int64
}

// watched returns deliver as the watchdog has to see it.
func (v *vigil) watched(deliver func(Batch) error) func(Batch) error {
	return func(b Batch) error {
		v.batches.Add(1)
		v.busy.Store(true)
		defer v.busy.Store(false)
		return deliver(b)
	}
}

// watchdog has the writer follow etcd anew when the feed says nothing though etcd has moved
// on: a connection may stay open, and be kept alive, on a member that hangs or has lost its
// leader. A feed that delivers is left alone, however far it is behind. If the next feed
// delivers nothing either it has twice the time, because etcd may just be slow.
//
// Where batches come it costs nothing, on an idle etcd one linearizable read of its revision
// every feedQuiet, and where only other keys are written a request for progress as well.
func (m *Mirror) watchdog(ctx context.Context) {
	v := &m.vigil
	ticker := time.NewTicker(feedTick)
	defer ticker.Stop()
	patience, ask := m.opts.FeedPatience, &asker{m: m}
	var (
		feed, batches int64         // as they were when something changed last
		quiet         time.Duration // since then, or since nothing was found to be wrong
		behind        time.Time     // since when the feed is known to be, and asked for progress
	)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if n := v.batches.Load(); n != batches {
			batches, quiet, behind = n, 0, time.Time{}
			patience = m.opts.FeedPatience
		}
		if n := v.feeds.Load(); n != feed {
			feed, quiet, behind = n, 0, time.Time{}
		}
		if quiet += feedTick; quiet <= feedQuiet || feed == 0 || v.busy.Load() {
			continue
		}
		switch {
		case !m.hasMovedOn(ctx, patience):
			quiet, behind = 0, time.Time{}
		case behind.IsZero():
			behind = time.Now()
			ask.ask(ctx)
		case time.Since(behind) < patience:
			ask.ask(ctx)
		default:
			select {
			case v.silent <- feed:
				patience = min(2*patience, feedPatienceLast)
			default: // the writer has yet to hear of the last one
			}
			quiet, behind = 0, time.Time{}
		}
	}
}

// hasMovedOn reports whether etcd is ahead of the clock. It asks etcd if that is not known
// yet; no answer means no.
func (m *Mirror) hasMovedOn(ctx context.Context, timeout time.Duration) bool {
	clock := m.clock.rev.Load()
	if m.stats.etcdRevision.Load() > clock {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rev, err := m.Current(ctx)
	return err == nil && rev > clock
}
