package freshness

import (
	"context"
	"sync/atomic"
	"time"
)

const (
	// feedQuiet is the time without a batch after which etcd's revision is compared with the
	// published revision. It is also the interval of revision reads on an idle etcd.
	feedQuiet = time.Second
	// feedTick is the interval of the watchdog's checks, and of progress requests on a feed that is
	// behind.
	feedTick = feedQuiet / 2
	// feedPatienceLast bounds the growing patience; see Watchdog.Run.
	feedPatienceLast = 30 * time.Second
)

// FeedHealth is the activity of the feed that the watchdog observes.
type FeedHealth struct {
	feeds   atomic.Int64 // number of feeds begun
	batches atomic.Int64 // batches delivered, by all feeds
	busy    atomic.Bool  // the writer has not received a batch yet; later ones wait
	silent  chan int64
}

// NewFeedHealth returns a feed that has not begun.
func NewFeedHealth() *FeedHealth { return &FeedHealth{silent: make(chan int64, 1)} }

// Begin returns the number of a new feed.
func (f *FeedHealth) Begin() int64 { return f.feeds.Add(1) }

// Silent returns a channel with the numbers of feeds to leave.
func (f *FeedHealth) Silent() <-chan int64 { return f.silent }

// Observed returns a function that records a batch for the watchdog and calls deliver.
func Observed[Batch any](f *FeedHealth, deliver func(Batch) error) func(Batch) error {
	return func(b Batch) error {
		f.batches.Add(1)
		f.busy.Store(true)
		defer f.busy.Store(false)
		return deliver(b)
	}
}

// Watchdog detects a feed that delivers nothing while etcd's revision advances, so that the writer
// leaves it.
type Watchdog struct {
	Feed      *FeedHealth
	Published *Published
	Reads     *Reads
	Patience  time.Duration         // of the first feed; see Run
	Request   func(context.Context) // requests progress
}

// Run sends the feed's number to FeedHealth.Silent when the feed delivers nothing while etcd's
// revision advances: a connection may stay open, and be kept alive, on a member that hangs or has
// lost its leader. A feed that delivers is never left, however far it is behind. If the next feed
// delivers nothing either, its patience is twice as long, because etcd may just be slow. Run
// returns with ctx.
//
// Cost: none while batches arrive; one linearizable read of the revision every feedQuiet on an idle
// etcd; and a progress request in addition if only keys outside the prefix are written.
func (w *Watchdog) Run(ctx context.Context) {
	f := w.Feed
	ticker := time.NewTicker(feedTick)
	defer ticker.Stop()
	patience := w.Patience
	var (
		feed, batches int64 // values at the last change
		// time since then, or since the last check found the feed in step
		quiet time.Duration
		// since when the feed is known to be behind, and progress is requested
		behind time.Time
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

// isBehind reports whether etcd is ahead of the published revision. It reads etcd's revision unless
// a known revision is above the published revision; it returns false if there is no answer.
func (w *Watchdog) isBehind(ctx context.Context, timeout time.Duration) bool {
	published := w.Published.Revision()
	if w.Reads.env.Known() > published {
		return true
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	rev, err := w.Reads.ReadRevision(ctx)
	return err == nil && rev > published
}
