package replica

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// TestReplica_CertificateIsThatOfAClient_IsNotReady: the primary accepts the certificate, but not as that of a front proxy, so that it would take its
// user, not that of the headers.
func TestReplica_CertificateIsThatOfAClient_IsNotReady(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	authority, _ := strings.CutPrefix(front.TrustFlags()[0], "--requestheader-client-ca-file=")
	primary := e.APIServer(etcd, "--client-ca-file="+authority)
	replica := e.StartReplica(etcd, front, []*harness.Server{primary})
	api := replica.API()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, "/readyz?verbose", "", nil)
		if err != nil {
			return false, err
		}
		body := string(r.Body)
		return r.Code == http.StatusInternalServerError && strings.Contains(body, "[-]replica-identity failed") && strings.Contains(body, "[+]replica-lag ok"),
			fmt.Errorf("/readyz: %d %s", r.Code, body)
	}))
	r, err := api.Do(ctx, http.MethodPost, configMaps, "", configMap("refused", nil))
	harness.Check(t, err)
	if r.Code != http.StatusServiceUnavailable || !strings.Contains(string(r.Body), "does not accept the front-proxy certificate") {
		t.Errorf("a write is answered with %d, want 503 with the reason: %s", r.Code, r.Body)
	}
	if sent, err := api.Sum(ctx, "strata_replica_proxy_requests_total"); err != nil || sent != 0 {
		t.Errorf("%v requests were sent to the primary, %v, want none", sent, err)
	}
	if log := replica.Output(); !strings.Contains(log, "takes another user than that of the headers") {
		t.Errorf("the log does not name the reason:\n%s", log)
	}
}

// TestReplica_PrimaryIsStopped_RequestInFlightEnds: a process that is stopped (SIGSTOP) closes no connection. A write in flight to it ends with 502 after
// about 10 s, and later ones succeed when it continues.
func TestReplica_PrimaryIsStopped_RequestInFlightEnds(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, front.TrustFlags()...)
	replica := e.Replica(etcd, front, []*harness.Server{primary})
	api := replica.API()
	_, err := api.Create(ctx, configMaps, configMap("before", nil))
	harness.Check(t, err)
	harness.Check(t, primary.Signal(syscall.SIGSTOP))
	began := time.Now()
	r, err := api.Do(ctx, http.MethodPost, configMaps, "", configMap("stopped", nil))
	took := time.Since(began)
	harness.Check(t, primary.Signal(syscall.SIGCONT))
	harness.Check(t, err)
	t.Logf("the write in flight was answered with %d after %v", r.Code, took)
	if r.Code != http.StatusBadGateway || took > 30*time.Second {
		t.Errorf("the write in flight was answered with %d after %v, want 502 after about 10 s: %s", r.Code, took, r.Body)
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodPost, configMaps, "", configMap("after", nil))
		return err == nil && r.Code == http.StatusCreated, fmt.Errorf("a write after the primary continues: %v, %w", r, err)
	}))
}
