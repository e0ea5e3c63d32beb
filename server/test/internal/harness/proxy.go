package harness

import (
	"crypto/tls"
	"strings"

	"github.com/stratakube/strata/server/test/internal/etcdproxy"
)

// Proxy is a proxy before an etcd of the environment.
type Proxy struct {
	*etcdproxy.Proxy
	etcd *Etcd
}

// Proxy starts a proxy before etcd, as long as the environment's processes.
func (e *Env) Proxy(etcd *Etcd) *Proxy {
	var config *tls.Config
	if etcd.tls.CertFile != "" {
		var err error
		config, err = etcd.tls.ClientConfig()
		e.check(err)
	}
	_, address, _ := strings.Cut(etcd.URL, "://")
	p, err := etcdproxy.Start(address, config)
	e.check(err)
	e.AtEnd(p.Close)
	return &Proxy{Proxy: p, etcd: &Etcd{URL: p.URL(), env: e}}
}

// Etcd returns the etcd as seen through the proxy: its URL is the proxy's. It is for flags and clients; what stops and
// starts the etcd is the one that Env.Proxy was given.
func (p *Proxy) Etcd() *Etcd { return p.etcd }
