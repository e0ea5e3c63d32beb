package mirror

// The types that connect the parts of a mirror, and the owner of each: shared belongs to all parts,
// Resource to readers, table and writer to the writer's goroutine, registry to its lock. Their
// methods are in the files named after them.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/freshness"
)

// shared is the state that callers, resources, loads and the writer of one mirror have in common.
// Every field is set once, is atomic, or has its own lock.
type shared struct {
	opts      Options
	published *freshness.Published
	stats     counters
	registry  registry

	compacted atomic.Int64  // the highest revision given to Compact
	cluster   atomic.Uint64 // the mirrored cluster's ID, 0 before the first list
	// prefixes whose keys lists may leave out; stored by the writer
	excluded       atomic.Pointer[[]string]
	installedLists atomic.Int64 // times the whole prefix was listed and installed
	loading        atomic.Bool  // the whole prefix is being loaded
	// history before it may differ from the events that clients have received
	trustedSince atomic.Int64

	restarts   chan restart // requests to leave the feed and to list the prefix
	feedHealth *freshness.FeedHealth
	timeline   timeline

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// restart is a request to the writer to leave a feed whose etcd cluster does not exist any more.
type restart struct {
	lists int64 // the value of shared.installedLists when the request was made
	err   error
}

// restart requests a list of the whole prefix; the writer ignores it if the number of lists has
// changed from lists since. It does not block: one pending request is enough.
func (s *shared) restart(lists int64, err error) {
	select {
	case s.restarts <- restart{lists, err}:
	default:
	}
}

// command runs f on the writer's goroutine, and returns when it has, or with ctx's error: f may
// then be running.
func (s *shared) command(ctx context.Context, f command) error {
	done := make(chan struct{})
	s.registry.enqueue(func(w *writer) {
		defer close(done)
		if ctx.Err() == nil {
			f(w)
		}
	})
	select {
	case <-done:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// mirroredState returns the mirrored cluster and the published revision.
func (s *shared) mirroredState() driver.Header {
	return driver.Header{ClusterID: s.cluster.Load(), Revision: s.published.Revision()}
}

// Resource is one key prefix of a mirror, for example the ConfigMaps of a cluster. All methods may
// be called concurrently, Release once for each claim. The writer's half of it is a table.
type Resource struct {
	m      *shared
	prefix string

	lineage lineagePointer
	// last is the newest version of a lineage that ended without a next one, nil while there is one
	last    atomic.Pointer[Snapshot]
	changed changes // after each publication that touches the resource
	readers readerCounts

	versionBytes atomic.Int64 // see ResourceStats
	removed      atomic.Bool  // see Removed
	counts       resourceCounters

	// Guarded by registry.mu.
	refs    int
	exclude bool // the refs are exclusions
}

// lineagePointer points to the lineage of a resource, nil while the resource is being loaded. The
// writer stores it.
type lineagePointer struct{ atomic.Pointer[lineage] }

// readable returns the lineage that readers may see, nil if there is none.
func (c *lineagePointer) readable() *lineage {
	if lin := c.Load(); lin != nil && !lin.hasNoClaim {
		return lin
	}
	return nil
}

// table is the writer's half of a resource. It belongs to the writer's goroutine, which alone calls
// its methods.
type table struct {
	*Resource
	w *writer

	owned             bool // the resource is claimed or excluded
	excluded          bool
	loading           bool
	stopLoading       context.CancelFunc // set while loading
	pending           []driver.Change    // arrived while loading
	divergenceBackoff backoff            // between relists after divergences
	// since when the resource is unreadable, zero if it can be read
	unreadableSince time.Time
	// whether the lineage that is being loaded is inconsistent, see lineage.inconsistent
	inconsistent bool

	bytes           int64 // of entries with value
	missing         int   // entries and events whose value was not stored
	sinceCheckpoint int   // events
	history         history
	lastMeasured    measuredVersions
	// the log lacks events up to here of absorbed resources (writer.absorb)
	absorbed Revision
}

// measuredVersions is the state of a resource's versions at the last weighing. It keeps them alive
// until the next weighing or until the window drops some.
type measuredVersions struct {
	head                        *version
	checkpoints, cachedVersions *[]*version
}

// tableUpdate is the effect of one batch, or of a part of a restored history, on one table.
type tableUpdate struct {
	t      *table
	lin    *lineage
	edit   *btree.Edit[*Entry]
	events []*Event
	old    []*leaf // replaced leaves that have a memo

	arrived int64 // see Event
}

// writer changes the resources of one mirror: it loads them, follows the feed, applies batches,
// publishes versions, and bounds history. The writer and its tables belong to one goroutine, which
// calls run. Other goroutines send commands (registry).
type writer struct {
	*shared
	publisher freshness.Publisher // of the published revision
	loader    *loader
	tables    map[string]*table // by prefix

	updates   []*tableUpdate // of the current batch
	unclaimed int64          // bytes of the values in tables without a claim

	measuring  bool // versions are being weighed
	weighAgain time.Time

	divergedTable *table // the last one with a divergence, since the last list
	divergedAt    time.Time
	contradiction error // the whole feed contradicts the cached state

	// Of the invariant checks.
	checked publishedReading // the published revision at the last check
	pace    pace
}

// registry holds the resources of a mirror with their claims, and the pending commands of the
// writer. One lock guards both, so that commands are in the order of their claims. All methods may
// be called concurrently.
type registry struct {
	due chan struct{} // contains a value if there are commands

	mu        sync.Mutex // leaf; held briefly; guards the fields below and the claims of resources
	resources map[string]*Resource
	commands  []command
}

// command is work for the writer, which runs it between two batches.
type command func(*writer)
