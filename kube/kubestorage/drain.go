package kubestorage

import (
	"context"
	"errors"
	"sync"
	"time"

	"github.com/stratakube/strata/kube/internal/running"
)

// Drain ends the watches of all storages of the engine, in order, for a server that
// shuts down (KEP-1904). From the call on new watches are refused with 429.
//
//  1. The clock catches up with etcd, for at most progress; 0 does not wait.
//  2. Each watch hands out what is due up to the clock, then, if its client asked for
//     bookmarks, one at the revision that it has come to, and ends without an error (I4).
//     One in the middle of its initial events ends without a bookmark. A client so
//     resumes wherever it likes, at a revision as new as any that this server knows.
//  3. Watches that have not ended when ctx does, because their clients do not read,
//     are ended as they are.
//
// Watches of WithoutDrain go on, and may begin, until their storages end.
//
// It returns when the last has ended, or says how many were not in time. Reads go on as
// before. Package readpath calls it at the right moment (DrainOnShutdown).
func (e *Engine) Drain(ctx context.Context, progress time.Duration) error {
	e.mu.Lock()
	e.draining = true
	clusters := make([]*cluster, 0, len(e.clusters))
	for _, c := range e.clusters {
		clusters = append(clusters, c)
	}
	e.mu.Unlock()
	for _, c := range clusters {
		c.watches.Refuse()
	}
	errs := make([]error, len(clusters))
	var wg sync.WaitGroup
	for i, c := range clusters {
		wg.Go(func() {
			c.catchUp(ctx, progress)
			errs[i] = c.watches.Drain(ctx)
		})
	}
	wg.Wait()
	return errors.Join(errs...)
}

// catchUp returns when memory has what etcd has, or when that takes too long.
func (c *cluster) catchUp(ctx context.Context, atMost time.Duration) {
	if c.mirror == nil || c.eventsOnly || atMost <= 0 || c.watches.Len() == 0 {
		return
	}
	ctx, cancel := context.WithTimeout(ctx, atMost)
	defer cancel()
	rev, err := c.mirror.Current(ctx)
	if err == nil {
		err = c.mirror.Wait(ctx, rev)
	}
	if err != nil {
		c.opts.Logger.Warn("watches end at a revision that may be behind etcd's", "prefix", c.prefix,
			"revision", c.mirror.Clock(), "error", err)
	}
}

type withoutDrainKey struct{}

// WithoutDrain returns a context for a watch that Engine.Drain is to leave alone: one of a client
// that stops with the server, such as an informer in its process. If it ended before its client
// stops, the client would start it again, in vain.
func WithoutDrain(ctx context.Context) context.Context {
	return context.WithValue(ctx, withoutDrainKey{}, true)
}

func isWithoutDrain(ctx context.Context) bool { return ctx.Value(withoutDrainKey{}) != nil }

// runningStream is a Stream as running.Watches knows it.
type runningStream Stream

// Leave implements running.Watch: next looks whether it is to leave.
func (st *runningStream) Leave() { (*Stream)(st).nudge() }

// Cut implements running.Watch.
func (st *runningStream) Cut(why running.Reason) { (*Stream)(st).cut(why) }

// endStreams ends the streams of a store that is being destroyed.
func (c *cluster) endStreams(s *Store) {
	c.watches.Every(func(w running.Watch) {
		if st, ok := w.(*runningStream); ok && st.store == s {
			st.Cut(running.ByStorage)
		}
	})
}
