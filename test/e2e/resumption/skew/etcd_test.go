package skew

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// etcdVersions are the tested minor versions of etcd, in order.
var etcdVersions = []string{"3.6", "3.7"}

// TestEtcdVersions_StrataWorksOnEach runs Strata on each etcd: progress advances lists and
// bookmarks of resources without writes, history is restored after a restart, a compaction takes
// effect, and a range that etcd sends in many parts is complete.
func TestEtcdVersions_StrataWorksOnEach(t *testing.T) {
	t.Parallel()
	for _, version := range etcdVersions {
		t.Run("etcd="+version, func(t *testing.T) {
			// it waits for bookmarks, and for a server to detect a compaction
			t.Parallel()
			harness.StockEtcd(t, version) // is built before the time limit begins
			ctx := harness.Context(t, testTimeout)
			env := harness.New(t)
			etcd := env.StockEtcd(t, version)
			client := etcd.Client()
			s := startStrata(env, etcd)
			harness.Check(t, s.Await(ctx, "/readyz"))
			s.AwaitProgress("")
			api := s.API()

			requireProgress(t, ctx, api, client)

			// History: a watch from before the restart delivers the events before and after it.
			from := list(t, ctx, api, defaultMaps, "").Metadata.ResourceVersion
			before := create(t, ctx, api, defaultMaps, configMap("before"))
			harness.Check(t, s.Stop())
			const large = 1500
			fillEtcd(t, ctx, client, "/registry/configmaps/large/", large)
			s.Restart()
			after := create(t, ctx, s.API(), defaultMaps, configMap("after"))
			w := watchFrom(t, ctx, s.API(), defaultMaps, from)
			expectEvent(t, ctx, w, "ADDED", before)
			expectEvent(t, ctx, w, "ADDED", after)
			w.Close()
			harness.Check(t, s.API().AwaitHistory(ctx))
			if n, err := s.API().Metric(ctx, "strata_mirror_replayed_events_total"); err != nil || n == 0 {
				t.Errorf("%v events of history were restored, %v", n, err)
			}
			if l := list(t, ctx, s.API(), "/api/v1/namespaces/large/configmaps", ""); len(l.Items) != large {
				t.Errorf("%d ConfigMaps, want %d", len(l.Items), large)
			}

			// A manual compaction takes effect at once, and a watch from before it continues from
			// memory.
			old := list(t, ctx, s.API(), defaultMaps, "").Metadata.ResourceVersion
			last := create(t, ctx, s.API(), defaultMaps, configMap("last"))
			_, err := client.Compact(ctx, harness.Revision(t, last.Metadata.ResourceVersion))
			harness.Check(t, err)
			awaitCode(t, ctx, s.API(), defaultMaps, exact(old), http.StatusGone)
			expectEvent(t, ctx, watchFrom(t, ctx, s.API(), defaultMaps, old), "ADDED", last)
		})
	}
}

// requireProgress writes a key that is not of an object. Consistent lists, bookmarks and the ends
// of initial events reach its revision, and reads read nothing from etcd except its revision.
func requireProgress(t *testing.T, ctx context.Context, api *harness.API, client *clientv3.Client) {
	t.Helper()
	const quiet = "/api/v1/limitranges"
	from := list(t, ctx, api, quiet, "").Metadata.ResourceVersion
	put, err := client.Put(ctx, "elsewhere", "written")
	harness.Check(t, err)
	if l := list(t, ctx, api, quiet, ""); harness.Revision(t, l.Metadata.ResourceVersion) < put.Header.Revision {
		t.Errorf("%s is listed at %s after a write at %d", quiet, l.Metadata.ResourceVersion, put.Header.Revision)
	}
	if at := endOfInitialEvents(t, ctx, api, quiet, ""); harness.Revision(t, at) < put.Header.Revision {
		t.Errorf("initial events end at %s after a write at %d", at, put.Header.Revision)
	}
	put, err = client.Put(ctx, "elsewhere", "again")
	harness.Check(t, err)
	awaitBookmark(t, ctx, api, quiet, from, put.Header.Revision)
	if n, err := api.Metric(ctx, "strata_mirror_progress_requests_total"); err != nil || n == 0 {
		t.Errorf("%v progress requests, %v", n, err)
	}
}

// awaitBookmark repeatedly watches a path without writes, until a bookmark has at least a revision.
// Each watch lasts long enough for one bookmark, which is sent 2 s before the end.
func awaitBookmark(t *testing.T, ctx context.Context, api *harness.API, path, from string, atLeast int64) {
	t.Helper()
	for {
		w := harness.StartWatch(t, ctx, api, path, "allowWatchBookmarks=true&timeoutSeconds=3&resourceVersion="+from)
		e, err := w.Next(ctx)
		w.Close()
		if errors.Is(err, harness.ErrEnded) {
			continue
		}
		harness.Check(t, err)
		if e.Type != "BOOKMARK" {
			t.Fatalf("%s of %s in a resource without writes", e.Type, e.Object.Key())
		}
		if harness.Revision(t, e.Object.Metadata.ResourceVersion) >= atLeast {
			return
		}
	}
}

// fillEtcd writes ConfigMaps of 4 kB in JSON, which API servers decode like their own protobuf.
func fillEtcd(t *testing.T, ctx context.Context, client *clientv3.Client, prefix string, objects int) {
	t.Helper()
	namespace := strings.Split(prefix, "/")[3]
	text := strings.Repeat("x", 4000)
	const each = 100 // below the limit of 128 operations in a transaction
	for i := 0; i < objects; i += each {
		var puts []clientv3.Op
		for j := i; j < min(i+each, objects); j++ {
			name := fmt.Sprintf("map-%05d", j)
			puts = append(puts, clientv3.OpPut(prefix+name, rawConfigMap(namespace, name, text)))
		}
		_, err := client.Txn(ctx).Then(puts...).Commit()
		harness.Check(t, err)
	}
}

func rawConfigMap(namespace, name, text string) string {
	return fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":%q,"uid":%q},"data":{"text":%q}}`,
		name, namespace, namespace+"-"+name, text)
}

// TestEtcdUpgrade_WatchDeliversEveryEvent replaces an etcd 3.6 by an etcd 3.7 on the same data,
// under Strata and a peer. Both continue, and a watch of Strata delivers all events.
func TestEtcdUpgrade_WatchDeliversEveryEvent(t *testing.T) {
	t.Parallel()
	for _, peer := range []string{upstream, older, newer} {
		t.Run("peer="+peer, func(t *testing.T) {
			for _, version := range etcdVersions {
				harness.StockEtcd(t, version) // is built before the time limit begins
			}
			ctx := harness.Context(t, testTimeout)
			program := program(t, peer)
			env := harness.New(t)
			etcd := env.StockEtcd(t, etcdVersions[0])
			p := &pair{client: etcd.Client(), strata: startStrata(env, etcd), peer: startPeer(env, program, etcd)}
			harness.Check(t, p.strata.Await(ctx, "/readyz"))
			harness.Check(t, p.peer.Await(ctx, "/readyz"))
			p.strata.AwaitProgress("")
			watched := p.strata.API()
			w := watchFrom(t, ctx, watched, defaultMaps, list(t, ctx, watched, defaultMaps, "").Metadata.ResourceVersion)
			expectEvent(t, ctx, w, "ADDED", create(t, ctx, p.peer.API(), defaultMaps, configMap("before")))

			etcd.Stop()
			etcd.Upgrade(harness.StockEtcd(t, etcdVersions[1]))
			etcd.Start()
			for _, dir := range p.directions() {
				var created harness.Object
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					var err error
					created, err = dir.from.Create(ctx, defaultMaps, object{"metadata": object{"generateName": "after-"}})
					return err == nil, err
				}))
				expectEvent(t, ctx, w, "ADDED", created)
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					l, err := dir.to.List(ctx, defaultMaps, "")
					if err != nil {
						return false, err
					}
					if !slices.Contains(l.Names(), created.Metadata.Name) {
						t.Errorf("%s: a list without resource version lacks %s", dir.name, created.Key())
					}
					return true, nil
				}))
			}
			requireProgress(t, ctx, watched, p.client)
		})
	}
}
