package clients

import (
	"strings"
	"testing"
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

	deleting := cluster.StartKubectl("delete", "namespace", u.namespace, "--timeout="+testTimeout.String())
	defer deleting.Kill()
	admin.ok("wait", "--for=jsonpath={.status.phase}=Terminating", "namespace/"+u.namespace, "--timeout="+testTimeout.String())
	u.fails([]string{"forbidden", "is being terminated"}, "create", "configmap", "late")
	admin.ok("wait", "--for=condition=NamespaceFinalizersRemaining", "namespace/"+u.namespace, "--timeout="+testTimeout.String())
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
	u.ok("wait", "--for=delete", "cm/child", "--timeout="+testTimeout.String())
	u.fails([]string{"NotFound"}, "get", "cm", "child")
}
