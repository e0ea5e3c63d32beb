package dropin

import (
	"context"
	"errors"
	"fmt"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// Tests of published revisions compare the resource versions of lists and bookmarks with the
// revision of the etcd that stores the resource.

// etcdRevision returns the current revision of an etcd.
func etcdRevision(t *testing.T, ctx context.Context, client *clientv3.Client) int64 {
	t.Helper()
	resp, err := client.Get(ctx, "outside", clientv3.WithCountOnly())
	harness.Check(t, err)
	return resp.Header.Revision
}

// lastChange returns the highest mod revision of an existing key below /registry/.
func lastChange(t *testing.T, ctx context.Context, client *clientv3.Client) int64 {
	t.Helper()
	resp, err := client.Get(ctx, "/registry/", clientv3.WithPrefix(), clientv3.WithKeysOnly(),
		clientv3.WithSort(clientv3.SortByModRevision, clientv3.SortDescend), clientv3.WithLimit(1))
	harness.Check(t, err)
	if len(resp.Kvs) == 0 {
		t.Fatal("the etcd is empty")
	}
	return resp.Kvs[0].ModRevision
}

// writeOutside writes to etcd outside the prefix of API servers and returns the revision of the
// write.
func writeOutside(t *testing.T, ctx context.Context, client *clientv3.Client) int64 {
	t.Helper()
	resp, err := client.Put(ctx, "outside", "")
	harness.Check(t, err)
	return resp.Header.Revision
}

// listRevision lists a path and returns the revision of the list.
func listRevision(t *testing.T, ctx context.Context, api *harness.API, path, query string) int64 {
	t.Helper()
	list, err := api.List(ctx, path, query)
	harness.Check(t, err)
	return harness.Revision(t, list.Metadata.ResourceVersion)
}

// initialEvents starts a watch with initial events, and returns the names of their objects, in
// order, and the revision of the bookmark after them.
func initialEvents(t *testing.T, ctx context.Context, api *harness.API, path, query string) (names []string, at int64) {
	t.Helper()
	w := harness.StartWatch(t, ctx, api, path, "sendInitialEvents=true&resourceVersionMatch=NotOlderThan&allowWatchBookmarks=true&"+query)
	defer w.Close()
	for {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		switch {
		case e.Type == "ADDED":
			names = append(names, e.Object.Metadata.Name)
		case e.Type == "BOOKMARK" && e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true":
			return names, harness.Revision(t, e.Object.Metadata.ResourceVersion)
		case e.Type != "BOOKMARK":
			t.Fatalf("initial events of %s?%s: got %s of %s (%s)", path, query, e.Type, e.Object.Key(), e.Status.Message)
		}
	}
}

// bookmarks is a query for a watch that lasts long enough for one bookmark: the last is sent 2 s
// before the end.
const bookmarks = "allowWatchBookmarks=true&timeoutSeconds=3&resourceVersion="

// nextBookmark returns the revision of the next bookmark of a watch, 0 if it ends without one.
// Events are errors.
func nextBookmark(t *testing.T, ctx context.Context, w *harness.Watch) (at int64) {
	t.Helper()
	e, err := w.Next(ctx)
	if errors.Is(err, harness.ErrEnded) {
		return 0
	}
	harness.Check(t, err)
	if e.Type != "BOOKMARK" {
		t.Fatalf("an idle watch got %s of %s (%s)", e.Type, e.Object.Key(), e.Status.Message)
	}
	return harness.Revision(t, e.Object.Metadata.ResourceVersion)
}

// awaitBookmark watches a path without events, starting at a revision, and repeats the watch until
// a bookmark has at least another revision.
func awaitBookmark(t *testing.T, ctx context.Context, api *harness.API, path string, from, atLeast int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		w := harness.StartWatch(t, ctx, api, path, bookmarks+fmt.Sprint(from))
		defer w.Close()
		at := nextBookmark(t, ctx, w)
		return at >= atLeast, fmt.Errorf("a bookmark of %s is at %d, want %d", path, at, atLeast)
	}))
}

// publishedRevision returns the published revision of a server's memory of an etcd.
func publishedRevision(t *testing.T, ctx context.Context, api *harness.API, etcd *harness.Etcd) int64 {
	t.Helper()
	return clusterMetric(t, ctx, api, "revision", etcd)
}

// clusterMetric returns a server's metric for one etcd.
func clusterMetric(t *testing.T, ctx context.Context, api *harness.API, name string, etcd *harness.Etcd) int64 {
	t.Helper()
	value, err := api.Metric(ctx, fmt.Sprintf("strata_mirror_%s{endpoints=%q,", name, etcd.URL))
	harness.Check(t, err)
	return int64(value)
}

// awaitPublished returns when a server's memory of an etcd has reached a revision.
func awaitPublished(t *testing.T, ctx context.Context, api *harness.API, etcd *harness.Etcd, atLeast int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		at := publishedRevision(t, ctx, api, etcd)
		return at >= atLeast, fmt.Errorf("published revision is %d, want %d", at, atLeast)
	}))
}
