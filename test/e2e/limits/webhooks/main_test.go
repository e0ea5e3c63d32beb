// Package webhooks serves conversion webhooks that count, hang and read through the server, and
// tests which requests they delay.
package webhooks

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// The server of this package runs no controllers: only the test writes to its namespaces.
var (
	etcd   *harness.Etcd
	server *harness.Server
	api    *harness.API
)

// withoutAccounts is the flag of a server in whose namespaces nothing makes service accounts.
const withoutAccounts = "--disable-admission-plugins=ServiceAccount"

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		etcd = e.Etcd()
		server = e.APIServer(etcd, withoutAccounts)
		api = server.API()
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// maps is the path of a namespace's ConfigMaps.
func maps(namespace string) string { return "/api/v1/namespaces/" + namespace + "/configmaps" }

// added reads n ADDED events, allowing bookmarks only in between; it returns their objects in
// order.
func added(ctx context.Context, w *harness.Watch, n int) ([]harness.Object, error) {
	var objects []harness.Object
	for len(objects) < n {
		e, err := w.Next(ctx)
		if err != nil {
			return objects, fmt.Errorf("after %d of %d objects: %w", len(objects), n, err)
		}
		switch e.Type {
		case "BOOKMARK":
		case "ADDED":
			objects = append(objects, e.Object)
		default:
			return objects, fmt.Errorf("after %d of %d objects: %s %s %s", len(objects), n, e.Type, e.Object.Key(), e.Status.Message)
		}
	}
	return objects, nil
}
