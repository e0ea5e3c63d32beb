package mirror

import (
	"sync/atomic"
	"time"
)

type counters struct {
	ready            atomic.Bool
	uncounted        atomic.Bool // see Mirror.ChecksArrival
	events           atomic.Int64
	dropped          atomic.Int64
	listedKeys       atomic.Int64
	replayedRecords  atomic.Int64 // changes read from etcd's history, including failed replays
	relists          atomic.Int64
	reconnects       atomic.Int64
	silentFeeds      atomic.Int64
	divergences      atomic.Int64
	etcdRevision     atomic.Int64
	progressRequests atomic.Int64
	historyBytes     atomic.Int64
	historyFloor     atomic.Int64
	versionBytes     atomic.Int64
	compacted        atomic.Int64
	unclaimed        atomic.Int64
	restores         atomic.Int64
	repairs          atomic.Int64
	replays          atomic.Int64
	replayedEvents   atomic.Int64
	replayFloor      atomic.Int64
	replayTime       atomic.Int64
}

// resourceCounters count for one resource since its first claim; see ResourceStats.
type resourceCounters struct {
	received, published           atomic.Int64
	loads, loadFailures, loadTime atomic.Int64
	publications                  [len(publicationBounds) + 1]struct{ n, time atomic.Int64 }
}

// publicationBounds are the upper bounds of ResourceStats.Publications except the last: the buckets
// of apiserver_watch_events_dispatch_duration_seconds.
var publicationBounds = [...]time.Duration{
	100 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second,
}
