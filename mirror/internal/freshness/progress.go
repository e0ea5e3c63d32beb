package freshness

import (
	"context"
	"sync/atomic"
	"time"
)

// While there are waits for the published revision, progress is requested at growing intervals. The
// first are short: etcd answers only when the feed is synced, which usually takes about a
// millisecond. 100 ms is KEP-2340's interval.
const (
	progressFirst = 2 * time.Millisecond
	progressLast  = 100 * time.Millisecond
)

// Progress requests progress from etcd:
//
//   - while there are waits for the published revision: at once if progress is expected to end them
//     (Published.byProgress), otherwise after progressFirst, because a write inside the prefix
//     moves the clock by its own event and needs no progress. Then at intervals that double up to
//     progressLast. The intervals restart when progress has ended a wait, and with a wait for a
//     lower revision than all others: no wait depends on the interval of others, and a wait for a
//     distant revision does not keep the interval short;
//   - when a revision read begins, if progress is expected to end waits (Reads), so that the two
//     answers arrive together;
//   - once in each idle interval without events, while a caller needs the published revision to
//     advance (Want).
type Progress struct {
	published *Published
	request   func(context.Context)
	interval  time.Duration

	due    chan struct{} // a request is due with a revision read
	wanted atomic.Int64  // calls of Want without their release
}

// NewProgress returns a Progress for the published revision; Run sends its requests by calling
// request. idle is the interval of requests for Want; there are none if it is not positive.
func NewProgress(c *Published, idle time.Duration, request func(context.Context)) *Progress {
	return &Progress{published: c, request: request, interval: idle, due: make(chan struct{}, 1)}
}

// Run sends requests until ctx ends.
func (p *Progress) Run(ctx context.Context) { (&requester{Progress: p}).run(ctx) }

// Want enables requests in idle intervals, for a caller that waits for no revision but needs the
// published revision to follow etcd, such as a watch with bookmarks. The caller must call release
// exactly once.
func (p *Progress) Want() (release func()) {
	p.wanted.Add(1)
	return func() { p.wanted.Add(-1) }
}

// withRead sends a request now, together with a revision read.
func (p *Progress) withRead() {
	select {
	case p.due <- struct{}{}:
	default:
	}
}

// requester is one call of Run.
type requester struct {
	*Progress
	along time.Time // time of the last request with a revision read
}

// run sends requests until ctx ends.
func (a *requester) run(ctx context.Context) {
	var idle <-chan time.Time
	if a.interval > 0 {
		ticker := time.NewTicker(a.interval)
		defer ticker.Stop()
		idle = ticker.C
	}
	events := int64(-1)
	for {
		select {
		case <-ctx.Done():
			return
		case <-a.published.whileWaits():
			a.forWaiters(ctx)
		case <-a.due:
			a.along = time.Now()
			a.request(ctx)
		case <-idle:
			now := a.published.events.Load()
			if now == events && a.wanted.Load() > 0 {
				a.request(ctx)
			}
			events = now
		}
	}
}

// forWaiters sends requests while there are waits for the published revision.
func (a *requester) forWaiters(ctx context.Context) {
	c := a.published
	// atOnce is false if a request was sent together with the revision read.
	atOnce := func() bool { return c.byProgress.Load() && time.Since(a.along) >= progressFirst }
	timer := time.NewTimer(0)
	defer timer.Stop()
	for interval, due := progressFirst, atOnce(); ; {
		served, rest := c.waitsEndedByProgress.Load(), c.whileNoWaits()
		if due {
			a.request(ctx)
		}
		timer.Reset(interval)
		select {
		case <-ctx.Done():
			return
		case <-rest:
			return
		case <-c.lowered:
			interval, due = progressFirst, atOnce()
			continue
		case <-timer.C:
		}
		due = true
		if c.waitsEndedByProgress.Load() == served {
			interval = min(2*interval, progressLast)
		} else {
			interval = progressFirst
		}
	}
}
