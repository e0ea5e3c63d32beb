package webhooks

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// TestConversionWebhook_ReadsFromServer_Succeeds uses a webhook that, before each answer, gets a
// ConfigMap and lists the stored version of the very objects to convert.
func TestConversionWebhook_ReadsFromServer_Succeeds(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const n = 20
	var d routes // set before the first read of v2
	defined := make(chan struct{})
	hook := newWebhook(t, func(ctx context.Context) error {
		select {
		case <-defined:
		case <-ctx.Done():
			return context.Cause(ctx)
		}
		if _, err := api.Get(ctx, maps(d.namespace)+"/settings", ""); err != nil {
			return err
		}
		list, err := api.List(ctx, d.path("v1"), "")
		if err == nil && len(list.Items) < n {
			err = fmt.Errorf("the webhook sees %d objects, of at least %d", len(list.Items), n)
		}
		return err
	})
	d = newRoutes(t, ctx, "through", hook)
	_, err := api.Create(ctx, maps(d.namespace), object{"metadata": object{"name": "settings"}})
	harness.Check(t, err)
	harness.Check(t, d.create(ctx, 0, n))
	close(defined)

	// A server that waits for itself times out after 30 s: the bound is less.
	const bound = 25 * time.Second
	list := func(want ...string) *harness.List {
		t.Helper()
		ctx, cancel := context.WithTimeoutCause(ctx, bound, fmt.Errorf("no answer within %v", bound))
		defer cancel()
		list, err := api.List(ctx, d.path("v2"), "")
		harness.Check(t, err)
		harness.Check(t, d.wrong("v2", list.Items, want...))
		return list
	}
	before := list(numbered(0, n)...)
	w := harness.StartWatch(t, ctx, api, d.path("v2"), "resourceVersion="+before.Metadata.ResourceVersion)
	harness.Check(t, d.create(ctx, n, n+5))
	events, err := added(ctx, w, 5)
	harness.Check(t, err)
	harness.Check(t, d.wrong("v2", events, numbered(n, n+5)...))
	list(numbered(0, n+5)...)
}
