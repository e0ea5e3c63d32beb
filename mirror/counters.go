package mirror

import (
	"sync/atomic"
	"time"
)

// counters are the values that the parts of a mirror count as they work. A field with the name of a
// field of Stats is copied to it.
type counters struct {
	Ready            atomic.Bool
	Compacted        atomic.Int64
	HistoryBytes     atomic.Int64
	VersionBytes     atomic.Int64
	UnclaimedBytes   atomic.Int64
	Events           atomic.Int64
	Dropped          atomic.Int64
	ListedKeys       atomic.Int64
	Relists          atomic.Int64
	Reconnects       atomic.Int64
	SilentFeeds      atomic.Int64
	Divergences      atomic.Int64
	Repairs          atomic.Int64
	ProgressRequests atomic.Int64
	EtcdRestores     atomic.Int64
	Restoring        atomic.Int64
	Replays          atomic.Int64
	ReplayedEvents   atomic.Int64
	ReplayFloor      atomic.Int64
	ReplayTime       atomic.Int64
	CompressedValues atomic.Int64

	EtcdRevision atomic.Int64 // without the published revision, which may be newer
	// keys read by the current or last list of the whole prefix
	listing  atomic.Int64
	position atomic.Pointer[string] // the last one of them
	// changes read from etcd's history, including failed replays
	replayedRecords atomic.Int64
	uncounted       atomic.Bool // see Mirror.VerifiesVersions
}

// resourceCounters count for one resource since its first claim; see ResourceStats.
type resourceCounters struct {
	received, published           atomic.Int64
	loads, loadFailures, loadTime atomic.Int64
	compressed, compressionSaves  atomic.Int64
	publications                  [len(publicationBounds) + 1]struct{ n, time atomic.Int64 }
}

// publicationBounds are the upper bounds of ResourceStats.Publications except the last: the buckets
// of apiserver_watch_events_dispatch_duration_seconds.
var publicationBounds = [...]time.Duration{
	100 * time.Microsecond, 500 * time.Microsecond, time.Millisecond, 5 * time.Millisecond, 10 * time.Millisecond, 25 * time.Millisecond,
	50 * time.Millisecond, 100 * time.Millisecond, 250 * time.Millisecond, 500 * time.Millisecond, time.Second, 2500 * time.Millisecond, 5 * time.Second,
}
