package mirror

// The types by which the parts of a mirror refer to one another, and their owners: shared belongs to all parts, Resource to
// readers, table, txn and writer to the writer's goroutine, registry to the holder of its lock. Their methods are in files of
// their names.

import (
	"context"
	"sync"
	"sync/atomic"
	"time"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/mirror/internal/freshness"
)

// shared is the state that callers, resources, loads and the writer of one mirror have in
// common. Every field is set once, is atomic, or has its own lock.
type shared struct {
	opts     Options
	clock    *freshness.Clock
	stats    counters
	registry registry

	compacted atomic.Int64             // the highest revision given to Compact
	cluster   atomic.Uint64            // the mirrored cluster's ID, 0 before the first list
	excluded  atomic.Pointer[[]string] // prefixes that no list needs to keep; stored by the writer
	lists     atomic.Int64             // times the whole prefix was listed and installed
	loading   atomic.Bool              // the whole prefix is being loaded
	since     atomic.Int64             // history before it may differ from the events that clients have seen

	restarts chan restart // requests to leave the feed and to list the prefix
	feed     *freshness.Feed

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// restart asks the writer to leave a feed whose etcd does not exist any more.
type restart struct {
	lists int64 // the value of shared.lists for which it is meant
	err   error
}

// restart asks for a list of the whole prefix, unless there was one after the given number of
// lists. It does not block: one request is enough.
func (s *shared) restart(lists int64, err error) {
	select {
	case s.restarts <- restart{lists, err}:
	default:
	}
}

// known returns the mirrored cluster and the published revision.
func (s *shared) known() Header {
	return Header{ClusterID: s.cluster.Load(), Revision: s.clock.Revision()}
}

// Resource is one key prefix of a mirror, for example the ConfigMaps of a cluster.
// All methods may be called concurrently, Release once for each claim. The writer's half of it is a table.
type Resource struct {
	m      *shared
	prefix string

	cur     current
	changed changes // after each publication that touches the resource
	holds   holds

	versionBytes atomic.Int64 // see ResourceStats
	forgotten    atomic.Bool  // see Forgotten
	counts       resourceCounters

	// Guarded by registry.mu.
	refs    int
	exclude bool // what the refs are for
}

// current points to the lineage of a resource, nil while the resource is being loaded. The writer
// stores it.
type current struct{ atomic.Pointer[lineage] }

// readable returns the lineage that readers may see, nil if there is none.
func (c *current) readable() *lineage {
	if lin := c.Load(); lin != nil && !lin.private {
		return lin
	}
	return nil
}

// table is the writer's half of a resource. It belongs to the writer's goroutine, which alone
// calls its methods.
type table struct {
	*Resource
	w *writer

	owned       bool // the resource is claimed or excluded
	excluded    bool
	loading     bool
	stopLoading context.CancelFunc // set while loading
	pending     []Change           // arrived while loading
	distrust    backoff            // between lists that a divergence asks for
	awaited     time.Time          // since when readers lack the resource, zero if it can be read
	suspect     bool               // of the lineage that is being loaded, see lineage.suspect

	bytes           int64 // of entries with value
	missing         int   // entries and events whose value was not kept
	sinceCheckpoint int   // events
	history         history
	weighed         weighed
	absorbed        Revision // the log lacks events up to here of resources that were absorbed (writer.absorb)
}

// weighed is what a resource's versions were when they were weighed. It keeps them alive, until
// the next time or until the window drops some.
type weighed struct {
	head              *version
	checkpoints, made *[]*version
}

// txn is the effect of one batch, or of a part of a restored history, on one table.
type txn struct {
	t      *table
	lin    *lineage
	edit   *btree.Edit[*Entry]
	events []*Event
	old    []*Leaf // replaced leaves that have a memo

	arrived int64 // see Event
}

// writer changes the resources of one mirror: it loads them, follows the feed, applies batches,
// publishes versions, and bounds history. It and its tables belong to one goroutine, the one
// that calls run. Other goroutines send it commands (registry).
type writer struct {
	*shared
	publisher freshness.Publisher // of the clock
	loader    *loader
	tables    map[string]*table // by prefix

	touched   []*txn // of the batch in hand
	unclaimed int64  // bytes of the values in tables that are not owned

	weighs     bool // versions are being weighed
	weighAgain time.Time

	doubted       *table // the last one that contradicted the feed, since the last list
	doubtedAt     time.Time
	contradiction error // the whole feed contradicts the cached state

	// Of the invariant checks.
	checked clockReading // at the last one
	pace    pace
}

// registry holds the resources of a mirror with their claims, and the commands that the writer
// has not run yet. One lock guards both, so that commands arrive in the order of the claims that
// they are about. All methods may be called concurrently.
type registry struct {
	due chan struct{} // holds a value if there are commands

	mu        sync.Mutex // leaf; held briefly; guards what follows and the claims of resources
	resources map[string]*Resource
	commands  []command
}

// command is work for the writer, which runs it between two batches.
type command func(*writer)
