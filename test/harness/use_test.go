package harness

import (
	"fmt"
	"net/http"
	"os"
	"testing"
	"time"

	"k8s.io/client-go/rest"
)

// TestContext_SharedServers_ShowLogsSinceFirstRequest has two shared servers, which end at once.
// The test sends requests to one, which starts again.
func TestContext_SharedServers_ShowLogsSinceFirstRequest(t *testing.T) {
	e := &Env{dir: t.TempDir(), shared: true}
	e.fail = func(err error) { t.Fatal(err) }
	start := func(line string) *Process {
		p := e.StartProgram("server", "echo", line)
		<-p.Done()
		return p
	}
	one, other := &Server{Process: start("before"), env: e}, &Server{Process: start("other"), env: e}
	ctx := Context(t, time.Minute)
	get := func(s *Server) {
		client := Must[*http.Client](t)(rest.HTTPClientFor(s.unlimited(&rest.Config{Host: "127.0.0.1:1"})))
		r := Must[*http.Request](t)(http.NewRequestWithContext(ctx, http.MethodGet, "http://127.0.0.1:1", nil))
		if resp, err := client.Do(r); err == nil {
			t.Error("a reserved port answers", resp.Body.Close())
		}
	}
	requireLogs := func(want string) {
		t.Helper()
		if got := ctx.Value(useKey{}).(*use).ends(); got != want {
			t.Errorf("logs %q, want %q", got, want)
		}
	}
	requireLogs("")
	get(one)
	file := Must[*os.File](t)(os.OpenFile(one.logs[0], os.O_APPEND|os.O_WRONLY, 0))
	defer file.Close()
	Must[int](t)(fmt.Fprintln(file, "after"))
	get(one)
	const end = "--- end of server.log of server ---\n"
	requireLogs(end + "after\n")
	one.before, one.Process = append(one.before, one.Process), start("started again")
	requireLogs(end + "after\n" + end + "started again\n")
	t.Run("own connection", func(t *testing.T) {
		ctx := Context(t, time.Minute)
		other.URL, other.Config = "https://127.0.0.1:1", &rest.Config{TLSClientConfig: rest.TLSClientConfig{Insecure: true}}
		if conn, err := other.Dial(ctx); err == nil {
			t.Error("a reserved port accepts a connection", conn.Close())
		}
		if got, want := ctx.Value(useKey{}).(*use).ends(), end+"(no lines)\n"; got != want {
			t.Errorf("logs %q, want %q", got, want)
		}
	})
	if own := other.env.tails(); own != end+"before\nafter\n"+end+"other\n"+end+"started again\n" {
		t.Errorf("logs of all %q", own)
	}
}
