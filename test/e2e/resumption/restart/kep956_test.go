package restart

import (
	"context"
	"encoding/json"
	"fmt"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/stratakube/strata/test/harness"
)

// KEP-956's scenario: a selector matches 1 change in 1,000, and the watch is restarted 100 times,
// as 50 watches of 2 restarts each. The measure is the number of changes that the server has to
// process for that: those since the revision at which a watch resumes. The same changes are made to
// two resources; only the watches of one have bookmarks.
func TestKEP956_Bookmarks_ReduceProcessedChanges(t *testing.T) {
	shared.use.Share(t)
	const (
		watches, restarts = 50, 2
		perRound          = 1000 // changes, one of them selected
		perTxn            = 100
		atLeast           = 40 // the factor between the two
	)
	ctx := harness.Context(t, 5*time.Minute)
	api, client := shared.servers[0].API(), shared.etcd.Client()
	// no other test writes them
	const marked, unmarked = "persistentvolumeclaims", "serviceaccounts"
	resources := map[string]string{marked: "allowWatchBookmarks=true&", unmarked: ""}

	watchers := map[string][]*watcher{}
	for resource, bookmarks := range resources {
		path := "/api/v1/namespaces/default/" + resource
		list, err := api.List(ctx, path, "")
		harness.Check(t, err)
		for range watches {
			// A bookmark is sent 2 s before the end.
			w := &watcher{path: path, query: bookmarks + "labelSelector=selected%3Dyes&timeoutSeconds=3"}
			harness.Check(t, w.begin(ctx, api, harness.Revision(t, list.Metadata.ResourceVersion)))
			watchers[resource] = append(watchers[resource], w)
			t.Cleanup(w.end)
		}
	}
	processed := func(resource string) float64 {
		n, err := api.Metric(ctx, fmt.Sprintf("apiserver_init_events_total{group=\"\",resource=%q", resource))
		if err != nil {
			return 0 // the series is missing until the first count
		}
		return n
	}
	counted := map[string]float64{} // by the restarts
	for round := range restarts {
		selected, last := int64(0), int64(0)
		for i := 0; i < perRound; i += perTxn {
			for resource := range resources {
				r := writeStored(t, ctx, client, resource, round*perRound+i, perTxn, func(n int) bool { return n%perRound == perRound/3 })
				if i/perTxn == perRound/3/perTxn && selected == 0 {
					selected = r
				}
				last = max(last, r)
			}
		}
		var reading errgroup.Group
		for resource, all := range watchers {
			until := selected
			if resource == marked {
				until = last // by a bookmark
			}
			for _, w := range all {
				reading.Go(func() error {
					if err := w.catchUp(ctx, api, until); err != nil {
						return err
					}
					// No watch is open when they restart: an open one has an index of the selector.
					return w.drain(ctx)
				})
			}
		}
		harness.Check(t, reading.Wait())
		before := map[string]float64{marked: processed(marked), unmarked: processed(unmarked)}
		for _, resource := range []string{marked, unmarked} {
			for _, w := range watchers[resource] {
				harness.Check(t, w.begin(ctx, api, w.position))
			}
		}
		// The server counts them after it has accepted the watch.
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			n := processed(unmarked) - before[unmarked]
			return n >= watches*perRound/4, fmt.Errorf("%.0f events are processed without bookmarks", n)
		}))
		for _, resource := range []string{marked, unmarked} {
			counted[resource] += processed(resource) - before[resource]
		}
	}
	with, without := counted[marked], counted[unmarked]
	t.Logf("%d restarts of a watch that selects 1 change in %d: %.0f events processed with bookmarks, %.0f without", watches*restarts, perRound, with, without)
	if with*atLeast > without {
		t.Errorf("%.0f events are processed with bookmarks and %.0f without, want at least %d times fewer", with, without, atLeast)
	}
}

// writeStored writes n objects, numbered from first on, to etcd in their stored form, in one
// transaction, and returns its revision. Objects for which selected returns true have the selected
// label.
func writeStored(t *testing.T, ctx context.Context, client *clientv3.Client, resource string, first, n int, selected func(i int) bool) int64 {
	t.Helper()
	const live = 500 // number of names
	kind := map[string]string{
		"persistentvolumeclaims": "PersistentVolumeClaim", "serviceaccounts": "ServiceAccount"}[resource]
	var puts []clientv3.Op
	for i := first; i < first+n; i++ {
		name := fmt.Sprintf("object-%d", i%live)
		labels := object{}
		if selected(i) {
			name, labels["selected"] = "selected", "yes"
		}
		value, err := json.Marshal(object{"apiVersion": "v1", "kind": kind, "metadata": object{
			"name": name, "namespace": "default", "uid": string(uuid.NewUUID()), "creationTimestamp": metav1.Now(), "labels": labels}})
		harness.Check(t, err)
		puts = append(puts, clientv3.OpPut("/registry/"+resource+"/default/"+name, string(value)))
	}
	r, err := client.Txn(ctx).Then(puts...).Commit()
	harness.Check(t, err)
	return r.Header.Revision
}
