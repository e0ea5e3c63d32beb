package harness

import (
	"net"
	"strings"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/balancer"
)

// Balancer forwards TCP connections to those API servers whose /readyz succeeds. While no server is
// ready, or when the chosen one refuses the connection, a new connection waits for a ready server.
type Balancer struct {
	URL    string
	Config *rest.Config // for the administrator
}

// Balancer starts a balancer in front of servers, which runs as long as the environment's
// processes. The servers may be stopped and started.
func (e *Env) Balancer(servers ...*Server) *Balancer {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	e.check(err)
	var backends []balancer.Backend
	for _, s := range servers {
		_, address, _ := strings.Cut(s.URL, "://")
		client, err := rest.HTTPClientFor(s.ConfigFor(adminToken))
		e.check(err)
		backends = append(backends, balancer.Backend{Name: address, Address: address, Check: balancer.Readyz(client, s.URL+"/readyz")})
	}
	e.AtEnd(balancer.Start(listener, balancer.Options{Backends: backends, ReadyOnly: true}).Close)
	b := &Balancer{URL: "https://" + listener.Addr().String(), Config: rest.CopyConfig(servers[0].Config)}
	b.Config.Host = b.URL
	return b
}
