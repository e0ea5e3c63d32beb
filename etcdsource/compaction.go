package etcdsource

import (
	"context"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/mirror"
)

// CompactionKey is the key with which kube-apiservers, and every Compactor, announce a compaction
// before they make it: its value is the decimal revision. Its Version counts the turns.
const CompactionKey = "compact_rev_key"

// defaultCheckInterval is the default of CompactorOptions.CheckInterval. A guess: rare enough to
// cost nothing, frequent enough for an unexpected case.
const defaultCheckInterval = 10 * time.Second

const (
	// Bounds of one request, which a hanging member may leave unanswered.
	compactionReadWait  = 2 * time.Second
	compactionReadTries = 3
	compactionWriteWait = 10 * time.Second
	// compactFirst and compactLast bound the pause before a failed compaction that was announced is
	// retried; compactTries bounds the number of attempts.
	compactFirst = 100 * time.Millisecond
	compactLast  = 5 * time.Second
	compactTries = 10
	// followFirst and followLast bound the pause before a lost watch is restarted.
	followFirst = 50 * time.Millisecond
	followLast  = time.Second
	// checkRetry is the pause before a failed check is repeated without a watch, when nothing else
	// shows compactions. It is the longest pause before a lost watch is restarted.
	checkRetry = time.Second
)

// CompactorOptions configure a Compactor. The zero value only follows compactions.
type CompactorOptions struct {
	// Interval is the time between two turns to compact; history of about that length, at most
	// twice that, remains. 0: this compactor compacts nothing, and only follows the compactions of
	// others.
	Interval time.Duration
	// OnCompaction, unless nil, is called with a revision to which etcd is or will soon be
	// compacted. It is called from several goroutines and must not block. It must be idempotent,
	// because calls may repeat, also after etcd was restored.
	OnCompaction func(mirror.Revision)
	// Oldest, unless nil, returns the oldest revision that the cache can serve, 0 if it serves only
	// the latest. With it, the compactor detects unannounced compactions: see CheckInterval.
	Oldest func() mirror.Revision
	// CheckInterval is the interval of two small reads: whether etcd still has Oldest, and the key
	// itself, in case its watch hangs. Default: 10 seconds; a negative value disables them, but
	// is the default WithoutWatch.
	CheckInterval time.Duration
	// WithoutWatch makes the compactor follow compactions by the check alone, which begins at once,
	// so that etcd has no watch for it. It then notices a compaction normally within CheckInterval,
	// later while etcd does not answer, and goes on serving the compacted revisions until then. A
	// check that failed is repeated after a second.
	WithoutWatch bool
	// Logger receives messages for the operator. Default: slog.Default().
	Logger *slog.Logger
}

// Compactor compacts etcd periodically, and follows the compactions of others (D9). Its protocol is
// that of kube-apiserver, so both may share an etcd:
//
//	at each turn   if the key's Version is the one seen at the last turn, no other process has had a
//	               turn since: announce the revision that etcd had then, and compact to it
//	otherwise      another process had the turn: store the Version, and etcd's revision
//
// The comparison and the announcement are one transaction, so of several concurrent ones only one
// succeeds. No state survives a restart: a process announces at its second turn at the earliest, or
// at its first, but then the revision 0, which compacts nothing.
//
// A value of the key is valid only if it is a decimal revision below the mod revision of its own
// write, because the announced revision existed before. Deleting the key does not change the
// recorded compaction.
//
// All methods may be called concurrently.
type Compactor struct {
	client *clientv3.Client
	opts   CompactorOptions
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex  // leaf
		cluster     uint64
		revision    mirror.Revision // the highest revision reported by this etcd
		compacted   mirror.Revision // the highest revision to which it is known to be compacted
		at          time.Time       // when compacted was last raised
		lastInvalid mirror.Revision // mod revision of the last invalid write to the key
	}
	following            atomic.Bool
	compactions          atomic.Int64
	failures             atomic.Int64
	invalidAnnouncements atomic.Int64
	losses               atomic.Int64
	unannounced          atomic.Int64
}

// CompactionStats is a reading of a Compactor's counters.
type CompactionStats struct {
	// the revision to which etcd is or will soon be compacted; 0: unknown
	Revision   mirror.Revision
	RecordedAt time.Time // when Revision was recorded; zero: never
	// the highest reported; EtcdRevision-Revision is the history that etcd retains
	EtcdRevision mirror.Revision
	// the key is being watched; WithoutWatch: the last check succeeded
	Following   bool
	Compactions int64 // made by this compactor
	Failures    int64 // failed turns of this compactor
	// times the watch of the key was lost, or, WithoutWatch, a check failed after one that
	// succeeded
	Losses               int64
	InvalidAnnouncements int64 // invalid writes to the key
	Unannounced          int64 // detected compactions without an announcement
}

// NewCompactor starts a compactor on the client, which it does not own. It runs until Stop.
func NewCompactor(client *clientv3.Client, opts CompactorOptions) *Compactor {
	if opts.CheckInterval == 0 || opts.WithoutWatch && opts.CheckInterval < 0 {
		opts.CheckInterval = defaultCheckInterval
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Compactor{client: client, opts: opts, cancel: cancel}
	if !opts.WithoutWatch {
		c.wg.Go(func() { c.follow(ctx) })
	}
	if opts.Interval > 0 {
		c.wg.Go(func() { c.takeTurns(ctx) })
	}
	if opts.CheckInterval > 0 {
		c.wg.Go(func() { c.keepChecking(ctx) })
	}
	return c
}

// Stop stops the compactor and returns when its goroutines have ended. It may be called again.
func (c *Compactor) Stop() {
	c.cancel()
	c.wg.Wait()
}

// CompactRevision returns the highest revision to which etcd is or will soon be compacted, 0 if
// none is known.
func (c *Compactor) CompactRevision() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.compacted
}

// Stats returns the counters, which are not read at one instant.
func (c *Compactor) Stats() CompactionStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return CompactionStats{
		Revision: c.mu.compacted, RecordedAt: c.mu.at, EtcdRevision: c.mu.revision,
		Following:   c.following.Load(),
		Compactions: c.compactions.Load(), Failures: c.failures.Load(),
		Losses: c.losses.Load(), InvalidAnnouncements: c.invalidAnnouncements.Load(), Unannounced: c.unannounced.Load(),
	}
}

// only returns the key of a read of one key; Version is 0 if the key does not exist.
func only(kvs []*mvccpb.KeyValue) *mvccpb.KeyValue {
	if len(kvs) == 0 {
		return &mvccpb.KeyValue{}
	}
	return kvs[0]
}

func decimal(rev mirror.Revision) string { return strconv.FormatInt(rev, 10) }

// sleep returns true after the duration, false when ctx has ended.
func sleep(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}
