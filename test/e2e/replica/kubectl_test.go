package replica

import (
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestReplica_Kubectl_Works: kubectl needs discovery, OpenAPI, tables, patches and watches, each of
// which another part of a replica answers.
func TestReplica_Kubectl_Works(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	const manifest = `apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: default, labels: {app: web}}
spec:
  replicas: 2
  selector: {matchLabels: {app: web}}
  template: {metadata: {labels: {app: web}}, spec: {containers: [{name: web, image: web}]}}
`
	for _, c := range []struct {
		name, stdin string
		args        []string
		want        string
	}{
		{name: "apply", stdin: manifest, args: []string{"apply", "-f", "-"}, want: "deployment.apps/web created"},
		{name: "apply again", stdin: manifest, args: []string{"apply", "-f", "-"}, want: "deployment.apps/web unchanged"},
		{name: "server-side apply", stdin: manifest, args: []string{"apply", "--server-side", "--force-conflicts", "-f", "-"}, want: "serverside-applied"},
		{name: "get", args: []string{"get", "deployments"}, want: "web    0/2"},
		{name: "get YAML", args: []string{"get", "deployment", "web", "-o", "yaml"}, want: "replicas: 2"},
		{name: "describe", args: []string{"describe", "deployment", "web"}, want: "2 desired"},
		{name: "scale", args: []string{"scale", "deployment", "web", "--replicas=3"}, want: "scaled"},
		{name: "wait", args: []string{"wait", "deployment", "web", "--for=jsonpath={.spec.replicas}=3", "--timeout=30s"}, want: "condition met"},
		{name: "label", args: []string{"label", "deployment", "web", "tier=front"}, want: "labeled"},
		{name: "get by label", args: []string{"get", "deployments", "-l", "tier=front", "-o", "name"}, want: "deployment.apps/web"},
		{name: "api-resources", args: []string{"api-resources"}, want: "deployments"},
		{name: "explain", args: []string{"explain", "deployment.spec.replicas"}, want: "Number of desired pods"},
		{name: "auth can-i", args: []string{"auth", "can-i", "create", "pods"}, want: "yes"},
		{name: "version", args: []string{"version"}, want: "Server Version"},
		{name: "delete", args: []string{"delete", "deployment", "web", "--timeout=30s"}, want: "deleted"},
	} {
		r, err := s.replica.Kubectl(ctx, c.stdin, c.args...)
		harness.Check(t, err)
		if r.Code != 0 || !strings.Contains(r.Stdout, c.want) {
			t.Errorf("%s: exit code %d, want 0 and %q\n%s%s", c.name, r.Code, c.want, r.Stdout, r.Stderr)
		}
	}
}
