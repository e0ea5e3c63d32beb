// Package feed tests watches and lists of a server whose responses from etcd are lost, late or
// wrong: broken connections, hanging members, an etcd restored from a backup, and a server that was
// killed and restarted.
//
// Most writes go to etcd directly, so that they continue when the server is cut off. The expected
// events are read from etcd's history: see history.
//
// Environment variables, in addition to those of the harness:
//
//	STRATA_TEST_LONG  1: the history that three servers (default two) restore at once has 200,000 revisions (default 20,000)
package feed

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// object is an object to write; its shape is that of the API.
type object = map[string]any

// noServiceAccounts prevents servers from writing to the namespaces of tests by themselves.
const noServiceAccounts = "--disable-admission-plugins=ServiceAccount"

// kind is a resource of the namespace default, in the API and in etcd.
type kind struct {
	path, prefix, apiVersion, kind string
}

var (
	maps    = kind{"/api/v1/namespaces/default/configmaps", "/registry/configmaps/default/", "v1", "ConfigMap"}
	secrets = kind{"/api/v1/namespaces/default/secrets", "/registry/secrets/default/", "v1", "Secret"}
	events  = kind{"/api/v1/namespaces/default/events", "/registry/events/default/", "v1", "Event"}
	leases  = kind{"/apis/coordination.k8s.io/v1/namespaces/default/leases", "/registry/leases/default/", "coordination.k8s.io/v1", "Lease"}
	things  = kind{"/apis/" + thingsGroup + "/v1/namespaces/default/things", "/registry/" + thingsGroup + "/things/default/", thingsGroup + "/v1", "Thing"}
)

const thingsGroup = "feed.example.com"

// body returns an object to send to the API.
func (k kind) body(name, value string) object {
	o := object{"apiVersion": k.apiVersion, "kind": k.kind, "metadata": object{"name": name, "namespace": "default", "annotations": object{"value": value}}}
	if k == events {
		o["involvedObject"] = object{"namespace": "default", "name": name}
	}
	return o
}

// put returns the write of an object to etcd: in JSON, which servers decode like their own format.
func (k kind) put(name, value string, opts ...clientv3.OpOption) clientv3.Op {
	stored := fmt.Sprintf(`{"apiVersion":%q,"kind":%q,"metadata":{"name":%q,"namespace":"default","uid":%q,"labels":{"value":%q},"annotations":{"value":%[5]q}}}`,
		k.apiVersion, k.kind, name, name, value)
	return clientv3.OpPut(k.prefix+name, stored, opts...)
}

// value returns the value that body or put wrote.
func value(o harness.Object) string { return o.Metadata.Annotations["value"] }

// commit writes to etcd in one transaction and returns its revision. It repeats what failed: a
// member that returns may cost etcd its leader. A failed transaction may still be applied, and is
// then in etcd's history too.
func commit(t *testing.T, ctx context.Context, client *clientv3.Client, ops ...clientv3.Op) (revision int64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
		defer cancel()
		r, err := client.Txn(ctx).Then(ops...).Commit()
		if err == nil {
			revision = r.Header.Revision
		}
		return err == nil, err
	}))
	return revision
}

// through returns the etcd with other URLs, for a server's flags.
func through(etcd *harness.Etcd, urls ...string) *harness.Etcd {
	other := *etcd
	other.URL = strings.Join(urls, ",")
	return &other
}

// metric returns a metric of the mirror.
func metric(t *testing.T, ctx context.Context, api *harness.API, name string) int64 {
	t.Helper()
	v, err := api.Metric(ctx, "strata_mirror_"+name+"{")
	harness.Check(t, err)
	return int64(v)
}

// items returns name, revision and value of each item of a list.
func items(list *harness.List) string {
	var b strings.Builder
	for _, o := range list.Items {
		fmt.Fprintf(&b, "%s@%s=%s ", o.Metadata.Name, o.Metadata.ResourceVersion, value(o))
	}
	return b.String()
}

// listAt lists exactly at a revision.
func listAt(ctx context.Context, api *harness.API, path string, revision int64) (*harness.Response, error) {
	return api.Do(ctx, http.MethodGet, path, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", revision), nil)
}
