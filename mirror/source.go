package mirror

import (
	"context"
	"errors"
)

// Revision numbers a state of an etcd cluster; every transaction that writes has
// its own, and they only grow.
type Revision = int64

// KV is one key of etcd as it stands at some revision.
type KV struct {
	Key, Value     []byte
	CreateRevision Revision // of the transaction that created the key
	ModRevision    Revision // of the last one that wrote it
	Version        int64    // writes since creation, 1 for the first; 0 if the store does not count them
}

// Change is the write or deletion of one key.
type Change struct {
	KV           // a deletion has Key and ModRevision only
	Deleted bool // the key was deleted, by a request or because its lease ended
}

// Batch is everything that happened after the batch before it and up to Through:
// every revision it touches is complete, and its changes are in revision order.
// A batch without changes is progress: nothing in the range changed up to Through.
type Batch struct {
	Through Revision
	Changes []Change
}

// Header tells which cluster answered and at which revision.
type Header struct {
	ClusterID uint64
	Revision  Revision
}

// replacedBy reports whether an answer is of another etcd than h, or of an older state of it.
func (h Header) replacedBy(answer Header) bool {
	return h.ClusterID != 0 && (answer.ClusterID != h.ClusterID || answer.Revision < h.Revision)
}

// ReplayBounds bounds the history that is read from etcd at once. etcd loads all of it
// into memory and holds up writers meanwhile (etcd#22264), so both count.
type ReplayBounds struct {
	// Revisions bounds the revisions of the cluster that are read over.
	Revisions int64
	// Bytes bounds the keys and values that are read, as far as can be told from
	// samples.
	Bytes int64
}

// Source is what a mirror needs of etcd. Package etcdsource implements it on a
// client; etcdsource/memory is its twin for tests. All methods may be called
// concurrently and honour their context.
type Source interface {
	// List calls page with all keys that start with prefix, in ascending order
	// and in pages of bounded size, as they stand at one revision, which it
	// returns: the newest if at is 0. The page's slice is not reused; page's
	// error ends the list and is returned. Errors: ErrCompacted if at was compacted.
	List(ctx context.Context, prefix string, at Revision, page func([]KV) error) (Header, error)

	// Keys is List without the values (KV.Value is nil), at a revision that exists. most
	// says how many keys a page may have that begins at a key: a source that reads values in
	// order to leave them out needs to know. Errors: ErrCompacted; ErrRestored if etcd has not come
	// to the revision.
	Keys(ctx context.Context, prefix string, at Revision, most func(start string) int, page func([]KV) error) (Header, error)

	// Get returns one key as it stands at a revision that exists, false if it is not there.
	// Errors: those of Keys.
	Get(ctx context.Context, key string, at Revision) (KV, bool, error)

	// Oldest returns the oldest revision from which Replay can deliver the history of
	// the prefix up to now, within the bounds. etcd has not compacted it, so List
	// works there. It is now's own if there is no history to be had. Errors:
	// ErrCompacted if now was compacted, ErrRestored if the cluster is not now's.
	Oldest(ctx context.Context, prefix string, now Header, bounds ReplayBounds) (Revision, error)

	// Replay calls deliver with every batch of the prefix after the revision after
	// and up to through, which exists, in order and without a gap, and returns nil
	// when all were delivered. It calls deliver from one goroutine; deliver's error
	// ends it and is returned. Errors: those of Watch.
	Replay(ctx context.Context, prefix string, after Header, through Revision, deliver func(Batch) error) error

	// Watch calls deliver with every batch of the prefix after the revision
	// after, in order and without a gap, until ctx ends or an error occurs. It
	// calls deliver from one goroutine; deliver's error ends the watch and is
	// returned. Errors: ErrCompacted if a revision that is still needed was
	// compacted, ErrRestored if the cluster is not the one of the header given.
	Watch(ctx context.Context, prefix string, after Header, deliver func(Batch) error) error

	// RequestProgress asks for a batch on the running Watch that tells how far
	// it has come. The answer may be late, may lag, or may not come at all.
	RequestProgress(ctx context.Context) error

	// Current returns the newest revision, linearizably: at least that of every
	// write that was acknowledged before the call.
	Current(ctx context.Context) (Header, error)
}

// Errors of a mirror and its sources, grouped by what to do next.
var (
	// ErrCompacted: the revision left the window or was compacted by etcd.
	// Permanent for this revision; the caller lists anew.
	ErrCompacted = errors.New("revision compacted")
	// ErrFutureRevision: the revision is above the clock. It may exist soon; see Wait.
	ErrFutureRevision = errors.New("revision not reached yet")
	// ErrNotReady: the resource is not loaded (yet, or again). Try again.
	ErrNotReady = errors.New("mirror is not ready")
	// ErrClosed: the mirror or the resource was closed.
	ErrClosed = errors.New("mirror closed")

	// ErrRestored: etcd is another cluster, or an older state of it, than the one
	// mirrored so far. Everything starts anew (the exception to I1).
	ErrRestored = errors.New("etcd was restored or replaced")
	// ErrDiverged: the feed contradicts what is held, so an event was lost,
	// repeated or overtaken. What it concerns is listed anew.
	ErrDiverged = errors.New("feed contradicts the mirror")
)
