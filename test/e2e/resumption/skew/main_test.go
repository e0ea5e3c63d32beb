// Package skew runs strata apiserver and kube-apiservers of the supported minor versions on one
// etcd: side by side, and one after another. The etcd servers are of two minor versions too.
//
// The kube-apiservers are stock ones: unmodified programs that `make stock` builds and `make skew`
// requires. The strata command with --engine=upstream, which has upstream's watch cache and
// Strata's own version, is a peer in every run of the tests.
package skew

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

const testTimeout = 10 * time.Minute

type object = map[string]any

// upstream is the peer that is the strata command with upstream's watch cache. Other peers are
// minor versions of the stock kube-apiserver.
const (
	upstream = "upstream"
	older    = "1.36" // the older supported minor version
	newer    = "1.37" // Strata's own version
)

// combination is a peer and the minor version of the etcd that it shares with Strata.
type combination struct{ peer, etcd string }

// Stock combinations need stock kube-apiservers.
var stockCombinations = []combination{{older, "3.6"}, {newer, "3.6"}, {older, "3.7"}, {newer, "3.7"}}

// forEach runs a test with each combination.
func forEach(t *testing.T, combinations []combination, test func(t *testing.T, ctx context.Context, c combination)) {
	for _, c := range combinations {
		t.Run(fmt.Sprintf("peer=%s/etcd=%s", c.peer, c.etcd), func(t *testing.T) {
			harness.StockEtcd(t, c.etcd) // is built before the time limit begins
			test(t, harness.Context(t, testTimeout), c)
		})
	}
}

// program returns the path of a peer's stock kube-apiserver, "" for the strata command. It skips
// the test if there is none.
func program(t *testing.T, peer string) string {
	t.Helper()
	if peer == upstream {
		return ""
	}
	return harness.StockAPIServer(t, peer)
}

// startPeer starts a peer of Strata, and does not wait for it.
func startPeer(env *harness.Env, program string, etcd *harness.Etcd, flags ...string) *harness.Server {
	if program == "" {
		return env.StartAPIServer(etcd, append([]string{"--engine=" + harness.Upstream}, flags...)...)
	}
	return env.StartStock(program, etcd, flags...)
}

// startStrata starts Strata, and does not wait for it.
func startStrata(env *harness.Env, etcd *harness.Etcd, flags ...string) *harness.Server {
	return env.StartAPIServer(etcd, append([]string{"--engine=" + harness.Strata, "--strata-progress-interval=200ms"}, flags...)...)
}

// pair is Strata and a peer on one etcd.
type pair struct {
	strata, peer *harness.Server
	client       *clientv3.Client // of the etcd
}

// Addresses that the servers of a pair advertise. They are reserved for documentation: no host has
// them.
const (
	strataAddress = "192.0.2.1"
	peerAddress   = "192.0.2.2"
)

// start starts both servers at the same time, on an empty etcd, and returns when both are ready.
func (c combination) start(t *testing.T, ctx context.Context, flags ...string) *pair {
	t.Helper()
	peer := program(t, c.peer)
	env := harness.New(t)
	etcd := env.StockEtcd(t, c.etcd)
	flags = slices.Clip(append([]string{"--endpoint-reconciler-type=lease"}, flags...))
	p := &pair{client: etcd.Client()}
	p.strata = startStrata(env, etcd, append(flags, "--advertise-address="+strataAddress)...)
	p.peer = startPeer(env, peer, etcd, append(flags, "--advertise-address="+peerAddress)...)
	harness.Check(t, p.strata.Await(ctx, "/readyz"))
	harness.Check(t, p.peer.Await(ctx, "/readyz"))
	return p
}

// direction is one of the two ways to use a pair: from writes or issues, to reads.
type direction struct {
	name     string
	from, to *harness.API
}

func (p *pair) directions() []direction {
	strata, peer := p.strata.API(), p.peer.API()
	return []direction{{"strata to peer", strata, peer}, {"peer to strata", peer, strata}}
}

// eachDirection runs a test in both directions.
func (p *pair) eachDirection(t *testing.T, test func(t *testing.T, d direction)) {
	for _, d := range p.directions() {
		t.Run(d.name, func(t *testing.T) { test(t, d) })
	}
}

func create(t *testing.T, ctx context.Context, api *harness.API, path string, body any) harness.Object {
	t.Helper()
	o, err := api.Create(ctx, path, body)
	harness.Check(t, err)
	return o
}

func list(t *testing.T, ctx context.Context, api *harness.API, path, query string) *harness.List {
	t.Helper()
	l, err := api.List(ctx, path, query)
	harness.Check(t, err)
	return l
}

// watchFrom starts a watch after a resource version.
func watchFrom(t *testing.T, ctx context.Context, api *harness.API, path, resourceVersion string) *harness.Watch {
	t.Helper()
	return harness.StartWatch(t, ctx, api, path, "resourceVersion="+resourceVersion)
}

// nextEvent returns the next event other than bookmarks.
func nextEvent(t *testing.T, ctx context.Context, w *harness.Watch) harness.Event {
	t.Helper()
	for {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type != "BOOKMARK" {
			return e
		}
	}
}

// expectEvent fails the test unless the next event has the type and the object's name and resource
// version.
func expectEvent(t *testing.T, ctx context.Context, w *harness.Watch, kind string, want harness.Object) {
	t.Helper()
	e := nextEvent(t, ctx, w)
	if e.Type != kind || e.Object.Key() != want.Key() || e.Object.Metadata.ResourceVersion != want.Metadata.ResourceVersion {
		t.Fatalf("got %s of %s at %s (%s), want %s of %s at %s", e.Type, e.Object.Key(), e.Object.Metadata.ResourceVersion,
			e.Status.Message, kind, want.Key(), want.Metadata.ResourceVersion)
	}
}

// exact returns the query of a list at a resource version.
func exact(resourceVersion string) string {
	return "resourceVersionMatch=Exact&resourceVersion=" + resourceVersion
}

// notOlder returns the query of a list that is not older than a resource version.
func notOlder(resourceVersion string) string {
	return "resourceVersionMatch=NotOlderThan&resourceVersion=" + resourceVersion
}

// continued returns the query of the page after one with a token.
func continued(token string, limit int) string {
	return url.Values{"continue": {token}, "limit": {strconv.Itoa(limit)}}.Encode()
}

const (
	defaultMaps    = "/api/v1/namespaces/default/configmaps"
	defaultSecrets = "/api/v1/namespaces/default/secrets"
	defaultLeases  = "/apis/coordination.k8s.io/v1/namespaces/default/leases"
)

func configMap(name string) object {
	return object{"metadata": object{"name": name}, "data": object{"name": name}}
}

// definition is the definition of the tests' custom resource: namespaced, with the versions v1 and
// v2 that differ in name only.
type definition struct{ group string }

func (d definition) path() string {
	return "/apis/apiextensions.k8s.io/v1/customresourcedefinitions/things." + d.group
}

func (d definition) things(version string) string {
	return "/apis/" + d.group + "/" + version + "/namespaces/default/things"
}

// prefix returns the key prefix of the objects of the default namespace in etcd.
func (d definition) prefix() string { return "/registry/" + d.group + "/things/default/" }

func (d definition) thing(version, name string) object {
	return object{"apiVersion": d.group + "/" + version, "kind": "Thing", "metadata": object{"name": name}, "spec": object{"text": name}}
}

// versions returns the entries of the definition, one of which is the storage version.
func (d definition) versions(storage string, served ...string) []any {
	var entries []any
	for _, name := range []string{"v1", "v2"} {
		entry := object{"name": name, "served": false, "storage": name == storage, "schema": object{"openAPIV3Schema": object{
			"type": "object", "x-kubernetes-preserve-unknown-fields": true}}}
		for _, s := range served {
			if s == name {
				entry["served"] = true
			}
		}
		entries = append(entries, entry)
	}
	return entries
}

func (d definition) create(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	create(t, ctx, api, "/apis/apiextensions.k8s.io/v1/customresourcedefinitions", object{
		"metadata": object{"name": "things." + d.group},
		"spec": object{
			"group": d.group, "scope": "Namespaced", "conversion": object{"strategy": "None"},
			"names":    object{"plural": "things", "singular": "thing", "kind": "Thing", "listKind": "ThingList"},
			"versions": d.versions("v1", "v1", "v2"),
		},
	})
}

// change replaces the versions of the definition.
func (d definition) change(t *testing.T, ctx context.Context, api *harness.API, versions []any) {
	t.Helper()
	patch, err := json.Marshal(object{"spec": object{"versions": versions}})
	harness.Check(t, err)
	_, err = api.Patch(ctx, d.path(), string(patch))
	harness.Check(t, err)
}

// await returns when a server answers a list of a version with the code.
func (d definition) await(t *testing.T, ctx context.Context, api *harness.API, version string, code int) {
	t.Helper()
	awaitCode(t, ctx, api, d.things(version), "", code)
}

// awaitCode waits until a GET is answered with the code, and returns the answer.
func awaitCode(t *testing.T, ctx context.Context, api *harness.API, path, query string, code int) *harness.Response {
	t.Helper()
	var response *harness.Response
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path, query, nil)
		if err != nil {
			return false, err
		}
		response = r
		return r.Code == code, fmt.Errorf("get %s?%s: %d, want %d", path, query, r.Code, code)
	}))
	return response
}

// etcdRevision returns the current revision of an etcd.
func etcdRevision(t *testing.T, ctx context.Context, client *clientv3.Client) int64 {
	t.Helper()
	resp, err := client.Get(ctx, "elsewhere", clientv3.WithCountOnly())
	harness.Check(t, err)
	return resp.Header.Revision
}
