// Package loopback reserves TCP ports of 127.0.0.1 for servers that `strata up`, tests and
// benchmarks run, most as separate processes. Such a server is configured with its port before it
// starts, and may stop and start again on it, so it cannot choose a port itself.
package loopback

import (
	"fmt"
	"sync"
)

// Port is a reserved port. A connection to it is refused while no server listens on it.
type Port struct {
	number  int
	release func() error
}

// Reserve picks a free port and binds it until Release or the end of this process. The kernel then
// assigns it neither to a listener on any port nor to an outgoing connection of any process. A
// server that names the port can listen on it, also after restarts, if it sets SO_REUSEADDR, which
// Go does for every listener.
//
// Only Linux allows a second socket on a bound port in this way. On other systems Reserve only
// picks a port that is currently free, and another process may take it first.
func Reserve() (*Port, error) {
	return reserveNumber(0)
}

// ReserveNumber is Reserve of the port with a given number. It fails if a server listens on the
// port.
func ReserveNumber(number int) (*Port, error) { return reserveNumber(number) }

func reserveNumber(number int) (*Port, error) {
	bound, release, err := reserve(number)
	if err != nil {
		return nil, fmt.Errorf("reserve a port of 127.0.0.1: %w", err)
	}
	return &Port{bound, sync.OnceValue(release)}, nil
}

// Number returns the number of the port.
func (p *Port) Number() int { return p.number }

// Address returns the address to listen on, as in 127.0.0.1:2379.
func (p *Port) Address() string { return fmt.Sprintf("127.0.0.1:%d", p.number) }

// Release ends the reservation; a server that listens on the port keeps it. Later calls return the
// result of the first.
func (p *Port) Release() error { return p.release() }
