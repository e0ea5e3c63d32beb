package handlerchain

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"k8s.io/apimachinery/pkg/util/sets"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericfilters "k8s.io/apiserver/pkg/server/filters"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestChain_BodyNeverEnds_TimesOut: a body that never ends is read until the request timeout; only
// a long-running request may read longer.
func TestChain_BodyNeverEnds_TimesOut(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	read := make(chan error, 1)
	h := &Chain{
		full: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			_, err := io.Copy(io.Discard, req.Body)
			read <- err
		}),
		requestInfo:    &request.RequestInfoFactory{APIPrefixes: sets.NewString("api", "apis"), GrouplessAPIPrefixes: sets.NewString("api")},
		longRunning:    genericfilters.BasicLongRunningRequestCheck(sets.NewString("watch", "proxy"), sets.NewString("proxy")),
		requestTimeout: time.Millisecond,
	}
	server := httptest.NewServer(h)
	defer server.Close()
	for _, c := range []struct {
		line  string
		bound bool
	}{
		{"POST /api/v1/namespaces/ns/configmaps", true},
		{"GET /api/v1/namespaces/ns/configmaps", true},
		{"GET /api/v1/namespaces/ns/configmaps?watch=true", true},
		{"POST /healthz", true},
		{"POST /api/v1/namespaces/ns/services/s/proxy/path", false},
	} {
		conn, err := net.Dial("tcp", strings.TrimPrefix(server.URL, "http://"))
		testcheck.NoError(t, err)
		defer conn.Close()
		if _, err := fmt.Fprintf(conn, "%s HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n", c.line); err != nil {
			t.Fatal(err)
		}
		if c.bound {
			if err := <-read; !isTimeout(err) {
				t.Errorf("%s: reading the body ended with %v, want a timeout", c.line, err)
			}
			if _, err := io.Copy(io.Discard, conn); err != nil {
				t.Errorf("%s: the connection: %v, want it closed", c.line, err)
			}
			continue
		}
		select {
		case err := <-read:
			t.Errorf("%s: reading the body ended with %v, it was not all there", c.line, err)
		case <-time.After(2 * (h.requestTimeout + bodyGrace)):
		}
		if _, err := io.WriteString(conn, "0\r\n\r\n"); err != nil {
			t.Fatal(err)
		}
		if err := <-read; err != nil {
			t.Errorf("%s: %v", c.line, err)
		}
		if _, err := http.ReadResponse(bufio.NewReader(conn), nil); err != nil {
			t.Errorf("%s: %v", c.line, err)
		}
	}
}

func isTimeout(err error) bool {
	timeout, ok := err.(net.Error)
	return ok && timeout.Timeout()
}

// TestChain_BodyDeadline_EndsWithRequest: the read deadline of a request does not apply to the
// next one on the same connection.
func TestChain_BodyDeadline_EndsWithRequest(t *testing.T) {
	h := &Chain{
		full:           http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) { _, _ = io.Copy(w, req.Body) }),
		requestInfo:    &request.RequestInfoFactory{APIPrefixes: sets.NewString("api"), GrouplessAPIPrefixes: sets.NewString("api")},
		requestTimeout: time.Millisecond,
	}
	server := httptest.NewServer(h)
	defer server.Close()
	conn, err := net.Dial("tcp", strings.TrimPrefix(server.URL, "http://"))
	testcheck.NoError(t, err)
	defer conn.Close()
	answers := bufio.NewReader(conn)
	for range 2 {
		if _, err := io.WriteString(conn, "POST /api/v1/nodes HTTP/1.1\r\nHost: a\r\nContent-Length: 2\r\n\r\nab"); err != nil {
			t.Fatal(err)
		}
		response, err := http.ReadResponse(answers, nil)
		testcheck.NoError(t, err)
		if body, err := io.ReadAll(response.Body); err != nil || string(body) != "ab" {
			t.Fatalf("%q, %v", body, err)
		}
		time.Sleep(h.requestTimeout + bodyGrace + 100*time.Millisecond) // the deadline passes
	}
}
