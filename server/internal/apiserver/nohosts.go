package apiserver

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"time"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/egressselector"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
)

// NoHostsFlag is a hidden flag, which may be repeated, with a range of addresses that no host has.
const NoHostsFlag = "no-hosts"

// refuseConnections makes connections of the server to kubelets, pods and services, webhooks and
// aggregated APIs among them, fail at addresses that no host has. Other hosts would otherwise
// receive the requests, or the default gateway. A request through a proxy is not refused: NO_PROXY
// has to name the addresses.
func refuseConnections(config *app.Config, noHosts []netip.Prefix) {
	transport := config.KubeAPIs.ControlPlane.ProxyTransport
	transport.DialContext = refusing(transport.DialContext, noHosts)
	kubelets := &config.KubeAPIs.Extra.KubeletClientConfig
	kubelets.Lookup = lookup(kubelets.Lookup, noHosts)
}

// lookup returns a lookup of dial functions that refuse addresses. next may be nil.
func lookup(next egressselector.Lookup, noHosts []netip.Prefix) egressselector.Lookup {
	return func(to egressselector.NetworkContext) (utilnet.DialFunc, error) {
		var dial utilnet.DialFunc
		if next != nil {
			var err error
			if dial, err = next(to); err != nil {
				return nil, err
			}
		}
		return refusing(dial, noHosts), nil
	}
}

// refusing returns a dial function that refuses IP addresses of noHosts. dial may be nil, for
// direct connections.
func refusing(dial utilnet.DialFunc, noHosts []netip.Prefix) utilnet.DialFunc {
	if dial == nil {
		// as net/http
		dial = (&net.Dialer{Timeout: 30 * time.Second, KeepAlive: 30 * time.Second}).DialContext
	}
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, err
		}
		if ip, err := netip.ParseAddr(host); err == nil && slices.ContainsFunc(noHosts, func(p netip.Prefix) bool { return p.Contains(ip.Unmap()) }) {
			return nil, fmt.Errorf("no host has %s: no container runs on simulated nodes, and no proxy forwards to services", host)
		}
		return dial(ctx, network, address)
	}
}
