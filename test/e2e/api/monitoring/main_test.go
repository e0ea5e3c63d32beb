// Package monitoring compares the files of deploy/monitoring with the metrics of a running server:
// Prometheus rules with their unit tests, and the Grafana dashboard. It also tests that the server
// has the metrics of the rules that most clusters run, those of kubernetes-mixin.
//
// The tests with promtool and prometheus are skipped where these are not installed, or fail if
// STRATA_TEST_REQUIRE names prometheus.
package monitoring

import (
	"bytes"
	"context"
	"fmt"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	dto "github.com/prometheus/client_model/go"
	"github.com/prometheus/common/expfmt"
	"github.com/prometheus/common/model"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

const (
	testTimeout = 10 * time.Minute
	files       = "../../../../deploy/monitoring/"
)

var (
	env    *harness.Env
	server *harness.Server
)

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		env = e
		clients := e.Authority()
		server = e.APIServer(e.Etcd(), "--engine="+harness.Strata, "--client-ca-file="+clients.CertFile, "--disable-admission-plugins=ServiceAccount")
		if err := use(clients.Issue("client")); err != nil {
			fmt.Fprintln(os.Stderr, "requests before the tests:", err)
			os.Exit(1)
		}
	})
}

// use sends requests of every verb and scope, with a token and with a client certificate, and a
// request that its timeout ends. It returns when each has left a metric.
func use(certificate harness.Certificate) error {
	ctx, cancel := context.WithTimeout(context.Background(), testTimeout)
	defer cancel()
	api := server.API()
	const all, in = "/api/v1/configmaps", "/api/v1/namespaces/default/configmaps"
	object := map[string]any{"metadata": map[string]any{"name": "one"}}
	for _, r := range []struct {
		method, path, query string
		body                any
	}{
		{http.MethodPost, in, "", object},
		{http.MethodGet, in + "/one", "", nil},
		{http.MethodGet, in, "", nil},
		{http.MethodGet, all, "", nil},
		{http.MethodGet, all, "limit=1", nil},
		{http.MethodGet, in, "watch=true&resourceVersion=0&timeoutSeconds=1", nil},
		{http.MethodGet, all, "watch=true&resourceVersionMatch=NotOlderThan&sendInitialEvents=true&allowWatchBookmarks=true&timeoutSeconds=1", nil},
		{http.MethodPut, in + "/one", "", object},
		{http.MethodPatch, in + "/one", "", map[string]any{"data": map[string]any{"a": "b"}}},
		{http.MethodGet, "/api/v1/nodes", "", nil},
		{http.MethodDelete, in + "/one", "", nil},
		{http.MethodDelete, in, "", nil},
	} {
		contentType := ""
		if r.method == http.MethodPatch {
			contentType = "application/merge-patch+json"
		}
		answer, err := api.DoAs(ctx, r.method, r.path, r.query, contentType, "", r.body)
		for err == nil && answer.Refused() { // etcd has not confirmed the present state in time
			harness.Pause(ctx, time.Second)
			answer, err = api.DoAs(ctx, r.method, r.path, r.query, contentType, "", r.body)
		}
		if err != nil {
			return err
		}
		if answer.Code >= 300 {
			return fmt.Errorf("%s %s?%s: %w", r.method, r.path, r.query, answer.Err())
		}
	}
	if err := loseAPIService(ctx, api); err != nil {
		return err
	}
	if err := deliverEvent(ctx, api, in); err != nil {
		return err
	}
	withCertificate := server.APIFor(&rest.Config{Host: server.URL, TLSClientConfig: rest.TLSClientConfig{
		CAFile: server.CAFile, CertData: certificate.CertPEM, KeyData: certificate.KeyPEM,
	}})
	if _, err := withCertificate.Do(ctx, http.MethodGet, all, "", nil); err != nil {
		return err
	}
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		if _, err := api.Do(ctx, http.MethodPost, in, "timeout=1us", object); err != nil {
			return false, err
		}
		for _, metric := range []string{"apiserver_request_terminations_total", "aggregator_unavailable_apiservice_total",
			"apiserver_client_certificate_expiration_seconds_count", "strata_watches_ended_total", "strata_watch_delivery_seconds_count"} {
			switch n, err := api.Sum(ctx, metric); {
			case err != nil:
				return false, err
			case n == 0:
				return false, fmt.Errorf("%s has no sample", metric)
			}
		}
		return true, nil
	})
}

// deliverEvent creates an object while it is watched.
func deliverEvent(ctx context.Context, api *harness.API, path string) error {
	w, refused, err := api.Watch(ctx, path, "")
	for err == nil && refused != nil && refused.Refused() {
		harness.Pause(ctx, time.Second)
		w, refused, err = api.Watch(ctx, path, "")
	}
	if err != nil {
		return err
	}
	if refused != nil {
		return refused.Err()
	}
	defer w.Close()
	if _, err := api.Create(ctx, path, map[string]any{"metadata": map[string]any{"name": "watched"}}); err != nil {
		return err
	}
	for {
		if e, err := w.Next(ctx); err != nil || e.Object.Metadata.Name == "watched" {
			return err
		}
	}
}

// loseAPIService creates an APIService that is available, because this server serves it, and moves
// it to a service that does not exist.
func loseAPIService(ctx context.Context, api *harness.API) error {
	const all, one = "/apis/apiregistration.k8s.io/v1/apiservices", "/apis/apiregistration.k8s.io/v1/apiservices/v1.unavailable.example.com"
	spec := map[string]any{"group": "unavailable.example.com", "version": "v1", "groupPriorityMinimum": 10, "versionPriority": 10}
	if _, err := api.Create(ctx, all, map[string]any{"metadata": map[string]any{"name": "v1.unavailable.example.com"}, "spec": spec}); err != nil {
		return err
	}
	err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, one, "", nil)
		return err == nil && bytes.Contains(r.Body, []byte(`"type":"Available"`)), err
	})
	if err != nil {
		return err
	}
	_, err = api.Patch(ctx, one, `{"spec":{"insecureSkipTLSVerify":true,"service":{"namespace":"default","name":"unavailable"}}}`)
	return err
}

// metrics are the metric families of /metrics by name.
type metrics map[string]*dto.MetricFamily

// scrape reads the server's metrics, and returns them with their text.
func scrape(t *testing.T) (metrics, []byte) {
	t.Helper()
	r, err := server.API().DoAs(harness.Context(t, testTimeout), http.MethodGet, "/metrics", "", "", "text/plain", nil)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Fatal(r.Err())
	}
	parser := expfmt.NewTextParser(model.LegacyValidation)
	families, err := parser.TextToMetricFamilies(bytes.NewReader(r.Body))
	harness.Check(t, err)
	return families, r.Body
}

// family returns the metric that has the series, which may be the buckets, the sum or the count of
// a histogram; nil if there is none.
func (m metrics) family(series string) *dto.MetricFamily {
	if f := m[series]; f != nil {
		return f
	}
	for _, suffix := range []string{"_bucket", "_sum", "_count"} {
		if name, ok := strings.CutSuffix(series, suffix); ok && m[name].GetType() == dto.MetricType_HISTOGRAM {
			return m[name]
		}
	}
	return nil
}

// labels returns the values of each label of a series.
func (m metrics) labels(series string) map[string]map[string]bool {
	values := map[string]map[string]bool{}
	add := func(label, value string) {
		if values[label] == nil {
			values[label] = map[string]bool{}
		}
		values[label][value] = true
	}
	for _, sample := range m.family(series).GetMetric() {
		for _, pair := range sample.GetLabel() {
			add(pair.GetName(), pair.GetValue())
		}
		if strings.HasSuffix(series, "_bucket") {
			for _, bucket := range sample.GetHistogram().GetBucket() {
				add("le", fmt.Sprint(bucket.GetUpperBound()))
			}
		}
	}
	return values
}
