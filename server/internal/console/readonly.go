package console

import (
	"context"
	"fmt"
	"strings"

	"k8s.io/apiserver/pkg/authorization/authorizer"

	"github.com/stratakube/strata/kube/consistency"
	"github.com/stratakube/strata/kube/status"
)

// ReadOnly returns an authorizer for servers with Sessions: it decides on the requests of sessions,
// and passes those of other users on. A session may get and list objects, except for Secrets, and
// get the pages that the console shows. It may not write, watch, impersonate, or use subresources,
// of which some reach into pods and nodes.
func ReadOnly(others authorizer.Authorizer) authorizer.Authorizer { return readOnly{others} }

type readOnly struct{ authorizer.Authorizer }

// Authorize implements authorizer.Authorizer.
func (o readOnly) Authorize(ctx context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
	if _, ok := a.GetUser().(*sessionUser); !ok {
		return o.Authorizer.Authorize(ctx, a)
	}
	return decide(a)
}

// ConditionsAwareAuthorize implements authorizer.Authorizer.
func (o readOnly) ConditionsAwareAuthorize(ctx context.Context, a authorizer.Attributes) authorizer.ConditionsAwareDecision {
	if _, ok := a.GetUser().(*sessionUser); !ok {
		return o.Authorizer.ConditionsAwareAuthorize(ctx, a)
	}
	return authorizer.ConditionsAwareDecisionFromParts(decide(a))
}

// pages are the paths, besides those of objects, that a session may get; those that end with a
// slash stand for all below them.
var pages = []string{"/api", "/api/", "/apis", "/apis/", "/version", "/readyz", "/livez", status.Path, consistency.Path, Path, Path + "/"}

func decide(a authorizer.Attributes) (authorizer.Decision, string, error) {
	deny := func(what string) (authorizer.Decision, string, error) {
		return authorizer.DecisionDeny, fmt.Sprintf("a session of the console may not %s; it gets and lists objects except for Secrets", what), nil
	}
	verb := a.GetVerb()
	if !a.IsResourceRequest() {
		for _, page := range pages {
			if verb == "get" && (a.GetPath() == page || strings.HasSuffix(page, "/") && strings.HasPrefix(a.GetPath(), page)) {
				return authorizer.DecisionAllow, "", nil
			}
		}
		return deny(verb + " this path")
	}
	switch {
	case verb != "get" && verb != "list":
		return deny(verb + " objects")
	case a.GetSubresource() != "":
		return deny("use subresources")
	case a.GetResource() == "secrets" && a.GetAPIGroup() == "":
		return deny("read Secrets")
	}
	return authorizer.DecisionAllow, "", nil
}
