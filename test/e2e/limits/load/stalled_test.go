package load

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// Clients request all objects as initial events, and read nothing. The server's memory for each of
// them is bounded by its write buffers, for any number of objects; a concurrent watcher receives
// every event; and after their end the memory is released.
func TestWatch_StalledClients_MemoryIsBoundedAndReleased(t *testing.T) {
	var (
		objects = harness.Pick(20_000, 300_000)
		clients = harness.Pick(60, 1_000)
		// a server that buffered unread data would need 20 MB for each
		bound = int64(harness.Pick(60*400e3, 200e6))
	)
	ctx := harness.Context(t, testTimeout)
	s := filled(t, ctx, objects)
	first, err := s.stall(t, ctx, 4) // one-time allocations come before the measurement
	harness.Check(t, err)
	first()
	before, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Log("before:", before)

	gone, err := s.stall(t, ctx, clients)
	harness.Check(t, err)
	meanwhile, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Logf("with %d clients: %v", clients, meanwhile)
	if harness.Engine() == harness.Strata {
		if more := meanwhile.Heap + meanwhile.Stacks - before.Heap - before.Stacks; more > bound {
			t.Errorf("the server holds %.1f MB for %d clients that do not read, want at most %.1f", float64(more)/1e6, clients, float64(bound)/1e6)
		}
		if more := meanwhile.Resident - before.Resident; harness.Long() && more > bound {
			t.Errorf("the server's memory has grown by %.1f MB, want at most %.1f", float64(more)/1e6, float64(bound)/1e6)
		}
	}
	s.healthy(t, ctx)
	gone()
	s.server.AwaitReleased(t, ctx, s.api, before, 16<<20, clients/3, 2*time.Minute)
}

// stall starts clients, half of them over HTTP/1.1, and returns when each has received its first
// byte. They read no more, until gone ends them.
func (s *scene) stall(t *testing.T, ctx context.Context, clients int) (gone func(), err error) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	all := make([]*client, clients)
	bodies := make([]io.Closer, clients)
	gone = func() {
		cancel()
		for i, c := range all {
			if bodies[i] != nil {
				bodies[i].Close()
			}
			c.http.CloseIdleConnections()
		}
	}
	for i := range all {
		all[i] = s.client(t, i%2 == 0)
	}
	var asking errgroup.Group
	asking.SetLimit(50)
	for i, c := range all {
		asking.Go(func() error {
			response, err := c.watch(ctx, everybody, "allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan")
			if err != nil {
				return err
			}
			bodies[i] = response.Body
			_, err = io.ReadFull(response.Body, make([]byte, 1))
			return err
		})
	}
	if err := asking.Wait(); err != nil {
		gone()
		return nil, fmt.Errorf("clients that do not read: %w", err)
	}
	return gone, nil
}

// healthy verifies that a watcher receives every change.
func (s *scene) healthy(t *testing.T, ctx context.Context) {
	t.Helper()
	const changes = 50
	list, err := s.api.List(ctx, namespace, "limit=1")
	harness.Check(t, err)
	w, r, err := s.api.Watch(ctx, namespace, "fieldSelector=metadata.name%3D"+firstName+"&resourceVersion="+list.Metadata.ResourceVersion)
	harness.Check(t, err)
	if w == nil {
		t.Fatal("a watch during clients that do not read:", r.Err())
	}
	defer w.Close()
	for i := range changes {
		patch := fmt.Sprintf(`{"data":{"changed":"%d"}}`, i)
		r, err := s.api.DoAs(ctx, http.MethodPatch, namespace+"/"+firstName, "", "application/merge-patch+json", "", patch)
		harness.Check(t, err)
		if r.Code != http.StatusOK {
			t.Fatal("a write during clients that do not read:", r.Err())
		}
		event, err := w.Next(ctx)
		harness.Check(t, err)
		written, err := r.Object()
		harness.Check(t, err)
		if event.Object.Metadata.ResourceVersion != written.GetResourceVersion() {
			t.Fatalf("event %s at %s, want revision %s", event.Type, event.Object.Metadata.ResourceVersion, written.GetResourceVersion())
		}
	}
}
