// Package semantics tests the answers to reads and watches, request by request, over HTTP and JSON.
package semantics

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/recorded"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// The server of this package runs no controllers: only the test writes to its namespaces.
var (
	etcd   *harness.Etcd
	server *harness.Server
	api    *harness.API
)

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		etcd = e.Etcd()
		// The first revision is compacted before the server starts, which then has no history of
		// it.
		ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
		defer cancel()
		for _, at := range []int64{2, 3} {
			if err := compactAt(ctx, at); err != nil {
				panic(err)
			}
		}
		recorded.All(e, etcd)
		server = e.APIServer(etcd, "--disable-admission-plugins=ServiceAccount", uncachedEvents)
		api = server.API()
	})
}

// uncachedEvents is a flag: Events are read from etcd, as the tests of resources that are not
// cached need.
const uncachedEvents = "--watch-cache-sizes=events#0"

// object is an object to write; its shape is that of the API.
type object = map[string]any

// maps is the path of a namespace's ConfigMaps, which most tests use because they are stored
// without changes.
func maps(namespace string) string { return "/api/v1/namespaces/" + namespace + "/configmaps" }

func configMap(name string, labels map[string]string) object {
	return object{"metadata": object{"name": name, "labels": labels}, "data": object{"name": name}}
}

// createMaps creates ConfigMaps and returns them as stored.
func createMaps(t *testing.T, ctx context.Context, namespace string, names ...string) []harness.Object {
	t.Helper()
	var created []harness.Object
	for _, name := range names {
		created = append(created, harness.Must[harness.Object](t)(api.Create(ctx, maps(namespace), configMap(name, nil))))
	}
	return created
}

// numbered returns n names that sort by number.
func numbered(n int) []string {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("map-%04d", i)
	}
	return names
}

// next returns the next event other than bookmarks.
func next(t *testing.T, ctx context.Context, w *harness.Watch) harness.Event {
	t.Helper()
	for {
		if e := harness.Must[harness.Event](t)(w.Next(ctx)); e.Type != "BOOKMARK" {
			return e
		}
	}
}

// expectEvent fails the test unless the next event has the type and the object's name.
func expectEvent(t *testing.T, ctx context.Context, w *harness.Watch, kind, name string) harness.Object {
	t.Helper()
	e := next(t, ctx, w)
	if e.Type != kind || e.Object.Metadata.Name != name {
		t.Fatalf("got %s of %q (%v), want %s of %q", e.Type, e.Object.Metadata.Name, e.Status.Message, kind, name)
	}
	return e.Object
}

// get sends a GET whose answer may have any code.
func get(t *testing.T, ctx context.Context, path, query string) *harness.Response {
	t.Helper()
	return harness.Must[*harness.Response](t)(api.Read(ctx, path, query, ""))
}
