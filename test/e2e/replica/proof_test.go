package replica

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// TestReplica_CertificateIsThatOfAClient_IsNotReady: the primary accepts the certificate, but not
// as that of a front proxy, so that it would take its user, not that of the headers.
func TestReplica_CertificateIsThatOfAClient_IsNotReady(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	replica := env.StartReplica(s.readOnly, s.clients, []*harness.Server{s.primary}, s.flags...)
	endWith(t, replica)
	api := replica.API()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodGet, "/readyz?verbose", "", nil)
		if err != nil {
			return false, err
		}
		body := string(r.Body)
		// A server that is stopped before it has read the definitions ends with upstream's error.
		return r.Code == http.StatusInternalServerError && strings.Contains(body, "[-]replica-identity failed") &&
				strings.Contains(body, "[+]replica-lag ok") && strings.Contains(body, "[+]poststarthook/crd-informer-synced ok"),
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
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		log := replica.Output()
		return strings.Contains(log, "takes another user than that of the headers"), fmt.Errorf("the log does not name the reason:\n%s", log)
	}))
}
