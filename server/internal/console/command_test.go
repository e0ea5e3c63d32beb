package console

import (
	"bytes"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

// command runs `strata console` with a kubeconfig for a server.
func command(t *testing.T, server string) (stdout string, err error) {
	t.Helper()
	path := filepath.Join(t.TempDir(), "kubeconfig")
	config := fmt.Sprintf("{apiVersion: v1, kind: Config, current-context: c, contexts: [{name: c, context: {cluster: c}}], clusters: [{name: c, cluster: {server: %q}}]}", server)
	if err := os.WriteFile(path, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	cmd := NewCommand(func() (string, error) { return path, nil })
	cmd.SetArgs(nil)
	cmd.SetOut(&out)
	cmd.SilenceErrors, cmd.SilenceUsage = true, true
	err = cmd.ExecuteContext(t.Context())
	return out.String(), err
}

func TestCommand_Failures_HaveNextStep(t *testing.T) {
	t.Setenv("KUBECONFIG", "")
	s := NewSessions()
	server := func(change func(*http.Request)) string {
		handler := s.LinkHandler()
		started := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			change(r)
			handler.ServeHTTP(w, r)
		}))
		t.Cleanup(started.Close)
		return started.URL
	}
	closed := httptest.NewServer(nil)
	closed.Close()
	missing := httptest.NewServer(http.NotFoundHandler())
	t.Cleanup(missing.Close)
	for name, c := range map[string]struct{ server, want string }{
		"another machine": {server(func(r *http.Request) { r.RemoteAddr = "192.0.2.7:40000" }), ": " + notLocal},
		"another name":    {server(func(r *http.Request) { r.Host = "example.com:6443" }), ": " + notLocal},
		"not running":     {closed.URL, "cannot be reached: connection refused; start it with strata up, or name the kubeconfig"},
		"no links":        {missing.URL, "has no links: it is not strata up"},
	} {
		if out, err := command(t, c.server); err == nil || !strings.Contains(err.Error(), c.want) || strings.Contains(err.Error(), "\n") || out != "" {
			t.Errorf("%s: %q, %v; want %q", name, out, err, c.want)
		}
	}
	if len(s.links) != 0 {
		t.Errorf("%d links were made", len(s.links))
	}
	here := server(func(*http.Request) {})
	if out, err := command(t, here); err != nil || !strings.HasPrefix(out, here+Path+"/#token=") {
		t.Errorf("%q, %v", out, err)
	}
}
