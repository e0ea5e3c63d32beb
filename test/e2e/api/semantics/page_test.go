package semantics

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestPagedList_ConcurrentWrites_IsOneSnapshot reads a list in pages and changes objects of earlier
// and of later pages.
func TestPagedList_ConcurrentWrites_IsOneSnapshot(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const count, limit = 100, 9
	for _, scope := range []string{"namespace", "everywhere"} {
		t.Run(scope, func(t *testing.T) {
			ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
			path := maps(ns)
			if scope == "everywhere" {
				path = "/api/v1/configmaps"
			}
			createMaps(t, ctx, ns, numbered(count)...)
			before := harness.Must[*harness.List](t)(api.List(ctx, path, ""))

			page := harness.Must[*harness.List](t)(api.List(ctx, path, fmt.Sprintf("limit=%d", limit)))
			first := page.Metadata.ResourceVersion
			items := page.Items
			for i := 0; page.Metadata.Continue != ""; i++ {
				if got, want := page.Metadata.RemainingItemCount, int64(len(before.Items)-len(items)); got == nil || *got != want {
					t.Errorf("page %d: remainingItemCount %v, want %d", i, show(got), want)
				}
				harness.Check(t, api.Delete(ctx, fmt.Sprintf("%s/map-%04d", maps(ns), i)))
				harness.Check(t, api.Delete(ctx, fmt.Sprintf("%s/map-%04d", maps(ns), count-1-i)))
				_, err := api.Patch(ctx, fmt.Sprintf("%s/map-%04d", maps(ns), count/2), fmt.Sprintf(`{"data":{"i":"%d"}}`, i))
				harness.Check(t, err)
				createMaps(t, ctx, ns, fmt.Sprintf("map-%04d-new-%d", 3*i, i))

				page = harness.Must[*harness.List](t)(api.List(ctx, path, fmt.Sprintf("limit=%d&continue=%s", limit, url.QueryEscape(page.Metadata.Continue))))
				if page.Metadata.ResourceVersion != first {
					t.Errorf("page %d has resource version %s, the first had %s", i+1, page.Metadata.ResourceVersion, first)
				}
				if len(page.Items) > limit {
					t.Errorf("page %d has %d items", i+1, len(page.Items))
				}
				items = append(items, page.Items...)
			}
			if page.Metadata.RemainingItemCount != nil && *page.Metadata.RemainingItemCount != 0 {
				t.Errorf("the last page has remainingItemCount %d", *page.Metadata.RemainingItemCount)
			}
			equalVersions(t, "pages", items, before.Items)
		})
	}
}

func show(n *int64) string {
	if n == nil {
		return "none"
	}
	return fmt.Sprint(*n)
}

// TestPagedList_Selector_ReturnsEveryMatch reads lists with a selector that matches some, the
// first, the last or no items.
func TestPagedList_Selector_ReturnsEveryMatch(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	const count = 40
	for i, name := range numbered(count) {
		labels := map[string]string{"third": fmt.Sprint(i % 3), "last": fmt.Sprint(i == count-1)}
		_, err := api.Create(ctx, maps(ns), configMap(name, labels))
		harness.Check(t, err)
	}
	for _, selector := range []string{"third=0", "third!=0", "third in (1,2)", "last=true", "last=false", "none", "!none"} {
		query := "labelSelector=" + url.QueryEscape(selector)
		want := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), query))
		for _, limit := range []int{1, 5, 100} {
			items, chunks, err := api.ListAll(ctx, maps(ns), query, limit)
			harness.Check(t, err)
			equalVersions(t, fmt.Sprintf("%s limit %d", selector, limit), items, want.Items)
			for i, chunk := range chunks {
				if chunk.RemainingItemCount != nil {
					t.Errorf("%s limit %d: remainingItemCount %d with a selector", selector, limit, *chunk.RemainingItemCount)
				}
				if chunk.ResourceVersion != chunks[0].ResourceVersion {
					t.Errorf("%s limit %d: chunk %d has another resource version", selector, limit, i)
				}
			}
		}
	}
}

// TestContinueToken_InvalidOrForeign_IsRejected sends continue tokens of other lists, and garbage.
func TestContinueToken_InvalidOrForeign_IsRejected(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, "a", "b", "c")
	token := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "limit=1")).Metadata.Continue
	for name, bad := range map[string]string{
		"garbage":     "garbage",
		"not base64":  "!!!",
		"cut":         token[:len(token)/2],
		"no revision": "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6MCwic3RhcnQiOiIifQ",
		// {"v":"meta.k8s.io/v1","rv":5,"start":"../../secrets/x\u0000"}
		"traversal": "eyJ2IjoibWV0YS5rOHMuaW8vdjEiLCJydiI6NSwic3RhcnQiOiIuLi8uLi9zZWNyZXRzL3hcdTAwMDAifQ",
	} {
		r := get(t, ctx, maps(ns), "limit=1&continue="+url.QueryEscape(bad))
		if r.Code != http.StatusBadRequest {
			t.Errorf("%s: got %v, want 400", name, r.Err())
		}
	}
	// A token of one namespace shows none of its objects in another.
	other := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, other, "x")
	r := get(t, ctx, maps(other), "limit=5&continue="+url.QueryEscape(token))
	if strings.Contains(string(r.Body), `"namespace":"`+ns+`"`) {
		t.Errorf("a token of namespace %s lists it in namespace %s: %s", ns, other, r.Body)
	}
	// A plain token is a position in any list; a sealed one is valid for its list only.
	if r.Code != http.StatusOK && r.Code != http.StatusBadRequest {
		t.Errorf("a token of another namespace: got %v, want a list or 400", r.Err())
	}
}

// TestPagedList_UncachedResource_IsComplete reads events in pages, which are served from etcd
// (uncachedEvents).
func TestPagedList_UncachedResource_IsComplete(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	path := "/api/v1/namespaces/" + ns + "/events"
	for _, name := range numbered(10) {
		_, err := api.Create(ctx, path, object{"metadata": object{"name": name},
			"involvedObject": object{"kind": "ConfigMap", "name": "a", "namespace": ns}, "reason": "Test", "type": "Normal"})
		harness.Check(t, err)
	}
	want := harness.Must[*harness.List](t)(api.List(ctx, path, ""))
	items, _, err := api.ListAll(ctx, path, "", 3)
	harness.Check(t, err)
	equalVersions(t, "events", items, want.Items)
	harness.RequireEqual(t, "events", want.Names(), numbered(10))
	w := harness.StartWatch(t, ctx, api, path, "fieldSelector=reason%3DTest&resourceVersion="+want.Metadata.ResourceVersion)
	harness.Check(t, api.Delete(ctx, path+"/map-0003"))
	expectEvent(t, ctx, w, "DELETED", "map-0003")
}
