package etcdmove

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	clientv3 "go.etcd.io/etcd/client/v3"
)

const (
	// raiseWriters is the number of empty writes in flight: etcd commits those that wait for one fsync together.
	raiseWriters = 256
	// compactEvery is the number of empty writes after which they are compacted, so that the database stays small.
	compactEvery = 100_000
)

// raise writes to a key of target until its revision is at least goal of the source's revision. Cost is one small write for each
// revision.
func (m *mover) raise(ctx context.Context, goal func(source int64) int64) error {
	revision := func(e end) (int64, error) {
		r, err := e.Get(ctx, m.markKey(), clientv3.WithCountOnly())
		if err != nil {
			return 0, fmt.Errorf("revision of %s: %w", e, err)
		}
		return r.Header.Revision, nil
	}
	from, err := revision(m.source)
	if err != nil {
		return err
	}
	start, err := revision(m.target)
	if err != nil {
		return err
	}
	to := goal(from)
	if start >= to {
		return nil
	}
	m.shown.Next("raising the revision of %s", m.target)
	m.shown.Of(int(to - start))
	key := m.prefix + "strata/move-revision"
	for at := start; at < to; {
		next := min(to, at+compactEvery)
		if err := m.writeEmpty(ctx, key, next-at); err != nil {
			return fmt.Errorf("raise the revision of %s: %w; the command can be run again", m.target, err)
		}
		at = next // or higher, by other writers
		if at < to {
			if _, err := m.target.Compact(ctx, at); err != nil {
				return fmt.Errorf("compact %s: %w", m.target, err)
			}
		}
	}
	if err := m.target.write(ctx, clientv3.OpDelete(key)); err != nil {
		return fmt.Errorf("raise the revision of %s: %w", m.target, err)
	}
	return nil
}

// writeEmpty writes key to target n times.
func (m *mover) writeEmpty(ctx context.Context, key string, n int64) error {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var taken atomic.Int64
	var writers sync.WaitGroup
	for range raiseWriters {
		writers.Go(func() {
			for taken.Add(1) <= n {
				if err := m.target.write(ctx, clientv3.OpPut(key, "")); err != nil {
					cancel(err)
					return
				}
				m.shown.Add(1)
			}
		})
	}
	writers.Wait()
	return context.Cause(ctx)
}

// compact compacts target at its revision. A client with a revision of source, which is lower, then gets 410 and relists.
// Compactions have no conditions: one after the loss of the lock makes clients of target relist, and loses nothing.
func (m *mover) compact(ctx context.Context) error {
	r, err := m.target.Get(ctx, m.markKey(), clientv3.WithCountOnly())
	if err == nil {
		_, err = m.target.Compact(ctx, r.Header.Revision)
	}
	if err != nil {
		return fmt.Errorf("compact %s: %w", m.target, err)
	}
	return nil
}
