package etcdsource

import (
	"context"
	"errors"
	"fmt"

	"go.etcd.io/etcd/api/v3/mvccpb"
	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/mirror"
)

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
