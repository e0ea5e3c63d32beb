package replica

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"net"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials"
	"k8s.io/apiserver/pkg/server/dynamiccertificates"
	"k8s.io/klog/v2"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"

	"github.com/stratakube/strata/etcdfeed"
	"github.com/stratakube/strata/server/internal/cli"
)

// feedServer is the endpoint at which other replicas follow this one in place of etcd.
type feedServer struct {
	address, clientCAFile string // flags

	server   *etcdfeed.Server // nil: there is no feed
	clients  dynamiccertificates.CAContentProvider
	conns    *feedClients
	listener net.Listener
	grpc     *grpc.Server
}

// options checks the flags. The feed serves stored values, which include Secrets, so it is never
// without client certificates.
func (f *feedServer) options(o *options.ServerRunOptions) (err error) {
	switch {
	case f.address == "" && f.clientCAFile == "":
		return nil
	case f.address == "" || f.clientCAFile == "":
		return cli.Misusef("--%s and --%s need each other: the feed has the stored values of all resources, Secrets included, and serves only clients with a certificate of these authorities",
			flagFeedAddress, flagFeedCAFile)
	case len(o.Etcd.EtcdServersOverrides) > 0:
		return cli.Misusef("--%s and --etcd-servers-overrides exclude each other: a feed serves one etcd cluster", flagFeedAddress)
	}
	if _, _, err := net.SplitHostPort(f.address); err != nil {
		return cli.Misusef("--%s=%s: must be host:port, such as 0.0.0.0:2379", flagFeedAddress, f.address)
	}
	if f.clients, err = dynamiccertificates.NewDynamicCAContentFromFile("replica-feed-client-ca", f.clientCAFile); err != nil {
		return fmt.Errorf("read the authorities of clients of the feed: %w; check --%s", err, flagFeedCAFile)
	}
	f.server = etcdfeed.New(etcdfeed.Options{})
	computed.feed.Store(f.server)
	return nil
}

// listen binds the address. The certificate is that of the replica.
func (f *feedServer) listen(cert dynamiccertificates.CertKeyContentProvider) (err error) {
	if f.server == nil {
		return nil
	}
	if cert == nil {
		return fmt.Errorf("--%s needs a serving certificate; set --tls-cert-file and --tls-private-key-file", flagFeedAddress)
	}
	if f.listener, err = net.Listen("tcp", f.address); err != nil {
		return fmt.Errorf("listen for other replicas: %w; choose another --%s", err, flagFeedAddress)
	}
	f.conns = newFeedClients(credentials.NewTLS(f.tls(cert)), f.clients)
	f.grpc = f.server.GRPC(grpc.Creds(f.conns))
	return nil
}

// tls returns a configuration with the current certificate and authorities for each connection.
func (f *feedServer) tls(cert dynamiccertificates.CertKeyContentProvider) *tls.Config {
	return &tls.Config{
		MinVersion: tls.VersionTLS12,
		NextProtos: []string{"h2"},
		GetConfigForClient: func(*tls.ClientHelloInfo) (*tls.Config, error) {
			pair, err := tls.X509KeyPair(cert.CurrentCertKeyContent())
			if err != nil {
				return nil, fmt.Errorf("serving certificate of the feed: %w", err)
			}
			verify, ok := f.clients.VerifyOptions()
			if !ok {
				return nil, errors.New("no authorities of clients of the feed")
			}
			return &tls.Config{MinVersion: tls.VersionTLS12, NextProtos: []string{"h2"}, Certificates: []tls.Certificate{pair},
				ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: verify.Roots}, nil
		},
	}
}

// run serves until ctx ends, and returns when it has stopped.
func (f *feedServer) run(ctx context.Context) {
	if f.server == nil {
		return
	}
	var work sync.WaitGroup
	defer work.Wait()
	if runner, ok := f.clients.(dynamiccertificates.ControllerRunner); ok {
		work.Go(func() { runner.Run(ctx, 1) })
	}
	work.Go(func() { f.conns.run(ctx) })
	work.Go(func() {
		<-ctx.Done()
		f.server.Close()
		f.grpc.Stop()
	})
	klog.InfoS("Feeding other replicas in place of etcd", "address", f.listener.Addr().String())
	if err := f.grpc.Serve(f.listener); err != nil && ctx.Err() == nil {
		klog.ErrorS(err, "The feed of other replicas ended; they continue at another feed, or when this replica is restarted")
	}
}

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
