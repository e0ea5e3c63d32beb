package replica

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"
	"time"

	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// auditedAt returns the audit event of a request at the primary, when it is complete.
func (s *scene) auditedAt(ctx context.Context, t *testing.T, id string) (found auditv1.Event) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		for line := range strings.Lines(readFile(t, s.auditLog)) {
			var event auditv1.Event
			if strings.Contains(line, id) && json.Unmarshal([]byte(line), &event) == nil && string(event.AuditID) == id && event.Stage == auditv1.StageResponseComplete {
				found = event
				return true, nil
			}
		}
		return false, errors.New("no audit event at the primary")
	}))
	return found
}

// TestReplica_ProxiedRequest_HasCallersIdentity: the primary authorizes and audits the user of the
// caller, not the replica's; headers with which a client claims another user have no effect.
func TestReplica_ProxiedRequest_HasCallersIdentity(t *testing.T) {
	t.Parallel()
	ctx, s := open(t)
	configMaps := s.maps(ctx, t)
	for _, c := range []struct {
		name, token  string
		header       http.Header
		code         int
		user         string
		groups       []string
		impersonated string
	}{
		{name: "user without rights", token: "reader-token", code: 403, user: "reader", groups: []string{"others", "readers", "system:authenticated"}},
		{name: "administrator", token: "admin-token", code: 201, user: "admin", groups: []string{"system:authenticated", "system:masters"}},
		{name: "claimed headers", token: "nothing-token", code: 403, user: "nothing", groups: []string{"system:authenticated"},
			header: http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}, "X-Remote-Extra-Scopes": {"all"}}},
		{name: "claimed headers without a token", code: 403, user: "system:anonymous", groups: []string{"system:unauthenticated"},
			header: http.Header{"X-Remote-User": {"admin"}, "X-Remote-Group": {"system:masters"}}},
		{name: "impersonation by the administrator", token: "admin-token", code: 403, user: "admin", groups: []string{"system:authenticated", "system:masters"},
			header: http.Header{"Impersonate-User": {"somebody"}}, impersonated: "somebody"},
		{name: "impersonation without the right", token: "reader-token", code: 403, user: "reader", groups: []string{"others", "readers", "system:authenticated"},
			header: http.Header{"Impersonate-User": {"admin"}, "Impersonate-Group": {"system:masters"}}},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := harness.NewName(strings.ReplaceAll(c.name, " ", "-"))
			header := c.header.Clone()
			if header == nil {
				header = http.Header{}
			}
			header.Set("Audit-Id", id)
			code, body := s.post(ctx, t, c.token, header, configMaps, fmt.Sprintf(`{"metadata":{"name":%q}}`, id))
			if code != c.code {
				t.Fatalf("code %d, want %d: %s", code, c.code, body)
			}
			event := s.auditedAt(ctx, t, id)
			slices.Sort(event.User.Groups)
			if event.User.Username != c.user || !slices.Equal(event.User.Groups, c.groups) {
				t.Errorf("audited as of user %q in groups %v, want %q in %v", event.User.Username, event.User.Groups, c.user, c.groups)
			}
			if len(event.User.Extra["scopes"]) > 0 {
				t.Errorf("audited with claimed extra fields %v", event.User.Extra)
			}
			if c.user == "reader" && event.User.UID != "reader-uid" {
				t.Errorf("audited with UID %q, want reader-uid", event.User.UID)
			}
			got := ""
			if event.ImpersonatedUser != nil {
				got = event.ImpersonatedUser.Username
			}
			if got != c.impersonated {
				t.Errorf("audited with impersonated user %q, want %q", got, c.impersonated)
			}
		})
	}
	t.Run("unknown token", func(t *testing.T) {
		if code, body := s.post(ctx, t, "unknown", http.Header{}, configMaps, `{}`); code != http.StatusUnauthorized {
			t.Errorf("code %d, want 401: %s", code, body)
		}
	})
}

// post sends a write to the replica with any headers.
func (s *scene) post(ctx context.Context, t *testing.T, token string, header http.Header, path, body string) (code int, text string) {
	t.Helper()
	config := s.replica.ConfigFor(token)
	config.WrapTransport = func(next http.RoundTripper) http.RoundTripper {
		return roundTripper(func(req *http.Request) (*http.Response, error) {
			req = req.Clone(req.Context())
			for name, values := range header {
				req.Header[name] = values
			}
			return next.RoundTrip(req)
		})
	}
	api := s.replica.APIFor(rest.CopyConfig(config))
	r, err := api.Do(ctx, http.MethodPost, path, "", body)
	for harness.Check(t, err); r.NotSent(); harness.Check(t, err) {
		harness.Pause(ctx, time.Second)
		r, err = api.Do(ctx, http.MethodPost, path, "", body)
	}
	return r.Code, string(r.Body)
}

type roundTripper func(*http.Request) (*http.Response, error)

func (f roundTripper) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
