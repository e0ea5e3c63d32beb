package semantics

import (
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// TestRead_FutureResourceVersion_TimesOut requests a resource version that is not reached.
func TestRead_FutureResourceVersion_TimesOut(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, "a")
	rv := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "")).Metadata.ResourceVersion
	future := fmt.Sprint(harness.Revision(t, rv) + 1_000_000)

	for name, request := range map[string]struct{ path, query string }{
		"get":                   {maps(ns) + "/a", "resourceVersion=" + future},
		"list":                  {maps(ns), "resourceVersion=" + future},
		"list not older":        {maps(ns), "resourceVersionMatch=NotOlderThan&resourceVersion=" + future},
		"list not older, paged": {maps(ns), "limit=5&resourceVersionMatch=NotOlderThan&resourceVersion=" + future},
		"list exactly":          {maps(ns), "resourceVersionMatch=Exact&resourceVersion=" + future},
		"list, selective":       {maps(ns), "labelSelector=a%3Db&resourceVersion=" + future},
		"list everywhere":       {"/api/v1/configmaps", "resourceVersion=" + future},
		"initial events": {maps(ns),
			"watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&resourceVersion=" + future},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel() // each waits three seconds
			ctx := harness.Context(t, testTimeout)
			status, code := metav1.Status{}, 0
			if name == "initial events" {
				// The answer to a watch may have started before the wait fails.
				w, refused, err := api.Watch(ctx, request.path, request.query)
				harness.Check(t, err)
				if refused != nil {
					status, code = refused.Status(), refused.Code
				} else {
					defer w.Close()
					e := harness.Must[harness.Event](t)(w.Next(ctx))
					if e.Type != "ERROR" {
						t.Fatalf("got %s of %q, want an error", e.Type, e.Object.Metadata.Name)
					}
					status, code = e.Status, int(e.Status.Code)
				}
			} else {
				r := get(t, ctx, request.path, request.query)
				status, code = r.Status(), r.Code
				if code == http.StatusGatewayTimeout && r.Header.Get("Retry-After") == "" {
					t.Errorf("no Retry-After header")
				}
			}
			if code != http.StatusGatewayTimeout || status.Reason != metav1.StatusReasonTimeout {
				t.Fatalf("got code %d, status %+v, want 504 Timeout", code, status)
			}
			if status.Details == nil || status.Details.RetryAfterSeconds < 1 {
				t.Errorf("details %+v, want retryAfterSeconds", status.Details)
			}
			tooLarge := func(c metav1.StatusCause) bool { return c.Type == metav1.CauseTypeResourceVersionTooLarge }
			if status.Details == nil || !slices.ContainsFunc(status.Details.Causes, tooLarge) {
				t.Errorf("details %+v, want the cause %s", status.Details, metav1.CauseTypeResourceVersionTooLarge)
			}
		})
	}
}

// TestRead_NearFutureResourceVersion_Waits requests a resource version that is reached while the
// request waits.
func TestRead_NearFutureResourceVersion_Waits(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	created := createMaps(t, ctx, ns, "a")
	for name, path := range map[string]string{"get": maps(ns) + "/a", "list": maps(ns)} {
		t.Run(name, func(t *testing.T) {
			// A write advances the revision by one, and other writers exist too, so this revision
			// is reached soon, but not yet.
			want := harness.Revision(t, harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "")).Metadata.ResourceVersion) + 5
			answers := make(chan *harness.Response, 1)
			var waiting sync.WaitGroup
			waiting.Go(func() {
				r, err := api.Do(ctx, http.MethodGet, path, fmt.Sprintf("resourceVersion=%d", want), nil)
				if err != nil {
					t.Error(err)
				}
				answers <- r
			})
			defer waiting.Wait()
			for i := 0; ; i++ {
				patched := harness.Must[harness.Object](t)(api.Patch(ctx, maps(ns)+"/"+created[0].Metadata.Name, fmt.Sprintf(`{"data":{"i":"%s %d"}}`, name, i)))
				if harness.Revision(t, patched.Metadata.ResourceVersion) >= want {
					break
				}
			}
			if r := <-answers; r != nil && r.Code != http.StatusOK {
				t.Errorf("got %v", r.Err())
			}
		})
	}
}

// TestRead_InvalidResourceVersion_Returns400 sends invalid resource versions.
func TestRead_InvalidResourceVersion_Returns400(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, "a")
	for _, version := range []string{"abc", "-1", "1.5", "0x10", "99999999999999999999999"} {
		for name, request := range map[string]struct{ path, query string }{
			"get":                 {maps(ns) + "/a", ""},
			"list":                {maps(ns), ""},
			"list, paged":         {maps(ns), "limit=1&"},
			"list exactly":        {maps(ns), "resourceVersionMatch=Exact&"},
			"watch":               {maps(ns), "watch=true&timeoutSeconds=5&"},
			"watch, initial":      {maps(ns), "watch=true&timeoutSeconds=5&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&"},
			"list everywhere":     {"/api/v1/configmaps", ""},
			"list of an uncached": {"/api/v1/namespaces/" + ns + "/events", ""},
		} {
			r := get(t, ctx, request.path, request.query+"resourceVersion="+version)
			// Upstream's cacher answers GET and WATCH with 500: it does not convert the error to a
			// status.
			upstreams500 := harness.Engine() == harness.Upstream && !strings.HasPrefix(name, "list") && r.Code == http.StatusInternalServerError
			if r.Code != http.StatusBadRequest && !upstreams500 {
				t.Errorf("%s at %q: got %v, want 400", name, version, r.Err())
			}
		}
	}
}

// TestRead_AfterAcknowledgedWrite_SeesWrite writes and reads with several concurrent clients: a
// read that starts after a write was acknowledged sees it (I6).
func TestRead_AfterAcknowledgedWrite_SeesWrite(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const writers, rounds = 4, 50
	var writing sync.WaitGroup
	for writer := range writers {
		ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
		writing.Go(func() {
			for round := range rounds {
				name := fmt.Sprintf("map-%d-%d", writer, round)
				created, err := api.Create(ctx, maps(ns), configMap(name, map[string]string{"round": fmt.Sprint(round)}))
				if err != nil {
					t.Error(err)
					return
				}
				if got, err := api.Get(ctx, maps(ns)+"/"+name, ""); err != nil || got.Metadata.ResourceVersion != created.Metadata.ResourceVersion {
					t.Errorf("get after create: %v, %v", got.Metadata.ResourceVersion, err)
					return
				}
				patched, err := api.Patch(ctx, maps(ns)+"/"+name, `{"data":{"patched":"yes"}}`)
				if err != nil {
					t.Error(err)
					return
				}
				list, err := api.List(ctx, maps(ns), fmt.Sprintf("labelSelector=round%%3D%d", round))
				if err != nil || len(list.Items) != 1 || list.Items[0].Metadata.ResourceVersion != patched.Metadata.ResourceVersion {
					t.Errorf("list after patch to %s: %+v, %v", patched.Metadata.ResourceVersion, list, err)
					return
				}
				if err := api.Delete(ctx, maps(ns)+"/"+name); err != nil {
					t.Error(err)
					return
				}
				if r, err := api.Do(ctx, http.MethodGet, maps(ns)+"/"+name, "", nil); err != nil || r.Code != http.StatusNotFound {
					t.Errorf("get after delete: %+v, %v, want 404", r, err)
					return
				}
				if list, err := api.List(ctx, maps(ns), ""); err != nil || len(list.Items) != 0 {
					t.Errorf("list after delete: %+v, %v, want no items", list, err)
					return
				}
			}
		})
	}
	writing.Wait()
}

// TestExactList_EqualsEarlierList lists at the resource version of an earlier list, in all shapes,
// while objects change.
func TestExactList_EqualsEarlierList(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, numbered(20)...)
	type snapshot struct {
		query string
		list  *harness.List
	}
	var taken []snapshot
	for i := range 10 {
		harness.Check(t, api.Delete(ctx, fmt.Sprintf("%s/map-%04d", maps(ns), i)))
		_, err := api.Patch(ctx, maps(ns)+"/map-0019", fmt.Sprintf(`{"metadata":{"labels":{"round":"%d"}}}`, i))
		harness.Check(t, err)
		for _, query := range []string{"", fmt.Sprintf("labelSelector=round%%3D%d", i), "fieldSelector=metadata.name%3Dmap-0019"} {
			taken = append(taken, snapshot{query, harness.Must[*harness.List](t)(api.List(ctx, maps(ns), query))})
		}
	}
	for _, s := range taken {
		query := s.query + "&resourceVersionMatch=Exact&resourceVersion=" + s.list.Metadata.ResourceVersion
		again := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), query))
		if again.Metadata.ResourceVersion != s.list.Metadata.ResourceVersion {
			t.Errorf("%s: resource version %s", query, again.Metadata.ResourceVersion)
		}
		equalVersions(t, query, again.Items, s.list.Items)

		paged, chunks, err := api.ListAll(ctx, maps(ns), query, 3)
		harness.Check(t, err)
		equalVersions(t, query+" in pages", paged, s.list.Items)
		for _, chunk := range chunks {
			if chunk.ResourceVersion != s.list.Metadata.ResourceVersion {
				t.Errorf("%s: a chunk has resource version %s", query, chunk.ResourceVersion)
			}
		}
	}
}

// equalVersions compares objects by key and resource version, in their order.
func equalVersions(t *testing.T, what string, got, want []harness.Object) {
	t.Helper()
	harness.RequireEqual(t, what, versions(got), versions(want))
}

func versions(objects []harness.Object) []string {
	var keys []string
	for _, o := range objects {
		keys = append(keys, o.Key()+"@"+o.Metadata.ResourceVersion)
	}
	return keys
}

// TestList_FieldSelector_ReturnsMatches lists by the selectable fields.
func TestList_FieldSelector_ReturnsMatches(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns, other := harness.Namespace(t, ctx, api, harness.NewName("ns")), harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, "a", "b", "c")
	createMaps(t, ctx, other, "a")
	pods := func(namespace string) string { return "/api/v1/namespaces/" + namespace + "/pods" }
	for i, node := range []string{"", "node-1", "node-1", "node-2"} {
		_, err := api.Create(ctx, pods(ns), pod(fmt.Sprintf("pod-%d", i), node))
		harness.Check(t, err)
	}
	_, err := api.Create(ctx, pods(other), pod("pod-9", "node-1"))
	harness.Check(t, err)

	for _, tc := range []struct {
		path, selector string
		want           []string
	}{
		{maps(ns), "metadata.name=b", []string{"b"}},
		{maps(ns), "metadata.name=nobody", nil},
		{maps(ns), "metadata.name!=b", []string{"a", "c"}},
		{maps(ns), "metadata.name=b,metadata.namespace=" + ns, []string{"b"}},
		{"/api/v1/configmaps", "metadata.name=a,metadata.namespace=" + ns, []string{"a"}},
		{"/api/v1/configmaps", "metadata.namespace=" + ns, []string{"a", "b", "c"}},
		{pods(ns), "spec.nodeName=node-1", []string{"pod-1", "pod-2"}},
		{"/api/v1/pods", "spec.nodeName=node-1", []string{"pod-1", "pod-2", "pod-9"}},
		{pods(ns), "spec.nodeName=", []string{"pod-0"}},
		{pods(ns), "spec.nodeName!=node-1", []string{"pod-0", "pod-3"}},
		{pods(ns), "spec.nodeName=node-1,metadata.name=pod-2", []string{"pod-2"}},
		{pods(ns), "status.phase=Pending,spec.nodeName=node-2", []string{"pod-3"}},
	} {
		for _, more := range []string{"", "&resourceVersion=0", "&limit=1"} {
			query := "fieldSelector=" + url.QueryEscape(tc.selector) + more
			if more == "&resourceVersion=0" {
				// Memory may be behind the writes above, until a consistent list has waited for
				// them.
				harness.Must[*harness.List](t)(api.List(ctx, tc.path, "fieldSelector="+url.QueryEscape(tc.selector)))
			}
			var names []string
			if more == "&limit=1" {
				items, _, err := api.ListAll(ctx, tc.path, "fieldSelector="+url.QueryEscape(tc.selector), 1)
				harness.Check(t, err)
				names = (&harness.List{Items: items}).Names()
				if harness.Engine() == harness.Upstream {
					// its token for metadata.namespace starts with the previous object
					names = slices.Compact(names)
				}
			} else {
				names = harness.Must[*harness.List](t)(api.List(ctx, tc.path, query)).Names()
			}
			harness.RequireEqual(t, tc.path+"?"+query, names, tc.want)
		}
	}
	if r := get(t, ctx, maps(ns), "fieldSelector=data.name%3Da"); r.Code != http.StatusBadRequest {
		t.Errorf("a field that cannot be selected: got %v, want 400", r.Err())
	}
}

// pod returns a pod that is bound to node, if that is not empty.
func pod(name, node string) object {
	spec := object{"containers": []any{object{"name": "c", "image": "none"}}}
	if node != "" {
		spec["nodeName"] = node
	}
	return object{"metadata": object{"name": name}, "spec": spec}
}
