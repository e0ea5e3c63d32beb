package replica

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"maps"
	"math/big"
	"net"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/connectivity"
	"google.golang.org/grpc/credentials"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/server/internal/pki"
)

// clientOf returns a connection to the address with a certificate of the authority in dir, which is
// ready.
func clientOf(t *testing.T, ctx context.Context, dir, address string, server *x509.CertPool) *grpc.ClientConn {
	t.Helper()
	certs, key, err := pki.IssueClient(dir, "replica", nil, time.Now())
	testcheck.NoError(t, err)
	pair, err := tls.X509KeyPair(certs, key)
	testcheck.NoError(t, err)
	conn, err := grpc.NewClient(address, grpc.WithTransportCredentials(credentials.NewTLS(&tls.Config{RootCAs: server, Certificates: []tls.Certificate{pair}})))
	testcheck.NoError(t, err)
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

// TestFeed_AuthorityRemoved_ClosesItsConnections: when an authority is removed from the file,
// connections of its clients are closed and not made again; those of others are not interrupted.
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
		testcheck.NoError(t, err)
		bundles = append(bundles, data)
	}
	authorities := filepath.Join(t.TempDir(), "clients.crt")
	testcheck.NoError(t, os.WriteFile(authorities, append(append([]byte(nil), bundles[0]...), bundles[1]...), 0o600))
	f := &feedServer{address: "127.0.0.1:0", clientCAFile: authorities, server: etcdfeed.New(etcdfeed.Options{})}
	var err error
	if f.clients, err = dynamiccertificates.NewDynamicCAContentFromFile("clients", authorities); err != nil {
		t.Fatal(err)
	}
	cert, err := dynamiccertificates.NewDynamicServingContentFromFiles("serving", files.Serving, files.Serving)
	testcheck.NoError(t, err)
	testcheck.NoError(t, f.listen(cert))
	serving, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { defer close(stopped); f.run(serving) }()
	defer func() { stop(); <-stopped }()

	server := x509.NewCertPool()
	server.AppendCertsFromPEM(bundles[1])
	lost := clientOf(t, ctx, removed, f.listener.Addr().String(), server)
	kept := clientOf(t, ctx, stays, f.listener.Addr().String(), server)
	before := f.conns.connections()
	if len(before) != 2 {
		t.Fatalf("%d connections, want 2", len(before))
	}
	testcheck.NoError(t, os.WriteFile(authorities, bundles[1], 0o600))
	reach(t, ctx, lost, connectivity.TransientFailure) // after a handshake that was refused
	f.conns.recheck()                                  // none is being checked any more
	after := f.conns.connections()
	if len(after) != 1 || !slices.Contains(before, after[0]) {
		t.Errorf("%d connections, want that of the other authority, which was not interrupted", len(after))
	}
	if state := kept.GetState(); state != connectivity.Ready {
		t.Errorf("the connection of the other authority is %s", state)
	}
}

// connections returns the open connections.
func (c *feedClients) connections() []*clientConn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return slices.Collect(maps.Keys(c.open))
}

// expiringClient returns the certificate of an authority, and a certificate of it for clients that
// expires at a time.
func expiringClient(t *testing.T, expires time.Time) (authority []byte, client *x509.Certificate) {
	t.Helper()
	issue := func(template, parent *x509.Certificate, signer *ecdsa.PrivateKey) (*x509.Certificate, *ecdsa.PrivateKey) {
		key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
		check(t, err)
		template.SerialNumber, template.NotBefore = big.NewInt(1), time.Now()
		if parent == nil {
			parent, signer = template, key
		}
		der, err := x509.CreateCertificate(rand.Reader, template, parent, &key.PublicKey, signer)
		check(t, err)
		cert, err := x509.ParseCertificate(der)
		check(t, err)
		return cert, key
	}
	ca, key := issue(&x509.Certificate{Subject: pkix.Name{CommonName: "authority"}, NotAfter: expires.AddDate(1, 0, 0), IsCA: true,
		BasicConstraintsValid: true, KeyUsage: x509.KeyUsageCertSign}, nil, nil)
	client, _ = issue(&x509.Certificate{Subject: pkix.Name{CommonName: "replica"}, NotAfter: expires,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}}, ca, key)
	return pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: ca.Raw}), client
}

// TestFeedClients_CertificateExpires_ClosesConnection: the connection stays open until the
// certificate expires, and is closed within a minute after that, without a change of the
// authorities.
func TestFeedClients_CertificateExpires_ClosesConnection(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const lifetime = 10 * time.Minute
		ca, cert := expiringClient(t, time.Now().Add(lifetime))
		authorities, err := dynamiccertificates.NewStaticCAContent("clients", ca)
		check(t, err)
		c := newFeedClients(nil, authorities)
		end, other := net.Pipe()
		defer other.Close()
		client := &clientConn{Conn: end, clients: c, certs: []*x509.Certificate{cert}}
		c.open[client] = true
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go c.run(ctx)
		closed := make(chan struct{})
		go func() {
			_, _ = other.Read(make([]byte, 1))
			close(closed)
		}()
		time.Sleep(lifetime - time.Second)
		synctest.Wait()
		select {
		case <-closed:
			t.Fatal("the connection was closed before the certificate has expired")
		default:
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		select {
		case <-closed:
		default:
			t.Error("the connection is open a minute after the certificate has expired")
			end.Close()
		}
	})
}
