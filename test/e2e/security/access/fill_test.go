package access

import (
	"context"
	"fmt"
	"net/http"
	"regexp"
	"slices"
	"strings"

	"github.com/stratakube/strata/test/harness"
)

const gizmoGroup = "test.example.com"

// resource is a resource that the tests read.
type resource struct {
	prefix, name string
	namespaced   bool
}

var (
	secrets    = resource{"/api/v1", "secrets", true}
	configMaps = resource{"/api/v1", "configmaps", true}
	// which the registry changes when it reads them
	services = resource{"/api/v1", "services", true}
	gizmos   = resource{"/apis/" + gizmoGroup + "/v1", "gizmos", true}
	nodes    = resource{"/api/v1", "nodes", false}
	pods     = resource{"/api/v1", "pods", true}
)

// path returns the path of the objects in a namespace, or in all namespaces if it is empty.
func (r resource) path(namespace string) string {
	if r.namespaced && namespace != "" {
		return r.prefix + "/namespaces/" + namespace + "/" + r.name
	}
	return r.prefix + "/" + r.name
}

// mark returns the unique text of an object.
func mark(r resource, namespace, name string) string {
	return fmt.Sprintf("mark.%s.%s.%s.end", r.name, namespace, name)
}

var anyMark = regexp.MustCompile(`mark\.[a-z]+\.[a-z-]*\.[a-z0-9-]+\.end`)

// marks returns the distinct marks in a body, sorted.
func marks(body []byte) []string {
	found := anyMark.FindAllString(string(body), -1)
	slices.Sort(found)
	return slices.Compact(found)
}

// padding makes a list of ConfigMaps long enough to be compressed. The padding itself compresses
// well.
var padding = strings.Repeat("padding ", 20_000)

// body returns an object with a mark.
func body(r resource, namespace, name string) object {
	o := object{"metadata": object{
		"name": name, "labels": object{"called": name, "all": "true"}, "annotations": object{"mark": mark(r, namespace, name)},
	}}
	switch r {
	case secrets:
		o["stringData"] = object{"key": "value"}
	case configMaps:
		if name == "three" {
			o["data"] = object{"key": padding}
		}
	case services:
		o["spec"] = object{"ports": []any{object{"port": 80}}}
	case gizmos:
		o["apiVersion"], o["kind"] = gizmoGroup+"/v1", "Gizmo"
	}
	return o
}

// pod returns a pod that runs on a node and mounts a Secret and a ConfigMap named for-NODE.
func pod(namespace, name, node string) object {
	o := body(pods, namespace, name)
	o["spec"] = object{
		"nodeName":   node,
		"containers": []any{object{"name": "c", "image": "example.test/i"}},
		"volumes": []any{
			object{"name": "s", "secret": object{"secretName": "for-" + node}},
			object{"name": "c", "configMap": object{"name": "for-" + node}},
		},
	}
	return o
}

// Namespaces. Nodes read the objects of the third, which do not affect the counts of the others.
var namespaces = []string{"a", "b", "nodes"}

// fill writes the objects and the roles, and returns when both engines have observed them.
func (w *world) fill(ctx context.Context) error {
	api := w.strata.API()
	create := func(path string, o object) error {
		_, err := api.Create(ctx, path, o)
		return err
	}
	if err := harness.Define(ctx, gizmoGroup, "gizmos", "Gizmo", object{"subresources": object{"status": object{}}}, api); err != nil {
		return err
	}
	for _, e := range w.each() {
		if err := e.Await(ctx, gizmos.path("")); err != nil {
			return err
		}
	}
	for _, ns := range namespaces {
		if err := create("/api/v1/namespaces", object{"metadata": object{"name": ns}}); err != nil {
			return err
		}
	}
	for _, name := range []string{"one", "two", "node-a", "node-b"} {
		if err := create(nodes.path(""), body(nodes, "", name)); err != nil {
			return err
		}
	}
	for _, ns := range []string{"a", "b"} {
		for _, r := range []resource{secrets, configMaps, services, gizmos} {
			for _, name := range []string{"one", "two", "three"} {
				if err := create(r.path(ns), body(r, ns, name)); err != nil {
					return err
				}
			}
		}
	}
	for _, node := range []string{"node-a", "node-b"} {
		for _, r := range []resource{secrets, configMaps} {
			if err := create(r.path("nodes"), body(r, "nodes", "for-"+node)); err != nil {
				return err
			}
		}
		for _, name := range []string{"x", "y"} {
			if err := create(pods.path("nodes"), pod("nodes", node+"-"+name, node)); err != nil {
				return err
			}
		}
	}
	if err := fillRBAC(create); err != nil {
		return err
	}
	return w.settle(ctx)
}

// fillRBAC writes roles.
func fillRBAC(create func(path string, o object) error) error {
	const rbac = "/apis/rbac.authorization.k8s.io/v1"
	reads := []string{"get", "list", "watch"}
	everything := func(verbs ...string) []any {
		return []any{object{"apiGroups": []string{"*"}, "resources": []string{"*"}, "verbs": verbs}}
	}
	one := []any{object{"apiGroups": []string{"*"}, "resources": []string{"*"}, "resourceNames": []string{"one"}, "verbs": reads}}
	// bind grants the user the rules in a namespace, or cluster-wide if it is empty.
	bind := func(user, namespace string, rules []any) error {
		kind, path := "ClusterRole", rbac
		if namespace != "" {
			kind, path = "Role", rbac+"/namespaces/"+namespace
		}
		name := "test-" + user
		if err := create(path+"/"+strings.ToLower(kind)+"s", object{"metadata": object{"name": name}, "rules": rules}); err != nil {
			return err
		}
		return create(path+"/"+strings.ToLower(kind)+"bindings", object{
			"metadata": object{"name": name},
			"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": kind, "name": name},
			"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": user}},
		})
	}
	for _, b := range []struct {
		user, namespace string
		rules           []any
	}{
		{all, "", everything(reads...)},
		{inA, "a", everything(reads...)},
		{inB, "b", everything(reads...)},
		{oneName, "a", one},
		{oneName, "", []any{object{"apiGroups": []string{""}, "resources": []string{"nodes"}, "resourceNames": []string{"one"}, "verbs": reads}}},
		{getter, "a", everything("get")},
		{lister, "a", everything("list")},
		{watcher, "a", everything("watch")},
		{impersonator, "", plainRules},
		{constrained, "", constrainedRules},
		{constrained, "a", constrainedRulesInA},
	} {
		if err := bind(b.user, b.namespace, b.rules); err != nil {
			return err
		}
	}
	return nil
}

// settle returns when both engines have observed all writes: authorizers read roles and a node's
// related objects from their own informers.
func (w *world) settle(ctx context.Context) error {
	list, err := w.strata.API().List(ctx, configMaps.path("a"), "")
	if err != nil {
		return err
	}
	w.revision = list.Metadata.ResourceVersion
	for _, e := range w.each() {
		if err := e.settle(ctx, w.revision); err != nil {
			return err
		}
	}
	return nil
}

// settle returns when the engine has observed all writes up to the revision.
func (e *engine) settle(ctx context.Context, revision string) error {
	ready := []request{
		{user: all, target: nodes.path("") + "/two"}, {user: inA, target: secrets.path("a")}, {user: inB, target: secrets.path("b")},
		{user: oneName, target: secrets.path("a") + "/one"}, {user: oneName, target: nodes.path("") + "/one"},
		{user: getter, target: secrets.path("a") + "/one"}, {user: lister, target: secrets.path("a")},
		{user: watcher, target: secrets.path("a") + "?watch=true&timeoutSeconds=1"},
		{user: nodeA, target: secrets.path("nodes") + "/for-node-a"}, {user: nodeB, target: secrets.path("nodes") + "/for-node-b"},
		{user: nodeA, target: configMaps.path("nodes") + "/for-node-a"}, {user: nodeB, target: configMaps.path("nodes") + "/for-node-b"},
		{user: impersonator, target: secrets.path("a"), header: http.Header{"Impersonate-User": {inA}}},
		{user: constrained, target: secrets.path("a"), header: http.Header{"Impersonate-User": {all}}},
	}
	for _, r := range []resource{secrets, configMaps, services, gizmos, nodes, pods} {
		if err := e.Await(ctx, r.path("")); err != nil {
			// custom resources are served a little after the server is ready
			return err
		}
		if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			// a server waits 3 s for the revision
			_, err := e.API().List(ctx, r.path(""), "resourceVersion="+revision)
			return err == nil, err
		}); err != nil {
			return fmt.Errorf("%s: %w", e.name, err)
		}
	}
	for _, r := range ready {
		err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			answer, err := e.send(ctx, r)
			if err != nil {
				return false, err
			}
			return answer.Code == http.StatusOK, fmt.Errorf("%s: %s as %s: %w", e.name, r.target, r.user, answer.Err())
		})
		if err != nil {
			return err
		}
	}
	return nil
}
