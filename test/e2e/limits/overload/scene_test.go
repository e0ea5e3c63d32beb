// Package overload tests a server under more load than it can serve: when all clients list all
// objects at once, and when clients send requests without reading the answers, or without ending
// the requests. The server has to stay below a bound of resident memory, to answer health checks,
// to refuse excess requests with 429, and to return to its initial state when the clients have
// gone.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG=1  as many objects and clients as the project supports, and its bounds: minutes, and gigabytes of memory
package overload

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/serializer/protobuf"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes/scheme"

	"github.com/stratakube/strata/test/harness"
)

const (
	mapsPath    = "/api/v1/configmaps"
	widgetsPath = "/apis/overload.example.com/v1/widgets"

	adminToken  = "admin-token"  // exempt from priority and fairness
	readerToken = "reader-token" // has all rights too, and is not exempt
	// Service accounts, at priority level workload-low; the reader is at global-default.
	greedyToken = "greedy-token"
	modestToken = "modest-token"
	systemToken = "system-token" // of kube-system: workload-high
	nodeToken   = "node-token"   // level system
	tokens      = adminToken + ",admin,admin,system:masters\n" + readerToken + ",reader,reader,readers\n" +
		greedyToken + ",system:serviceaccount:default:greedy,greedy,\"system:serviceaccounts,readers\"\n" +
		modestToken + ",system:serviceaccount:default:modest,modest,\"system:serviceaccounts,readers\"\n" +
		systemToken + ",system:serviceaccount:kube-system:greedy,system,\"system:serviceaccounts,readers\"\n" +
		nodeToken + ",probe,probe,\"system:nodes,readers\"\n"
)

// scene is a server on an etcd of its own with ConfigMaps, and a tenth as many custom resources.
type scene struct {
	env     *harness.Env
	server  *harness.Server
	api     *harness.API
	objects int
	old     int64 // a revision older than memory, at which all objects exist
}

// newScene starts a scene with ConfigMaps of about 1 KB in stored form. The objects are written
// before the server starts, which restores no history: revisions from before its start are older
// than its memory. memoryLimit is GOMEMLIMIT; 0 for no limit.
func newScene(t *testing.T, ctx context.Context, objects int, memoryLimit int64, flags ...string) *scene {
	t.Helper()
	env := harness.New(t).DefaultGC()
	etcd := env.Etcd()
	s := &scene{env: env, objects: objects}
	s.fill(t, ctx, etcd.Client())
	if memoryLimit > 0 {
		t.Setenv("GOMEMLIMIT", strconv.FormatInt(memoryLimit, 10))
	}
	all := []string{
		"--disable-admission-plugins=ServiceAccount",
		"--token-auth-file=" + env.WriteFile("tokens.csv", []byte(tokens)),
		"--etcd-healthcheck-timeout=1m", "--etcd-readycheck-timeout=1m", // patience judges
	}
	if harness.Engine() == harness.Strata && !slices.Contains(flags, "--engine="+harness.Upstream) {
		all = append(all, "--strata-feature-gates=WatchHistoryRestore=false")
	}
	s.server = env.APIServer(etcd, append(all, flags...)...)
	s.api = s.server.API()
	_, err := s.api.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", map[string]any{
		"metadata": map[string]any{"name": "readers"},
		"roleRef":  map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{map[string]any{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": "readers"}},
	})
	harness.Check(t, err)
	s.define(t, ctx)
	return s
}

// fill writes the objects to etcd, many per transaction: through the API it would take minutes.
func (s *scene) fill(t *testing.T, ctx context.Context, etcd *clientv3.Client) {
	t.Helper()
	const atOnce = 100
	serializer := protobuf.NewSerializer(scheme.Scheme, scheme.Scheme)
	created := metav1.NewTime(time.Date(2026, time.January, 1, 0, 0, 0, 0, time.UTC))
	var ops []clientv3.Op
	put := func(key, value string) {
		if ops = append(ops, clientv3.OpPut(key, value)); len(ops) < atOnce {
			return
		}
		r, err := etcd.Txn(ctx).Then(ops...).Commit()
		harness.Check(t, err)
		s.old, ops = r.Header.Revision, ops[:0]
	}
	if objects := s.objects + s.objects/10; objects%atOnce != 0 {
		t.Fatalf("%d objects do not fill transactions of %d", objects, atOnce)
	}
	for i := range s.objects {
		labels := map[string]string{"even": strconv.FormatBool(i%2 == 0)}
		name, uid := fmt.Sprintf("map-%06d", i), types.UID(fmt.Sprintf("00000000-0000-4000-8000-%012d", i))
		text := value(i)
		cm := &corev1.ConfigMap{
			TypeMeta:   metav1.TypeMeta{APIVersion: "v1", Kind: "ConfigMap"},
			ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "default", UID: uid, CreationTimestamp: created, Labels: labels},
			Data:       map[string]string{"value": text},
		}
		data, err := runtime.Encode(serializer, cm)
		harness.Check(t, err)
		put("/registry/configmaps/default/"+name, string(data))
		if i%10 == 0 {
			data, err := json.Marshal(map[string]any{
				"apiVersion": "overload.example.com/v1", "kind": "Widget",
				"metadata": map[string]any{"name": name, "namespace": "default", "uid": uid, "creationTimestamp": created, "generation": 1, "labels": labels},
				"spec":     map[string]any{"value": text},
			})
			harness.Check(t, err)
			put("/registry/overload.example.com/widgets/default/"+name, string(data))
		}
	}
}

// value returns text of 960 bytes that compresses about as well as typical objects.
func value(i int) string {
	var b strings.Builder
	for n := 0; b.Len() < 960; n++ {
		fmt.Fprintf(&b, "setting-%d = %x\n", n, (i*7919+n*104729)%1000003)
	}
	return b.String()[:960]
}

// define creates the custom resource definition and waits until it is served.
func (s *scene) define(t *testing.T, ctx context.Context) {
	t.Helper()
	harness.Check(t, harness.Define(ctx, "overload.example.com", "widgets", "Widget", nil, s.api))
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := s.api.List(ctx, widgetsPath, "limit=1")
		return err == nil && len(list.Items) == 1, err
	}))
}

// works verifies that reads and writes are served.
func (s *scene) works(t *testing.T, ctx context.Context) {
	t.Helper()
	const path = "/api/v1/namespaces/default/configmaps"
	reader := s.server.APIFor(s.server.ConfigFor(readerToken))
	made, err := reader.Create(ctx, path, map[string]any{"metadata": map[string]any{"generateName": "after-"}})
	harness.Check(t, err)
	list, err := reader.List(ctx, path, "fieldSelector=metadata.name%3D"+made.Metadata.Name)
	harness.Check(t, err)
	if len(list.Items) != 1 {
		t.Errorf("a list of the created object after the overload has %d items, want 1", len(list.Items))
	}
	harness.Check(t, reader.Delete(ctx, path+"/"+made.Metadata.Name))
}

// health requests /livez and /readyz in turn, each on a new connection, until stop is called, which
// returns their latencies. Any answer other than 200 within patience fails the test.
func (s *scene) health(t *testing.T, ctx context.Context, patience time.Duration) (stop func() []time.Duration) {
	t.Helper()
	ctx, cancel := context.WithCancel(ctx)
	var (
		asking sync.WaitGroup
		took   []time.Duration
	)
	asking.Go(func() {
		ticker := time.NewTicker(250 * time.Millisecond)
		defer ticker.Stop()
		for i := 0; ; i++ {
			select {
			case <-ticker.C:
			case <-ctx.Done():
				return
			case <-s.server.Done():
				t.Error("the server has ended")
				return
			}
			path := [2]string{"/livez", "/readyz"}[i%2]
			began := time.Now()
			code, err := s.once(ctx, path, patience)
			if ctx.Err() != nil {
				return
			}
			took = append(took, time.Since(began))
			if err != nil || code != http.StatusOK {
				t.Errorf("%s: %d %v after %v", path, code, err, time.Since(began))
			}
		}
	})
	return func() []time.Duration {
		cancel()
		asking.Wait()
		return took
	}
}

// logHealth logs the latencies of health checks and returns the longest.
func (s *scene) logHealth(t *testing.T, took []time.Duration) (longest time.Duration) {
	t.Helper()
	if len(took) == 0 {
		return 0
	}
	slices.Sort(took)
	longest = took[len(took)-1]
	t.Logf("%d health checks: median %v, 99%% %v, longest %v", len(took), took[len(took)/2], took[len(took)*99/100], longest)
	return longest
}

// once sends a GET over a connection of its own.
func (s *scene) once(ctx context.Context, path string, patience time.Duration) (code int, err error) {
	ctx, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	c, err := s.client(options{token: adminToken})
	if err != nil {
		return 0, err
	}
	defer c.close()
	resp, err := c.get(ctx, path, "", "", "")
	if err != nil {
		return 0, err
	}
	resp.Body.Close()
	return resp.StatusCode, nil
}

// watchMemory kills the server when its resident memory exceeds most bytes, which fails the test;
// stop returns the peak.
func (s *scene) watchMemory(t *testing.T, most int64) (stop func() int64) {
	t.Helper()
	ended := make(chan struct{})
	var watching errgroup.Group
	watching.Go(func() error {
		ticker := time.NewTicker(20 * time.Millisecond)
		defer ticker.Stop()
		for {
			select {
			case <-ticker.C:
			case <-ended:
				return nil
			case <-s.server.Done():
				return errors.New("the server has ended")
			}
			if now, err := s.server.Resident(); err == nil && now > most {
				s.server.Kill()
				return fmt.Errorf("the server holds %.1f MB, more than %.1f", float64(now)/1e6, float64(most)/1e6)
			}
		}
	})
	return func() int64 {
		memory, err := s.server.Memory()
		close(ended)
		if watched := watching.Wait(); watched != nil {
			t.Fatal(watched)
		}
		harness.Check(t, err)
		return int64(memory.Peak)
	}
}
