package restart

import (
	"context"
	"math/rand/v2"
	"net/url"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
	"github.com/stratakube/strata/test/harness/recorded"
)

// 200 watchers reconnect at random revisions, on random servers, under writes. All of them receive
// the same order of events: that of etcd.
func TestWatch_RandomReconnects_KeepEtcdOrder(t *testing.T) {
	shared.use.Share(t)
	const (
		watchers   = 200
		reconnects = 10
		perClient  = 20 // watches on one connection
	)
	ctx := harness.Context(t, 6*time.Minute)
	seed := testseed.New(t)
	client, servers := shared.etcd.Client(), shared.servers
	createGizmos(t, ctx, servers)
	history := recorded.Follow(t, ctx, client, "/registry/")
	type one struct {
		watcher
		informer.Follow
	}
	all := make([]*one, watchers)
	var first int64
	for i := range all {
		w := &one{Follow: []informer.Follow{
			{GroupVersionResource: maps},
			{GroupVersionResource: maps, Labels: "shard=" + shard(i%5)},
			{GroupVersionResource: maps, Namespace: namespace(i % 2)},
			{GroupVersionResource: gizmos},
			{GroupVersionResource: gizmos, Labels: "shard notin (" + shard(i%5) + ")"},
		}[i%5]}
		w.path = collection(w.Follow)
		w.query = "allowWatchBookmarks=true&labelSelector=" + url.QueryEscape(w.Labels)
		all[i] = w
		if first == 0 {
			for _, server := range servers { // both servers have reached the start revision
				list, err := server.API().List(ctx, w.path, "")
				harness.Check(t, err)
				first = harness.Revision(t, list.Metadata.ResourceVersion)
			}
		}
	}
	writing, stop := context.WithCancel(ctx)
	var writers sync.WaitGroup
	defer writers.Wait()
	defer stop()
	writers.Go(func() {
		rnd := rand.New(rand.NewPCG(seed, watchers))
		for i := 0; writing.Err() == nil; i++ {
			// Several keys change in one revision.
			storeMany(t, writing, rnd, client, i)
			harness.Pause(writing, 5*time.Millisecond)
		}
	})
	var apis []*harness.API
	for i := range watchers / perClient * len(servers) {
		server := servers[i%len(servers)]
		apis = append(apis, server.APIFor(harness.OwnConnections(server.Config)))
	}
	var reading sync.WaitGroup
	for i, w := range all {
		reading.Go(func() {
			defer w.end()
			rest := w.query
			rnd := rand.New(rand.NewPCG(seed, uint64(i)))
			after := first
			for k := range reconnects {
				// Every other time the server ends the watch, and the watcher resumes at its
				// position: no revision may be split.
				byServer := k%2 == 1
				if w.query = rest; byServer {
					w.query += "&timeoutSeconds=1"
				}
				api := apis[(i/perClient*len(servers)+rnd.IntN(len(servers)))%len(apis)]
				if err := retried(ctx, func(context.Context) error { return w.begin(ctx, api, after) }); err != nil {
					t.Errorf("watch of %s after %d: %v", w.path, after, err)
					return
				}
				if byServer {
					if err := w.drain(ctx); err != nil {
						t.Errorf("watch of %s after %d, at %d: %v", w.path, after, w.position, err)
						return
					}
					after = w.position
					continue
				}
				for range 1 + rnd.IntN(50) {
					if _, err := w.next(ctx); err != nil {
						t.Errorf("watch of %s after %d, at %d: %v", w.path, after, w.position, err)
						return
					}
				}
				// This time the client ends it, and goes back to a revision that it has received
				// completely.
				after = max(first, w.complete)
				if rnd.IntN(2) == 0 {
					after = first + rnd.Int64N(after-first+1)
				}
			}
		})
	}
	reading.Wait()
	stop()
	writers.Wait()
	reference, err := history.Now(ctx)
	harness.Check(t, err)
	wrong := 0
	for _, w := range all {
		sessions, err := w.sessions.Recorded(0)
		harness.Check(t, err)
		if err := reference.Under(w.Prefix()).View(w.Selects(t)).Check(sessions); err != nil {
			if wrong++; wrong <= 5 {
				t.Errorf("watch of %s?%s: %v", w.path, w.query, err)
			}
		}
	}
	t.Logf("%d changes, %d watchers with %d reconnects each; %d of them saw something else", len(reference.Changes), watchers, reconnects, wrong)
}
