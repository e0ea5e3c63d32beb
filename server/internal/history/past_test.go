package history

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/cli-runtime/pkg/resource"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// presentServer is a server of the present that records the targets of its requests. It answers
// each with a list, and a watch with frames until the client has gone.
type presentServer struct {
	*httptest.Server
	revision string // of its lists

	mu      sync.Mutex
	targets []string
}

func newPresentServer(t *testing.T, revision string) *presentServer {
	p := &presentServer{revision: revision}
	p.Server = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		p.mu.Lock()
		p.targets = append(p.targets, req.Method+" "+req.RequestURI)
		p.mu.Unlock()
		w.Header().Set("Content-Type", jsonMedia)
		fmt.Fprintf(w, `{"kind":"ConfigMapList","apiVersion":"v1","metadata":{"resourceVersion":%q},"items":[{"metadata":{"name":"x"}}]}`, p.revision)
		if req.URL.Query().Get("watch") == "true" {
			w.(http.Flusher).Flush()
			<-req.Context().Done()
		}
	}))
	t.Cleanup(p.Close)
	return p
}

// asked returns the targets since the last call.
func (p *presentServer) asked() []string {
	p.mu.Lock()
	defer p.mu.Unlock()
	targets := p.targets
	p.targets = nil
	return targets
}

// startPast serves revision 30 of the server of the present, and returns a function that sends a
// request line's target as it is.
func startPast(t *testing.T, p *presentServer) (get func(target string) (code int, body string)) {
	t.Helper()
	config := &rest.Config{Host: p.URL}
	config.GroupVersion = &schema.GroupVersion{}
	config.NegotiatedSerializer = resource.UnstructuredPlusDefaultContentConfig().NegotiatedSerializer
	s, err := newPastServer(&client{config: config}, newClock(window{times: observed(), from: 30, to: 70}, time.Time{}, 0), "127.0.0.1:0")
	testcheck.NoError(t, err)
	s.listener.Close()
	server := httptest.NewServer(s)
	t.Cleanup(server.Close)
	return func(target string) (int, string) {
		t.Helper()
		conn, err := net.Dial("tcp", server.Listener.Addr().String())
		testcheck.NoError(t, err)
		defer conn.Close()
		testcheck.NoError(t, conn.SetDeadline(time.Now().Add(time.Minute)))
		fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: past\r\nAuthorization: Bearer %s\r\nConnection: close\r\n\r\n", target, s.token)
		response, err := http.ReadResponse(bufio.NewReader(conn), nil)
		if err != nil {
			t.Fatalf("%s: %v", target, err)
		}
		defer response.Body.Close()
		body, err := io.ReadAll(response.Body)
		if err != nil {
			t.Fatalf("%s: %v", target, err)
		}
		return response.StatusCode, string(body)
	}
}

// TestPastServer_PathThatIsNotClean_NeverReachesThePresent sends paths that a server of the present
// would clean, decode or proxy.
func TestPastServer_PathThatIsNotClean_NeverReachesThePresent(t *testing.T) {
	p := newPresentServer(t, "30")
	get := startPast(t, p)
	const secrets = "api/v1/namespaces/default/secrets/live"
	targets := []string{
		"/", "*", "//", "/.", "/..", "/metrics", "/logs/", "/debug/pprof/", "/metrics/", "/openid/v1/jwks", "/.well-known/openid-configuration",
		"/version/live", "/healthz/etcd", "/livez/ping", "/readyz/etcd", "/healthz/../metrics", "/openapi/v2/x", "/openapi", "/openapi/v1",
		"/openapi/v3/a/b/c/d", "/api/v1/proxy", "/api/v1/watch/pods", "/api/v1/proxy/nodes/n/metrics", "/apis/apps/v1/watch/deployments",
		"/api/v1/namespaces/a/pods/b/log", "/api/v1/namespaces/a/services/b/proxy/x", "/api/v1/nodes/n/proxy/metrics",
		"/api/v1/namespaces/a/pods/b/status/../log", "/api/v1/namespaces/a/pods/", "/api/v1/namespaces/a/pods/b/", "/api/v1/pods//",
	}
	for _, before := range []string{"version", "api", "apis", "openapi", "openapi/v3", "healthz", "api/v1", "api/v1/pods"} {
		up := strings.Repeat("../", strings.Count(before, "/")+1)
		encoded := strings.Repeat("%2e%2e/", strings.Count(before, "/")+1)
		targets = append(targets,
			"/"+before+"/"+up+secrets, "/"+before+"/"+up+"metrics", "/"+before+"/"+encoded+secrets,
			"/"+before+"/"+strings.Repeat("%2E./", strings.Count(before, "/")+1)+"metrics",
			"/"+before+"/.%2e%2f"+secrets, "/"+before+"%2f..%2f"+secrets, "/"+before+"/..%5c"+secrets, `/`+before+`/..\`+secrets,
			"/"+before+"/./"+secrets, "/"+before+"//"+secrets, "/"+before+"/..", "/"+before+"/.", "/"+before+"/%2e", "/"+before+"//",
			"/"+before+"/%252e%252e/metrics", "/"+before+"/..;/metrics", "/"+before+"/../"+up+"metrics?watch=true",
		)
	}
	targets = append(targets,
		"//present/api/v1/secrets", "http://present/api", "http://present/version/../metrics", "https://past/api/v1/pods",
		"/api/v1/namespaces/..%2f..%2f..%2fmetrics/pods", "/api/v1/namespaces/../../../metrics/x", "/api/v1/namespaces/%2e%2e/pods/x",
		"/api/v1/namespaces/a/pods/%2e%2e", "/api/v1/namespaces/a/pods/..", "/api/v1/namespaces/a/pods/b%2flog", "/api/v1/namespaces/a/pods/b%2Flog",
		"/api/v1/namespaces/a/pods/b%00", "/api/v1/namespaces/a/pods/b%0d%0a", "/api/v1/pods%3fwatch=true", "/api/v1/pods;x", "/api/v1/Pods",
		"/api/%2e%2e/metrics", "/apis/a..b/v1", "/apis/a%3Fb/v1", "/openapi/v3/%2e%2e", "/openapi/v3/api%2fv1", "/api/v1/%70ods%2e",
	)
	if len(targets) < 50 {
		t.Fatalf("%d targets", len(targets))
	}
	for _, target := range targets {
		code, body := get(target)
		if asked := p.asked(); code != http.StatusNotFound && code != http.StatusBadRequest || len(asked) > 0 {
			t.Errorf("%s: %d %.80q, the server of the present was asked %q; want 404 and nothing", target, code, body, asked)
		}
	}
}

func TestPastServer_CleanPath_AsksForTheSamePath(t *testing.T) {
	p := newPresentServer(t, "30")
	get := startPast(t, p)
	const at = "resourceVersion=30&resourceVersionMatch=Exact"
	for target, want := range map[string]string{
		"/api":                            "/api",
		"/api/":                           "/api",
		"/api/v1":                         "/api/v1",
		"/api/v1/?timeout=32s":            "/api/v1?timeout=32s",
		"/apis":                           "/apis",
		"/apis/apps":                      "/apis/apps",
		"/apis/rbac.authorization.k8s.io": "/apis/rbac.authorization.k8s.io",
		"/apis/apps/v1":                   "/apis/apps/v1",
		"/version":                        "/version",
		"/version/":                       "/version",
		"/healthz":                        "/healthz",
		"/readyz?verbose=1&exclude=a":     "/readyz?exclude=a&verbose=1",
		"/openapi/v2":                     "/openapi/v2",
		"/openapi/v3":                     "/openapi/v3",
		"/openapi/v3/apis/apps/v1?hash=A": "/openapi/v3/apis/apps/v1?hash=A",
		"/openapi/v3/.well-known/openid-configuration/": "/openapi/v3/.well-known/openid-configuration",
		"/openapi/v3/openid/v1/jwks":                    "/openapi/v3/openid/v1/jwks",
		"/api?watch=true":                               "/api",
		"/apis/apps/v1?watch=1&allowWatchBookmarks=1":   "/apis/apps/v1",
		"/version?watch=true&watch=false":               "/version",
		"/api/v1/namespaces/a/configmaps":               "/api/v1/namespaces/a/configmaps?" + at,
		"/api/v1/namespaces/a/configmaps?limit=5":       "/api/v1/namespaces/a/configmaps?limit=5&" + at,
		"/api/v1/configmaps?watch=0&watch=true":         "/api/v1/configmaps?" + at,
		"/api/v1/namespaces/a/configmaps/x":             "/api/v1/namespaces/a/configmaps?fieldSelector=metadata.name%3Dx&" + at,
		"/api/v1/namespaces/a/configmaps/x.y/status":    "/api/v1/namespaces/a/configmaps?fieldSelector=metadata.name%3Dx.y&" + at,
		// A GET has no parameters of lists.
		"/api/v1/namespaces/a/configmaps/x?fieldSelector=metadata.name%3Dy&labelSelector=a&limit=1&continue=c&pretty=true": "/api/v1/namespaces/a/configmaps?fieldSelector=metadata.name%3Dx&pretty=true&" + at,
		// A client may encode a colon, which names of roles have.
		"/apis/rbac.authorization.k8s.io/v1/clusterroles/system%3Anode": "/apis/rbac.authorization.k8s.io/v1/clusterroles?fieldSelector=metadata.name%3Dsystem%3Anode&" + at,
	} {
		code, body := get(target)
		if asked := p.asked(); code != http.StatusOK || !slices.Equal(asked, []string{"GET " + want}) {
			t.Errorf("%s: %d %.80q, the server of the present was asked %q; want %q", target, code, body, asked, want)
		}
	}
}

// TestPastServer_AnswerOfAnotherRevision_IsRefused: an API that ignores revisions answers with the
// present, and so does a list that continues with a token of a later revision, which a client can
// make.
func TestPastServer_AnswerOfAnotherRevision_IsRefused(t *testing.T) {
	for revision, want := range map[string]struct{ list, next int }{
		"30": {http.StatusOK, http.StatusOK},
		"29": {http.StatusNotFound, http.StatusOK}, // a list that the client began earlier
		"31": {http.StatusNotFound, http.StatusNotFound},
		"":   {http.StatusNotFound, http.StatusNotFound},
	} {
		get := startPast(t, newPresentServer(t, revision))
		for target, want := range map[string]int{
			"/api/v1/componentstatuses": want.list, "/api/v1/namespaces/a/configmaps/x": want.list, "/api/v1/configmaps?continue=token": want.next,
		} {
			if code, body := get(target); code != want {
				t.Errorf("revision %q, %s: %d %.120q, want %d", revision, target, code, body, want)
			}
		}
	}
}
