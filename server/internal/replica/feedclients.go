package replica

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc/credentials"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/klog/v2"
)

// recheckInterval is the time between the checks of the certificates of connected clients: one that
// expires, or whose authority is removed during its handshake, is found then.
const recheckInterval = 30 * time.Second

// feedClients are credentials that also apply to connections that exist: when the authorities
// change, or a certificate expires, the connections that would be refused now are closed. Others
// are not interrupted. All methods may be called concurrently.
type feedClients struct {
	credentials.TransportCredentials
	authorities dynamiccertificates.CAContentProvider
	changed     chan struct{} // contains a value if the authorities may have changed

	mu   sync.Mutex // leaf; guards the field below
	open map[*clientConn]bool
}

// clientConn is the connection of a client with its certificates, its own first.
type clientConn struct {
	net.Conn
	clients *feedClients
	certs   []*x509.Certificate
}

// newFeedClients returns credentials on TLS credentials that require certificates of the
// authorities.
func newFeedClients(tls credentials.TransportCredentials, authorities dynamiccertificates.CAContentProvider) *feedClients {
	c := &feedClients{TransportCredentials: tls, authorities: authorities, changed: make(chan struct{}, 1), open: map[*clientConn]bool{}}
	authorities.AddListener(c)
	return c
}

// Enqueue implements dynamiccertificates.Listener.
func (c *feedClients) Enqueue() {
	select {
	case c.changed <- struct{}{}:
	default:
	}
}

// ServerHandshake implements credentials.TransportCredentials.
func (c *feedClients) ServerHandshake(raw net.Conn) (net.Conn, credentials.AuthInfo, error) {
	conn, info, err := c.TransportCredentials.ServerHandshake(raw)
	if err != nil {
		return nil, nil, err
	}
	tls, ok := info.(credentials.TLSInfo)
	if !ok {
		_ = conn.Close()
		return nil, nil, fmt.Errorf("connection of a client of the feed has no TLS: %T", info)
	}
	client := &clientConn{Conn: conn, clients: c, certs: tls.State.PeerCertificates}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.open[client] = true
	return client, info, nil
}

// Clone implements credentials.TransportCredentials.
func (c *feedClients) Clone() credentials.TransportCredentials { return c }

// Close implements net.Conn.
func (c *clientConn) Close() error {
	c.clients.mu.Lock()
	delete(c.clients.open, c)
	c.clients.mu.Unlock()
	return c.Conn.Close()
}

// run checks the connections until ctx ends.
func (c *feedClients) run(ctx context.Context) {
	ticker := time.NewTicker(recheckInterval)
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-c.changed:
		case <-ticker.C:
		}
		c.recheck()
	}
}

// recheck closes the connections whose certificates are not valid now.
func (c *feedClients) recheck() {
	verify, ok := c.authorities.VerifyOptions()
	if !ok {
		return // as the handshake, it needs authorities that could be read once
	}
	c.mu.Lock()
	open := make([]*clientConn, 0, len(c.open))
	for client := range c.open {
		open = append(open, client)
	}
	c.mu.Unlock()
	for _, client := range open {
		if err := client.verify(verify.Roots); err != nil {
			klog.InfoS("Closing the connection of another replica to the feed: its certificate is not valid any more", "address", client.RemoteAddr().String(), "err", err)
			_ = client.Close()
		}
	}
}

// verify verifies the certificates as a handshake does.
func (c *clientConn) verify(roots *x509.CertPool) error {
	if len(c.certs) == 0 {
		return errors.New("no certificate")
	}
	intermediates := x509.NewCertPool()
	for _, cert := range c.certs[1:] {
		intermediates.AddCert(cert)
	}
	_, err := c.certs[0].Verify(x509.VerifyOptions{Roots: roots, Intermediates: intermediates, KeyUsages: []x509.ExtKeyUsage{x509.ExtKeyUsageClientAuth}})
	return err
}
