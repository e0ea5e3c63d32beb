package clients

import (
	"net/http"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// TestKubectlDelete_Namespace_WaitsForFinalizer deletes a namespace with objects of several kinds,
// one of which a finalizer blocks for a while.
func TestKubectlDelete_Namespace_WaitsForFinalizer(t *testing.T) {
	t.Parallel() // these wait for controllers and caches most of the time
	u := newUser(t)
	u.okWith(greeting+"---\n"+deployment, "create", "-f", "-")
	u.ok("create", "serviceaccount", "robot")
	u.okWith(strings.Replace(greeting, "name: greeting", "name: held\n  finalizers: [example.com/hold]", 1), "create", "-f", "-")
	admin := u
	admin.namespace = ""
	admin.ok("get", "namespace", u.namespace, "-o", "jsonpath={.status.phase}").prints("Active")

	deleting := cluster.StartKubectl("delete", "namespace", u.namespace, "--timeout=90s")
	defer deleting.Kill()
	admin.ok("wait", "--for=jsonpath={.status.phase}=Terminating", "namespace/"+u.namespace, "--timeout=30s")
	u.fails([]string{"forbidden", "is being terminated"}, "create", "configmap", "late")
	admin.ok("wait", "--for=condition=NamespaceFinalizersRemaining", "namespace/"+u.namespace, "--timeout=60s")
	u.ok("get", "deployments,serviceaccounts", "-o", "name").prints("")
	u.ok("get", "configmaps", "-o", "name").prints("configmap/held")
	select {
	case <-deleting.Done():
		t.Fatalf("the deletion did not wait for the finalizer\n%s", deleting.Output())
	default:
	}
	u.ok("patch", "configmap", "held", "--type=json", "-p", `[{"op":"remove","path":"/metadata/finalizers"}]`)
	if code, err := deleting.Wait(u.ctx); err != nil || code != 0 {
		t.Fatalf("delete namespace: exit code %d, %v\n%s", code, err, deleting.Output())
	}
	admin.fails([]string{"NotFound"}, "get", "namespace", u.namespace)
	// A namespace of the same name is new and empty.
	admin.ok("create", "namespace", u.namespace).prints("namespace/" + u.namespace + " created")
	u.ok("get", "configmaps,secrets,deployments", "-l", "app=hello", "-o", "name").prints("")
	admin.ok("delete", "namespace", u.namespace)
}

// TestGarbageCollector_OwnerDeleted_DeletesDependents relies on the garbage collector, which reads
// the metadata of all objects.
func TestGarbageCollector_OwnerDeleted_DeletesDependents(t *testing.T) {
	t.Parallel() // these wait for controllers and caches most of the time
	u := newUser(t)
	u.okWith(greeting, "create", "-f", "-")
	uid := u.ok("get", "cm", "greeting", "-o", "jsonpath={.metadata.uid}").Stdout
	u.okWith(strings.Replace(greeting, "name: greeting", "name: child\n  ownerReferences: [{apiVersion: v1, kind: ConfigMap, name: greeting, uid: "+uid+"}]", 1), "create", "-f", "-")
	u.ok("delete", "cm", "greeting")
	u.ok("wait", "--for=delete", "cm/child", "--timeout=60s")
	u.fails([]string{"NotFound"}, "get", "cm", "child")
}

// TestRBAC_KubectlUsers_SeePermittedObjectsOnly tests the answers to users without rights, with
// some rights, and to anonymous users.
func TestRBAC_KubectlUsers_SeePermittedObjectsOnly(t *testing.T) {
	t.Parallel() // these wait for controllers and caches most of the time
	u := newUser(t)
	u.okWith(greeting, "create", "-f", "-")
	u.ok("create", "secret", "generic", "login", "--from-literal=password=pw")
	u.ok("create", "serviceaccount", "reader").prints("serviceaccount/reader created")
	token := strings.TrimSpace(u.ok("create", "token", "reader").Stdout)
	account := "system:serviceaccount:" + u.namespace + ":reader"

	reader := u
	reader.kubeconfig = cluster.KubeconfigFor(token)
	reader.ok("auth", "whoami").shows(account)
	for _, args := range [][]string{
		{"get", "configmaps"}, {"get", "configmap", "greeting"}, {"get", "secrets", "-A"}, {"get", "configmaps", "--watch"}, {"get", "nodes"},
		{"delete", "configmap", "greeting"}, {"delete", "configmaps", "--all"}, {"create", "configmap", "mine"},
		{"patch", "configmap", "greeting", "-p", `{"data":{"hello":"me"}}`},
	} {
		reader.fails([]string{"orbidden", account}, args...)
	}

	u.ok("create", "role", "reader", "--verb=get,list,watch", "--resource=configmaps").prints("role.rbac.authorization.k8s.io/reader created")
	u.ok("create", "rolebinding", "reader", "--role=reader", "--serviceaccount="+u.namespace+":reader")
	// The authorizer reads roles and bindings from its informers, with a short delay.
	if err := harness.Poll(u.ctx, reader.can("get", "configmaps")); err != nil {
		t.Fatal(err)
	}
	reader.ok("get", "configmap", "greeting", "-o", "jsonpath={.data.hello}").prints("world")
	reader.ok("get", "configmaps", "-o", "name").shows("configmap/greeting")
	reader.fails([]string{"Forbidden"}, "get", "configmaps", "-A")
	reader.fails([]string{"Forbidden"}, "get", "secrets")
	reader.fails([]string{"Forbidden"}, "delete", "configmap", "greeting")
	u.ok("auth", "can-i", "--list", "--as="+account).shows("configmaps", "[get list watch]")
	u.ok("delete", "rolebinding", "reader")
	if err := harness.Poll(u.ctx, reader.cannot("get", "configmaps")); err != nil {
		t.Fatal(err)
	}
	reader.fails([]string{"Forbidden"}, "get", "configmap", "greeting")

	// A role for a single name allows a list that selects this name.
	u.ok("create", "role", "one", "--verb=get,list,watch", "--resource=configmaps", "--resource-name=greeting")
	u.ok("create", "rolebinding", "one", "--role=one", "--serviceaccount="+u.namespace+":reader")
	if err := harness.Poll(u.ctx, reader.can("get", "configmaps/greeting")); err != nil {
		t.Fatal(err)
	}
	reader.ok("get", "configmaps", "--field-selector=metadata.name=greeting", "-o", "name").prints("configmap/greeting")
	reader.fails([]string{"Forbidden"}, "get", "configmaps")

	// The token of a deleted account is invalid.
	u.ok("delete", "serviceaccount", "reader")
	if err := harness.Poll(u.ctx, reader.unauthorized); err != nil {
		t.Fatal(err)
	}

	// Without credentials, and with invalid ones: 401 for every request.
	for name, config := range map[string]*rest.Config{"anonymous": cluster.ConfigFor(""), "wrong token": cluster.ConfigFor("nonsense")} {
		api := cluster.APIFor(config)
		for _, path := range []string{"/api/v1/namespaces", "/api/v1/namespaces/default/configmaps?watch=true", "/version", "/nonsense", "/healthz"} {
			r, err := api.Do(u.ctx, http.MethodGet, path, "", nil)
			if err != nil {
				t.Fatal(err)
			}
			if r.Code != http.StatusUnauthorized {
				t.Errorf("%s: %s is answered with %d, want 401", name, path, r.Code)
			}
		}
	}
}
