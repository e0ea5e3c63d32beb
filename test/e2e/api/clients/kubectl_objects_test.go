package clients

import (
	"fmt"
	"strings"
	"testing"
)

const greeting = `apiVersion: v1
kind: ConfigMap
metadata:
  name: greeting
  labels: {app: hello}
data:
  hello: world
`

// deployment is paused: its controller creates no pods and keeps its status.
const deployment = `apiVersion: apps/v1
kind: Deployment
metadata:
  name: web
  labels: {app: web}
spec:
  paused: true
  replicas: 2
  selector: {matchLabels: {app: web}}
  template:
    metadata: {labels: {app: web}}
    spec:
      containers:
      - {name: server, image: "web:1"}
      - {name: sidecar, image: "proxy:1"}
`

func TestKubectl_CreateGetDescribeDelete(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	file := u.path("greeting.yaml", greeting)
	u.ok("create", "-f", file).prints("configmap/greeting created")
	u.fails([]string{"AlreadyExists", `configmaps "greeting" already exists`}, "create", "-f", file)
	u.ok("get", "configmap", "greeting", "-o", "jsonpath={.data.hello}").prints("world")
	u.ok("get", "configmap", "greeting", "-o", "yaml").shows("apiVersion: v1", "hello: world", "kind: ConfigMap", "resourceVersion:")
	u.ok("get", "cm", "greeting", "-o", "name").prints("configmap/greeting")
	u.ok("get", "cm", "greeting").shows("NAME", "DATA", "AGE", "greeting", "1")
	u.ok("get", "cm", "-l", "app=hello", "-o", "name").prints("configmap/greeting")
	u.ok("get", "cm", "-l", "app!=hello", "-o", "name").hides("greeting")
	u.ok("get", "cm", "--field-selector", "metadata.name=greeting", "-o", "name").prints("configmap/greeting")
	u.ok("get", "cm", "--show-labels").shows("greeting", "app=hello")
	u.ok("describe", "configmap", "greeting").shows("Name:", "greeting", "Namespace:", u.namespace, "Labels:", "app=hello", "hello:", "world")
	u.fails([]string{`configmaps "missing" not found`}, "get", "configmap", "missing")

	u.ok("create", "secret", "generic", "login", "--from-literal=password=pw").prints("secret/login created")
	u.ok("get", "secret", "login", "-o", "go-template={{.data.password | base64decode}}").prints("pw")
	u.ok("describe", "secret", "login").shows("Type:", "Opaque", "password:", "2 bytes")

	u.ok("delete", "configmap", "greeting").prints(fmt.Sprintf("configmap \"greeting\" deleted from %s namespace", u.namespace))
	u.fails([]string{"NotFound"}, "get", "configmap", "greeting")
	u.fails([]string{"NotFound"}, "delete", "configmap", "greeting")
	u.ok("delete", "configmap", "greeting", "--ignore-not-found").prints("")
}

func TestKubectlApply_ChangesOwnedFieldsOnly(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	file := u.path("greeting.yaml", greeting)
	u.ok("apply", "-f", file).prints("configmap/greeting created")
	u.ok("apply", "-f", file).prints("configmap/greeting unchanged")
	changed := u.path("changed.yaml", strings.Replace(greeting, "world", "moon", 1))
	if o := u.run("", "diff", "-f", changed); o.Code != 1 || !strings.Contains(o.Stdout, "-  hello: world") || !strings.Contains(o.Stdout, "+  hello: moon") {
		t.Errorf("diff: exit code %d\n%s%s", o.Code, o.Stdout, o.Stderr)
	}
	u.ok("apply", "-f", changed).prints("configmap/greeting configured")
	u.ok("get", "cm", "greeting", "-o", "jsonpath={.data}").prints(`{"hello":"moon"}`)
	// A field removed from the file is removed; fields of other managers stay.
	u.ok("label", "cm", "greeting", "by=hand").prints("configmap/greeting labeled")
	u.ok("apply", "-f", u.path("less.yaml", strings.Replace(greeting, "app: hello", `kept: "true"`, 1)))
	u.ok("get", "cm", "greeting", "-o", "jsonpath={.metadata.labels}").prints(`{"by":"hand","kept":"true"}`)

	// Server-side apply records the owner of a field.
	u.okWith(greeting, "apply", "--server-side", "--field-manager=one", "--force-conflicts", "-f", "-").prints("configmap/greeting serverside-applied")
	u.failsWith(strings.Replace(greeting, "world", "mars", 1), []string{"conflict with \"one\"", ".data.hello"},
		"apply", "--server-side", "--field-manager=two", "-f", "-")
	u.okWith(strings.Replace(greeting, "world", "mars", 1), "apply", "--server-side", "--field-manager=two", "--force-conflicts", "-f", "-")
	u.ok("get", "cm", "greeting", "-o", "jsonpath={.data.hello}").prints("mars")

	u.okWith(deployment+"---\n"+greeting, "apply", "-f", "-").shows("deployment.apps/web created", "configmap/greeting")
	u.ok("get", "deploy,cm", "-o", "name").shows("deployment.apps/web", "configmap/greeting")
	u.okWith(deployment+"---\n"+greeting, "delete", "-f", "-").shows(`deployment.apps "web" deleted`, `configmap "greeting" deleted`)
}

func TestKubectlPatch_EveryPatchType_IsApplied(t *testing.T) {
	u := newUser(t)
	u.okWith(deployment, "create", "-f", "-").prints("deployment.apps/web created")
	images := func() output {
		return u.ok("get", "deployment", "web", "-o", "jsonpath={range .spec.template.spec.containers[*]}{.name}={.image} {end}{.spec.replicas}")
	}
	images().prints("server=web:1 sidecar=proxy:1 2")
	// A strategic merge patch merges containers by name, a merge patch replaces the list, a JSON
	// patch works by position.
	u.ok("patch", "deployment", "web", "-p", `{"spec":{"template":{"spec":{"containers":[{"name":"sidecar","image":"proxy:2"}]}}}}`).
		prints("deployment.apps/web patched")
	images().prints("server=web:1 sidecar=proxy:2 2")
	u.ok("patch", "deployment", "web", "--type=json", "-p", `[{"op":"test","path":"/spec/replicas","value":2},{"op":"replace","path":"/spec/replicas","value":5}]`)
	images().prints("server=web:1 sidecar=proxy:2 5")
	u.fails([]string{"the server rejected our request"}, "patch", "deployment", "web", "--type=json", "-p", `[{"op":"test","path":"/spec/replicas","value":2}]`)
	u.ok("patch", "deployment", "web", "--type=merge", "-p", `{"spec":{"template":{"spec":{"containers":[{"name":"server","image":"web:3"}]}}}}`)
	images().prints("server=web:3 5")
	u.ok("scale", "deployment", "web", "--replicas=7").prints("deployment.apps/web scaled")
	u.ok("set", "image", "deployment/web", "server=web:4").prints("deployment.apps/web image updated")
	u.ok("annotate", "deployment", "web", "note=x").prints("deployment.apps/web annotated")
	u.ok("patch", "deployment", "web", "--subresource=status", "-p", `{"spec":{"replicas":3},"status":{"conditions":[{"type":"Tested","status":"True"}]}}`)
	u.ok("get", "deployment", "web").shows("NAME", "READY", "UP-TO-DATE", "AVAILABLE", "web", "0/7")
	u.ok("get", "deployment", "web", "-o", "wide").shows("CONTAINERS", "IMAGES", "server", "web:4")
	u.ok("get", "deployment", "web", "-o", `jsonpath={.spec.replicas} {.status.conditions[?(@.type=="Tested")].status}`).prints("7 True")
	u.fails([]string{`Deployment "web" is invalid`, "spec.replicas"}, "patch", "deployment", "web", "-p", `{"spec":{"replicas":-1}}`)
}

func TestKubectlReplace_StaleResourceVersion_Conflicts(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.okWith(greeting, "create", "-f", "-")
	stored := u.ok("get", "cm", "greeting", "-o", "yaml").Stdout
	u.okWith(strings.Replace(stored, "world", "moon", 1), "replace", "-f", "-").prints("configmap/greeting replaced")
	// A repeated update carries the old resource version.
	u.failsWith(strings.Replace(stored, "world", "mars", 1), []string{"Conflict", "the object has been modified"}, "replace", "-f", "-")
	u.ok("patch", "cm", "greeting", "-p", `{"data":{"hello":"moon"}}`).prints("configmap/greeting patched (no change)")
	u.ok("get", "cm", "greeting", "-o", "jsonpath={.data.hello}").prints("moon")
	// Without a resource version it is unconditional.
	u.okWith(strings.Replace(greeting, "world", "mars", 1), "replace", "-f", "-").prints("configmap/greeting replaced")
	u.ok("get", "cm", "greeting", "-o", "jsonpath={.data.hello}").prints("mars")
	uid := u.ok("get", "cm", "greeting", "-o", "jsonpath={.metadata.uid}").Stdout
	u.okWith(greeting, "replace", "--force", "-f", "-").shows("deleted", "configmap/greeting replaced")
	if again := u.ok("get", "cm", "greeting", "-o", "jsonpath={.metadata.uid}").Stdout; again == uid || again == "" {
		t.Errorf("uid %q after replace --force, was %q", again, uid)
	}
	u.failsWith(strings.Replace(greeting, "name: greeting", "name: missing", 1), []string{"NotFound"}, "replace", "-f", "-")
}

// TestKubectlGet_Watch_FollowsChanges follows objects with get --watch during concurrent changes.
func TestKubectlGet_Watch_FollowsChanges(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	u.okWith(greeting, "create", "-f", "-")
	p := cluster.StartKubectl("--namespace="+u.namespace, "get", "configmaps", "--field-selector=metadata.name!=kube-root-ca.crt", "--watch", "--output-watch-events")
	defer p.Kill()
	at := 0
	expect := func(kind, name string) {
		t.Helper()
		line, n, err := p.WaitLine(u.ctx, at, kind)
		if err != nil {
			t.Fatal(err)
		}
		if fields := strings.Fields(line); n != at+1 || fields[1] != name {
			t.Fatalf("line %d is %q, want %s of %s next\n%s", n, line, kind, name, strings.Join(p.Lines(), "\n"))
		}
		at = n
	}
	if _, n, err := p.WaitLine(u.ctx, 0, "EVENT"); err != nil || n != 1 {
		t.Fatalf("header in line %d: %v", n, err)
	}
	at = 1
	expect("ADDED", "greeting")
	u.ok("create", "configmap", "second", "--from-literal=a=b")
	expect("ADDED", "second")
	u.ok("patch", "configmap", "greeting", "-p", `{"data":{"more":"data"}}`)
	expect("MODIFIED", "greeting")
	u.ok("delete", "configmap", "greeting")
	expect("DELETED", "greeting")
	u.ok("delete", "configmap", "second")
	expect("DELETED", "second")

	// wait is a watch too.
	u.ok("create", "configmap", "third")
	waiting := cluster.StartKubectl("--namespace="+u.namespace, "wait", "--for=jsonpath={.data.state}=done", "configmap/third", "--timeout=60s")
	defer waiting.Kill()
	gone := cluster.StartKubectl("--namespace="+u.namespace, "wait", "--for=delete", "configmap/third", "--timeout=60s")
	defer gone.Kill()
	u.ok("patch", "configmap", "third", "-p", `{"data":{"state":"done"}}`)
	if code, err := waiting.Wait(u.ctx); err != nil || code != 0 {
		t.Errorf("wait for a value: exit code %d, %v\n%s", code, err, waiting.Output())
	}
	u.ok("delete", "configmap", "third")
	if code, err := gone.Wait(u.ctx); err != nil || code != 0 {
		t.Errorf("wait for deletion: exit code %d, %v\n%s", code, err, gone.Output())
	}
}

func TestKubectlDelete_All_DeletesEveryObject(t *testing.T) {
	t.Parallel()
	u := newUser(t)
	for i := range 5 {
		u.ok("create", "secret", "generic", fmt.Sprintf("secret-%d", i), "--from-literal=a=b")
	}
	o := u.ok("delete", "secrets", "--all")
	for i := range 5 {
		o.shows(fmt.Sprintf(`secret "secret-%d" deleted`, i))
	}
	u.ok("get", "secrets", "-o", "name").prints("")
	u.okWith(deployment, "create", "-f", "-")
	u.ok("delete", "deployments,services", "--all", "--wait").shows(`deployment.apps "web" deleted`)
	u.ok("get", "all", "-o", "name").prints("")
}

func TestKubectl_Discovery_ListsResourcesAndVersions(t *testing.T) {
	u := newUser(t)
	u.ok("api-resources").shows("NAME", "SHORTNAMES", "APIVERSION", "NAMESPACED", "KIND",
		"configmaps", "cm", "v1", "true", "ConfigMap", "deployments", "deploy", "apps/v1", "true", "Deployment")
	u.ok("api-resources", "--namespaced=false", "-o", "name").shows("namespaces", "nodes", "customresourcedefinitions.apiextensions.k8s.io")
	u.ok("api-resources", "--api-group=apps", "--verbs=watch", "-o", "name").shows("daemonsets.apps", "deployments.apps", "statefulsets.apps")
	u.ok("api-versions").shows("apps/v1", "rbac.authorization.k8s.io/v1", "v1")
	u.ok("explain", "deployment.spec.strategy").shows("GROUP:", "apps", "KIND:", "Deployment", "FIELDS", "rollingUpdate")
	u.ok("explain", "pods", "--recursive").shows("containers", "image", "nodeName")
	u.fails([]string{"doesn't have a resource type"}, "get", "nonsenses")
	u.ok("version").shows("Client Version: v1.37.2+strata.", "Server Version: v1.37.2+strata.")
	u.ok("cluster-info").shows("Kubernetes control plane is running at", cluster.URL)
	u.ok("get", "--raw", "/readyz").prints("ok")
	u.ok("get", "--raw", "/api/v1/namespaces/"+u.namespace).shows(`"name":"` + u.namespace + `"`)
}
