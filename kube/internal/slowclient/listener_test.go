package slowclient

import (
	"context"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestListener_CloseConnection_ClosesAndRemoves: a connection is found by a request received on it,
// closed, and removed from the index.
func TestListener_CloseConnection_ClosesAndRemoves(t *testing.T) {
	plain, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	listener := Track(plain)
	defer listener.Close()
	if Track(listener) != listener {
		t.Error("a tracked listener is wrapped twice")
	}
	open := func() (client, server net.Conn) {
		t.Helper()
		client, err := net.Dial("tcp", listener.Addr().String())
		testcheck.NoError(t, err)
		t.Cleanup(func() { client.Close() })
		if server, err = listener.Accept(); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { server.Close() })
		return client, server
	}
	tracked := func() (n int) {
		listener.conns.Range(func(any, any) bool { n++; return true })
		return n
	}
	client, server := open()
	_, other := open()
	if n := tracked(); n != 2 {
		t.Errorf("%d connections are tracked, want 2", n)
	}

	req := httptest.NewRequest(http.MethodGet, "/", nil)
	req.RemoteAddr = server.RemoteAddr().String()
	listener.CloseConnection(req) // not a server request: its context has no local address
	if n := tracked(); n != 2 {
		t.Errorf("%d connections are tracked, want 2", n)
	}
	req = req.WithContext(context.WithValue(req.Context(), http.LocalAddrContextKey, server.LocalAddr()))
	listener.CloseConnection(req)
	if _, err := client.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("read of a connection that was closed: %v", err)
	}
	if n := tracked(); n != 1 {
		t.Errorf("%d connections are tracked, want 1", n)
	}
	listener.CloseConnection(req) // a second call has no effect
	if err := other.Close(); err != nil {
		t.Error(err)
	}
	if n := tracked(); n != 0 {
		t.Errorf("%d connections are tracked, want none", n)
	}
}
