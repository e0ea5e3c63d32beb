// Package checker tests the comparison of the cache with etcd (KEP-4988): the differences that it
// finds when events are lost, their repair, its reads of etcd, and that it reports no false
// differences.
//
// Two servers share an etcd, each through a proxy that drops the events selected by a test. The
// lossy one compares on demand only, and does not panic. The strict one compares at short
// intervals, and exits at a difference. The tests that end servers are the last ones.
package checker

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"hash/fnv"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"
	apiextensionsv1 "k8s.io/apiextensions-apiserver/pkg/apis/apiextensions/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// noServiceAccounts prevents servers from writing to the namespaces of tests by themselves.
const noServiceAccounts = "--disable-admission-plugins=ServiceAccount"

// often sets the interval of the strict server's checks.
const often = "--strata-consistency-check-interval=1s"

var (
	env    *harness.Env
	etcd   *harness.Etcd
	client *clientv3.Client // bypasses all proxies

	// in front of the etcd of the lossy server, and of the strict one
	proxy, strictProxy *harness.Proxy
	lossy, strict      *harness.Server

	hook *webhook
)

func TestMain(m *testing.M) {
	if harness.Engine() != harness.Strata {
		harness.Main(m, func(*harness.Env) {}) // each test skips itself
	}
	hook = newWebhook()
	harness.Main(m, func(e *harness.Env) {
		e.AtEnd(hook.server.Close)
		env, etcd = e, e.Etcd()
		client = etcd.Client()
		proxy, strictProxy = e.Proxy(etcd), e.Proxy(etcd)
		strict = e.APIServer(strictProxy.Etcd(), noServiceAccounts, often)
		lossy = e.APIServer(proxy.Etcd(), noServiceAccounts, harness.Unchecked("it loses events"))
		lossy.AwaitProgress("")
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		for _, err := range []error{
			define(ctx, things, nil, strict.API(), lossy.API()),
			define(ctx, routes, hook, strict.API(), lossy.API()),
		} {
			if err != nil {
				panic(err)
			}
		}
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// kind is a resource in the API and in etcd.
type kind struct {
	name, path, prefix, apiVersion, kind string // name is that of the resource with its group
}

const group = "checker.example.com"

var (
	maps       = kind{"configmaps", "/api/v1/configmaps", "/registry/configmaps/", "v1", "ConfigMap"}
	secrets    = kind{"secrets", "/api/v1/secrets", "/registry/secrets/", "v1", "Secret"}
	namespaces = kind{"namespaces", "/api/v1/namespaces", "/registry/namespaces/", "v1", "Namespace"}
	leases     = kind{"leases.coordination.k8s.io", "/apis/coordination.k8s.io/v1/leases", "/registry/leases/", "coordination.k8s.io/v1", "Lease"}
	things     = kind{"things." + group, "/apis/" + group + "/v1/things", "/registry/" + group + "/things/", group + "/v1", "Thing"}
	// Routes are stored in v1, and a webhook converts them to v2.
	routes = kind{"routes." + group, "/apis/" + group + "/v2/routes", "/registry/" + group + "/routes/", group + "/v1", "Route"}
)

// in returns the path of a namespace.
func (k kind) in(namespace string) string {
	i := strings.LastIndexByte(k.path, '/')
	return k.path[:i] + "/namespaces/" + namespace + k.path[i:]
}

// key is that of an object of the namespace default.
func (k kind) key(name string) string { return k.prefix + "default/" + name }

// put returns the write of an object in the namespace default to etcd: in JSON, which servers
// decode like their own format.
func (k kind) put(name, value string) clientv3.Op {
	stored := fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"namespace":"default","uid":%[3]q,"annotations":{"value":%[4]q}}}`,
		k.apiVersion, k.kind, name, value)
	return clientv3.OpPut(k.key(name), stored)
}

// commit writes to etcd in one transaction and returns its revision.
func commit(t *testing.T, ctx context.Context, ops ...clientv3.Op) int64 {
	t.Helper()
	r, err := client.Txn(ctx).Then(ops...).Commit()
	harness.Check(t, err)
	return r.Header.Revision
}

// stored returns keys and revisions under a prefix in etcd, at a revision or the current one if
// that is 0.
func stored(t *testing.T, ctx context.Context, prefix string, at int64) (items []string) {
	t.Helper()
	r, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithRev(at), clientv3.WithKeysOnly())
	harness.Check(t, err)
	for _, kv := range r.Kvs {
		items = append(items, fmt.Sprintf("%s@%d", strings.TrimPrefix(string(kv.Key), prefix), kv.ModRevision))
	}
	return items
}

// list returns the same from a server's list: namespace/name@resourceVersion.
func list(t *testing.T, ctx context.Context, s *harness.Server, k kind, query string) (items []string, revision int64) {
	t.Helper()
	var l *harness.List
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := s.API().Do(ctx, http.MethodGet, k.path, query, nil)
		if err != nil {
			return false, err
		}
		if r.Code == http.StatusTooManyRequests { // right after a start
			return false, r.Err()
		}
		l, err = r.List()
		harness.Check(t, err)
		return true, nil
	}))
	for _, o := range l.Items {
		items = append(items, o.Key()+"@"+o.Metadata.ResourceVersion)
	}
	return items, harness.Revision(t, l.Metadata.ResourceVersion)
}

// exactly returns the query of a list at a revision.
func exactly(revision int64) string {
	return fmt.Sprintf("resourceVersion=%d&resourceVersionMatch=Exact", revision)
}

// hashOf is KEP-4988's hash of a list: 64-bit FNV over namespace, name and resource version of each
// object, joined by '/'. Objects without a namespace have an empty one.
func hashOf(items []string) string {
	h := fnv.New64()
	for _, item := range items {
		key, revision, _ := strings.Cut(item, "@")
		if !strings.Contains(key, "/") {
			key = "/" + key
		}
		fmt.Fprintf(h, "%s/%s", key, revision)
	}
	return fmt.Sprintf("%x", h.Sum64())
}

// compare makes a server compare a resource now.
func compare(t *testing.T, ctx context.Context, s *harness.Server, k kind) harness.Consistency {
	t.Helper()
	all, err := s.API().Consistent(ctx, k.name)
	harness.Check(t, err)
	if len(all) != 1 || strings.TrimSuffix(all[0].Resource+"."+all[0].Group, ".") != k.name {
		t.Fatalf("a check of %s is %+v", k.name, all)
	}
	return all[0]
}

// requireStatus makes a server compare a resource now, and requires a status of the result.
func requireStatus(t *testing.T, ctx context.Context, s *harness.Server, k kind, status string) harness.Consistency {
	t.Helper()
	c := compare(t, ctx, s, k)
	if c.Status != status {
		t.Errorf("a check of %s is %+v, want %s", k.name, c, status)
	}
	return c
}

// checks returns the number of checks of a resource, or of all, with a status.
func checks(t *testing.T, ctx context.Context, s *harness.Server, k kind, status string) int {
	t.Helper()
	resource, _, _ := strings.Cut(k.name, ".")
	n, err := s.API().Checks(ctx, resource, status)
	harness.Check(t, err)
	return n
}

// requireSame reports the first difference of two lists.
func requireSame(t *testing.T, what string, got, want []string) {
	t.Helper()
	if slices.Equal(got, want) {
		return
	}
	i := 0
	for i < len(got) && i < len(want) && got[i] == want[i] {
		i++
	}
	t.Errorf("%s: %d objects, want %d; from number %d on %v, want %v", what, len(got), len(want), i, got[i:min(i+3, len(got))], want[i:min(i+3, len(want))])
}

// webhook converts by changing the version only. It counts its calls, and refuses them while it is
// broken.
type webhook struct {
	server *httptest.Server
	calls  atomic.Int64
	broken atomic.Bool
}

func newWebhook() *webhook {
	h := &webhook{}
	h.server = httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h.calls.Add(1)
		var review apiextensionsv1.ConversionReview
		if err := json.NewDecoder(r.Body).Decode(&review); err != nil || review.Request == nil || h.broken.Load() {
			http.Error(w, fmt.Sprintf("broken, or no conversion request: %v", err), http.StatusInternalServerError)
			return
		}
		response := &apiextensionsv1.ConversionResponse{UID: review.Request.UID, Result: metav1.Status{Status: metav1.StatusSuccess}}
		for _, raw := range review.Request.Objects {
			o := &unstructured.Unstructured{}
			if err := o.UnmarshalJSON(raw.Raw); err != nil {
				http.Error(w, err.Error(), http.StatusBadRequest)
				return
			}
			o.SetAPIVersion(review.Request.DesiredAPIVersion)
			converted, err := o.MarshalJSON()
			if err != nil {
				http.Error(w, err.Error(), http.StatusInternalServerError)
				return
			}
			response.ConvertedObjects = append(response.ConvertedObjects, runtime.RawExtension{Raw: converted})
		}
		review.Request, review.Response = nil, response
		w.Header().Set("Content-Type", "application/json")
		json.NewEncoder(w).Encode(&review) // an error means that the caller has disconnected
	}))
	return h
}

// define creates a definition, with a second version if a webhook converts, and returns when all
// servers serve it.
func define(ctx context.Context, k kind, hook *webhook, servers ...*harness.API) error {
	version := func(name string, storage bool) object {
		return object{"name": name, "served": true, "storage": storage, "schema": object{"openAPIV3Schema": object{
			"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}
	}
	plural, _, _ := strings.Cut(k.name, ".")
	spec := object{
		"group": group, "scope": "Namespaced",
		"names":    object{"plural": plural, "singular": strings.ToLower(k.kind), "kind": k.kind, "listKind": k.kind + "List"},
		"versions": []any{version("v1", true)},
	}
	if hook != nil {
		ca := pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: hook.server.Certificate().Raw})
		spec["versions"] = []any{version("v1", true), version("v2", false)}
		spec["conversion"] = object{"strategy": "Webhook", "webhook": object{
			"conversionReviewVersions": []string{"v1"},
			"clientConfig":             object{"url": hook.server.URL, "caBundle": base64.StdEncoding.EncodeToString(ca)},
		}}
	}
	if _, err := servers[0].Create(ctx, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", object{"metadata": object{"name": k.name}, "spec": spec}); err != nil {
		return err
	}
	for _, s := range servers {
		if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			_, err := s.List(ctx, k.path, "")
			return err == nil, err
		}); err != nil {
			return err
		}
	}
	return nil
}
