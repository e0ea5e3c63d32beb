package dropin

import (
	"context"
	"fmt"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestReplicas_QuietResource_ReachEtcdRevision reads a resource without writes from two servers
// that were started at different revisions: both reach the revision of etcd, for every kind of
// write (KEP-1904, the second scenario).
func TestReplicas_QuietResource_ReachEtcdRevision(t *testing.T) {
	shared.use.Share(t)
	ctx := harness.Context(t, testTimeout)
	etcd := shared.etcd
	client := etcd.Client()
	apis := []*harness.API{shared.servers[0].API(), shared.servers[1].API()}
	start := listRevision(t, ctx, apis[1], quietPath, "resourceVersion=0") // in the history of both

	t.Run("lists", func(t *testing.T) {
		for i := range 20 {
			writer := apis[i%2]
			o := create(t, ctx, writer, defaultMaps, configMap(harness.NewName("written")))
			for _, api := range []*harness.API{apis[(i+1)%2], writer} {
				if got, want := listRevision(t, ctx, api, quietPath, ""), harness.Revision(t, o.Metadata.ResourceVersion); got < want {
					t.Fatalf("a list is of %d after a write at %d", got, want)
				}
			}
		}
		// A revision returned by one server is not in the future of the other.
		shown := listRevision(t, ctx, apis[0], quietPath, "")
		for _, api := range apis {
			if got := listRevision(t, ctx, api, quietPath, fmt.Sprintf("resourceVersion=%d", shown)); got < shown {
				t.Errorf("a list not older than %d is of %d", shown, got)
			}
		}
	})
	if harness.Engine() == harness.Upstream {
		return // upstream advances only with reads, or with etcd's own notifications
	}
	t.Run("idle watches", func(t *testing.T) {
		for _, api := range apis {
			harness.StartWatch(t, ctx, api, quietPath, fmt.Sprintf("allowWatchBookmarks=true&resourceVersion=%d", start))
		}
		// Only progress notifications report a write outside the prefix, unless a later write
		// inside it follows.
		for {
			outside := writeOutside(t, ctx, client)
			for _, api := range apis {
				awaitPublished(t, ctx, api, etcd, outside)
			}
			if lastChange(t, ctx, client) < outside {
				break
			}
		}
	})
	t.Run("bookmarks", func(t *testing.T) {
		outside := writeOutside(t, ctx, client)
		for _, api := range apis {
			awaitBookmark(t, ctx, api, quietPath, start, outside)
			if got := listRevision(t, ctx, api, quietPath, "resourceVersion=0"); got < outside {
				t.Errorf("in memory at %d, want %d", got, outside)
			}
		}
	})
}

// requireNoProgressAsked checks that a server does not request progress by itself while another
// server does; both have a watch with bookmarks.
func requireNoProgressAsked(t *testing.T, ctx context.Context, etcd *harness.Etcd, api, other *harness.API) {
	t.Helper()
	for _, api := range []*harness.API{api, other} {
		harness.StartWatch(t, ctx, api, quietPath, "allowWatchBookmarks=true&resourceVersion=0")
	}
	asked := func(api *harness.API) int64 { return clusterMetric(t, ctx, api, "progress_requests_total", etcd) }
	read := func() int64 { return clusterMetric(t, ctx, api, "revision_reads_total", etcd) }
	var unread []int64 // requests in periods without a read
	for len(unread) < 3 {
		before, reads, others := asked(api), read(), asked(other)
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			return asked(other) >= others+5, fmt.Errorf("the other server requests no progress")
		}))
		after := asked(api)
		switch {
		case read() != reads: // a read inside the server waits for progress
		case after == before:
			return
		default: // perhaps for a read of the period before
			unread = append(unread, after-before)
		}
	}
	t.Errorf("%d progress requests in periods without a read", unread)
}
