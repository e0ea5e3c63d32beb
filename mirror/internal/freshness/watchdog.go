package freshness

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// feedQuiet is the time without a batch after which etcd's revision is compared with the clock.
	// It is also how often an idle etcd is asked for its revision.
	feedQuiet = time.Second
	// feedTick is how often the watchdog looks, and requests progress of a feed that is behind.
	feedTick = feedQuiet / 2
	// feedPatienceLast bounds the patience that grows; see Watchdog.Run.
	feedPatienceLast = 30 * time.Second
)

// Feed is the activity of the feed that the watchdog observes.
type Feed struct {
	feeds   atomic.Int64 // begun so far
	batches atomic.Int64 // delivered so far, by all of them
	busy    atomic.Bool  // the writer has not taken a batch yet; later ones have to wait
	silent  chan int64
}

// NewFeed returns a feed that has not begun.
func NewFeed() *Feed { return &Feed{silent: make(chan int64, 1)} }

// Begin returns the number of a feed that begins now.
func (f *Feed) Begin() int64 { return f.feeds.Add(1) }

// Silent returns a channel with the numbers of feeds that are to be left.
func (f *Feed) Silent() <-chan int64 { return f.silent }

// Observed returns a function that calls deliver and has the watchdog see it.
func Observed[Batch any](f *Feed, deliver func(Batch) error) func(Batch) error {
	return func(b Batch) error {
		f.batches.Add(1)
		f.busy.Store(true)
		defer f.busy.Store(false)
		return deliver(b)
	}
}

// Watchdog has a feed left that delivers nothing while etcd's revision advances.
type Watchdog struct {
	Feed     *Feed
	Clock    *Clock
	Reads    *Reads
	Patience time.Duration         // of the first feed; see Run
	Request  func(context.Context) // requests progress
}

// Run leaves the feed when it delivers nothing though etcd has moved
// on: a connection may stay open, and be kept alive, on a member that hangs or has lost its
// leader. A feed that delivers is left alone, however far it is behind. If the next feed
// delivers nothing either it has twice the time, because etcd may just be slow. Run returns with ctx.
//
// Where batches come it costs nothing, on an idle etcd one linearizable read of its revision
// every feedQuiet, and where only other keys are written a request for progress as well.
func (w *Watchdog) Run(ctx context.Context) {
	f := w.Feed
	ticker := time.NewTicker(feedTick)
	defer ticker.Stop()
	patience := w.Patience
	var (
		feed, batches int64         // as they were when something changed last
		quiet         time.Duration // since then, or since nothing was found to be wrong
		behind        time.Time     // since when the feed is known to be, and progress is requested
	)
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
		}
		if n := f.batches.Load(); n != batches {
			batches, quiet, behind = n, 0, time.Time{}
			patience = w.Patience
		}
		if n := f.feeds.Load(); n != feed {
			feed, quiet, behind = n, 0, time.Time{}
		}
		if quiet += feedTick; quiet <= feedQuiet || feed == 0 || f.busy.Load() {
			continue
		}
		switch {
		case !w.isBehind(ctx, patience):
			quiet, behind = 0, time.Time{}
		case behind.IsZero():
			behind = time.Now()
			w.Request(ctx)
		case time.Since(behind) < patience:
			w.Request(ctx)
		default:
			select {
			case f.silent <- feed:
				patience = min(2*patience, feedPatienceLast)
			default: // the writer has not received the last one
			}
			quiet, behind = 0, time.Time{}
		}
	}
}

// isBehind reports whether etcd is ahead of the clock. It reads etcd's revision if that is not known
// yet; no answer means no.
func (w *Watchdog) isBehind(ctx context.Context, timeout time.Duration) bool {
	clock := w.Clock.Revision()
	if w.Reads.env.Known() > clock {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rev, err := w.Reads.Current(ctx)
	return err == nil && rev > clock
}
