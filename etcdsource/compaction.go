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

// CompactionKey is where kube-apiservers, and every Compactor, announce a compaction before
// they make it: the decimal revision. Its Version counts the turns.
const CompactionKey = "compact_rev_key"

// DefaultCheckInterval is CompactorOptions.CheckInterval where nothing else is said. A guess:
// seldom enough to cost nothing, often enough for what nobody is expected to do.
const DefaultCheckInterval = 10 * time.Second

const (
	// Bounds of one request, of which a member that hangs may leave any unanswered.
	compactionReadWait  = 2 * time.Second
	compactionReadTries = 3
	compactionWriteWait = 10 * time.Second
	// compactFirst and compactLast bound the pause before a compaction that was announced
	// and failed is tried again, compactTries how often it is.
	compactFirst = 100 * time.Millisecond
	compactLast  = 5 * time.Second
	compactTries = 10
	// followFirst and followLast bound the pause before a watch that was lost is begun again.
	followFirst = 50 * time.Millisecond
	followLast  = time.Second
)

// CompactorOptions configure a Compactor. The zero value follows and does nothing else.
type CompactorOptions struct {
	// Interval is the time between two turns to compact; history of about that length, twice
	// that at most, stays. 0: this one compacts nothing, and follows what others compact.
	Interval time.Duration
	// Forget, unless nil, is told that etcd is compacted to a revision, or is about to be.
	// It is called from several goroutines, must not block, and may be told the same again,
	// also after an etcd that was restored: what it leads to has to be idempotent.
	Forget func(mirror.Revision)
	// Oldest, unless nil, returns the oldest revision that memory can still serve, 0 if it
	// serves none but the present. With it, compactions that nobody announces are noticed:
	// see CheckInterval.
	Oldest func() mirror.Revision
	// CheckInterval is how often etcd is asked whether it still has Oldest, and for the key
	// itself, in case its watch hangs: two small reads. Default: DefaultCheckInterval; negative: never.
	CheckInterval time.Duration
	// Logger receives what an operator should know. Default: slog.Default().
	Logger *slog.Logger
}

// Compactor compacts etcd now and then, and follows what others compact (D9). Its protocol
// is that of kube-apiserver, so both may share an etcd:
//
//	at each turn   if the key's Version is the one seen at the last turn, nobody else has had a
//	               turn since: announce the revision that etcd had then, and compact to it
//	otherwise      it was somebody else's turn: remember the Version, and etcd's revision
//
// The comparison and the announcement are one transaction, so of several that race one wins.
// Nothing is remembered over a restart: a process announces at its second turn at the
// earliest, or at its first, but then the revision 0, which compacts nothing.
//
// Of the key only this is believed: a decimal revision below that of the write which put
// it there, for whoever announces one knows it already. Deleting the key changes nothing that
// was learned.
//
// All methods may be called concurrently.
type Compactor struct {
	client *clientv3.Client
	opts   CompactorOptions
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu struct {
		sync.Mutex // leaf
		cluster    uint64
		revision   mirror.Revision // the highest that this etcd has told
		compacted  mirror.Revision // the highest that it is known to be compacted to
		at         time.Time       // when that was learned
		doubted    mirror.Revision // of the last write to the key that was not believed
	}
	following   atomic.Bool
	compactions atomic.Int64
	failures    atomic.Int64
	doubts      atomic.Int64
	losses      atomic.Int64
	unannounced atomic.Int64
}

// CompactionStats is a reading of a Compactor's counters.
type CompactionStats struct {
	Revision     mirror.Revision // that etcd is known to be compacted to, or is about to be; 0: none is known
	Learned      time.Time       // when Revision was learned; zero: never
	EtcdRevision mirror.Revision // the highest that was heard; EtcdRevision-Revision is the history that etcd keeps
	Following    bool            // the key is being watched
	Compactions  int64           // made by this one
	Failures     int64           // turns of this one that have failed
	Losses       int64           // times the watch of the key was lost
	Doubts       int64           // writes to the key that were not believed
	Unannounced  int64           // compactions found that nobody had announced
}

// NewCompactor starts a compactor on the client, which it does not own. It runs until Stop.
func NewCompactor(client *clientv3.Client, opts CompactorOptions) *Compactor {
	if opts.CheckInterval == 0 {
		opts.CheckInterval = DefaultCheckInterval
	}
	if opts.Logger == nil {
		opts.Logger = slog.Default()
	}
	ctx, cancel := context.WithCancel(context.Background())
	c := &Compactor{client: client, opts: opts, cancel: cancel}
	c.wg.Go(func() { c.follow(ctx) })
	if opts.Interval > 0 {
		c.wg.Go(func() { c.takeTurns(ctx) })
	}
	if opts.CheckInterval > 0 {
		c.wg.Go(func() { c.keepChecking(ctx) })
	}
	return c
}

// Stop ends the compactor and returns when its goroutines are gone. It may be called again.
func (c *Compactor) Stop() {
	c.cancel()
	c.wg.Wait()
}

// CompactRevision returns the highest revision that etcd is known to be compacted to, or is
// about to be, 0 if none is known.
func (c *Compactor) CompactRevision() int64 {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.mu.compacted
}

// Stats returns the counters. Readings are not of one moment.
func (c *Compactor) Stats() CompactionStats {
	c.mu.Lock()
	defer c.mu.Unlock()
	return CompactionStats{
		Revision: c.mu.compacted, Learned: c.mu.at, EtcdRevision: c.mu.revision,
		Following:   c.following.Load(),
		Compactions: c.compactions.Load(), Failures: c.failures.Load(),
		Losses: c.losses.Load(), Doubts: c.doubts.Load(), Unannounced: c.unannounced.Load(),
	}
}

// ledger is what a compactor remembers of its last turn. The zero value: nothing.
type ledger struct {
	cluster uint64
	version int64           // of the key; 0: there is none
	rev     mirror.Revision // that etcd had
	tried   mirror.Revision // announced then, but whether etcd took it is not known; 0: none
}

// takeTurns has a turn whenever the interval is over. The time that a turn takes is not part
// of the interval, so no history goes before its time.
func (c *Compactor) takeTurns(ctx context.Context) {
	var l ledger
	for sleep(ctx, c.opts.Interval) {
		if err := c.turn(ctx, &l); err != nil && ctx.Err() == nil {
			c.failures.Add(1)
			if errors.Is(err, rpctypes.ErrNoSpace) {
				c.opts.Logger.Error("etcd has no space left and takes no writes, so compactions cannot be announced and are not made; "+
					"compact and defragment it by hand, then disarm its alarm", "err", err)
				continue
			}
			c.opts.Logger.Error("etcd was not compacted; the next try is at the next turn", "interval", c.opts.Interval, "err", err)
		}
	}
}

// turn compacts etcd if it is this one's turn.
func (c *Compactor) turn(ctx context.Context, l *ledger) error {
	now, err := c.read(ctx, compactionReadTries)
	if err != nil {
		return err
	}
	header, key := now.Header, only(now.Kvs)
	if l.cluster != 0 && (header.ClusterId != l.cluster || header.Revision < l.rev) {
		c.opts.Logger.Warn("etcd was restored or replaced; the revision to compact it to is found anew",
			"revision", header.Revision, "was", l.rev)
		*l = ledger{}
	}
	l.cluster = header.ClusterId
	tried := l.tried
	l.tried = 0
	switch {
	case tried > 0 && key.Version == l.version+1 && string(key.Value) == decimal(tried):
		// It was taken, though the answer was lost.
		l.version, l.rev = key.Version, header.Revision
		return c.compact(ctx, l, tried)
	case key.Version != l.version:
		// It was somebody else's turn, or the key was deleted: then Version begins anew.
		l.version, l.rev = key.Version, header.Revision
		return nil
	}

	// Exactly this form: there are servers that are no etcd and know it by its form (kine).
	due := l.rev
	ctxTxn, cancel := context.WithTimeout(ctx, compactionWriteWait)
	defer cancel()
	resp, err := c.client.Txn(ctxTxn).
		If(clientv3.Compare(clientv3.Version(CompactionKey), "=", l.version)).
		Then(clientv3.OpPut(CompactionKey, decimal(due))).
		Else(clientv3.OpGet(CompactionKey)).
		Commit()
	if err != nil {
		l.tried = due
		return fmt.Errorf("announce a compaction to %d: %w", due, err)
	}
	if resp.Header.ClusterId != l.cluster || resp.Header.Revision < due {
		*l = ledger{}
		return fmt.Errorf("etcd was restored while a compaction was announced: it is at %d, was at %d", resp.Header.Revision, due)
	}
	l.rev = resp.Header.Revision
	if !resp.Succeeded { // overtaken
		var kvs []*mvccpb.KeyValue
		if len(resp.Responses) > 0 {
			kvs = resp.Responses[0].GetResponseRange().GetKvs()
		}
		l.version = only(kvs).Version
		return nil
	}
	l.version++
	if due == 0 {
		return nil // nothing is known of the past yet
	}
	return c.compact(ctx, l, due)
}

// compact compacts etcd to a revision that was announced. It tries again for a while: those
// who follow the key have let go of what lies below.
func (c *Compactor) compact(ctx context.Context, l *ledger, rev mirror.Revision) error {
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
		case errors.Is(err, rpctypes.ErrCompacted): // the lost answer to an attempt, or somebody was ahead
			c.noteCompacted(rev)
			return nil
		case errors.Is(err, rpctypes.ErrFutureRev):
			*l = ledger{}
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
				c.opts.Logger.Info("compactions of etcd are followed again", "key", CompactionKey)
			}
		})
		was := c.following.Swap(false)
		if ctx.Err() != nil {
			return
		}
		if was {
			c.losses.Add(1)
		}
		if !lost && !was { // what is lost and at once found again is not worth a line
			lost = true
			c.opts.Logger.Warn("compactions of etcd cannot be followed; trying again", "key", CompactionKey, "err", err)
		}
		if !sleep(ctx, pause) {
			return
		}
		pause = min(2*pause, followLast)
	}
}

// watch reads the key and then watches it; it calls began when the watch has begun. It
// returns why that has ended.
func (c *Compactor) watch(ctx context.Context, began func()) error {
	now, err := c.read(ctx, 1) // the next try comes soon
	if err != nil {
		return err
	}
	cluster := now.Header.ClusterId
	ctx, cancel := context.WithCancelCause(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel(nil)
	// See Source.Watch: the client would resume on whatever etcd it finds.
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
			return fmt.Errorf("%w: cluster %x, was %x", mirror.ErrRestored, resp.Header.ClusterId, cluster)
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

// compactionStream marks calls on a gRPC stream that delays nobody else's progress, and that
// the member ends when it has lost its leader.
func compactionStream(ctx context.Context) context.Context {
	return clientv3.WithRequireLeader(metadata.NewOutgoingContext(ctx, metadata.Pairs("strata-stream", "compaction")))
}

// keepChecking looks for what following the key does not show.
func (c *Compactor) keepChecking(ctx context.Context) {
	for sleep(ctx, c.opts.CheckInterval) {
		if err := c.check(ctx); err != nil && ctx.Err() == nil {
			c.opts.Logger.Debug("etcd did not tell what it is compacted to", "err", err)
		}
	}
}

// check asks etcd whether it still has what memory can serve: an operator, or etcd's own
// --auto-compaction-mode, announces nothing.
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
	floor, err := c.floor(ctx, oldest)
	if err != nil {
		return fmt.Errorf("%d is compacted; the oldest revision: %w", oldest, err)
	}
	if _, err := c.read(ctx, compactionReadTries); err != nil { // it may have been announced meanwhile
		return err
	}
	if floor > c.CompactRevision() {
		c.unannounced.Add(1)
		c.opts.Logger.Info("etcd was compacted by somebody who has not announced it", "key", CompactionKey, "revision", floor)
		c.noteCompacted(floor)
	}
	return nil
}

// floor returns the oldest revision that etcd has. It is for an etcd that has compacted the
// one given, so that a watch from there is refused.
func (c *Compactor) floor(ctx context.Context, gone mirror.Revision) (mirror.Revision, error) {
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
	return 0, fmt.Errorf("etcd does not tell: %w", context.Cause(ctx))
}

// read reads the key, linearizably, and learns what the answer says.
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
		// Another etcd, or an older state: what was learned of the one before is void.
		c.mu.revision, c.mu.compacted, c.mu.at, c.mu.doubted = 0, 0, time.Time{}, 0
	}
	c.mu.cluster, c.mu.revision = resp.Header.ClusterId, max(c.mu.revision, resp.Header.Revision)
	c.mu.Unlock()
	if len(resp.Kvs) > 0 {
		c.applyAnnouncement(resp.Kvs[0])
	}
	return resp, nil
}

// applyAnnouncement records the compaction that the key announces. A value that is not a revision
// below that of the write is logged and ignored.
func (c *Compactor) applyAnnouncement(kv *mvccpb.KeyValue) {
	rev, err := strconv.ParseInt(string(kv.Value), 10, 64)
	if err == nil && rev >= 0 && rev < kv.ModRevision {
		if rev > 0 { // else it announces that somebody has begun to count
			c.noteCompacted(rev)
		}
		return
	}
	c.mu.Lock()
	known := c.mu.doubted == kv.ModRevision
	c.mu.doubted = kv.ModRevision
	c.mu.Unlock()
	if !known {
		c.doubts.Add(1)
		c.opts.Logger.Warn("what announces compactions of etcd holds no revision from before it was written; it is not believed",
			"key", CompactionKey, "value", fmt.Sprintf("%.40q", kv.Value), "written", kv.ModRevision)
	}
}

// noteCompacted records that etcd is compacted to the revision, or is about to be. A reader that
// sees it in CompactRevision finds that memory has dropped the versions below it.
func (c *Compactor) noteCompacted(rev mirror.Revision) {
	if c.opts.Forget != nil {
		c.opts.Forget(rev)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if rev > c.mu.compacted {
		c.mu.compacted, c.mu.at = rev, time.Now()
	}
}

// noteRevision records that etcd has been at the revision.
func (c *Compactor) noteRevision(rev mirror.Revision) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.mu.revision = max(c.mu.revision, rev)
}

// only returns what a read of one key has found; of a key that is not there, Version is 0.
func only(kvs []*mvccpb.KeyValue) *mvccpb.KeyValue {
	if len(kvs) == 0 {
		return &mvccpb.KeyValue{}
	}
	return kvs[0]
}

func decimal(rev mirror.Revision) string { return strconv.FormatInt(rev, 10) }

// sleep returns true when the time is over, false when ctx has ended.
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
