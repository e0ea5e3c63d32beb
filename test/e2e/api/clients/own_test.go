package clients

import (
	"context"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
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

// ownWatch matches the log of an ended watch of the server's own clients: the path and the address
// that it came from.
var ownWatch = regexp.MustCompile(`"HTTP" verb="WATCH" URI="([^"?]*)[^"]*" .*userAgent="strata/[^"]*" .*srcIP="([^"]*)"`)

// ownInformers are the informers of a server itself. They are authenticated, audited and served,
// and their watches come from no connection (port 0).
type ownInformers struct {
	audit string // path of the audit log
	users int    // that a role has reached
}

// flags returns the flags of the server.
func (o *ownInformers) flags(env *harness.Env) []string {
	o.audit = filepath.Join(env.Dir("audit"), "audit.log")
	return []string{"--v=3", "--audit-policy-file=" + env.WriteFile("audit.yaml", []byte(ownAuditPolicy)), "--audit-log-path=" + o.audit}
}

var ownWatched = []string{"pods", "nodes", "namespaces", "clusterroles", "customresourcedefinitions", "apiservices", "resourcequotas"}

// stop demands that the informers of a server run, and stops it: it stops with them, without an
// error.
func (o *ownInformers) stop(t *testing.T, ctx context.Context, server *harness.Server) {
	t.Helper()
	if harness.Engine() != harness.Strata {
		// upstream's engine leaves the server's clients as they are
		harness.Check(t, server.Stop())
		return
	}
	api := server.API()
	for _, resource := range ownWatched {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			watches, err := api.Sum(ctx, "apiserver_longrunning_requests", `resource="`+resource+`"`, `verb="WATCH"`)
			return watches >= 1, err
		}))
	}
	o.users++
	roleReachesAuthorizer(t, ctx, api, fmt.Sprint("reader-", o.users))
	harness.Check(t, server.Stop())
	log := server.Output()
	for _, wrong := range []string{"Panic in a request", "Stopped with running requests", "Failed to watch"} {
		if strings.Contains(log, wrong) {
			t.Errorf("the log has %q", wrong)
		}
	}
	ended := map[string]bool{}
	for _, match := range ownWatch.FindAllStringSubmatch(log, -1) {
		ended[match[1][strings.LastIndex(match[1], "/")+1:]] = true
		if match[2] != "127.0.0.1:0" {
			t.Errorf("the watch of %s came from %s", match[1], match[2])
		}
	}
	for _, resource := range ownWatched {
		if !ended[resource] {
			t.Errorf("the log has no watch of %s by the server", resource)
		}
	}
	events, err := os.ReadFile(o.audit)
	harness.Check(t, err)
	if !strings.Contains(string(events), `"requestURI":"/api/v1/pods?`) || !strings.Contains(string(events), `"sourceIPs":["127.0.0.1"]`) {
		t.Error("the audit log has no event of the server's informers with their address")
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
