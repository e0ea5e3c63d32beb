package semantics

import (
	"fmt"
	"net/http"
	"slices"
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
