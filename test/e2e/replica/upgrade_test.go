package replica

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"github.com/stratakube/strata/test/harness"
)

// requireIdentity fails the test unless the last request was sent by the front proxy, for the
// administrator, without credentials.
func (f *fronted) requireIdentity(t *testing.T) {
	t.Helper()
	f.mu.Lock()
	defer f.mu.Unlock()
	if len(f.received) == 0 {
		t.Fatal("the primary has received no request")
	}
	req := f.received[len(f.received)-1]
	if name := req.TLS.PeerCertificates[0].Subject.CommonName; name != "front-proxy-client" {
		t.Errorf("sent by %q, want the front proxy", name)
	}
	if user := req.Header.Get("X-Remote-User"); user != "admin" {
		t.Errorf("sent for user %q, want admin", user)
	}
	if protocols := req.Header.Get("Sec-Websocket-Protocol"); req.Header.Get("Authorization") != "" || strings.Contains(protocols, "bearer") {
		t.Errorf("the credentials of the caller were forwarded: %v", req.Header)
	}
}

const podPath = "/api/v1/namespaces/default/pods/one"

func clientTLS(t *testing.T, s *harness.Server) *tls.Config {
	t.Helper()
	pem, err := os.ReadFile(s.CAFile)
	harness.Check(t, err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(pem)
	return &tls.Config{RootCAs: pool, NextProtos: []string{"http/1.1"}}
}

// pod returns a handler of requests that an API server sends to a kubelet, for the pod at podPath.
func (f *fronted) pod() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc(podPath+"/exec", echoMessages)
	mux.HandleFunc(podPath+"/portforward", echoLine)
	mux.HandleFunc(podPath+"/log", f.followLog)
	mux.HandleFunc(podPath+"/eviction", func(_ http.ResponseWriter, req *http.Request) {
		f.arrived <- struct{}{}
		<-req.Context().Done()
	})
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		f.mu.Lock()
		f.received = append(f.received, req)
		f.mu.Unlock()
		mux.ServeHTTP(w, req)
	})
}

// echoMessages upgrades the connection to a WebSocket.
func echoMessages(w http.ResponseWriter, req *http.Request) {
	upgrader := websocket.Upgrader{Subprotocols: []string{"v5.channel.k8s.io"}}
	conn, err := upgrader.Upgrade(w, req, nil)
	if err != nil {
		return
	}
	defer conn.Close()
	for {
		kind, data, err := conn.ReadMessage()
		if err != nil {
			return
		}
		if conn.WriteMessage(kind, append([]byte("echo of "), data...)) != nil {
			return
		}
	}
}

// echoLine upgrades the connection to any protocol.
func echoLine(w http.ResponseWriter, req *http.Request) {
	conn, stream, err := http.NewResponseController(w).Hijack()
	if err != nil {
		return
	}
	defer conn.Close()
	fmt.Fprintf(conn, "HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: %s\r\n\r\n", req.Header.Get("Upgrade"))
	line, err := stream.ReadString('\n')
	if err == nil {
		fmt.Fprintf(conn, "echo of %s", line)
	}
}

// followLog sends the lines until the request ends.
func (f *fronted) followLog(w http.ResponseWriter, req *http.Request) {
	w.Header().Set("Content-Type", "text/plain")
	for {
		select {
		case line := <-f.lines:
			fmt.Fprintln(w, line)
			if http.NewResponseController(w).Flush() != nil {
				return
			}
		case <-req.Context().Done():
			return
		}
	}
}

// webSocket: exec, attach and port-forward upgrade their connection to a WebSocket.
func (f *fronted) webSocket(t *testing.T) {
	ctx, replica := harness.Context(t, testTimeout), f.replica
	dialer := websocket.Dialer{TLSClientConfig: clientTLS(t, replica), Subprotocols: []string{"v5.channel.k8s.io"}}
	var conn *websocket.Conn
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		var resp *http.Response
		conn, resp, err = dialer.DialContext(ctx, "wss"+strings.TrimPrefix(replica.URL, "https")+podPath+"/exec?command=sh&stdin=true&stdout=true",
			http.Header{"Authorization": {"Bearer " + replica.Config.BearerToken}})
		late := resp != nil && resp.StatusCode == http.StatusServiceUnavailable // none is healthy
		if err != nil && !late {
			t.Fatalf("%v: %v", err, resp)
		}
		return err == nil, err
	}))
	defer conn.Close()
	if conn.Subprotocol() != "v5.channel.k8s.io" {
		t.Errorf("subprotocol %q", conn.Subprotocol())
	}
	for i := range 3 {
		text := fmt.Sprintf("line %d", i)
		harness.Check(t, conn.WriteMessage(websocket.BinaryMessage, []byte(text)))
		_, data, err := conn.ReadMessage()
		harness.Check(t, err)
		if string(data) != "echo of "+text {
			t.Errorf("received %q for %q", data, text)
		}
	}
	f.requireIdentity(t)
}

// spdy: older clients upgrade to SPDY. Its bytes pass unchanged, so any will do here.
func (f *fronted) spdy(t *testing.T) {
	ctx, replica := harness.Context(t, testTimeout), f.replica
	dialer := tls.Dialer{Config: clientTLS(t, replica)}
	var (
		conn net.Conn
		in   *bufio.Reader
		resp *http.Response
	)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
		if conn, err = dialer.DialContext(ctx, "tcp", strings.TrimPrefix(replica.URL, "https://")); err != nil {
			return false, err
		}
		fmt.Fprintf(conn, "POST %s/portforward HTTP/1.1\r\nHost: replica\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n",
			podPath, replica.Config.BearerToken)
		in = bufio.NewReader(conn)
		ends := context.AfterFunc(ctx, func() { conn.Close() })
		resp, err = http.ReadResponse(in, nil)
		ends()
		if err != nil {
			conn.Close()
			t.Fatal(err)
		}
		if resp.StatusCode == http.StatusServiceUnavailable { // none is healthy
			conn.Close()
			return false, errors.New(resp.Status)
		}
		return true, nil
	}))
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != "SPDY/3.1" {
		t.Fatalf("answered with %s, Upgrade %q", resp.Status, resp.Header.Get("Upgrade"))
	}
	fmt.Fprint(conn, "frame\n")
	line, err := in.ReadString('\n')
	harness.Check(t, err)
	if line != "echo of frame\n" {
		t.Errorf("received %q", line)
	}
	f.requireIdentity(t)
}

// followedLog: a response that does not end is flushed as it arrives.
func (f *fronted) followedLog(t *testing.T) {
	ctx, replica := harness.Context(t, testTimeout), f.replica
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, replica.URL+podPath+"/log?follow=true", nil)
	harness.Check(t, err)
	req.Header.Set("Authorization", "Bearer "+replica.Config.BearerToken)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: clientTLS(t, replica)}}
	defer client.CloseIdleConnections()
	give := func(line string) {
		t.Helper()
		select {
		case f.lines <- line:
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		}
	}
	type answer struct {
		resp *http.Response
		err  error
	}
	answered := make(chan answer, 1)
	go func() {
		resp, err := client.Do(req)
		for err == nil && resp.StatusCode == http.StatusServiceUnavailable { // again
			resp.Body.Close()
			harness.Pause(ctx, 100*time.Millisecond)
			resp, err = client.Do(req)
		}
		answered <- answer{resp, err}
	}()
	give("first")
	a := <-answered
	harness.Check(t, a.err)
	defer a.resp.Body.Close()
	in := bufio.NewReader(a.resp.Body)
	for _, line := range []string{"first", "second", "third"} {
		if line != "first" {
			give(line) // only after the line before has arrived
		}
		got, err := in.ReadString('\n')
		if err != nil && !errors.Is(err, io.EOF) {
			t.Fatal(err)
		}
		if got != line+"\n" {
			t.Errorf("received %q, want %q", got, line)
		}
	}
	f.requireIdentity(t)
}
