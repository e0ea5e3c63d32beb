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

	"github.com/stratakube/strata/server/test/internal/harness"
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

// ownWatch matches the log of an ended watch of the server's own clients: the path and the address that it came from.
var ownWatch = regexp.MustCompile(`"HTTP" verb="WATCH" URI="([^"?]*)[^"]*" .*userAgent="strata/[^"]*" .*srcIP="([^"]*)"`)

// TestOwnInformers_RunWithoutConnection: the informers of the server itself are authenticated, audited and served, and their watches
// come from no connection (port 0). The server stops with them, and starts again, without an error.
func TestOwnInformers_RunWithoutConnection(t *testing.T) {
	if harness.Engine() != "strata" {
		t.Skip("upstream's engine leaves the server's clients as they are")
	}
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	audit := filepath.Join(env.Dir("audit"), "audit.log")
	server := env.APIServer(env.Etcd(), "--v=3", "--audit-policy-file="+env.WriteFile("audit.yaml", []byte(ownAuditPolicy)), "--audit-log-path="+audit)
	watched := []string{"pods", "nodes", "namespaces", "clusterroles", "customresourcedefinitions", "apiservices", "resourcequotas"}
	for start := range 2 {
		api := server.API()
		for _, resource := range watched {
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				watches, err := api.Sum(ctx, "apiserver_longrunning_requests", `resource="`+resource+`"`, `verb="WATCH"`)
				return watches >= 1, err
			}))
		}
		roleReachesAuthorizer(t, ctx, api, fmt.Sprintf("reader-%d", start))
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
		for _, resource := range watched {
			if !ended[resource] {
				t.Errorf("the log has no watch of %s by the server", resource)
			}
		}
		if start == 0 {
			server.Restart()
		}
	}
	events, err := os.ReadFile(audit)
	harness.Check(t, err)
	if !strings.Contains(string(events), `"requestURI":"/api/v1/pods?`) || !strings.Contains(string(events), `"sourceIPs":["127.0.0.1"]`) {
		t.Error("the audit log has no event of the server's informers with their address")
	}
}

// roleReachesAuthorizer binds a user to a role, and waits until the authorizer, which reads bindings with an informer, permits the user's reads.
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
