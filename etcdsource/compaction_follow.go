package etcdsource

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"go.etcd.io/etcd/api/v3/mvccpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"google.golang.org/grpc/metadata"

	"github.com/stratakube/strata/mirror"
)

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
