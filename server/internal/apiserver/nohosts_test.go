package apiserver

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"

	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/server/egressselector"
)

func TestRefusing_AddressWithoutHost_IsNotDialled(t *testing.T) {
	noHosts := []netip.Prefix{netip.MustParsePrefix("198.18.0.0/15"), netip.MustParsePrefix("10.0.0.0/24")}
	reached := errors.New("reached")
	var dialled []string
	dial := func(_ context.Context, _, address string) (net.Conn, error) {
		dialled = append(dialled, address)
		return nil, reached
	}
	looked, err := lookup(func(egressselector.NetworkContext) (utilnet.DialFunc, error) { return dial, nil }, noHosts)(egressselector.Cluster.AsNetworkContext())
	if err != nil {
		t.Fatal(err)
	}
	for name, dial := range map[string]utilnet.DialFunc{"transport": refusing(dial, noHosts), "kubelets": looked} {
		for address, refused := range map[string]bool{
			"198.18.0.1:80": true, "198.19.255.255:1": true, "[::ffff:198.18.0.1]:80": true, "10.0.0.158:443": true,
			"198.20.0.0:80": false, "10.0.1.0:80": false, "127.0.0.1:80": false, "[::1]:80": false, "example.com:443": false,
		} {
			dialled = nil
			_, err := dial(t.Context(), "tcp", address)
			switch {
			case refused && (len(dialled) > 0 || err == nil || !strings.Contains(err.Error(), "no host has")):
				t.Errorf("%s: %s was dialled: %v, %v", name, address, dialled, err)
			case !refused && (len(dialled) != 1 || !errors.Is(err, reached)):
				t.Errorf("%s: %s was not dialled: %v", name, address, err)
			}
		}
	}
	if _, err := lookup(func(egressselector.NetworkContext) (utilnet.DialFunc, error) { return nil, reached }, noHosts)(egressselector.NetworkContext{}); !errors.Is(err, reached) {
		t.Errorf("error %v, want %v", err, reached)
	}
}
