package mirror

import (
	"context"
	"sync"
	"sync/atomic"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/freshness"
)

// shared is the state that callers, resources, loads and the writer of one mirror have in common.
// Every field is set once, is atomic, or has its own lock.
type shared struct {
	opts      Options
	published *freshness.Published
	stats     counters
	registry  registry

	compacted atomic.Int64  // the highest revision given to Compact
	cluster   atomic.Uint64 // the mirrored cluster's ID, 0 before the first list
	// prefixes whose keys lists may leave out; stored by the writer
	excluded       atomic.Pointer[[]string]
	installedLists atomic.Int64 // times the whole prefix was listed and installed
	loading        atomic.Bool  // the whole prefix is being loaded
	// history before it may differ from the events that clients have received
	trustedSince atomic.Int64

	restarts   chan restart // requests to leave the feed and to list the prefix
	feedHealth *freshness.FeedHealth
	timeline   timeline

	ctx    context.Context // ends with Close
	cancel context.CancelFunc
	wg     sync.WaitGroup
}

// restart is a request to the writer to leave a feed whose etcd cluster does not exist any more.
type restart struct {
	lists int64 // the value of shared.installedLists when the request was made
	err   error
}

// restart requests a list of the whole prefix; the writer ignores it if the number of lists has
// changed from lists since. It does not block: one pending request is enough.
func (s *shared) restart(lists int64, err error) {
	select {
	case s.restarts <- restart{lists, err}:
	default:
	}
}

// command runs f on the writer's goroutine, and returns when it has, or with ctx's error: f may
// then be running.
func (s *shared) command(ctx context.Context, f command) error {
	done := make(chan struct{})
	s.registry.enqueue(func(w *writer) {
		defer close(done)
		if ctx.Err() == nil {
			f(w)
		}
	})
	select {
	case <-done:
		return ctx.Err()
	case <-ctx.Done():
		return ctx.Err()
	}
}

// mirroredState returns the mirrored cluster and the published revision.
func (s *shared) mirroredState() driver.Header {
	return driver.Header{ClusterID: s.cluster.Load(), Revision: s.published.Revision()}
}
