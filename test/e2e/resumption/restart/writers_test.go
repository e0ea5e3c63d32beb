package restart

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"net/http"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/util/uuid"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
)

const (
	namespaces = 8
	shards     = 40                    // values of the label in the informers' selectors
	writePause = 25 * time.Millisecond // of each writer, between two writes
)

func namespace(i int) string { return fmt.Sprintf("space-%d", i%namespaces) }

// nodes returns the number of nodes with pods. In the long form each has a watcher.
func nodes() int {
	if harness.Long() {
		return 5000
	}
	return 30
}

func shard(i int) string { return fmt.Sprintf("shard-%d", i%shards) }
func node(i int) string  { return fmt.Sprintf("node-%d", i) }

func configMap(name string, i int) object {
	return object{"metadata": object{"name": name, "labels": object{"shard": shard(i)}}, "data": object{"i": fmt.Sprint(i)}}
}

func gizmo(name string, i int) object {
	return object{"apiVersion": gizmoGroup + "/v1", "kind": "Gizmo",
		"metadata": object{"name": name, "labels": object{"shard": shard(i)}}, "spec": object{"i": i}}
}

func pod(name, node string) object {
	return object{"metadata": object{"name": name}, "spec": object{"nodeName": node,
		"containers": []any{object{"name": "main", "image": "none"}}}}
}

// seed creates the objects that exist before the informers start. Secrets and limit ranges are not
// changed afterwards.
func (s *scene) seed(t *testing.T, ctx context.Context) {
	t.Helper()
	create := func(path string, body object) {
		t.Helper()
		harness.Check(t, s.api.Ensure(ctx, path, body))
	}
	for i := range namespaces {
		create("/api/v1/namespaces", object{"metadata": object{"name": namespace(i)}})
	}
	for i := range 80 {
		in := "/api/v1/namespaces/" + namespace(i)
		create(in+"/configmaps", configMap(fmt.Sprintf("seed-%d", i), i))
		create("/apis/"+gizmoGroup+"/v1/namespaces/"+namespace(i)+"/gizmos", gizmo(fmt.Sprintf("seed-%d", i), i))
		if i < 30 {
			create(in+"/pods", pod(fmt.Sprintf("seed-%d", i), node(i)))
			create(in+"/secrets", object{"metadata": object{"name": fmt.Sprintf("seed-%d", i), "labels": object{"shard": shard(i)}}})
			create(in+"/limitranges", object{"metadata": object{"name": fmt.Sprintf("seed-%d", i)}, "spec": object{"limits": []any{}}})
		}
	}
}

// writers write until end is called. Requests may fail while servers restart.
type writers struct {
	stop   context.CancelFunc
	group  sync.WaitGroup
	writes atomic.Int64 // accepted writes
	failed atomic.Int64
}

// startWriters starts writers through the balancer, and one that writes to etcd like another API
// server, so that the revision advances while no server of the scene runs.
func (s *scene) startWriters(t *testing.T, ctx context.Context) *writers {
	t.Helper()
	w := &writers{}
	ctx, w.stop = context.WithCancel(ctx)
	t.Cleanup(w.end)
	maps := func(i int) string { return "/api/v1/namespaces/" + namespace(i) + "/configmaps" }
	gizmos := func(i int) string { return "/apis/" + gizmoGroup + "/v1/namespaces/" + namespace(i) + "/gizmos" }
	pods := func(i int) string { return "/api/v1/namespaces/" + namespace(i) + "/pods" }
	seed := testseed.New(t)
	source := func(writer uint64) *rand.Rand { return rand.New(rand.NewPCG(seed, writer)) }
	for i := range uint64(2) {
		w.write(s, ctx, source(i), maps, func(name string, i int) object { return configMap(name, i) })
	}
	w.write(s, ctx, source(2), gizmos, func(name string, i int) object { return gizmo(name, i) })
	byNode := source(3)
	w.write(s, ctx, byNode, pods, func(name string, _ int) object { return pod(name, node(byNode.IntN(nodes()))) })
	w.group.Go(func() { w.writeToEtcd(ctx, s.etcd.Client()) })
	return w
}

// readOften gets objects through the balancer until the writers are stopped, and counts unexpected
// answers.
func (w *writers) readOften(s *scene, ctx context.Context, unexpected *atomic.Int64) {
	api := s.servers[0].APIFor(harness.OwnConnections(s.balancer.Config))
	w.group.Go(func() {
		for i := 0; ctx.Err() == nil; i++ {
			n := i % 80
			r, err := api.Do(ctx, http.MethodGet, fmt.Sprintf("/api/v1/namespaces/%s/configmaps/seed-%d", namespace(n), n), "", nil)
			switch {
			case err != nil, r.Code == http.StatusTooManyRequests, r.Code >= http.StatusInternalServerError:
				// during a restart
			case r.Code != http.StatusOK:
				unexpected.Add(1)
			}
			harness.Pause(ctx, writePause)
		}
	})
}

// await returns after n more accepted writes.
func (w *writers) await(t *testing.T, ctx context.Context, n int64) {
	t.Helper()
	until := w.writes.Load() + n
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		now := w.writes.Load()
		return now >= until, fmt.Errorf("%d writes, want %d", now, until)
	}))
}

// end stops the writers. It may be called again.
func (w *writers) end() {
	w.stop()
	w.group.Wait()
}

// write creates, changes and deletes objects of one kind. rnd and body belong to its goroutine.
func (w *writers) write(s *scene, ctx context.Context, rnd *rand.Rand, path func(i int) string, body func(name string, i int) object) {
	api := s.servers[0].APIFor(harness.OwnConnections(s.balancer.Config))
	id := uuid.NewUUID()[:6]
	w.group.Go(func() {
		const live = 40 // objects
		for i := 0; ctx.Err() == nil; i++ {
			name := fmt.Sprintf("busy-%s-%d", id, i)
			w.do(ctx, api, http.MethodPost, path(i), body(name, i))
			if old := i - 1 - rnd.IntN(live); old >= 0 {
				// A change of the label moves it from one selector to another.
				w.do(ctx, api, http.MethodPatch, path(old)+fmt.Sprintf("/busy-%s-%d", id, old),
					fmt.Sprintf(`{"metadata":{"labels":{"shard":%q}}}`, shard(rnd.IntN(shards))))
			}
			if old := i - live; old >= 0 {
				w.do(ctx, api, http.MethodDelete, path(old)+fmt.Sprintf("/busy-%s-%d", id, old), object{"gracePeriodSeconds": 0})
			}
		}
	})
}

// do sends one write and waits for the answer, which bounds the load.
func (w *writers) do(ctx context.Context, api *harness.API, method, path string, body any) {
	contentType := ""
	if method == http.MethodPatch {
		contentType = "application/merge-patch+json"
	}
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	r, err := api.DoAs(ctx, method, path, "", contentType, "", body)
	if err != nil || r.Code/100 != 2 {
		w.failed.Add(1)
	} else {
		w.writes.Add(1)
	}
	harness.Pause(ctx, writePause)
}

// storeMany writes several configmaps and gizmos in stored form, in one transaction; i is the
// number of the call.
func storeMany(t testing.TB, ctx context.Context, rnd *rand.Rand, client *clientv3.Client, i int) {
	const live, atOnce = 60, 4
	var ops []clientv3.Op
	for k := range atOnce {
		n := (i*atOnce + k) % live
		name := fmt.Sprintf("stored-%d", n)
		for prefix, kind := range map[string]string{"/registry/configmaps/": "ConfigMap", gizmosInEtcd: "Gizmo"} {
			key := prefix + namespace(n%2) + "/" + name
			if (i/live)%3 == 2 {
				ops = append(ops, clientv3.OpDelete(key))
				continue
			}
			version := "v1"
			if prefix == gizmosInEtcd {
				version = gizmoGroup + "/v1"
			}
			value, err := json.Marshal(object{"apiVersion": version, "kind": kind, "metadata": object{
				"name": name, "namespace": namespace(n % 2), "uid": string(uuid.NewUUID()), "generation": 1,
				"creationTimestamp": metav1.Now(), "labels": object{"shard": shard(rnd.IntN(5))}}})
			if err != nil {
				t.Error(err)
				return
			}
			ops = append(ops, clientv3.OpPut(key, string(value)))
		}
	}
	_, err := client.Txn(ctx).Then(ops...).Commit()
	for errors.Is(err, rpctypes.ErrTimeout) && ctx.Err() == nil { // whether it was applied or not
		_, err = client.Txn(ctx).Then(ops...).Commit()
	}
	if err != nil && ctx.Err() == nil {
		t.Error(err)
	}
}

// writeToEtcd changes gizmos in stored form.
func (w *writers) writeToEtcd(ctx context.Context, client *clientv3.Client) {
	const live = 50
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("stored-%d", i%live)
		o := gizmo(name, i)
		o["metadata"] = object{"name": name, "namespace": namespace(i % live), "uid": string(uuid.NewUUID()), "generation": 1,
			"creationTimestamp": metav1.Now(), "labels": object{"shard": shard(i)}}
		key := gizmosInEtcd + namespace(i%live) + "/" + name
		value, err := json.Marshal(o)
		if err == nil {
			if i/live%4 == 3 {
				_, err = client.Delete(ctx, key)
			} else {
				_, err = client.Put(ctx, key, string(value))
			}
		}
		if err != nil {
			w.failed.Add(1)
		} else {
			w.writes.Add(1)
		}
		harness.Pause(ctx, writePause)
	}
}
