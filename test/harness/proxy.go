package harness

import (
	"crypto/tls"
	"strings"

	"github.com/stratakube/strata/test/harness/etcdproxy"
)

// Proxy is a proxy in front of an etcd of the environment.
type Proxy struct {
	*etcdproxy.Proxy
	etcd *Etcd
}

// Proxy starts a proxy in front of etcd, which runs as long as the environment's processes.
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

// Etcd returns the etcd with the proxy's URL, for flags and clients. To stop and start the etcd,
// use the argument of Env.Proxy.
func (p *Proxy) Etcd() *Etcd { return p.etcd }
