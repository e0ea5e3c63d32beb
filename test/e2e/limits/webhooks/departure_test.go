package webhooks

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// stillHangs fails the test unless the webhook has been called once, and has not answered: the
// requests before it did not wait for it.
func stillHangs(t *testing.T, ctx context.Context, hook *webhook, before string) {
	t.Helper()
	// calls are counted first
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return hook.held.Load() > 0, errors.New("the webhook was not called")
	}))
	if calls, held := hook.calls.Load(), hook.held.Load(); calls != 1 || held != 1 {
		t.Fatalf("after %s the webhook has %d calls, of which %d are unanswered, want 1 and 1", before, calls, held)
	}
}

// awaitCall returns when the webhook has been called.
func awaitCall(t *testing.T, ctx context.Context, hook *webhook) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return hook.calls.Load() > 0, errors.New("the webhook was not called")
	}))
}

// asReader returns a client of a user with all rights whose priority level is not exempt, and the
// label of that level in metrics.
func asReader(t *testing.T, ctx context.Context, s *harness.Server, name string) (client *harness.API, level string) {
	t.Helper()
	_, err := s.API().Create(ctx, "/apis/rbac.authorization.k8s.io/v1/clusterrolebindings", object{
		"metadata": object{"name": name},
		"roleRef":  object{"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "cluster-admin"},
		"subjects": []any{object{"apiGroup": "rbac.authorization.k8s.io", "kind": "User", "name": name}},
	})
	harness.Check(t, err)
	config := rest.CopyConfig(s.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: name, Groups: []string{"system:authenticated"}}
	return s.APIFor(config), `priority_level="global-default"`
}

// TestConversionWebhook_Hanging_RequestsEndWithDeadlinesAndClients reads a version whose webhook
// does not answer: requests with a timeout get a 504, watches end, requests of clients that leave
// give up their seats, and all of them together have called the webhook once.
func TestConversionWebhook_Hanging_RequestsEndWithDeadlinesAndClients(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const n = 6
	var g gate
	g.close()
	t.Cleanup(g.open)
	hook := newWebhook(t, g.pass)
	d := newRoutes(t, ctx, "departure", hook)
	v2 := d.path("v2")
	harness.Check(t, d.create(ctx, 0, n))
	reader, level := asReader(t, ctx, server, "departing")
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		// until the right is effective
		r, err := reader.Do(ctx, http.MethodGet, d.path("v1"), "", nil)
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusOK, r.Err()
	}))
	hanging, cancel := context.WithTimeoutCause(ctx, hangBound, fmt.Errorf("the requests together took more than %v", hangBound))
	defer cancel()

	// All begin at the same time, because the server gives up the first call after 30 s.
	requests := []struct{ path, query string }{
		// Without a revision etcd may answer, with a call of its own: the last request.
		{v2 + "/" + routeName(0), "timeout=2s&resourceVersion=0"},
		{v2, "timeout=2s"},
		{v2, "timeout=2s&labelSelector=no!%3Dlabel"},
		{v2, "timeout=2s&resourceVersion=0"},
	}
	answers := make(chan error, len(requests))
	for _, request := range requests {
		go func() {
			answers <- timesOut(hanging, reader, request.path, request.query)
		}()
	}
	watches := []*harness.Watch{
		harness.StartWatch(t, hanging, api, v2, "timeoutSeconds=2"),
		harness.StartWatch(t, hanging, api, v2, "timeoutSeconds=2&labelSelector=no!%3Dlabel"),
	}
	for range requests {
		harness.Check(t, <-answers)
	}
	for _, w := range watches {
		if e, err := w.Next(hanging); !errors.Is(err, harness.ErrEnded) {
			t.Errorf("a watch had the event %+v, and %v, want its end", e, err)
		}
	}
	stillHangs(t, hanging, hook, "requests with a timeout")

	seats := func(ctx context.Context) (float64, error) {
		return api.Sum(ctx, "apiserver_flowcontrol_current_executing_seats", level)
	}
	const clients = 5
	leaving, leave := context.WithCancel(hanging)
	defer leave()
	for range clients {
		// it has no answer
		go reader.Do(leaving, http.MethodGet, v2, "labelSelector=no!%3Dlabel", nil)
	}
	harness.Check(t, harness.Poll(hanging, func(ctx context.Context) (bool, error) {
		n, err := seats(ctx)
		return n >= clients, errors.Join(err, fmt.Errorf("%v seats are taken, of %d requests", n, clients))
	}))
	leave()
	harness.Check(t, harness.Poll(hanging, func(ctx context.Context) (bool, error) {
		n, err := seats(ctx)
		return n == 0, errors.Join(err, fmt.Errorf("%v seats are taken after the clients have left", n))
	}))
	stillHangs(t, hanging, hook, "requests of clients that have left")

	lists := make(chan error, clients)
	for range clients {
		go func() {
			list, err := reader.List(ctx, v2, "labelSelector=no!%3Dlabel")
			if err == nil {
				err = d.wrong("v2", list.Items, numbered(0, n)...)
			}
			lists <- err
		}()
	}
	harness.Check(t, harness.Poll(hanging, func(ctx context.Context) (bool, error) {
		n, err := seats(ctx)
		return n >= clients, errors.Join(err, fmt.Errorf("%v seats are taken, of %d requests", n, clients))
	}))
	g.open()
	for range clients {
		harness.Check(t, <-lists)
	}
	if calls, objects := hook.calls.Load(), hook.objects.Load(); calls != n || objects != n {
		t.Errorf("the webhook was called %d times with %d objects, want once for each of %d", calls, objects, n)
	}

	g.close()
	harness.Check(t, d.create(ctx, n, n+1))
	harness.Check(t, timesOut(ctx, reader, v2+"/"+routeName(n), "timeout=2s"))
}

// timesOut returns an error unless a GET is answered with 504, as upstream's timeout filter writes
// it.
func timesOut(ctx context.Context, client *harness.API, path, query string) error {
	r, err := client.Do(ctx, http.MethodGet, path, query, nil)
	for err == nil && r.Refused() { // etcd did not confirm its state in that time
		r, err = client.Do(ctx, http.MethodGet, path, query, nil)
	}
	if err != nil {
		return err
	}
	var status metav1.Status // without a kind
	if err := json.Unmarshal(r.Body, &status); err != nil {
		return err
	}
	want := "Timeout: request did not complete within the allotted timeout"
	if r.Code != http.StatusGatewayTimeout || status.Reason != metav1.StatusReasonTimeout || status.Message != want {
		return fmt.Errorf("got %w, want 504 %q", r.Err(), want)
	}
	return nil
}

// TestConversionWebhook_Hanging_ServerStops stops a server on which a list, whose client has left,
// and a watch wait for a webhook.
func TestConversionWebhook_Hanging_ServerStops(t *testing.T) {
	ctx := harness.Context(t, testTimeout+time.Minute)
	var g gate
	g.close()
	t.Cleanup(g.open)
	hook := newWebhook(t, g.pass)
	d := newRoutes(t, ctx, "stop", hook)
	v2 := d.path("v2")
	harness.Check(t, d.create(ctx, 0, 6))
	stopped := harness.New(t).APIServer(etcd, withoutAccounts)
	client := stopped.API()
	leaving, leave := context.WithCancel(ctx)
	defer leave()
	go client.Do(leaving, http.MethodGet, v2, "labelSelector=no!%3Dlabel", nil) // it has no answer
	awaitCall(t, ctx, hook)
	harness.StartWatch(t, ctx, client, v2, "")
	leave()
	if err := stopped.Stop(); err != nil {
		t.Errorf("the server did not stop: %v", err)
	}
	if calls := hook.calls.Load(); calls != 1 {
		t.Errorf("the webhook was called %d times, want 1: the server waited for its answer", calls)
	}
}
