package overload

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"github.com/stratakube/strata/test/harness"
)

const (
	narrowLevel = "narrow"
	narrowHand  = 4              // handSize of the level
	narrowLimit = 5 * narrowHand // requests that the queues of a flow hold
)

// narrow creates a priority level with few seats for the service accounts greedy and modest, and
// returns its number of seats when the server has adopted it.
func (s *scene) narrow(t *testing.T, ctx context.Context) (seats int) {
	t.Helper()
	const flowcontrol = "/apis/flowcontrol.apiserver.k8s.io/v1"
	level, err := s.api.Create(ctx, flowcontrol+"/prioritylevelconfigurations", map[string]any{
		"metadata": map[string]any{"name": narrowLevel},
		"spec": map[string]any{"type": "Limited", "limited": map[string]any{
			"nominalConcurrencyShares": 1, "lendablePercent": 0, "borrowingLimitPercent": 0,
			"limitResponse": map[string]any{"type": "Queue", "queuing": map[string]any{"queues": 16, "handSize": narrowHand, "queueLengthLimit": narrowLimit / narrowHand}},
		}},
	})
	harness.Check(t, err)
	var subjects []any
	for _, account := range []string{"greedy", "modest"} {
		subjects = append(subjects, map[string]any{"kind": "User", "user": map[string]any{"name": "system:serviceaccount:default:" + account}})
	}
	_, err = s.api.Create(ctx, flowcontrol+"/flowschemas", map[string]any{
		"metadata": map[string]any{"name": narrowLevel},
		"spec": map[string]any{
			"priorityLevelConfiguration": map[string]any{"name": narrowLevel}, "matchingPrecedence": 500,
			"distinguisherMethod": map[string]any{"type": "ByUser"},
			"rules": []any{map[string]any{"subjects": subjects, "resourceRules": []any{map[string]any{
				"verbs": []any{"*"}, "apiGroups": []any{"*"}, "resources": []any{"*"}, "namespaces": []any{"*"}, "clusterScope": true}}}},
		},
	})
	harness.Check(t, err)
	for _, token := range []string{greedyToken, modestToken} {
		api := s.server.APIFor(s.server.ConfigFor(token))
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, mapPath, "", nil)
			if err != nil {
				return false, err
			}
			return r.Header.Get("X-Kubernetes-Pf-Prioritylevel-Uid") == string(level.Metadata.UID), r.Err()
		}))
	}
	limit, err := s.level(ctx, "apiserver_flowcontrol_current_limit_seats")
	harness.Check(t, err)
	if limit < 1 {
		t.Fatalf("the level has %v seats", limit)
	}
	return int(limit)
}

// mapPath is the path of an object.
const mapPath = "/api/v1/namespaces/default/configmaps/map-000000"

// level returns a metric of the narrow level.
func (s *scene) level(ctx context.Context, metric string) (float64, error) {
	return s.api.Sum(ctx, metric, fmt.Sprintf("priority_level=%q", narrowLevel))
}

// await polls until a metric of the narrow level has the value.
func (s *scene) await(t *testing.T, ctx context.Context, metric string, want float64) {
	t.Helper()
	if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := s.level(ctx, metric)
		return err == nil && got == want, errors.Join(err, fmt.Errorf("%s is %v, want %v", metric, got, want))
	}); err != nil {
		t.Fatal(err)
	}
}

// occupy sends a request of the greedy account that occupies a seat until release is closed,
// because its body does not arrive.
func (s *scene) occupy(ctx context.Context, name string, release <-chan struct{}) error {
	c, err := s.client(options{token: greedyToken})
	if err != nil {
		return err
	}
	defer c.close()
	body, writer := io.Pipe()
	go func() {
		select {
		case <-release:
		case <-ctx.Done():
		}
		_, err := fmt.Fprintf(writer, `{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q}}`, name)
		writer.CloseWithError(err)
	}()
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.server.URL+"/api/v1/namespaces/default/configmaps", body)
	if err != nil {
		return err
	}
	request.Header.Set("Authorization", "Bearer "+greedyToken)
	request.Header.Set("Content-Type", jsonType)
	response, err := c.http.Do(request)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	if response.StatusCode != http.StatusCreated {
		return fmt.Errorf("a request with a seat was answered with %s", response.Status)
	}
	return nil
}

// refusals counts the answers with 429 and Retry-After that a client receives.
type refusals struct {
	http.RoundTripper
	received atomic.Int64
}

func (r *refusals) RoundTrip(request *http.Request) (*http.Response, error) {
	response, err := r.RoundTripper.RoundTrip(request)
	if err == nil && response.StatusCode == http.StatusTooManyRequests && response.Header.Get("Retry-After") != "" {
		r.received.Add(1)
	}
	return response, err
}

// TestOverloadedFlow_IsRefused_OthersAreServed runs an account that overloads its priority level,
// beside others, and then an informer whose lists are audited.
func TestOverloadedFlow_IsRefused_OthersAreServed(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, 4*time.Minute)
	flags := append(auditLists(t), "--request-timeout=5m") // a request may be queued for a minute
	strata := harness.Engine() == harness.Strata
	if strata {
		flags = append(flags, "--strata-list-bytes-in-flight=16Mi")
	}
	s := newScene(t, ctx, 20_000, 0, flags...)
	if strata {
		t.Run("overloaded flow", func(t *testing.T) { s.refuseOverloaded(t, ctx) })
	}
	t.Run("audited list above the limit", func(t *testing.T) { s.serveAudited(t, ctx) })
}

// refuseOverloaded: an account occupies all seats of its priority level, and has as many requests
// queued as a queue of the level holds, for more than a second. Its next request is refused with
// 429 and Retry-After, which client-go retries until it is served. An account at the same level is
// queued; one at another level is served.
func (s *scene) refuseOverloaded(t *testing.T, ctx context.Context) {
	seats := s.narrow(t, ctx)
	get := func(token string) (*harness.Response, error) {
		return s.server.APIFor(s.server.ConfigFor(token)).Do(ctx, http.MethodGet, mapPath, "", nil)
	}
	served := func(token string) func() error {
		return func() error {
			r, err := get(token)
			if err == nil && r.Code != http.StatusOK {
				err = fmt.Errorf("%s was refused: %w", token, r.Err())
			}
			return err
		}
	}

	var requests errgroup.Group
	release := make(chan struct{})
	for i := range seats {
		requests.Go(func() error { return s.occupy(ctx, fmt.Sprint("occupied-", i), release) })
	}
	s.await(t, ctx, "apiserver_flowcontrol_current_executing_seats", float64(seats))
	for range narrowLimit {
		requests.Go(served(greedyToken))
	}
	s.await(t, ctx, "strata_flows_overloaded", 1)

	refused, err := get(greedyToken)
	harness.Check(t, err)
	if refused.Code != http.StatusTooManyRequests || refused.Header.Get("Retry-After") == "" {
		t.Errorf("a request of the overloaded flow: %v with Retry-After %q, want 429 with Retry-After", refused.Err(), refused.Header.Get("Retry-After"))
	}
	if n, err := s.level(ctx, "strata_requests_refused_total"); err != nil || n != 1 {
		t.Errorf("%v requests were refused (%v), want 1", n, err)
	}
	if err := served(nodeToken)(); err != nil {
		t.Errorf("another priority level: %v", err)
	}
	requests.Go(served(modestToken))
	s.await(t, ctx, "apiserver_flowcontrol_current_inqueue_requests", narrowLimit+1)

	config := s.server.ConfigFor(greedyToken)
	counted := &refusals{}
	config.Wrap(func(inner http.RoundTripper) http.RoundTripper {
		counted.RoundTripper = inner
		return counted
	})
	client, err := kubernetes.NewForConfig(config)
	harness.Check(t, err)
	requests.Go(func() error {
		_, err := client.CoreV1().ConfigMaps("default").Get(ctx, "map-000000", metav1.GetOptions{})
		if err != nil {
			return fmt.Errorf("client-go, refused %d times: %w", counted.received.Load(), err)
		}
		return nil
	})
	// With two flows, each may have half of the limit queued; the greedy one has more.
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		return counted.received.Load() > 0, errors.New("client-go's request was not refused")
	}))

	close(release)
	if err := requests.Wait(); err != nil {
		t.Error(err)
	}
	if n, err := s.level(ctx, "strata_flows_overloaded"); err != nil || n != 0 {
		t.Errorf("%v flows are overloaded afterwards (%v)", n, err)
	}
}
