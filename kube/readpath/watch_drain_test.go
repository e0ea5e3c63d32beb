package readpath

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"sync/atomic"
	"testing"

	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// leavingServer serves "ok", and lines of a watch while the test sends to lines, behind a drainer.
func leavingServer(t *testing.T, http2 bool, lines <-chan string) (d *drainer, server *httptest.Server, opened *atomic.Int64) {
	t.Helper()
	d = &drainer{config: &genericapiserver.Config{LoopbackClientConfig: &rest.Config{BearerToken: "own"}}, watches: map[*openWatch]struct{}{}}
	opened = &atomic.Int64{}
	server = httptest.NewUnstartedServer(d.handler(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		if !mayBeWatch(req) {
			io.WriteString(w, "ok")
			return
		}
		w.(http.Flusher).Flush()
		for line := range lines {
			fmt.Fprintln(w, line)
			w.(http.Flusher).Flush()
		}
	})))
	server.EnableHTTP2 = http2
	server.Config.ConnState = func(_ net.Conn, state http.ConnState) {
		if state == http.StateNew {
			opened.Add(1)
		}
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	return d, server, opened
}

func get(t *testing.T, server *httptest.Server, token string) {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodGet, server.URL+"/api/v1/pods/a", nil)
	testcheck.NoError(t, err)
	req.Header.Set("Authorization", "Bearer "+token)
	resp, err := server.Client().Do(req)
	testcheck.NoError(t, err)
	defer resp.Body.Close()
	if body, err := io.ReadAll(resp.Body); err != nil || string(body) != "ok" {
		t.Fatalf("body %q, %v", body, err)
	}
}

func TestDrainer_Leaving_ClientsReconnect(t *testing.T) {
	t.Parallel()
	for _, http2 := range []bool{true, false} {
		t.Run(fmt.Sprintf("HTTP/2 %v", http2), func(t *testing.T) {
			// Connections after the requests before the server leaves, after those that are told,
			// and after the next one.
			var got, want [3]int64
			want = [3]int64{1, 1, 2}
			// A client of HTTP/1.1 may drop a connection whose request took most of a tenth of a
			// second to send, as on a busy machine: such an attempt shows nothing.
			for range 20 {
				d, server, opened := leavingServer(t, http2, nil)
				for range 3 {
					get(t, server, "user")
				}
				got[0] = opened.Load()
				d.leaving.Store(true)
				get(t, server, "own") // the server's own client has no other server
				get(t, server, "user")
				got[1] = opened.Load()
				get(t, server, "user")
				if got[2] = opened.Load(); got == want {
					return
				}
			}
			t.Errorf("%d connections, want %d", got, want)
		})
	}
}

func TestDrainer_Leaving_OpenWatchContinues(t *testing.T) {
	t.Parallel()
	lines := make(chan string)
	d, server, opened := leavingServer(t, true, lines)
	resp, err := server.Client().Get(server.URL + "/api/v1/pods?watch=true")
	testcheck.NoError(t, err)
	defer resp.Body.Close()
	defer close(lines)
	events := bufio.NewReader(resp.Body)
	next := func(want string) {
		t.Helper()
		lines <- want
		if got, err := events.ReadString('\n'); err != nil || got != want+"\n" {
			t.Fatalf("the watch received %q, %v, want %q", got, err, want)
		}
	}
	next("before")
	d.leaving.Store(true)
	for range 20 { // the client may send the next request before it is told to reconnect
		if get(t, server, "user"); opened.Load() > 1 {
			break
		}
	}
	if n := opened.Load(); n != 2 {
		t.Errorf("%d connections, want the watch's and another one", n)
	}
	next("after")
}
