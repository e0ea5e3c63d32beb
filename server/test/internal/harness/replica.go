package harness

import (
	"crypto/tls"
	"crypto/x509"
	"strings"
)

// FrontProxy is an authority of front proxies, and the certificate of one.
type FrontProxy struct {
	ca    *Authority
	proxy Certificate
}

// FrontProxy creates an authority of front proxies.
func (e *Env) FrontProxy() *FrontProxy {
	ca := e.Authority()
	return &FrontProxy{ca: ca, proxy: ca.Issue("front-proxy-client")}
}

// TrustFlags returns the flags with which an API server accepts the users that the front proxy names.
func (f *FrontProxy) TrustFlags() []string {
	return []string{
		"--requestheader-client-ca-file=" + f.ca.CertFile,
		"--requestheader-allowed-names=front-proxy-client",
		"--requestheader-username-headers=X-Remote-User",
		"--requestheader-uid-headers=X-Remote-Uid",
		"--requestheader-group-headers=X-Remote-Group",
		"--requestheader-extra-headers-prefix=X-Remote-Extra-",
	}
}

// ServerOf returns the certificate of a server of the environment that a test runs in its own process in place of a primary, and the
// authorities of the front proxy.
func (f *FrontProxy) ServerOf(e *Env) (tls.Certificate, *x509.CertPool) {
	serving := e.serving().Issue("stub")
	cert, err := tls.X509KeyPair(serving.CertPEM, serving.KeyPEM)
	e.check(err)
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(f.ca.CertPEM)
	return cert, pool
}

// ProxyFlags returns the flags with which a replica is the front proxy.
func (f *FrontProxy) ProxyFlags() []string {
	return []string{"--proxy-client-cert-file=" + f.proxy.CertFile, "--proxy-client-key-file=" + f.proxy.KeyFile}
}

// Replica starts `strata replica` on etcd, in front of the primaries, which trust the front proxy, and returns when /readyz succeeds. Later
// flags override earlier ones.
func (e *Env) Replica(etcd *Etcd, f *FrontProxy, primaries []*Server, flags ...string) *Server {
	s := e.StartReplica(etcd, f, primaries, flags...)
	ctx, cancel := ready()
	defer cancel()
	e.check(s.Await(ctx, "/readyz"))
	return s
}

// StartReplica is Replica without the wait.
func (e *Env) StartReplica(etcd *Etcd, f *FrontProxy, primaries []*Server, flags ...string) *Server {
	urls := make([]string, 0, len(primaries))
	for _, p := range primaries {
		urls = append(urls, p.URL)
	}
	return e.ReplicaOf(etcd, f, urls, flags...)
}

// DelegatingReplica is Replica with --delegate-auth, and without keys and tokens.
func (e *Env) DelegatingReplica(etcd *Etcd, f *FrontProxy, primaries []*Server, flags ...string) *Server {
	urls := make([]string, 0, len(primaries))
	for _, p := range primaries {
		urls = append(urls, p.URL)
	}
	s := e.startAPIServer(launch{command: "replica", withoutKeys: true}, etcd, append(e.replicaFlags(f, urls), append(flags, "--delegate-auth")...)...)
	ctx, cancel := ready()
	defer cancel()
	e.check(s.Await(ctx, "/readyz"))
	return s
}

// ReplicaOf is StartReplica with the URLs of the primaries, whose certificates are those of servers of the environment.
func (e *Env) ReplicaOf(etcd *Etcd, f *FrontProxy, urls []string, flags ...string) *Server {
	return e.startAPIServer(launch{command: "replica"}, etcd, append(e.replicaFlags(f, urls), flags...)...)
}

func (e *Env) replicaFlags(f *FrontProxy, urls []string) []string {
	return append(f.ProxyFlags(), "--primary="+strings.Join(urls, ","), "--primary-ca-file="+e.serving().CertFile)
}
