package readpath

import (
	"fmt"
	"net/http"
	"net/url"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// TestContinueToken_OtherSelector_MatchesUpstream continues paged lists with another selector,
// limit or namespace, on both servers. Tokens of either engine give the same result.
func TestContinueToken_OtherSelector_MatchesUpstream(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	namespace := harness.NewName("ns")
	path := func(namespace string) string {
		if namespace == "" {
			return "/api/v1/configmaps"
		}
		return "/api/v1/namespaces/" + namespace + "/configmaps"
	}
	queries := []string{"", "labelSelector=shard%3D0", "labelSelector=shard%3D1", "labelSelector=shard+in+(0,1,2)", "labelSelector=none", "fieldSelector=metadata.name%3Dobject-000033",
		"fieldSelector=metadata.namespace%3D" + namespace}
	for i := range 60 {
		name := fmt.Sprintf("object-%06d", i)
		harness.Must[*clientv3.PutResponse](t)(etcd.Put(ctx, "/registry/configmaps/"+namespace+"/"+name, fmt.Sprintf(
			`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":%q,"uid":%[1]q,"labels":{"shard":"%[3]d"}}}`, name, namespace, i%4%3)))
	}
	show := func(r *harness.Response) string {
		if r.Code != http.StatusOK {
			status := r.Status()
			return fmt.Sprint(r.Code, status.Reason, status.Continue != "")
		}
		list, err := r.List()
		harness.Check(t, err)
		remaining := "unknown"
		if n := list.Metadata.RemainingItemCount; n != nil {
			remaining = fmt.Sprint(*n)
		}
		return fmt.Sprintf("%v at %s, more: %t, remaining: %s", list.Names(), list.Metadata.ResourceVersion, list.Metadata.Continue != "", remaining)
	}
	// Both servers have reached the current revision.
	list, err := upstream.List(ctx, path(namespace), "")
	harness.Check(t, err)
	at := "&resourceVersionMatch=Exact&resourceVersion=" + list.Metadata.ResourceVersion
	for _, from := range []string{namespace, ""} {
		for _, begin := range queries {
			for _, mine := range []bool{true, false} {
				first := upstream
				if mine {
					first = api
				}
				r := get(t, ctx, first, path(from), "limit=5&"+begin+at)
				page, err := r.List()
				harness.Check(t, err)
				if page.Metadata.Continue == "" {
					continue
				}
				for _, then := range queries {
					for _, where := range []string{namespace, ""} {
						for _, limit := range []string{"", "limit=3&", "limit=500&"} {
							query := limit + then + "&continue=" + url.QueryEscape(page.Metadata.Continue)
							got, want := get(t, ctx, api, path(where), query), get(t, ctx, upstream, path(where), query)
							if g, w := show(got), show(want); g != w {
								t.Errorf("started in %q with %q (token of this engine: %t), then %q with %s%s:\n%.300s\nupstream:\n%.300s", from, begin, mine, where, limit, then, g, w)
							}
						}
					}
				}
			}
		}
	}
}
