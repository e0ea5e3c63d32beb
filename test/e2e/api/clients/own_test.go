package clients

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

const ownAuditPolicy = `
apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
- level: Metadata
  users: [system:apiserver]
  verbs: [watch, list]
`

// ownInformers are the informers of a server itself. Those that its parts share read the engine:
// they make no request, so the audit log has none. Those of definitions and of APIServices are
// clients of the API.
type ownInformers struct {
	audit string // path of the audit log
	users int    // that a role has reached
}

// flags returns the flags of the server.
func (o *ownInformers) flags(env *harness.Env) []string {
	o.audit = filepath.Join(env.Dir("audit"), "audit.log")
	return []string{"--audit-policy-file=" + env.WriteFile("audit.yaml", []byte(ownAuditPolicy)), "--audit-log-path=" + o.audit}
}

// stop demands that the informers of a server run, and stops it: it stops with them, without an
// error.
func (o *ownInformers) stop(t *testing.T, ctx context.Context, server *harness.Server) {
	t.Helper()
	if harness.Engine() != harness.Strata {
		// upstream's engine leaves the server's informers as they are
		harness.Check(t, server.Stop())
		return
	}
	o.users++
	roleReachesAuthorizer(t, ctx, server.API(), fmt.Sprint("reader-", o.users))
	harness.Check(t, server.Stop())
	log := server.Output()
	for _, wrong := range []string{"Panic in a request", "Failed to watch"} {
		if strings.Contains(log, wrong) {
			t.Errorf("the log has %q", wrong)
		}
	}
	events, err := os.ReadFile(o.audit)
	harness.Check(t, err)
	for resource, requested := range map[string]bool{"pods": false, "nodes": false, "namespaces": false, "resourcequotas": false,
		"customresourcedefinitions": true, "apiservices": true} {
		if strings.Contains(string(events), `"resource":"`+resource+`"`) != requested {
			t.Errorf("requests for %s by the server in the audit log: %v, want %v", resource, !requested, requested)
		}
	}
}

// roleReachesAuthorizer binds a user to a role, and waits until the authorizer, which reads
// bindings with an informer, permits the user's reads.
func roleReachesAuthorizer(t *testing.T, ctx context.Context, api *harness.API, user string) {
	t.Helper()
	allowed := func(ctx context.Context) (bool, error) {
		resp, err := api.Do(ctx, http.MethodPost, "/apis/authorization.k8s.io/v1/subjectaccessreviews", "", object{
			"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview",
			"spec": object{"user": user, "resourceAttributes": object{"verb": "list", "resource": "configmaps"}}})
		if err != nil {
			return false, err
		}
		if resp.Code != http.StatusCreated {
			return false, resp.Err()
		}
		review, err := resp.Object()
		if err != nil {
			return false, err
		}
		return review.Object["status"].(object)["allowed"] == true, nil
	}
	if is, err := allowed(ctx); err != nil || is {
		t.Fatalf("before the binding: allowed %v, %v", is, err)
	}
	_, err := api.Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", object{
		"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding",
		"metadata": object{"name": user}, "roleRef": object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "system:aggregate-to-view"},
		"subjects": []any{object{"kind": "User", "name": user, "apiGroup": "rbac.authorization.k8s.io"}}})
	harness.Check(t, err)
	harness.Check(t, harness.Poll(ctx, allowed))
}
