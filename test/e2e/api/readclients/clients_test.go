package readclients

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// TestClientLibraries_ReadsUseBytePath runs one client library after the other against a control
// plane, whose controllers are clients too. The byte path passes none of their reads to upstream's
// handlers, except tables.
func TestClientLibraries_ReadsUseBytePath(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	createGizmos(t, ctx, cluster.API())
	for _, client := range []struct {
		name  string
		verbs string // that the client uses
		test  func(t *testing.T, ctx context.Context)
	}{
		{"kubectl", "get list watch", useKubectl},
		{"client-go, typed, protobuf", "get list watch", func(t *testing.T, ctx context.Context) { useTyped(t, ctx, "application/vnd.kubernetes.protobuf") }},
		{"client-go, typed, JSON", "get list watch", func(t *testing.T, ctx context.Context) { useTyped(t, ctx, "application/json") }},
		{"client-go, dynamic", "get list watch", useDynamic},
		{"client-go, metadata", "get list watch", useMetadata},
		{"client-go, informers that watch lists", "watch", func(t *testing.T, ctx context.Context) { useInformers(t, ctx, true) }},
		{"client-go, informers that list first", "list watch", func(t *testing.T, ctx context.Context) { useInformers(t, ctx, false) }},
		{"controller-runtime", "get list watch", useControllerRuntime},
		{"JavaScript", "get list watch", useJavaScript},
	} {
		t.Run(client.name, func(t *testing.T) {
			ctx := harness.Context(t, testTimeout)
			before := readMetrics(t, ctx)
			client.test(t, ctx)
			expectNothingPassed(t, ctx, before, strings.Fields(client.verbs))
		})
	}
}

// Metrics of the byte path: requests answered, and requests passed to upstream's handlers.
const (
	answered = "strata_readpath_requests_total"
	passedOn = "strata_readpath_passed_total"
	// reads of the present; those with the label fallback are GETs that etcd answers because memory
	// is not current within 250 ms, as on a busy machine
	consistent = "apiserver_watch_cache_consistent_read_total"
)

func readMetrics(t *testing.T, ctx context.Context) []sample {
	t.Helper()
	return harness.Must[[]sample](t)(scrape(ctx, cluster.API(), answered, passedOn, consistent))
}

// expectNothingPassed fails the test unless the byte path has answered reads of each verb since
// before, and passed on only reads of tables, and GETs that memory could not answer in time. The
// latter are counted when etcd has answered.
func expectNothingPassed(t *testing.T, ctx context.Context, before []sample, used []string) {
	t.Helper()
	verbs := map[string]bool{}
	ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, errors.New("reads were passed on"))
	defer cancel()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		grown := since(before, readMetrics(t, ctx))
		late := 0.0
		for _, s := range grown {
			if s.name == consistent && s.labels["fallback"] == "true" {
				late += s.value
			}
		}
		for _, s := range grown {
			switch {
			case s.name == answered:
				verbs[s.labels["verb"]] = true
			case s.name != passedOn || s.labels["reason"] == "table":
			case s.labels["reason"] == "etcd":
				if s.value > late {
					return false, fmt.Errorf("%s has grown by %v, want at most %v", s, s.value, late)
				}
			default:
				t.Errorf("%s has grown by %v, want 0", s, s.value)
			}
		}
		return true, nil
	}))
	for _, verb := range used {
		if !verbs[verb] {
			t.Errorf("no %s was answered by the byte path", verb)
		}
	}
}

func newClusterNamespace(t *testing.T, ctx context.Context) string {
	t.Helper()
	return harness.Namespace(t, ctx, cluster.API(), harness.NewName("client"))
}

// useKubectl runs kubectl get, watch, describe and wait on objects of built-in and custom kinds.
// The short form has all calls for ConfigMaps and the custom kind, and a third for each other kind.
func useKubectl(t *testing.T, ctx context.Context) {
	namespace := newClusterNamespace(t, ctx)
	run := func(args ...string) string {
		t.Helper()
		r, err := cluster.Kubectl(ctx, "", append([]string{"--namespace=" + namespace}, args...)...)
		harness.Check(t, err)
		if r.Code != 0 {
			t.Fatalf("kubectl %s: exit code %d\n%s%s", strings.Join(args, " "), r.Code, r.Stdout, r.Stderr)
		}
		return r.Stdout
	}
	shows := func(want string, args ...string) {
		t.Helper()
		if got := run(args...); !strings.Contains(got, want) {
			t.Errorf("kubectl %s: no %q in\n%s", strings.Join(args, " "), want, got)
		}
	}
	harness.Check(t, cluster.Apply(ctx, fmt.Sprintf(`
{apiVersion: v1, kind: ConfigMap, metadata: {name: one, namespace: %[1]s, labels: {a: b}}, data: {k: v}}
---
{apiVersion: test.example.com/v1, kind: Gizmo, metadata: {name: one, namespace: %[1]s, labels: {a: b}}, spec: {want: more}}
---
{apiVersion: v1, kind: Service, metadata: {name: one, namespace: %[1]s}, spec: {ports: [{port: 80}]}}
---
{apiVersion: v1, kind: PersistentVolumeClaim, metadata: {name: one, namespace: %[1]s}, spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}}
---
{apiVersion: apps/v1, kind: Deployment, metadata: {name: one, namespace: %[1]s}, spec: {replicas: 2, selector: {matchLabels: {a: b}}, template: {metadata: {labels: {a: b}}, spec: {containers: [{name: c, image: i}]}}}}
`, namespace)))

	for i, resource := range []string{"configmaps", "gizmos.test.example.com", "services", "persistentvolumeclaims", "deployments"} {
		for j, call := range [][]string{
			{"one", "get", resource},
			{"one", "get", resource, "one", "-o", "wide"},
			{`"kind": "List"`, "get", resource, "-o", "json"},
			{"kind: ", "get", resource, "one", "-o", "yaml"},
			{"/one", "get", resource, "-o", "name", "--chunk-size=1"},
			{"one", "get", resource, "--field-selector=metadata.name=one", "-o", "jsonpath={.items[*].metadata.name}"},
			{"one", "get", resource, "-A", "-o", "custom-columns=NAME:.metadata.name"},
			{"Name:", "describe", resource, "one"},
		} {
			if harness.Long() || i < 2 || (i+j)%3 == 0 {
				shows(call[0], call[1:]...)
			}
		}
	}
	shows("one", "get", "configmaps", "-l", "a=b", "--show-labels")
	shows("one", "get", "configmaps,gizmos.test.example.com", "-o", "yaml")
	shows(`"kind":"ConfigMap"`, "get", "--raw", maps(namespace)+"/one")
	shows(`"kind":"GizmoList"`, "get", "--raw", gizmos(namespace)+"?limit=1")
	shows("Name:", "describe", "namespace", namespace)
	run("rollout", "history", "deployment/one")
	run("events")
	run("wait", "--for=jsonpath={.spec.replicas}=2", "deployment/one", "--timeout=60s")
	run("wait", "--for=jsonpath={.data.k}=v", "configmap/one", "--timeout=60s")
	run("wait", "--for=jsonpath={.spec.want}=more", "gizmo/one", "--timeout=60s")

	for _, output := range []string{"-oname", "-ojson", "-oyaml", "-owide"} {
		for _, resource := range []string{"configmaps", "gizmos"} {
			watching := cluster.StartKubectl("--namespace="+namespace, "get", resource, "--watch", output)
			defer watching.Kill()
			_, n, err := watching.WaitLine(ctx, 0, "one")
			harness.Check(t, err)
			added := "added" + strings.ToLower(strings.TrimPrefix(output, "-"))
			path, o := maps(namespace), configMap(added, "data")
			if resource == "gizmos" {
				path, o = gizmos(namespace), gizmo(added, "more")
			}
			_, err = cluster.API().Create(ctx, path, o)
			harness.Check(t, err)
			_, _, err = watching.WaitLine(ctx, n, added)
			harness.Check(t, err)
		}
	}
	run("delete", "configmap,gizmo", "--all") // waits, by watches, for their deletion
	r, err := cluster.API().Do(ctx, http.MethodGet, gizmos(namespace)+"/one", "", nil)
	harness.Check(t, err)
	if r.Code != http.StatusNotFound {
		t.Errorf("after kubectl delete: %v", r.Err())
	}
}
