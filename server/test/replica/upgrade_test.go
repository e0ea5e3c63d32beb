package replica

import (
	"bufio"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/gorilla/websocket"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// stub is a server in the place of a primary, for requests that need kubelets.
type stub struct {
	url string

	mu       sync.Mutex
	received []*http.Request
}

// newStub starts a stub that trusts the front proxy and serves handler, below the path of a pod.
func newStub(t *testing.T, e *harness.Env, front *harness.FrontProxy, handler http.HandlerFunc) *stub {
	t.Helper()
	s := &stub{}
	cert, pool := front.ServerOf(e)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	server := &http.Server{
		TLSConfig: &tls.Config{Certificates: []tls.Certificate{cert}, ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: pool},
		Handler: http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
			switch req.URL.Path {
			case "/readyz":
				return
			case "/apis/authentication.k8s.io/v1/selfsubjectreviews": // by which the replica verifies that its headers are accepted
				w.WriteHeader(http.StatusCreated)
				_ = json.NewEncoder(w).Encode(object{"status": object{"userInfo": object{
					"username": req.Header.Get("X-Remote-User"), "uid": req.Header.Get("X-Remote-Uid"), "groups": req.Header["X-Remote-Group"]}}})
				return
			}
			s.mu.Lock()
			s.received = append(s.received, req)
			s.mu.Unlock()
			handler(w, req)
		}),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
			t.Error(err)
		}
	}()
	t.Cleanup(func() {
		server.Close()
		<-done
	})
	s.url = "https://" + listener.Addr().String()
	return s
}

// requireIdentity fails the test unless the last request was sent by the front proxy, for the administrator, without credentials.
func (s *stub) requireIdentity(t *testing.T) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.received) == 0 {
		t.Fatal("the primary has received no request")
	}
	req := s.received[len(s.received)-1]
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

// stubScene starts an etcd with the objects of a cluster, and a replica whose only primary is a stub.
func stubScene(t *testing.T, handler http.HandlerFunc) (context.Context, *harness.Server, *stub) {
	t.Helper()
	ctx := harness.Context(t, testTimeout)
	e := harness.New(t)
	etcd, front := e.Etcd(), e.FrontProxy()
	primary := e.APIServer(etcd, front.TrustFlags()...)
	harness.Check(t, primary.Stop())
	s := newStub(t, e, front, handler)
	replica := e.ReplicaOf(etcd, front, []string{s.url})
	harness.Check(t, replica.Await(ctx, "/readyz"))
	return ctx, replica, s
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

// TestReplica_WebSocketOfExec_PassesBothWays: exec, attach and port-forward upgrade their connection to a WebSocket.
func TestReplica_WebSocketOfExec_PassesBothWays(t *testing.T) {
	t.Parallel()
	upgrader := websocket.Upgrader{Subprotocols: []string{"v5.channel.k8s.io"}}
	ctx, replica, primary := stubScene(t, func(w http.ResponseWriter, req *http.Request) {
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
	})
	dialer := websocket.Dialer{TLSClientConfig: clientTLS(t, replica), Subprotocols: []string{"v5.channel.k8s.io"}}
	conn, resp, err := dialer.DialContext(ctx, "wss"+strings.TrimPrefix(replica.URL, "https")+podPath+"/exec?command=sh&stdin=true&stdout=true",
		http.Header{"Authorization": {"Bearer " + replica.Config.BearerToken}})
	if err != nil {
		t.Fatalf("%v: %v", err, resp)
	}
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
	primary.requireIdentity(t)
}

// TestReplica_SPDYUpgrade_PassesBothWays: older clients upgrade to SPDY. Its bytes pass unchanged, so any will do here.
func TestReplica_SPDYUpgrade_PassesBothWays(t *testing.T) {
	t.Parallel()
	ctx, replica, primary := stubScene(t, func(w http.ResponseWriter, req *http.Request) {
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
	})
	dialer := tls.Dialer{Config: clientTLS(t, replica)}
	conn, err := dialer.DialContext(ctx, "tcp", strings.TrimPrefix(replica.URL, "https://"))
	harness.Check(t, err)
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	fmt.Fprintf(conn, "POST %s/portforward HTTP/1.1\r\nHost: replica\r\nAuthorization: Bearer %s\r\nConnection: Upgrade\r\nUpgrade: SPDY/3.1\r\nContent-Length: 0\r\n\r\n",
		podPath, replica.Config.BearerToken)
	in := bufio.NewReader(conn)
	resp, err := http.ReadResponse(in, nil)
	harness.Check(t, err)
	if resp.StatusCode != http.StatusSwitchingProtocols || resp.Header.Get("Upgrade") != "SPDY/3.1" {
		t.Fatalf("answered with %s, Upgrade %q", resp.Status, resp.Header.Get("Upgrade"))
	}
	fmt.Fprint(conn, "frame\n")
	line, err := in.ReadString('\n')
	harness.Check(t, err)
	if line != "echo of frame\n" {
		t.Errorf("received %q", line)
	}
	primary.requireIdentity(t)
}

// TestReplica_FollowedLog_ArrivesLineByLine: a response that does not end is flushed as it arrives.
func TestReplica_FollowedLog_ArrivesLineByLine(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	ctx, replica, primary := stubScene(t, func(w http.ResponseWriter, req *http.Request) {
		w.Header().Set("Content-Type", "text/plain")
		for {
			select {
			case line := <-next:
				fmt.Fprintln(w, line)
				if http.NewResponseController(w).Flush() != nil {
					return
				}
			case <-req.Context().Done():
				return
			}
		}
	})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, replica.URL+podPath+"/log?follow=true", nil)
	harness.Check(t, err)
	req.Header.Set("Authorization", "Bearer "+replica.Config.BearerToken)
	client := &http.Client{Transport: &http.Transport{TLSClientConfig: clientTLS(t, replica)}}
	defer client.CloseIdleConnections()
	give := func(line string) {
		t.Helper()
		select {
		case next <- line:
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
	primary.requireIdentity(t)
}
