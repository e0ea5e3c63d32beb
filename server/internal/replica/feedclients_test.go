package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"os"
	"path/filepath"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/server/internal/pki"
)

// clientOf returns a connection to the address with a certificate of the authority in dir, which is ready.
func clientOf(t *testing.T, ctx context.Context, dir, address string, server *x509.CertPool) *grpc.ClientConn {
	t.Helper()
	certs, key, err := pki.IssueClient(dir, "replica", nil, time.Now())
	if err != nil {
		t.Fatal(err)
	}
	pair, err := tls.X509KeyPair(certs, key)
	if err != nil {
		t.Fatal(err)
	}
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: server, Certificates: []tls.Certificate{pair}})))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Close() })
	conn.Connect()
	reach(t, ctx, conn, connectivity.Ready)
	return conn
}

// reach returns when the connection has the state.
func reach(t *testing.T, ctx context.Context, conn *grpc.ClientConn, want connectivity.State) {
	t.Helper()
	for state := conn.GetState(); state != want; state = conn.GetState() {
		if state == connectivity.Idle {
			conn.Connect()
		}
		if !conn.WaitForStateChange(ctx, state) {
			t.Fatalf("the connection is %s, want %s", state, want)
		}
	}
}

// TestFeed_AuthorityRemoved_ClosesItsConnections: when an authority is removed from the file, connections of its clients are closed and not made
// again; those of others are not interrupted.
func TestFeed_AuthorityRemoved_ClosesItsConnections(t *testing.T) {
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	stays, removed := t.TempDir(), t.TempDir()
	var bundles [][]byte
	var files *pki.Files
	for _, dir := range []string{removed, stays} {
		var err error
		if files, err = pki.EnsureTemporary(dir, []string{"127.0.0.1"}, time.Now()); err != nil {
			t.Fatal(err)
		}
		data, err := os.ReadFile(files.CA)
		if err != nil {
			t.Fatal(err)
		}
		bundles = append(bundles, data)
	}
	authorities := filepath.Join(t.TempDir(), "clients.crt")
	if err := os.WriteFile(authorities, append(append([]byte(nil), bundles[0]...), bundles[1]...), 0o600); err != nil {
		t.Fatal(err)
	}
	f := &feed{address: "127.0.0.1:0", clientCAFile: authorities, server: etcdfeed.New(etcdfeed.Options{})}
	var err error
	if f.clients, err = dynamiccertificates.NewDynamicCAContentFromFile("clients", authorities); err != nil {
		t.Fatal(err)
	}
	cert, err := dynamiccertificates.NewDynamicServingContentFromFiles("serving", files.Serving, files.Serving)
	if err != nil {
		t.Fatal(err)
	}
	if err := f.listen(cert); err != nil {
		t.Fatal(err)
	}
	serving, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { defer close(stopped); f.run(serving) }()
	defer func() { stop(); <-stopped }()

	server := x509.NewCertPool()
	server.AppendCertsFromPEM(bundles[1])
	lost := clientOf(t, ctx, removed, f.listener.Addr().String(), server)
	kept := clientOf(t, ctx, stays, f.listener.Addr().String(), server)
	interrupted := make(chan bool, 1)
	go func() { interrupted <- kept.WaitForStateChange(serving, connectivity.Ready) }()
	if err := os.WriteFile(authorities, bundles[1], 0o600); err != nil {
		t.Fatal(err)
	}
	reach(t, ctx, lost, connectivity.TransientFailure) // after a handshake that was refused
	f.conns.mu.Lock()
	open := len(f.conns.open)
	f.conns.mu.Unlock()
	if open != 1 {
		t.Errorf("%d connections, want that of the other authority", open)
	}
	select {
	case <-interrupted:
		t.Error("the connection of the other authority was interrupted")
	default:
	}
}
