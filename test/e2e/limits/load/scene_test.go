// Package load tests a server's memory and goroutines for clients that request much and read
// little, during and after their connections. No test depends on timings.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG=1  as many objects and clients as the project supports, and its bounds: minutes, and gigabytes of memory
package load

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

const (
	namespace = "/api/v1/namespaces/default/configmaps"
	everybody = "/api/v1/configmaps"

	firstName = "map-000000" // all names have this length
)

// testTimeout bounds a failing test.
var testTimeout = harness.Pick(5*time.Minute, 15*time.Minute)

// perConnection is the server's limit of requests on an HTTP/2 connection.
const perConnection = 200

// shared is the server of all tests.
var shared *scene

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		etcd := e.Etcd()
		shared = &scene{etcd: etcd.Client(), server: e.APIServer(etcd, "--disable-admission-plugins=ServiceAccount",
			fmt.Sprintf("--http2-max-streams-per-connection=%d", perConnection))}
		shared.api = shared.server.API()
	})
}

// scene is a server on an etcd of its own with ConfigMaps.
type scene struct {
	server  *harness.Server
	api     *harness.API
	etcd    *clientv3.Client
	objects int
}

// filled returns the shared scene with at least as many ConfigMaps of about 1 KB.
func filled(t *testing.T, ctx context.Context, objects int) *scene {
	t.Helper()
	if shared.objects == 0 {
		_, err := shared.api.Create(ctx, namespace, map[string]any{
			"metadata": map[string]any{"name": firstName}, "data": map[string]any{"value": strings.Repeat("0123456789abcdef", 60)},
		})
		harness.Check(t, err)
		shared.objects = 1
	}
	shared.fill(t, ctx, objects)
	return shared
}

// fill copies the first ConfigMap in etcd, many copies per transaction: through the API it would
// take minutes.
func (s *scene) fill(t *testing.T, ctx context.Context, objects int) {
	t.Helper()
	const prefix, atOnce = "/registry/configmaps/default/", 100
	stored, err := s.etcd.Get(ctx, prefix+firstName)
	harness.Check(t, err)
	if len(stored.Kvs) != 1 {
		t.Fatalf("etcd holds %d values of %s", len(stored.Kvs), firstName)
	}
	var ops []clientv3.Op
	for ; s.objects < objects; s.objects++ {
		name := fmt.Sprintf("map-%06d", s.objects)
		ops = append(ops, clientv3.OpPut(prefix+name, string(bytes.ReplaceAll(stored.Kvs[0].Value, []byte(firstName), []byte(name)))))
		if len(ops) == atOnce || s.objects == objects-1 {
			_, err := s.etcd.Txn(ctx).Then(ops...).Commit()
			harness.Check(t, err)
			ops = ops[:0]
		}
	}
	// The server has received all of them when its list is complete.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		list, err := s.api.List(ctx, namespace, "limit=1")
		if err != nil {
			return false, err
		}
		there := len(list.Items)
		if left := list.Metadata.RemainingItemCount; left != nil {
			there += int(*left)
		}
		return there >= objects, fmt.Errorf("the server has %d of %d objects", there, objects)
	}))
}

// client has a harness.Server.SlowClient.
type client struct {
	http *http.Client
	s    *scene
}

func (s *scene) client(t *testing.T, http1 bool) *client {
	t.Helper()
	slow, err := s.server.SlowClient(http1)
	harness.Check(t, err)
	return &client{slow, s}
}

// watch starts a watch and returns its body unread.
func (c *client) watch(ctx context.Context, path, query string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.s.server.URL+path+"?watch=1&"+query, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+c.s.server.Config.BearerToken)
	response, err := c.http.Do(request)
	// as clients do, while a busy server cannot confirm the present state in time
	for err == nil && response.StatusCode == http.StatusTooManyRequests && response.Header.Get("Retry-After") != "" {
		response.Body.Close()
		harness.Pause(ctx, time.Second)
		response, err = c.http.Do(request)
	}
	if err != nil {
		return nil, err
	}
	if response.StatusCode != http.StatusOK {
		response.Body.Close()
		return nil, fmt.Errorf("watch %s?%s: %s", path, query, response.Status)
	}
	return response, nil
}
