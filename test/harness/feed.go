package harness

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"fmt"

	"go.etcd.io/etcd/client/pkg/v3/transport"
)

// Feed is the endpoint at which a replica feeds others, on a reserved port, and the authority of
// its clients.
type Feed struct {
	env    *Env
	ca     *Authority
	client Certificate
	port   int
}

// Feed reserves a feed.
func (e *Env) Feed() *Feed {
	ca := e.Authority()
	return &Feed{env: e, ca: ca, client: ca.Issue("replica"), port: e.port()}
}

// Flags returns the flags with which a replica serves the feed.
func (f *Feed) Flags() []string {
	return []string{fmt.Sprintf("--feed-bind-address=127.0.0.1:%d", f.port), "--feed-client-ca-file=" + f.ca.CertFile}
}

// Etcd returns the feed in place of an etcd, for other replicas and for clients.
func (f *Feed) Etcd() *Etcd {
	return &Etcd{URL: fmt.Sprintf("https://127.0.0.1:%d", f.port), env: f.env,
		tls: transport.TLSInfo{CertFile: f.client.CertFile, KeyFile: f.client.KeyFile, TrustedCAFile: f.env.serving().CertFile}}
}

// Another reserves a feed for the same clients.
func (f *Feed) Another() *Feed {
	other := *f
	other.port = f.env.port()
	return &other
}

// Handshake connects with certificates, and reads the first byte of the server, which it sends
// after it has verified them. Error: the server refuses the certificates by a TLS alert, or cannot
// be reached.
func (f *Feed) Handshake(ctx context.Context, certificates ...Certificate) error {
	serving := x509.NewCertPool()
	serving.AppendCertsFromPEM(f.env.serving().CertPEM)
	config := &tls.Config{RootCAs: serving, NextProtos: []string{"h2"}}
	for _, c := range certificates {
		pair, err := tls.X509KeyPair(c.CertPEM, c.KeyPEM)
		if err != nil {
			return err
		}
		config.Certificates = append(config.Certificates, pair)
	}
	dialer := &tls.Dialer{Config: config}
	conn, err := dialer.DialContext(ctx, "tcp", fmt.Sprintf("127.0.0.1:%d", f.port))
	if err != nil {
		return err
	}
	defer func() { _ = conn.Close() }()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return err
		}
	}
	_, err = conn.Read(make([]byte, 1))
	return err
}

// Client returns the certificate of the clients of the feed.
func (f *Feed) Client() Certificate { return f.client }
