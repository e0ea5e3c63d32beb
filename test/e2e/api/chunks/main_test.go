// Package chunks tests lists in pages and at exact revisions, over HTTP, in all forms that clients
// request: on several servers of one etcd, while some are killed and restarted, and while etcd is
// compacted.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG  1: three servers (default two), killed twice (default once); history under churn is of 150,000 objects and
//	                  1,000 writes a second for 5 minutes
package chunks

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		etcd := e.Etcd()
		shared = &scene{env: e, etcd: etcd, client: etcd.Client()}
		var starting sync.WaitGroup
		shared.replicas = make([]*replica, harness.Pick(2, 3))
		for i := range shared.replicas {
			// As during a rollout of sealed tokens: each server accepts the tokens of the others.
			gates := fmt.Sprintf("--strata-feature-gates=SealedContinueTokens=%t,ManagedFieldsOptOut=%[1]t", i == len(shared.replicas)-1)
			starting.Go(func() { shared.replicas[i] = shared.start(gates) })
		}
		starting.Wait()
	})
}

// shared is a control plane of several servers, which a test kills and restarts. The last one seals
// its continue tokens, and omits managed fields for clients that ask for that.
var shared *scene

// scene is an etcd and servers on it.
type scene struct {
	env      *harness.Env
	etcd     *harness.Etcd
	client   *clientv3.Client // bypasses the servers
	replicas []*replica
}

// replica is a server with its own proxy in front of etcd.
type replica struct {
	*harness.Server
	api   *harness.API
	proxy *harness.Proxy
}

// start starts another server.
func (s *scene) start(flags ...string) *replica {
	proxy := s.env.Proxy(s.etcd)
	server := s.env.APIServer(proxy.Etcd(), append([]string{"--disable-admission-plugins=ServiceAccount", "--etcd-compaction-interval=0"}, flags...)...)
	return &replica{server, server.API(), proxy}
}

// killAll kills all servers at once and starts them again.
func (s *scene) killAll(t *testing.T, ctx context.Context) {
	t.Helper()
	for _, r := range s.replicas {
		r.Kill()
	}
	for _, r := range s.replicas {
		r.StartAgain()
	}
	for _, r := range s.replicas {
		harness.Check(t, r.Await(ctx, "/readyz"))
	}
}

// reset clears the proxies' records of reads from etcd.
func (s *scene) reset() {
	for _, r := range s.replicas {
		r.proxy.Reset()
	}
}

// requireNoObjectReads fails the test if any server has read objects of the resource from etcd
// since reset.
func (s *scene) requireNoObjectReads(t *testing.T, k kind) {
	t.Helper()
	for i, r := range s.replicas {
		if keys := r.objectReads(k); len(keys) > 0 {
			t.Errorf("server %d sent %d requests for objects to etcd: %q", i, len(keys), keys[:min(5, len(keys))])
		}
	}
}

// objectReads returns the keys of the reads of objects of the resource. Reads of keys only are
// consistency checks.
func (r *replica) objectReads(k kind) (keys []string) {
	for _, request := range r.proxy.Ranges() {
		key := string(request.Key)
		if !request.CountOnly && !request.KeysOnly && strings.HasPrefix(key, k.prefix) && (len(request.RangeEnd) > 0 || key != k.prefix) {
			keys = append(keys, key)
		}
	}
	return keys
}

// kind is a resource, in the API and in etcd.
type kind struct {
	group, plural, apiVersion, kind string
	prefix                          string // of its keys
}

const thingsGroup = "chunks.example.com"

var (
	maps      = kind{"", "configmaps", "v1", "ConfigMap", "/registry/configmaps/"}
	templates = kind{"", "podtemplates", "v1", "PodTemplate", "/registry/podtemplates/"}
	things    = kind{thingsGroup, "things", thingsGroup + "/v1", "Thing", "/registry/" + thingsGroup + "/things/"}
)

// path returns the list path of a namespace, of all namespaces if it is "".
func (k kind) path(namespace string) string {
	root := "/api/v1"
	if k.group != "" {
		root = "/apis/" + k.apiVersion
	}
	if namespace != "" {
		root += "/namespaces/" + namespace
	}
	return root + "/" + k.plural
}

// put returns the write of an object to etcd: in JSON, which servers decode like their own format.
func (k kind) put(namespace, name, value string) clientv3.Op {
	stored := fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"namespace":%q,"uid":%q,"creationTimestamp":"2026-01-01T00:00:00Z","labels":{"shard":"%d"}},"data":{"value":%q}}`,
		k.apiVersion, k.kind, name, namespace, namespace+"-"+name, len(name+value)%3, value)
	return clientv3.OpPut(k.prefix+namespace+"/"+name, stored)
}

func (k kind) delete(namespace, name string) clientv3.Op {
	return clientv3.OpDelete(k.prefix + namespace + "/" + name)
}

// fill writes n objects named 0000.. in few transactions, and returns their names.
func (s *scene) fill(t *testing.T, ctx context.Context, k kind, namespace, value string, n int) (names []string) {
	t.Helper()
	for i := 0; i < n; {
		var ops []clientv3.Op
		for ; i < n && len(ops) < 100; i++ {
			names = append(names, fmt.Sprintf("object-%06d", i))
			ops = append(ops, k.put(namespace, names[i], value))
		}
		s.commit(t, ctx, ops...)
	}
	return names
}

// commit writes to etcd in one transaction and returns its revision.
func (s *scene) commit(t *testing.T, ctx context.Context, ops ...clientv3.Op) int64 {
	t.Helper()
	r, err := s.client.Txn(ctx).Then(ops...).Commit()
	harness.Check(t, err)
	return r.Header.Revision
}

// compact compacts etcd like an API server's compactor: it writes the revision to a key that
// servers watch.
func (s *scene) compact(t *testing.T, ctx context.Context, revision int64) {
	t.Helper()
	_, err := s.client.Put(ctx, "compact_rev_key", fmt.Sprint(revision))
	harness.Check(t, err)
	_, err = s.client.Compact(ctx, revision)
	harness.Check(t, err)
}

// defineThings defines a custom resource, and returns when all servers serve it.
func (s *scene) defineThings(t *testing.T, ctx context.Context) {
	t.Helper()
	var apis []*harness.API
	for _, r := range s.replicas {
		apis = append(apis, r.api)
	}
	harness.Check(t, harness.Define(ctx, thingsGroup, "things", "Thing", nil, apis...))
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// get sends a GET whose answer may have any code.
func get(t *testing.T, ctx context.Context, api *harness.API, path, query string) *harness.Response {
	t.Helper()
	return harness.Must[*harness.Response](t)(api.Read(ctx, path, query, ""))
}
