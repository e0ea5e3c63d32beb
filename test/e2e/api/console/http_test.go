package console

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// anonymous is a client without credentials.
var anonymous = &http.Client{
	Transport:     &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
	CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse },
}

type answer struct {
	code   int
	header http.Header
	body   []byte
}

// send sends a request with a bearer token, "" for none.
func send(t *testing.T, ctx context.Context, method, target, token, body string, header ...string) answer {
	t.Helper()
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	r := harness.Must[*http.Request](t)(http.NewRequestWithContext(ctx, method, cluster.URL+target, strings.NewReader(body)))
	if token != "" {
		r.Header.Set("Authorization", "Bearer "+token)
	}
	if body != "" {
		r.Header.Set("Content-Type", "application/json")
	}
	for i := 0; i < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	resp := harness.Must[*http.Response](t)(anonymous.Do(r))
	defer resp.Body.Close()
	data := harness.Must[[]byte](t)(io.ReadAll(resp.Body))
	return answer{resp.StatusCode, resp.Header, data}
}

var inLink = regexp.MustCompile(`#token=([A-Za-z0-9_-]{43})`)

// linkToken returns the token of a link that the administrator requests.
func linkToken(t *testing.T, ctx context.Context) string {
	t.Helper()
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	r := harness.Must[*harness.Response](t)(cluster.API().Do(ctx, http.MethodPost, "/debug/strata/console/link", "", nil))
	found := inLink.FindSubmatch(r.Body)
	if r.Code != http.StatusOK || found == nil {
		t.Fatalf("%d: %s", r.Code, r.Body)
	}
	return string(found[1])
}

// begin returns the token of a session.
func begin(t *testing.T, ctx context.Context) string {
	t.Helper()
	a := send(t, ctx, http.MethodPost, "/debug/strata/console/session", "", `{"token":"`+linkToken(t, ctx)+`"}`)
	var session struct{ Token string }
	if err := json.Unmarshal(a.body, &session); err != nil || a.code != http.StatusOK || session.Token == "" {
		t.Fatalf("%d, %v: %s", a.code, err, a.body)
	}
	if len(a.header.Values("Set-Cookie")) > 0 || a.header.Get("Cache-Control") != "no-store" {
		t.Errorf("the answer has headers %v", a.header)
	}
	return session.Token
}

func TestPage_WithoutCredentials_HasFilesAndNoData(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	for _, path := range []string{"/", "/main.js", "/console.css", "/uplot/uPlot.esm.js"} {
		a := send(t, ctx, http.MethodGet, "/debug/strata/console"+path, "", "")
		if a.code != http.StatusOK || !strings.Contains(a.header.Get("Content-Security-Policy"), "default-src 'none'") {
			t.Errorf("%s: %d, %v", path, a.code, a.header)
		}
	}
	for path, want := range map[string]int{
		"/debug/strata/status":          http.StatusUnauthorized,
		"/debug/strata/consistency":     http.StatusUnauthorized,
		"/api/v1/pods":                  http.StatusUnauthorized,
		"/apis":                         http.StatusUnauthorized,
		"/version":                      http.StatusUnauthorized,
		"/debug/strata/consoles/":       http.StatusUnauthorized,
		"/debug/strata/console/link":    http.StatusUnauthorized,
		"/debug/strata/console/session": http.StatusMethodNotAllowed,
		// the prefix is that of the console, and it has no such file
		"/debug/strata/console/../status":  http.StatusNotFound,
		"/debug/strata/console/none":       http.StatusNotFound,
		"/debug/strata/console%2f..%2fapi": http.StatusNotFound,
	} {
		if a := send(t, ctx, http.MethodGet, path, "", ""); a.code != want || bytes.Contains(a.body, []byte("items")) {
			t.Errorf("%s: %d, want %d: %.200s", path, a.code, want, a.body)
		}
	}
	for path, want := range map[string]int{
		"/debug/strata/console/link":    http.StatusUnauthorized,
		"/debug/strata/console/session": http.StatusForbidden,
		"/debug/strata/console/":        http.StatusMethodNotAllowed,
	} {
		if a := send(t, ctx, http.MethodPost, path, "", `{"token":""}`); a.code != want {
			t.Errorf("POST %s: %d, want %d: %.200s", path, a.code, want, a.body)
		}
	}
}

func TestSession_Requests_OnlyRead(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	session := begin(t, ctx)
	for target, want := range map[string]int{
		"/debug/strata/status":                              http.StatusOK,
		"/debug/strata/consistency":                         http.StatusOK,
		"/readyz?verbose":                                   http.StatusOK,
		"/apis":                                             http.StatusOK,
		"/api/v1/pods?limit=5":                              http.StatusOK,
		"/api/v1/namespaces/kube-system/configmaps":         http.StatusOK,
		"/api/v1/namespaces/default":                        http.StatusOK,
		"/apis/coordination.k8s.io/v1/leases":               http.StatusOK,
		"/api/v1/secrets":                                   http.StatusForbidden,
		"/api/v1/namespaces/default/secrets/x":              http.StatusForbidden,
		"/api/v1/pods?watch=1":                              http.StatusForbidden,
		"/api/v1/watch/pods":                                http.StatusForbidden,
		"/api/v1/namespaces/default/pods/x/log":             http.StatusForbidden,
		"/api/v1/namespaces/default/pods/x/exec?command=sh": http.StatusForbidden,
		"/api/v1/namespaces/default/services/x/proxy/":      http.StatusForbidden,
		"/api/v1/nodes/x/proxy/configz":                     http.StatusForbidden,
		"/metrics":                                          http.StatusForbidden,
		"/debug/pprof/cmdline":                              http.StatusForbidden,
		"/configz":                                          http.StatusForbidden,
		"/logs/":                                            http.StatusForbidden,
		// no such object
		"/apis/authentication.k8s.io/v1/selfsubjectreviews/foo": http.StatusNotFound,
	} {
		if a := send(t, ctx, http.MethodGet, target, session, ""); a.code != want {
			t.Errorf("GET %s: %d, want %d: %.200s", target, a.code, want, a.body)
		}
	}
	for target, methods := range map[string][]string{
		"/api/v1/namespaces":                                     {http.MethodPost},
		"/api/v1/namespaces/default":                             {http.MethodPut, http.MethodPatch, http.MethodDelete},
		"/api/v1/namespaces/default/configmaps":                  {http.MethodPost, http.MethodDelete},
		"/api/v1/namespaces/kube-system/serviceaccounts/x/token": {http.MethodPost},
		"/debug/strata/consistency":                              {http.MethodPost},
		"/debug/strata/console/link":                             {http.MethodPost},
	} {
		for _, method := range methods {
			if a := send(t, ctx, method, target, session, `{"metadata":{"name":"x"}}`); a.code != http.StatusForbidden {
				t.Errorf("%s %s: %d: %.200s", method, target, a.code, a.body)
			}
		}
	}
	for _, header := range []string{"Impersonate-User", "Impersonate-Group"} {
		if a := send(t, ctx, http.MethodGet, "/api/v1/pods", session, "", "Impersonate-User", "strata-admin", header, "system:masters"); a.code != http.StatusForbidden {
			t.Errorf("with %s: %d: %.200s", header, a.code, a.body)
		}
	}
}

// TestLink_UserWithoutRights_IsForbidden: a user with the name of sessions has no rights by it.
func TestLink_UserWithoutRights_IsForbidden(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	if cluster == nil {
		t.Skip("the console is a part of the engine of strata")
	}
	config := rest.CopyConfig(cluster.Config)
	config.Impersonate = rest.ImpersonationConfig{UserName: "strata:console", Groups: []string{"system:authenticated"}}
	api := cluster.APIFor(config)
	for method, path := range map[string]string{http.MethodPost: "/debug/strata/console/link", http.MethodGet: "/api/v1/pods"} {
		if r := harness.Must[*harness.Response](t)(api.Do(ctx, method, path, "", nil)); r.Code != http.StatusForbidden {
			t.Errorf("%s %s: %d", method, path, r.Code)
		}
	}
}

// TestTokens_LogOfServer_HasNone: the server logs sessions, and no token of a link or session.
func TestTokens_LogOfServer_HasNone(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	link := linkToken(t, ctx)
	a := send(t, ctx, http.MethodPost, "/debug/strata/console/session", "", `{"token":"`+link+`"}`)
	var session struct{ Token string }
	harness.Check(t, json.Unmarshal(a.body, &session))
	send(t, ctx, http.MethodPost, "/debug/strata/console/session", "", `{"token":"`+link+`"}`)
	send(t, ctx, http.MethodGet, "/api/v1/pods", session.Token+"x", "")
	var log []byte
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		// the log is written in the background
		var err error
		log, err = os.ReadFile(filepath.Join(filepath.Dir(cluster.Kubeconfig), "strata.log"))
		return bytes.Contains(log, []byte("Began a session of the console")) && bytes.Contains(log, []byte("Refused a session of the console")), err
	}))
	if bytes.Contains(log, []byte(link)) || bytes.Contains(log, []byte(session.Token)) {
		t.Error("the log has a token")
	}
}
