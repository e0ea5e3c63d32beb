package webhooks

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	// requestBound bounds a request that does not depend on the hanging webhook. It is far above
	// the latency on a busy machine, and below that of a request that waits for the webhook.
	requestBound = 15 * time.Second

	// hangBound is less than the 30 s after which the server cancels a webhook call.
	hangBound = 25 * time.Second
	// hangWithin is the time in which requests begin while the webhook hangs: those that have begun
	// and the events of a watch have the rest of hangBound.
	hangWithin = 12 * time.Second
)

// load are requests that do not concern v2 of some routes.
type load struct {
	routes routes
	next   int // number of the next route and ConfigMap to create
}

// run sends n requests of each kind, each within requestBound, and returns a line with their 99th
// percentiles. On a slow machine it begins no more of them after the time within.
func (l *load) run(ctx context.Context, n int, within time.Duration) (string, error) {
	namespaceMaps, v1, began := maps(l.routes.namespace), l.routes.path("v1"), time.Now()
	first := l.next
	kinds := []struct {
		name string
		do   func(ctx context.Context, i int) error
	}{
		{"create map", func(ctx context.Context, i int) error {
			_, err := api.Create(ctx, namespaceMaps, object{"metadata": object{"name": fmt.Sprintf("map-%04d", i)}})
			return err
		}},
		{"get map", func(ctx context.Context, i int) error {
			_, err := api.Get(ctx, fmt.Sprintf("%s/map-%04d", namespaceMaps, i), "")
			return err
		}},
		{"list maps", func(ctx context.Context, i int) error {
			_, err := api.List(ctx, namespaceMaps, "")
			return err
		}},
		{"create v1", func(ctx context.Context, i int) error { return l.routes.create(ctx, i, i+1) }},
		{"get v1", func(ctx context.Context, i int) error {
			_, err := api.Get(ctx, v1+"/"+routeName(i), "")
			return err
		}},
		{"list v1", func(ctx context.Context, i int) error {
			list, err := api.List(ctx, v1, "")
			if err != nil {
				return err
			}
			return l.routes.wrong("v1", list.Items, numbered(0, i+1)...)
		}},
	}
	took := make([][]time.Duration, len(kinds))
	for i := first; i < first+n && time.Since(began) < within; i++ {
		l.next++
		for k, kind := range kinds {
			start := time.Now()
			err := func() error {
				ctx, cancel := context.WithTimeoutCause(ctx, requestBound, fmt.Errorf("no answer within %v", requestBound))
				defer cancel()
				return kind.do(ctx, i)
			}()
			if err != nil {
				return "", fmt.Errorf("%s, number %d: %w", kind.name, i, err)
			}
			took[k] = append(took[k], time.Since(start))
		}
	}
	line := "p99:"
	for k, kind := range kinds {
		slices.SortFunc(took[k], cmp.Compare[time.Duration])
		line += fmt.Sprintf(" %s %v,", kind.name, took[k][(len(took[k])*99+99)/100-1].Round(10*time.Microsecond))
	}
	return line[:len(line)-1], nil
}

// TestConversionWebhook_Hanging_OtherRequestsAreServed reads a version whose webhook does not
// answer, concurrently with all other requests.
func TestConversionWebhook_Hanging_OtherRequestsAreServed(t *testing.T) {
	for _, tc := range []struct {
		name string
		warm bool // v2 is read before the webhook hangs
	}{
		{name: "cold"},
		{name: "warm", warm: true},
	} {
		t.Run(tc.name, func(t *testing.T) {
			ctx := harness.Context(t, testTimeout)
			var g gate
			hook := newWebhook(t, g.pass)
			t.Cleanup(g.open)
			d := newRoutes(t, ctx, "hang"+tc.name, hook)
			testHang(t, ctx, d, hook, &g, tc.warm)
		})
	}
}

func testHang(t *testing.T, ctx context.Context, d routes, hook *webhook, g *gate, warm bool) {
	n := harness.Pick(30, 100)
	v1, v2 := d.path("v1"), d.path("v2")
	l := &load{routes: d}
	before, err := l.run(ctx, n, testTimeout)
	harness.Check(t, err)

	var early *harness.Watch // of v2, from before the hang
	list, err := api.List(ctx, v1, "")
	harness.Check(t, err)
	if warm {
		list, err = api.List(ctx, v2, "")
		harness.Check(t, err)
		harness.Check(t, d.wrong("v2", list.Items, numbered(0, n)...))
		early = harness.StartWatch(t, ctx, api, v2, "resourceVersion="+list.Metadata.ResourceVersion)
	}
	w1 := harness.StartWatch(t, ctx, api, v1, "resourceVersion="+list.Metadata.ResourceVersion)

	g.close()
	// an unconverted object, as earlier ones may be cached
	harness.Check(t, d.create(ctx, l.next, l.next+1))
	l.next++
	// Readers of v2 now wait, or are asked to retry.
	readers, stop := context.WithCancel(ctx)
	defer stop()
	type result struct {
		what string
		err  error
	}
	const lists = 4
	results := make(chan result, lists+1)
	for i := range lists {
		query := []string{"", "resourceVersion=0"}[i%2]
		go func() {
			list, err := api.List(readers, v2, query)
			if err == nil && query == "" && len(list.Items) < n {
				err = fmt.Errorf("it has %d objects, of at least %d", len(list.Items), n)
			}
			results <- result{fmt.Sprintf("list %q", query), err}
		}()
	}
	go func() {
		w, refused, err := api.Watch(readers, v2, "")
		for err == nil && refused != nil && refused.Refused() { // as clients do
			harness.Pause(readers, time.Second)
			w, refused, err = api.Watch(readers, v2, "")
		}
		if refused != nil {
			err = refused.Err()
		}
		if err == nil {
			defer w.Close()
			_, err = added(readers, w, n)
		}
		results <- result{"watch", err}
	}()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return hook.held.Load() > 0, errors.New("the webhook was not called")
	}))
	hanging, cancel := context.WithTimeoutCause(ctx, hangBound, fmt.Errorf("the requests together took more than %v", hangBound))
	defer cancel()
	hangs := time.Now()
	during, err := l.run(hanging, n, hangWithin)
	harness.Check(t, err)
	_, err = added(hanging, w1, l.next-n)
	harness.Check(t, err)
	if hook.held.Load() == 0 {
		t.Error("the webhook did not hang all the time")
	}
	t.Logf("before %s", before)
	t.Logf("during %s; it hung %v, with %d calls", during, time.Since(hangs).Round(time.Millisecond), hook.held.Load())

	g.open()
	for range lists + 1 {
		select {
		case r := <-results:
			if r.err != nil {
				t.Errorf("%s of v2 that began while the webhook hung: %v", r.what, r.err)
			}
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
	}
	want := numbered(0, l.next)
	after, err := api.List(ctx, v2, "")
	harness.Check(t, err)
	harness.Check(t, d.wrong("v2", after.Items, want...))
	fresh, err := added(ctx, harness.StartWatch(t, ctx, api, v2, "resourceVersion=0"), l.next)
	harness.Check(t, err)
	slices.SortFunc(fresh, func(a, b harness.Object) int { return cmp.Compare(a.Metadata.Name, b.Metadata.Name) })
	harness.Check(t, d.wrong("v2", fresh, want...))
	if early != nil {
		events, err := added(ctx, early, l.next-n)
		harness.Check(t, err)
		harness.Check(t, d.wrong("v2", events, numbered(n, l.next)...))
	}
}
