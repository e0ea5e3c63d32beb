package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/mirror"
)

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
