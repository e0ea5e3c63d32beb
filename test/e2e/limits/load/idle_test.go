package load

import (
	"context"
	"fmt"
	"io"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// Thousands of watches without events cost little memory each, and none after their end.
func TestWatch_ManyIdle_MemoryIsBoundedAndReleased(t *testing.T) {
	const bytesEach = 27e3 // heap and stacks; 17.5 to 21.0 in three runs
	watchers := harness.Pick(600, 10_000)
	ctx := harness.Context(t, testTimeout)
	s := filled(t, ctx, 1_000)
	first, err := s.idle(t, ctx, 10) // one-time allocations come before the measurement
	harness.Check(t, err)
	first()
	before, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Log("before:", before)

	gone, err := s.idle(t, ctx, watchers)
	harness.Check(t, err)
	meanwhile, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Logf("with %d watchers: %v", watchers, meanwhile)
	if harness.Engine() == harness.Strata {
		if each := float64(meanwhile.Heap+meanwhile.Stacks-before.Heap-before.Stacks) / float64(watchers); each > bytesEach {
			t.Errorf("the server holds %.1f KB for each idle watcher, want at most %.1f", each/1e3, bytesEach/1e3)
		}
	}
	gone()
	s.server.AwaitReleased(t, ctx, s.api, before, 4<<20+int64(watchers)<<10, watchers/10, 2*time.Minute)
}

// idle opens watches with bookmarks, alternately of one object and of the namespace, and returns
// when the server has accepted all of them.
func (s *scene) idle(t *testing.T, ctx context.Context, watchers int) (gone func(), err error) {
	t.Helper()
	list, err := s.api.List(ctx, namespace, "limit=1")
	harness.Check(t, err)
	ctx, cancel := context.WithCancel(ctx)
	clients := make([]*client, (watchers+perConnection-1)/perConnection)
	for i := range clients {
		clients[i] = s.client(t, false)
	}
	bodies := make([]io.Closer, watchers)
	gone = func() {
		cancel()
		for _, body := range bodies {
			if body != nil {
				body.Close()
			}
		}
		for _, c := range clients {
			c.http.CloseIdleConnections()
		}
	}
	var opening errgroup.Group
	opening.SetLimit(50)
	for i := range watchers {
		opening.Go(func() error {
			query := "allowWatchBookmarks=true&resourceVersion=" + list.Metadata.ResourceVersion
			if i%2 == 0 {
				query += fmt.Sprintf("&fieldSelector=metadata.name%%3Dmap-%06d", i%1000)
			}
			response, err := clients[i/perConnection].watch(ctx, namespace, query)
			if err != nil {
				return err
			}
			bodies[i] = response.Body
			return nil
		})
	}
	if err := opening.Wait(); err != nil {
		gone()
		return nil, fmt.Errorf("idle watchers: %w", err)
	}
	return gone, nil
}
