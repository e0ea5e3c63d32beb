package semantics

import (
	"context"
	"fmt"
	"net/http"
	"net/url"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// compact compacts etcd like an API server's compactor: it writes the revision to a key that all
// servers watch.
func compact(t *testing.T, ctx context.Context, at int64) {
	t.Helper()
	harness.Check(t, compactAt(ctx, at))
}

func compactAt(ctx context.Context, at int64) error {
	client := etcd.Client()
	_, err := client.Put(ctx, "compact_rev_key", fmt.Sprint(at))
	if err == nil {
		_, err = client.Compact(ctx, at)
	}
	return err
}

// TestContinueToken_Compacted_Returns410WithNewToken compacts the revision of a continue token. The
// answer is 410 with a token that continues at the current revision.
func TestContinueToken_Compacted_Returns410WithNewToken(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	ns := harness.Namespace(t, ctx, api, harness.NewName("ns"))
	createMaps(t, ctx, ns, numbered(12)...)
	page := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "limit=4"))
	old := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), ""))
	harness.Check(t, api.Delete(ctx, maps(ns)+"/map-0005"))
	createMaps(t, ctx, ns, "map-0005-new")
	latest := createMaps(t, ctx, ns, "map-0000-new")[0]
	compact(t, ctx, harness.Revision(t, latest.Metadata.ResourceVersion))

	var expired *harness.Response
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, maps(ns), "limit=4&continue="+url.QueryEscape(page.Metadata.Continue), nil)
		if err != nil {
			return false, err
		}
		expired = r
		return r.Code == http.StatusGone, fmt.Errorf("token of a compacted revision: code %d", r.Code)
	}))
	status := expired.Status()
	if status.Reason != metav1.StatusReasonExpired {
		t.Errorf("reason %s, want Expired", status.Reason)
	}
	if status.Continue == "" {
		t.Fatalf("no token to continue at the latest revision: %s", expired.Body)
	}
	// From the same key, at the current revision; further chunks share one resource version again.
	var items []harness.Object
	version := ""
	for token := status.Continue; token != ""; {
		list := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "limit=4&continue="+url.QueryEscape(token)))
		items = append(items, list.Items...)
		if version != "" && list.Metadata.ResourceVersion != version {
			t.Errorf("chunk at %s after one at %s", list.Metadata.ResourceVersion, version)
		}
		version, token = list.Metadata.ResourceVersion, list.Metadata.Continue
	}
	want := []string{"map-0004", "map-0005-new", "map-0006", "map-0007", "map-0008", "map-0009", "map-0010", "map-0011"}
	harness.RequireEqual(t, "the rest", (&harness.List{Items: items}).Names(), want)

	// An exact list at a compacted revision gets 410, too; a list that may be newer does not.
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, maps(ns), "resourceVersionMatch=Exact&resourceVersion="+old.Metadata.ResourceVersion, nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusGone && r.Status().Reason == metav1.StatusReasonExpired, r.Err()
	}))
	list := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "resourceVersionMatch=NotOlderThan&resourceVersion="+old.Metadata.ResourceVersion))
	if len(list.Items) != 13 {
		t.Errorf("got %d items, want 13", len(list.Items))
	}
	// The compacted revision itself can still be read.
	exact := harness.Must[*harness.List](t)(api.List(ctx, maps(ns), "resourceVersionMatch=Exact&resourceVersion="+latest.Metadata.ResourceVersion))
	if len(exact.Items) != 13 {
		t.Errorf("at the compacted revision: got %d items, want 13", len(exact.Items))
	}
}
