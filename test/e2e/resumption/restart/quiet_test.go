package restart

import (
	"context"
	"fmt"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
	"github.com/stratakube/strata/test/harness/recorded"
)

// There are no changes for three compactions with a restart in between. Watches with bookmarks are
// ended by their timeouts and by the restart, and resume without a 410. A watch without bookmarks
// could not: its start revision is compacted.
func TestBookmarks_QuietRegistry_WatchesResumeWithout410(t *testing.T) {
	t.Parallel()
	// A watch gets a bookmark 2 s before its timeout, and a revision is compacted one interval
	// after it was current. The rest is the time for a client to resume on a busy machine.
	interval := harness.Pick(8*time.Second, 30*time.Second)
	ctx := harness.Context(t, 8*time.Minute)
	e := harness.New(t)
	etcd := e.Etcd()
	client := etcd.Client()
	server := e.APIServer(etcd, append([]string{"--etcd-compaction-interval=" + interval.String()}, serverFlags...)...)
	api := server.API()
	createGizmos(t, ctx, []*harness.Server{server})
	history := recorded.Follow(t, ctx, client, "/registry/")
	paths := map[string]string{
		"/api/v1/secrets":                         "/registry/secrets/",
		"/api/v1/namespaces/default/limitranges":  "/registry/limitranges/",
		"/apis/" + gizmoGroup + "/v1/gizmos":      "/registry/" + gizmoGroup + "/gizmos/",
		"/apis/apps/v1/deployments":               "/registry/deployments/",
		"/apis/node.k8s.io/v1/runtimeclasses":     "/registry/runtimeclasses/",
		"/api/v1/namespaces/default/podtemplates": "/registry/podtemplates/",
	}
	_, err := api.Create(ctx, "/api/v1/namespaces/default/secrets", object{"metadata": object{"name": "there"}})
	harness.Check(t, err)
	type quiet struct {
		*watcher
		prefix string
		start  int64
	}
	var all []*quiet
	for path, prefix := range paths {
		list, err := api.List(ctx, path, "")
		harness.Check(t, err)
		for k := range 3 {
			w := &quiet{&watcher{path: path}, prefix, harness.Revision(t, list.Metadata.ResourceVersion)}
			w.query = fmt.Sprintf("allowWatchBookmarks=true&timeoutSeconds=%d", 3+k)
			if k == 2 {
				w.query += "&labelSelector=a%3Db"
			}
			harness.Check(t, w.begin(ctx, api, w.start))
			all = append(all, w)
			t.Cleanup(w.end)
		}
	}
	reading, stop := context.WithCancel(ctx)
	var group sync.WaitGroup
	for _, w := range all {
		group.Go(func() {
			for reading.Err() == nil {
				if err := w.drain(reading); err != nil && reading.Err() == nil {
					t.Errorf("watch of %s, started after %d, now at %d: %v", w.path, w.start, w.position, err)
					return
				}
				after := w.position
				err := retried(reading, func(ctx context.Context) error { return w.begin(reading, api, after) })
				if err != nil && reading.Err() == nil {
					t.Errorf("watch of %s, started after %d, resumes after %d: %v", w.path, w.start, after, err)
					return
				}
			}
		})
	}
	defer group.Wait()
	defer stop()
	compactions := func(n int) {
		t.Helper()
		harness.Check(t, awaitCompactions(ctx, client, n))
	}
	compactions(2)
	harness.Check(t, server.Stop())
	server.Restart()
	compactions(2)
	stop()
	group.Wait()
	if t.Failed() {
		return
	}
	for _, w := range all {
		after := w.position
		harness.Check(t, w.begin(ctx, api, after))
		if harness.Engine() == harness.Strata && after == w.start {
			t.Errorf("watch of %s: no bookmark has ever come", w.path)
		}
		labels := ""
		if w.query[len(w.query)-3:] == "3Db" {
			labels = "a=b"
		}
		judge(t, ctx, history, w.prefix, informer.Follow{Labels: labels}, w.watcher, after)
	}
	// A client without bookmarks would still be at its start revision.
	old := &watcher{path: all[0].path}
	err = old.begin(ctx, api, all[0].start)
	if err == nil {
		t.Cleanup(old.end)
		_, err = old.next(ctx)
	}
	if !apierrors.IsResourceExpired(err) && !apierrors.IsGone(err) {
		t.Errorf("a watch after the compacted revision %d: %v, want 410", all[0].start, err)
	}
}

// awaitCompactions returns after n more compactions of etcd.
func awaitCompactions(ctx context.Context, client *clientv3.Client, n int) error {
	last := int64(-1)
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := client.HashKV(ctx, client.Endpoints()[0], 0)
		if err != nil {
			return false, err
		}
		if last >= 0 && r.CompactRevision > last {
			n--
		}
		last = r.CompactRevision
		return n <= 0, fmt.Errorf("%d more compactions have to come; the last one was at %d", n, last)
	})
}
