// Package dropin runs `strata apiserver` in place of a kube-apiserver: on its etcd, with its flags,
// and back again.
//
// Two servers on one etcd are shared, by tests with namespaces or resources of their own. Other
// tests have an etcd and servers of their own. All but one run in parallel.
package dropin

import (
	"context"
	"encoding/json"
	"maps"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

const testTimeout = 10 * time.Minute

// shared are two servers of the engine under test on one etcd. The second one has started at a
// later revision.
var shared struct {
	etcd    *harness.Etcd
	servers []*harness.Server
	use     harness.Turns
}

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		shared.etcd = e.Etcd()
		for range 2 {
			shared.servers = append(shared.servers, e.APIServer(shared.etcd, progressOften))
		}
	})
}

// progressOften makes a server with idle watches request progress often.
const progressOften = "--strata-progress-interval=200ms"

type object = map[string]any

// engine returns the flag that selects an engine.
func engine(name string) string { return "--engine=" + name }

const (
	defaultMaps    = "/api/v1/namespaces/default/configmaps"
	defaultSecrets = "/api/v1/namespaces/default/secrets"
)

func configMap(name string) object {
	return object{"metadata": object{"name": name}, "data": object{"name": name}}
}

func create(t *testing.T, ctx context.Context, api *harness.API, path string, body any) harness.Object {
	t.Helper()
	o, err := api.Create(ctx, path, body)
	harness.Check(t, err)
	return o
}

// expectEvent fails the test unless the next event other than bookmarks has the type and the
// object's name.
func expectEvent(t *testing.T, ctx context.Context, w *harness.Watch, kind, name string) harness.Object {
	t.Helper()
	for {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type == "BOOKMARK" {
			continue
		}
		if e.Type != kind || e.Object.Metadata.Name != name {
			t.Fatalf("got %s of %q (%s), want %s of %q", e.Type, e.Object.Metadata.Name, e.Status.Message, kind, name)
		}
		return e.Object
	}
}

// content is the objects that a server returns: for each resource in each version, as JSON, by key.
type content map[string]map[string]string

// read lists every resource in every version of discovery.
func read(t *testing.T, ctx context.Context, api *harness.API) content {
	t.Helper()
	all := content{}
	for _, path := range groupVersions(t, ctx, api) {
		var discovered struct {
			Resources []struct {
				Name  string
				Verbs []string
			}
		}
		get(t, ctx, api, path, &discovered)
		for _, r := range discovered.Resources {
			if strings.Contains(r.Name, "/") || !slices.Contains(r.Verbs, "list") {
				continue
			}
			if r.Name == "componentstatuses" {
				continue // computed, not stored
			}
			var list struct{ Items []json.RawMessage }
			get(t, ctx, api, path+"/"+r.Name, &list)
			objects := map[string]string{}
			for _, item := range list.Items {
				var o struct{ Metadata metav1.ObjectMeta }
				harness.Check(t, json.Unmarshal(item, &o))
				if !changesByItself(o.Metadata) {
					objects[o.Metadata.Namespace+"/"+o.Metadata.Name] = string(item)
				}
			}
			all[path+"/"+r.Name] = objects
		}
	}
	return all
}

// changesByItself reports whether an object is a server's identity lease, which the server renews
// periodically.
func changesByItself(o metav1.ObjectMeta) bool {
	return o.Namespace == "kube-system" && o.Labels["apiserver.kubernetes.io/identity"] != ""
}

// groupVersions returns the paths of all versions of all groups.
func groupVersions(t *testing.T, ctx context.Context, api *harness.API) []string {
	t.Helper()
	var groups struct {
		Groups []struct {
			Versions []struct{ GroupVersion string }
		}
	}
	get(t, ctx, api, "/apis", &groups)
	paths := []string{"/api/v1"}
	for _, g := range groups.Groups {
		for _, v := range g.Versions {
			paths = append(paths, "/apis/"+v.GroupVersion)
		}
	}
	return paths
}

// get reads a path, and retries while the server asks for it: a resource without earlier requests
// is loaded into memory first.
func get(t *testing.T, ctx context.Context, api *harness.API, path string, into any) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		if err != nil {
			return false, err
		}
		if r.Code == http.StatusTooManyRequests && r.Header.Get("Retry-After") != "" {
			return false, r.Err()
		}
		if r.Code != http.StatusOK {
			t.Fatalf("get %s: %v", path, r.Err())
		}
		return true, json.Unmarshal(r.Body, into)
	}))
}

// objects returns the number of objects.
func (c content) objects() int {
	n := 0
	for _, objects := range c {
		n += len(objects)
	}
	return n
}

// requireEqual compares the contents of two servers.
func requireEqual(t *testing.T, what string, got, want content) {
	t.Helper()
	shown := 0
	for _, path := range slices.Sorted(maps.Keys(want)) {
		if _, ok := got[path]; !ok {
			t.Errorf("%s: %s is not served", what, path)
			continue
		}
		for _, key := range slices.Sorted(maps.Keys(want[path])) {
			if got[path][key] != want[path][key] {
				if shown++; shown <= 5 {
					t.Errorf("%s: %s %s is\n%s\nwant\n%s", what, path, key, got[path][key], want[path][key])
				}
			}
		}
		for key := range got[path] {
			if _, ok := want[path][key]; !ok {
				t.Errorf("%s: %s %s is new", what, path, key)
			}
		}
	}
	for path := range got {
		if _, ok := want[path]; !ok {
			t.Errorf("%s: %s is served, and was not", what, path)
		}
	}
	if shown > 5 {
		t.Errorf("%s: %d objects differ", what, shown)
	}
}
