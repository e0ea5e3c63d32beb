// Package readclients makes third-party clients read from the binary with the byte path on:
// kubectl, client-go, controller-runtime, the JavaScript client, curl, Node and Chromium. It also
// tests features that a handler in front of upstream's must preserve: audit events, request
// metrics, traces, seats of priority and fairness, and answers to paths and methods that it does
// not handle. In these tests both engines read one etcd, and upstream's answer is the reference.
//
// Node, npm, curl and Chromium are used where they are installed; otherwise their tests are
// skipped, or fail if STRATA_TEST_REQUIRE (a comma-separated list) names them.
package readclients

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/go-logr/logr"
	ctrl "sigs.k8s.io/controller-runtime"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// The servers of this package. Controllers run beside cluster only: on the other servers only tests
// write.
var (
	cluster *harness.Server // `strata up`
	both    *engines
)

func TestMain(m *testing.M) {
	ctrl.SetLogger(logr.Discard())
	harness.Main(m, func(e *harness.Env) {
		var starting sync.WaitGroup
		starting.Go(func() { cluster = e.Up() })
		starting.Go(func() { both = startEngines(e) })
		starting.Wait()
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// maps is the path of a namespace's ConfigMaps.
func maps(namespace string) string { return "/api/v1/namespaces/" + namespace + "/configmaps" }

func configMap(name, data string) object {
	return object{"metadata": object{"name": name, "labels": object{"name": name}}, "data": object{"data": data}}
}

const (
	gizmoGroup  = "test.example.com"
	gizmoPrefix = "/apis/" + gizmoGroup + "/v1"
)

// gizmos is the path of a namespace's custom resources.
func gizmos(namespace string) string { return gizmoPrefix + "/namespaces/" + namespace + "/gizmos" }

func gizmo(name, want string) object {
	return object{"apiVersion": gizmoGroup + "/v1", "kind": "Gizmo", "metadata": object{"name": name}, "spec": object{"want": want}}
}

// createGizmos creates the definition of the custom resource of these tests, if it does not exist,
// and returns when all the servers serve it.
func createGizmos(t *testing.T, ctx context.Context, servers ...*harness.API) {
	t.Helper()
	open := object{"type": "object", "x-kubernetes-preserve-unknown-fields": true}
	harness.Check(t, harness.Define(ctx, gizmoGroup, "gizmos", "Gizmo", object{
		"subresources": object{"status": object{}},
		"schema":       object{"openAPIV3Schema": object{"type": "object", "properties": object{"spec": open, "status": open}}},
	}, servers...))
}
