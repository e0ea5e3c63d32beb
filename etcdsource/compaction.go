package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/mirror"
)

// CompactionKey is the key with which kube-apiservers, and every Compactor, announce a compaction
// before they make it: its value is the decimal revision. Its Version counts the turns.
const CompactionKey = "compact_rev_key"

// DefaultCheckInterval is the default of CompactorOptions.CheckInterval. A guess: rare enough to
// cost nothing, frequent enough for an unexpected case.
const DefaultCheckInterval = 10 * time.Second

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
	// itself, in case its watch hangs. Default: DefaultCheckInterval; a negative value disables
	// them, but is the default WithoutWatch.
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
		opts.CheckInterval = DefaultCheckInterval
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

// turnState is the state of a compactor after its last turn. The zero value: no turn yet.
type turnState struct {
	cluster     uint64
	version     int64           // of the key; 0: the key does not exist
	rev         mirror.Revision // etcd's revision at the last turn
	unconfirmed mirror.Revision // announced then without an answer; 0: none
}

// takeTurns takes a turn after each interval. The duration of a turn is not part of the interval,
// so history is not compacted early.
func (c *Compactor) takeTurns(ctx context.Context) {
	var l turnState
	for sleep(ctx, c.opts.Interval) {
		if err := c.turn(ctx, &l); err != nil && ctx.Err() == nil {
			c.failures.Add(1)
			if errors.Is(err, rpctypes.ErrNoSpace) {
				c.opts.Logger.Error("Etcd database space exceeded, skipping compaction; "+
					"compact and defragment etcd manually, then disarm its alarm", "err", err)
				continue
			}
			c.opts.Logger.Error("Failed to compact etcd; retrying after the interval", "interval", c.opts.Interval, "err", err)
		}
	}
}

// turn compacts etcd if the turn belongs to this compactor.
func (c *Compactor) turn(ctx context.Context, l *turnState) error {
	now, err := c.read(ctx, compactionReadTries)
	if err != nil {
		return err
	}
	header, key := now.Header, only(now.Kvs)
	if l.cluster != 0 && (header.ClusterId != l.cluster || header.Revision < l.rev) {
		c.opts.Logger.Warn("Etcd was restored or replaced; restarting the compaction schedule",
			"revision", header.Revision, "previousRevision", l.rev)
		*l = turnState{}
	}
	l.cluster = header.ClusterId
	tried := l.unconfirmed
	l.unconfirmed = 0
	switch {
	case tried > 0 && key.Version == l.version+1 && string(key.Value) == decimal(tried):
		// The write succeeded, although the answer was lost.
		l.version, l.rev = key.Version, header.Revision
		return c.compact(ctx, l, tried)
	case key.Version != l.version:
		// Another process had the turn, or the key was deleted and its Version restarted.
		l.version, l.rev = key.Version, header.Revision
		return nil
	}

	// The transaction must have exactly this form: kine recognizes it by its form (E13 of
	// docs/etcd-contract.md).
	due := l.rev
	ctxTxn, cancel := context.WithTimeout(ctx, compactionWriteWait)
	defer cancel()
	resp, err := c.client.Txn(ctxTxn).
		If(clientv3.Compare(clientv3.Version(CompactionKey), "=", l.version)).
		Then(clientv3.OpPut(CompactionKey, decimal(due))).
		Else(clientv3.OpGet(CompactionKey)).
		Commit()
	if err != nil {
		l.unconfirmed = due
		return fmt.Errorf("record compaction to %d in %s: %w", due, CompactionKey, err)
	}
	if resp.Header.ClusterId != l.cluster || resp.Header.Revision < due {
		*l = turnState{}
		return fmt.Errorf("etcd was restored during a compaction: revision is %d, was %d", resp.Header.Revision, due)
	}
	l.rev = resp.Header.Revision
	if !resp.Succeeded { // another process was faster
		var kvs []*mvccpb.KeyValue
		if len(resp.Responses) > 0 {
			kvs = resp.Responses[0].GetResponseRange().GetKvs()
		}
		l.version = only(kvs).Version
		return nil
	}
	l.version++
	if due == 0 {
		return nil // no earlier revision is known yet
	}
	return c.compact(ctx, l, due)
}

// compact compacts etcd to an announced revision. It retries for a while: the followers of the key
// have already dropped the revisions below.
func (c *Compactor) compact(ctx context.Context, l *turnState, rev mirror.Revision) error {
	pause := compactFirst
	for try := 1; ; try++ {
		attempt, cancel := context.WithTimeout(ctx, compactionWriteWait)
		_, err := c.client.Compact(attempt, rev)
		cancel()
		switch {
		case err == nil:
			c.compactions.Add(1)
			c.noteCompacted(rev)
			return nil
		case errors.Is(err, rpctypes.ErrCompacted):
			// an attempt whose answer was lost, or another process, was faster
			c.noteCompacted(rev)
			return nil
		case errors.Is(err, rpctypes.ErrFutureRev):
			*l = turnState{}
			return fmt.Errorf("compact to %d: etcd was restored to an older state: %w", rev, err)
		case try == compactTries:
			return fmt.Errorf("compact to %d: %w", rev, err)
		}
		if !sleep(ctx, min(pause, c.opts.Interval)) {
			return ctx.Err()
		}
		pause = min(2*pause, compactLast)
	}
}

// follow watches the key, and reads it when the watch begins.
func (c *Compactor) follow(ctx context.Context) {
	lost := false
	pause := followFirst
	for {
		err := c.watch(ctx, func() {
			pause = followFirst
			if lost {
				lost = false
				c.opts.Logger.Info("Watch on the compaction key resumed", "key", CompactionKey)
			}
		})
		was := c.following.Swap(false)
		if ctx.Err() != nil {
			return
		}
		if was {
			c.losses.Add(1)
		}
		if !lost && !was { // a loss that is repaired at once is not logged
			lost = true
			c.opts.Logger.Warn("Failed to watch the compaction key; retrying", "key", CompactionKey, "err", err)
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, followLast)
	}
}

// watch reads the key and then watches it; it calls began when the watch was created. It returns
// the reason for the watch's end.
func (c *Compactor) watch(ctx context.Context, began func()) error {
	now, err := c.read(ctx, 1) // the next attempt follows soon
	if err != nil {
		return err
	}
	cluster := now.Header.ClusterId
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	// See Source.Watch: the client would resume on any etcd that it reaches.
	conn := c.client.ActiveConnection()
	wg.Go(func() {
		if waitDisconnected(ctx, conn) {
			cancel(errors.New("connection to etcd lost"))
		}
	})
	for resp := range c.client.Watch(compactionStream(ctx), CompactionKey,
		clientv3.WithRev(now.Header.Revision+1), clientv3.WithCreatedNotify()) {
		if err := resp.Err(); err != nil {
			return fmt.Errorf("watch %s: %w", CompactionKey, err)
		}
		if resp.Header.ClusterId != cluster {
			return fmt.Errorf("%w: cluster ID %x, was %x", mirror.ErrRestored, resp.Header.ClusterId, cluster)
		}
		if resp.Created {
			c.following.Store(true)
			began()
		}
		for _, e := range resp.Events {
			c.noteRevision(e.Kv.ModRevision)
			if e.Type == mvccpb.PUT {
				c.applyAnnouncement(e.Kv)
			}
		}
	}
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return errors.New("etcd closed the watch")
}

// compactionStream marks calls on a separate gRPC stream, which delays no progress of other
// watches. The member ends the stream when it has lost its leader.
func compactionStream(ctx context.Context) context.Context {
	return clientv3.WithRequireLeader(metadata.NewOutgoingContext(ctx, metadata.Pairs("strata-stream", "compaction")))
}

// keepChecking detects compactions that the watch of the key does not show, or all without a watch.
func (c *Compactor) keepChecking(ctx context.Context) {
	if c.opts.WithoutWatch {
		c.followByChecks(ctx)
		return
	}
	for sleep(ctx, c.opts.CheckInterval) {
		if err := c.check(ctx); err != nil && ctx.Err() == nil {
			c.opts.Logger.Debug("Failed to read the compact revision of etcd; retrying", "interval", c.opts.CheckInterval, "err", err)
		}
	}
}

// followByChecks checks at once and after each interval, sooner after a failure, and records
// whether compactions are followed.
func (c *Compactor) followByChecks(ctx context.Context) {
	failing := false
	for {
		err := c.check(ctx)
		if ctx.Err() != nil {
			return
		}
		was := c.following.Swap(err == nil)
		pause := c.opts.CheckInterval
		switch {
		case err != nil:
			pause = min(pause, checkRetry)
			if was {
				c.losses.Add(1)
			}
			if !failing {
				c.opts.Logger.Warn("Failed to read the compact revision of etcd; retrying", "key", CompactionKey, "interval", pause, "err", err)
			}
		case failing:
			c.opts.Logger.Info("Reads of the compact revision of etcd resumed", "key", CompactionKey)
		}
		failing = err != nil
		if !sleep(ctx, pause) {
			return
		}
	}
}

// check reads from etcd whether the revisions that the cache can serve still exist: compactions by
// an operator, or by etcd's own --auto-compaction-mode, are not announced.
func (c *Compactor) check(ctx context.Context) error {
	now, err := c.read(ctx, compactionReadTries)
	if err != nil || c.opts.Oldest == nil {
		return err
	}
	oldest := c.opts.Oldest()
	if oldest <= 0 || oldest < c.CompactRevision() || oldest >= now.Header.Revision {
		return nil
	}
	_, err = attempts(ctx, compactionReadWait, compactionReadTries, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.client.Get(ctx, CompactionKey, clientv3.WithRev(oldest), clientv3.WithCountOnly())
	})
	if !errors.Is(err, rpctypes.ErrCompacted) {
		return err
	}
	floor, err := c.oldestRevision(ctx, oldest)
	if err != nil {
		return fmt.Errorf("revision %d is compacted, but the oldest revision is unknown: %w", oldest, err)
	}
	if _, err := c.read(ctx, compactionReadTries); err != nil {
		// the compaction may have been announced meanwhile
		return err
	}
	if floor > c.CompactRevision() {
		c.unannounced.Add(1)
		c.opts.Logger.Info("Detected a compaction that was not recorded in the compaction key", "key", CompactionKey, "revision", floor)
		c.noteCompacted(floor)
	}
	return nil
}

// oldestRevision returns etcd's oldest revision. etcd must have compacted the revision gone, so
// that it refuses a watch from there.
func (c *Compactor) oldestRevision(ctx context.Context, gone mirror.Revision) (mirror.Revision, error) {
	ctx, cancel := context.WithTimeout(ctx, probeWait)
	defer cancel()
	for resp := range c.client.Watch(compactionStream(ctx), CompactionKey, clientv3.WithRev(gone)) {
		if resp.CompactRevision > 0 {
			return resp.CompactRevision, nil
		}
		if err := resp.Err(); err != nil {
			return 0, err
		}
	}
	return 0, fmt.Errorf("etcd did not report its compact revision: %w", context.Cause(ctx))
}

// read reads the key, linearizably, and applies the answer.
func (c *Compactor) read(ctx context.Context, tries int) (*clientv3.GetResponse, error) {
	c.mu.Lock()
	cluster, before := c.mu.cluster, c.mu.revision
	c.mu.Unlock()
	resp, err := attempts(ctx, compactionReadWait, tries, func(ctx context.Context) (*clientv3.GetResponse, error) {
		return c.client.Get(ctx, CompactionKey)
	})
	if err != nil {
		return nil, fmt.Errorf("read %s: %w", CompactionKey, err)
	}
	c.mu.Lock()
	if cluster != 0 && cluster != resp.Header.ClusterId || resp.Header.Revision < before {
		// Another etcd, or an older state: the recorded state is invalid.
		c.mu.revision, c.mu.compacted, c.mu.at, c.mu.lastInvalid = 0, 0, time.Time{}, 0
	}
	c.mu.cluster, c.mu.revision = resp.Header.ClusterId, max(c.mu.revision, resp.Header.Revision)
	c.mu.Unlock()
	if len(resp.Kvs) > 0 {
		c.applyAnnouncement(resp.Kvs[0])
	}
	return resp, nil
}

// applyAnnouncement records the compaction that the key announces. An invalid value, which is not a
// revision below the mod revision of the write, is logged and ignored.
func (c *Compactor) applyAnnouncement(kv *mvccpb.KeyValue) {
	rev, err := strconv.ParseInt(string(kv.Value), 10, 64)
	if err == nil && rev >= 0 && rev < kv.ModRevision {
		if rev > 0 { // 0 is the first announcement of a process and compacts nothing
			c.noteCompacted(rev)
		}
		return
	}
	c.mu.Lock()
	known := c.mu.lastInvalid == kv.ModRevision
	c.mu.lastInvalid = kv.ModRevision
	c.mu.Unlock()
	if !known {
		c.invalidAnnouncements.Add(1)
		c.opts.Logger.Warn("Ignoring invalid compaction key: value is not a revision below its own mod revision",
			"key", CompactionKey, "value", fmt.Sprintf("%.40q", kv.Value), "modRevision", kv.ModRevision)
	}
}

// noteCompacted records that etcd is or will soon be compacted to the revision. It calls
// OnCompaction before it updates CompactRevision, so a reader that observes the revision there also
// observes the effect of OnCompaction.
//
// etcd's recorded revision is above the one of a valid announcement, which was read or watched
// before. It is not if a read has found a restored etcd in between: the announcement then is of the
// etcd before, and is ignored.
func (c *Compactor) noteCompacted(rev mirror.Revision) {
	if !c.reached(rev) {
		return
	}
	if c.opts.OnCompaction != nil {
		c.opts.OnCompaction(rev)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if rev > c.mu.compacted && rev <= c.mu.revision {
		c.mu.compacted, c.mu.at = rev, time.Now()
	}
}

// reached reports whether etcd is known to have the revision.
func (c *Compactor) reached(rev mirror.Revision) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return rev <= c.mu.revision
}

// noteRevision records that etcd has reached the revision.
func (c *Compactor) noteRevision(rev mirror.Revision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.revision = max(c.mu.revision, rev)
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
