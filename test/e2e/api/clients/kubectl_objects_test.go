package clients

import (
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
