// Package driver is the contract between a mirror and the store that it copies: the Source, and the
// keys, changes and batches that it delivers. Package etcdsource implements it.
package driver

import (
	"context"
	"errors"
	"time"
)

// Errors of a Source.
var (
	// ErrCompacted: etcd has compacted the revision. Permanent for this revision; the caller
	// relists.
	ErrCompacted = errors.New("revision compacted")
	// ErrRestored: etcd is another cluster than before, or an older state of it.
	ErrRestored = errors.New("etcd was restored or replaced")
)

// Revision numbers a state of an etcd cluster. Every write transaction has its own revision, and
// revisions only increase.
type Revision = int64

var started = time.Now()

// Now returns the monotonic time in nanoseconds since the process began: the scale of the times at
// which batches arrive.
func Now() int64 { return int64(time.Since(started)) }

// KV is one key of etcd at some revision.
type KV struct {
	Key, Value     []byte
	CreateRevision Revision // of the transaction that created the key
	ModRevision    Revision // of the last one that wrote it
	// writes since creation, 1 for the first; 0 if the store does not count them
	Version int64
}

// Change is the write or deletion of one key.
type Change struct {
	KV           // a deletion has Key and ModRevision only
	Deleted bool // the key was deleted, by a request or because its lease ended
}

// Batch contains every change after the previous batch and up to Through. Every revision in it is
// complete, and its changes are in revision order. A batch without changes is progress: nothing in
// the range changed up to Through.
type Batch struct {
	Through Revision
	Changes []Change
}

// Header identifies the cluster that answered, and its revision.
type Header struct {
	ClusterID uint64
	Revision  Revision
}

// ReplacedBy reports whether answer comes from another etcd cluster than h, or from an older state
// of it.
func (h Header) ReplacedBy(answer Header) bool {
	return h.ClusterID != 0 && (answer.ClusterID != h.ClusterID || answer.Revision < h.Revision)
}

// ReplayBounds bounds the history that one replay reads from etcd. etcd loads all of it into memory
// and blocks writers meanwhile (etcd#22264), so all bounds matter.
type ReplayBounds struct {
	// Revisions bounds the number of cluster revisions in the replayed range.
	Revisions int64
	// Bytes bounds the keys and values that are read, estimated from samples.
	Bytes int64
	// Pause bounds the time for which etcd may block writers at once, estimated from samples. 0
	// means no bound.
	Pause time.Duration
}

// Source is the mirror's access to etcd. Package etcdsource implements it on an etcd client;
// etcdsource/memory is an in-memory implementation for tests. All methods may be called
// concurrently and honour their context.
type Source interface {
	// List calls page with all keys that start with prefix, in ascending order and in pages of
	// bounded size. All pages are of one revision, which List returns: at, or the newest if at is
	// 0. A page, its keys and its values are valid until page returns; page's error ends the list
	// and is returned. Errors: ErrCompacted if at was compacted.
	List(ctx context.Context, prefix string, at Revision, page func([]KV) error) (Header, error)

	// Keys is List without the values (KV.Value is nil), at a revision that exists. A page and its
	// keys are valid until page returns. maxKeys returns the maximum number of keys for a page that
	// begins at start; a source that has to read the values in order to omit them uses it to bound
	// its reads. Errors: ErrCompacted; ErrRestored if etcd has not reached the revision.
	Keys(ctx context.Context, prefix string, at Revision, maxKeys func(start string) int, page func([]KV) error) (Header, error)

	// GetAll calls found for each of the keys that exists at a revision that exists, in their
	// order. found's error ends the read and is returned. Errors: those of Keys.
	GetAll(ctx context.Context, keys []string, at Revision, found func(KV) error) error

	// Oldest returns the oldest revision from which Replay can deliver the history of the prefix up
	// to now, within the bounds. etcd has not compacted it, so GetAll works at it. It is now's own
	// revision if no history is available. Errors: ErrCompacted if now was compacted, ErrRestored
	// if the cluster is not now's.
	Oldest(ctx context.Context, prefix string, now Header, bounds ReplayBounds) (Revision, error)

	// Replay calls deliver with every batch of the prefix after the revision after and up to
	// through, which exists, in order and without a gap. It returns nil after the last batch. It
	// calls deliver from one goroutine; deliver's error ends the replay and is returned. Errors:
	// those of Watch.
	Replay(ctx context.Context, prefix string, after Header, through Revision, deliver func(Batch) error) error

	// Watch calls deliver with every batch of the prefix after the revision after, in order and
	// without a gap, until ctx ends or an error occurs. It calls deliver from one goroutine;
	// deliver's error ends the watch and is returned. Errors: ErrCompacted if a revision that is
	// still needed was compacted, ErrRestored if the cluster is not the cluster of after.
	Watch(ctx context.Context, prefix string, after Header, deliver func(Batch) error) error

	// RequestProgress requests a progress batch on the running Watch. The answer may be late, may
	// lag, or may not come at all.
	RequestProgress(ctx context.Context) error

	// ReadRevision returns the newest revision, read linearizably: at least the revision of every
	// write acknowledged before the call.
	ReadRevision(ctx context.Context) (Header, error)
}
