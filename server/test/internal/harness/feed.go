package harness

import (
	"fmt"

	"go.etcd.io/etcd/client/pkg/v3/transport"
)

// Feed is the endpoint at which a replica feeds others, on a reserved port, and the authority of its clients.
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
func (f *Feed) Etcd() *Etcd { return f.EtcdWith(f.client) }

// EtcdWith is Etcd with another certificate of the client.
func (f *Feed) EtcdWith(client Certificate) *Etcd {
	return &Etcd{URL: fmt.Sprintf("https://127.0.0.1:%d", f.port), env: f.env,
		tls: transport.TLSInfo{CertFile: client.CertFile, KeyFile: client.KeyFile, TrustedCAFile: f.env.serving().CertFile}}
}

// Another reserves a feed for the same clients.
func (f *Feed) Another() *Feed {
	other := *f
	other.port = f.env.port()
	return &other
}
