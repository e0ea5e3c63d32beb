package webhooks

import (
	"fmt"
	"net/http"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestConversionWebhook_UnreadVersion_IsNotCalled does all writes and reads through the stored
// version, and only then reads the other one.
func TestConversionWebhook_UnreadVersion_IsNotCalled(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	hook := newWebhook(t, nil)
	d := newRoutes(t, ctx, "unread", hook)
	v1, v2 := d.path("v1"), d.path("v2")
	const n = 50

	empty, err := api.List(ctx, v1, "")
	harness.Check(t, err)
	w := harness.StartWatch(t, ctx, api, v1, "resourceVersion="+empty.Metadata.ResourceVersion)
	harness.Check(t, d.create(ctx, 0, n))
	events, err := added(ctx, w, n)
	harness.Check(t, err)
	harness.Check(t, d.wrong("v1", events, numbered(0, n)...))
	initial, err := added(ctx, harness.StartWatch(t, ctx, api, v1, "resourceVersion=0"), n)
	harness.Check(t, err)
	if len(initial) != n {
		t.Errorf("a watch began with %d objects, want %d", len(initial), n)
	}
	for _, query := range []string{"", "resourceVersion=0", "labelSelector=no%3Dlabel", "resourceVersionMatch=Exact&resourceVersion=" + empty.Metadata.ResourceVersion} {
		_, err := api.List(ctx, v1, query)
		harness.Check(t, err)
	}
	items, _, err := api.ListAll(ctx, v1, "", 7)
	harness.Check(t, err)
	harness.Check(t, d.wrong("v1", items, numbered(0, n)...))

	// One of each kind of write.
	want := numbered(0, n)
	o, err := api.Get(ctx, v1+"/"+routeName(1), "")
	harness.Check(t, err)
	updated := d.route(1)
	updated["metadata"] = object{"name": routeName(1), "resourceVersion": o.Metadata.ResourceVersion}
	updated["data"] = object{"address": "updated:1"}
	_, err = api.Update(ctx, v1+"/"+routeName(1), updated)
	harness.Check(t, err)
	want[3] = "updated:1"
	_, err = api.Patch(ctx, v1+"/"+routeName(2), `{"data":{"address":"patched:2"}}`)
	harness.Check(t, err)
	want[5] = "patched:2"
	applied := d.route(3)
	applied["data"] = object{"address": "applied:3"}
	r, err := api.DoAs(ctx, http.MethodPatch, v1+"/"+routeName(3), "fieldManager=test&force=true", "application/apply-patch+yaml", "", applied)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Fatal(r.Err())
	}
	want[7] = "applied:3"
	harness.Check(t, api.Delete(ctx, v1+"/"+routeName(0)))
	want = want[2:]
	list, err := api.List(ctx, v1, "")
	harness.Check(t, err)
	harness.Check(t, d.wrong("v1", list.Items, want...))

	unread := hook.calls.Load()
	switch {
	case harness.Engine() == harness.Upstream:
		t.Logf("upstream called the webhook %d times for an unread version", unread)
	case unread != 0:
		t.Errorf("the webhook was called %d times with %d objects for an unread version, want 0", unread, hook.objects.Load())
	}

	for _, round := range []string{"first", "second"} {
		calls, objects := hook.calls.Load(), hook.objects.Load()
		converted, err := api.List(ctx, v2, "")
		harness.Check(t, err)
		harness.Check(t, d.wrong("v2", converted.Items, want...))
		calls, objects = hook.calls.Load()-calls, hook.objects.Load()-objects
		t.Logf("the %s list of v2 called the webhook %d times with %d objects", round, calls, objects)
		if round == "second" && calls != 0 {
			t.Errorf("the second list called the webhook %d times, want 0", calls)
		}
	}
	if hook.calls.Load() == 0 {
		t.Error("v2 was shown without a call of the webhook")
	}
	one, err := api.Get(ctx, v2+"/"+routeName(2), "")
	harness.Check(t, err)
	harness.Check(t, d.wrong("v2", []harness.Object{one}, routeName(2), "patched:2"))

	// The version, once read, follows writes through either version.
	w2 := harness.StartWatch(t, ctx, api, v2, "resourceVersion="+list.Metadata.ResourceVersion)
	harness.Check(t, d.create(ctx, n, n+1))
	_, err = api.Create(ctx, v2, object{"apiVersion": group + "/v2", "kind": d.kind(),
		"metadata": object{"name": routeName(n + 1)}, "data": object{"host": fmt.Sprintf("host-%d", n+1), "port": fmt.Sprint(8000 + n + 1)}})
	harness.Check(t, err)
	seen, err := added(ctx, w2, 2)
	harness.Check(t, err)
	harness.Check(t, d.wrong("v2", seen, numbered(n, n+2)...))
	want = append(want, numbered(n, n+2)...)
	for _, version := range []string{"v1", "v2"} {
		list, err := api.List(ctx, d.path(version), "")
		harness.Check(t, err)
		harness.Check(t, d.wrong(version, list.Items, want...))
	}
}
