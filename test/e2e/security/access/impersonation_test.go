package access

import (
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

const authentication = "authentication.k8s.io"

// plainRules let a user impersonate two others, one of them a node with the group of nodes, and
// give the user a few rights of its own.
var plainRules = []any{
	object{"apiGroups": []string{""}, "resources": []string{"users"}, "resourceNames": []string{inA, oneName, nodeA}, "verbs": []string{"impersonate"}},
	object{"apiGroups": []string{""}, "resources": []string{"groups"}, "resourceNames": []string{"system:nodes", "some"}, "verbs": []string{"impersonate"}},
	object{"apiGroups": []string{""}, "resources": []string{"serviceaccounts"}, "resourceNames": []string{"robot"}, "verbs": []string{"impersonate"}},
	object{"apiGroups": []string{authentication}, "resources": []string{"uids"}, "resourceNames": []string{"1234"}, "verbs": []string{"impersonate"}},
	object{"apiGroups": []string{authentication}, "resources": []string{"userextras/scopes"}, "resourceNames": []string{"view"}, "verbs": []string{"impersonate"}},
}

// constrainedRules allow impersonation only for the requests listed in constrainedRules or, in
// namespace a, in constrainedRulesInA.
var (
	constrainedRules = []any{
		object{"apiGroups": []string{authentication}, "resources": []string{"users"}, "resourceNames": []string{all, inB}, "verbs": []string{"impersonate:user-info"}},
		object{"apiGroups": []string{authentication}, "resources": []string{"nodes"}, "resourceNames": []string{"node-a"}, "verbs": []string{"impersonate:arbitrary-node"}},
		object{"apiGroups": []string{authentication}, "resources": []string{"serviceaccounts"}, "resourceNames": []string{"robot"}, "verbs": []string{"impersonate:serviceaccount"}},
		object{"apiGroups": []string{""}, "resources": []string{"pods"}, "verbs": []string{"impersonate-on:arbitrary-node:list", "impersonate-on:arbitrary-node:watch"}},
		object{"apiGroups": []string{""}, "resources": []string{"secrets"}, "verbs": []string{"impersonate-on:serviceaccount:list"}},
	}
	constrainedRulesInA = []any{object{"apiGroups": []string{""}, "resources": []string{"secrets"},
		"verbs": []string{"impersonate-on:user-info:get", "impersonate-on:user-info:list"}}}
)

// TestImpersonation_GrantsRightsOfImpersonatedUser: a user with the right to impersonate another
// reads the objects that the other may read, and only by the requests for which impersonation is
// allowed. Other users are refused. Both engines record the impersonated user and the kind of
// impersonation in the audit log.
func TestImpersonation_GrantsRightsOfImpersonatedUser(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	as := func(user string, more ...string) http.Header {
		h := http.Header{}
		if user != "" {
			h.Set("Impersonate-User", user)
		}
		for _, m := range more {
			name, value, _ := strings.Cut(m, "=")
			h.Add("Impersonate-"+name, value)
		}
		return h
	}
	robot := "system:serviceaccount:b:robot"
	masters := "Group=system:masters"
	headers := []http.Header{
		as(inA), as(oneName), as(all), as(inB), as(admin), as(nodeA), as(nodeB), as(robot), as("system:anonymous"), as("nobody-at-all"),
		as(inA, "Group=some"), as(inA, masters), as(inA, "Group=some", masters), as(oneName, "Group=system:nodes"), as(nodeA, "Group=system:nodes"), as(nodeB, "Group=system:nodes"),
		as(inA, "Uid=1234"), as(inA, "Uid=9"), as(inA, "Extra-Scopes=view"), as(inA, "Extra-Scopes=admin"), as(inA, "Extra-Scopes=view", "Extra-Other=view"),
		as("", masters), as("", "Uid=1234"), as("", "Extra-Scopes=view"), as(all, masters), as(all, "Group=some"), as(nodeA, masters), as(robot, masters),
		{"Impersonate-User": {inA, all}}, {"Impersonate-User": {all, inA}}, {"Impersonate-User": {""}}, {"Impersonate-User": {""}, "Impersonate-Group": {"system:masters"}},
	}
	const watch = "watch=true&timeoutSeconds=1&resourceVersion=0"
	mine := "fieldSelector=spec.nodeName%3Dnode-a"
	targets := []struct {
		target string
		read   read
	}{
		{secrets.path("a"), read{verb: "list", resource: secrets, namespace: "a"}},
		{secrets.path("b"), read{verb: "list", resource: secrets, namespace: "b"}},
		{secrets.path(""), read{verb: "list", resource: secrets}},
		{secrets.path("a") + "/one", read{verb: "get", resource: secrets, namespace: "a", name: "one"}},
		{secrets.path("a") + "/two", read{verb: "get", resource: secrets, namespace: "a", name: "two"}},
		{secrets.path("a") + "?fieldSelector=metadata.name%3Done&resourceVersion=0", read{verb: "list", resource: secrets, namespace: "a", name: "one"}},
		{secrets.path("a") + "?" + watch, read{verb: "watch", resource: secrets, namespace: "a"}},
		{gizmos.path("a") + "/two", read{verb: "get", resource: gizmos, namespace: "a", name: "two"}},
		{pods.path("") + "?" + mine, read{verb: "list", resource: pods}},
		{pods.path("") + "?" + mine + "&" + watch, read{verb: "watch", resource: pods}},
		{secrets.path("nodes") + "/for-node-a", read{verb: "get", resource: secrets, namespace: "nodes", name: "for-node-a"}},
	}
	var requests []asked
	for _, user := range []string{nothing, all, inA, impersonator, constrained, anonymous, stranger} {
		for _, h := range headers {
			for _, target := range targets {
				requests = append(requests, asked{request{user: user, target: target.target, header: h}, wantImpersonated(user, h, target.read)})
			}
		}
	}
	// A refusal names the kind of impersonation that last succeeded for the user, which would
	// depend on the order of concurrent requests. The answers of upstream's handlers, such as those
	// to escaped paths, pass through a filter chain with a memory of its own.
	for _, e := range []*engine{w.upstream, w.strata} {
		for _, path := range []string{secrets.path("a"), strings.Replace(secrets.path("a"), "/api", "/%61pi", 1)} {
			first, err := e.patient(ctx, request{user: impersonator, target: path, header: as(inA)})
			harness.Check(t, err)
			if first.Code != http.StatusOK {
				t.Fatalf("%s: the first impersonation: %d %s", e.name, first.Code, first.Body)
			}
		}
	}
	w.same(t, ctx, "impersonation", requests)
}

// wantImpersonated returns the expectation for a read as another user. It restates the rules for
// plain impersonation of one user. For all other cases it requires only that no object is returned
// that none of the possible impersonated users may see.
func wantImpersonated(user string, h http.Header, r read) expectation {
	wanted := h.Get("Impersonate-User")
	if user == stranger {
		return expectation{refused: http.StatusUnauthorized}
	}
	none := expectation{refused: -1} // 403, or 400 or 500 for headers that make no sense
	if wanted == "" && len(h["Impersonate-User"]) > 0 && len(h) == 1 {
		return expectation{refused: -1, sees: sees(user)} // an empty name counts as no name
	}
	switch user {
	case impersonator:
		switch {
		case wanted == inA && len(h) == 1 || wanted == oneName && len(h) == 1:
			want := wantOf(wanted, r)
			return want
		case wanted == inA:
			return expectation{refused: -1, sees: sees(inA)}
		case wanted == oneName, wanted == nodeA:
			return expectation{refused: -1, sees: func(m string) bool { return sees(oneName)(m) || nodeSees("node-a")(m) }}
		}
	case constrained:
		inSecrets := r.resource == secrets && r.namespace == "a" && (r.verb == "get" || r.verb == "list")
		onPods := r.resource == pods
		switch {
		case wanted == all && len(h) == 1 && inSecrets:
			return wantOf(all, r)
		case wanted == all && len(h) == 1:
			return expectation{refused: http.StatusForbidden}
		case wanted == nodeA && len(h) == 1 && onPods:
			return expectation{sees: nodeSees("node-a")}
		case wanted == nodeA && len(h) == 1:
			return expectation{refused: http.StatusForbidden}
		}
	}
	return none
}
