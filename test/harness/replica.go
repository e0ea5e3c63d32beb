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

// AuthorityFile returns the file with the certificate of the authority.
func (f *FrontProxy) AuthorityFile() string { return f.ca.CertFile }

// TrustFlags returns the flags with which an API server accepts the users that the front proxy
// names.
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

// InPlaceOfPrimary returns the TLS configurations of a server of the environment that a test runs
// in its own process between replicas and a primary: for connections of the replicas, which have to
// come from the front proxy, and to the primary, as the front proxy.
func (f *FrontProxy) InPlaceOfPrimary(e *Env) (server, client *tls.Config) {
	trusted, serving := x509.NewCertPool(), x509.NewCertPool()
	trusted.AppendCertsFromPEM(f.ca.CertPEM)
	serving.AppendCertsFromPEM(e.serving().CertPEM)
	pair := func(c Certificate) []tls.Certificate {
		cert, err := tls.X509KeyPair(c.CertPEM, c.KeyPEM)
		e.check(err)
		return []tls.Certificate{cert}
	}
	return &tls.Config{Certificates: pair(e.serving().Issue("stub")), ClientAuth: tls.RequireAndVerifyClientCert, ClientCAs: trusted},
		&tls.Config{Certificates: pair(f.proxy), RootCAs: serving}
}

// ProxyFlags returns the flags with which a replica is the front proxy.
func (f *FrontProxy) ProxyFlags() []string {
	return []string{"--proxy-client-cert-file=" + f.proxy.CertFile, "--proxy-client-key-file=" + f.proxy.KeyFile}
}

// Replica starts `strata replica` on etcd, in front of the primaries, which trust the front proxy,
// and returns when /readyz succeeds. Later flags override earlier ones.
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

// ReplicaOf is StartReplica with the URLs of the primaries, whose certificates are those of servers
// of the environment.
func (e *Env) ReplicaOf(etcd *Etcd, f *FrontProxy, urls []string, flags ...string) *Server {
	return e.startAPIServer(launch{command: "replica"}, etcd, append(e.replicaFlags(f, urls), flags...)...)
}

func (e *Env) replicaFlags(f *FrontProxy, urls []string) []string {
	return append(f.ProxyFlags(), "--primary="+strings.Join(urls, ","), "--primary-ca-file="+e.serving().CertFile)
}
