package faulty

import (
	"fmt"
	"hash/fnv"
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

// Link is a TCP proxy in front of a server, such as a member of etcd, with the faults of real
// networks. Its methods may be called concurrently.
type Link struct {
	URL string

	listener net.Listener
	group    sync.WaitGroup
	down     atomic.Int64 // bytes from the server to clients
	opened   atomic.Int64 // connections

	mu struct {
		sync.Mutex // leaf
		target     string
		conns      map[*conn]struct{}
		refuse     bool          // connections are reset
		silent     bool          // all bytes are dropped
		delay      time.Duration // maximum
		even       bool          // delay is that of all connections
	}
}

// conn is a connection through a link.
type conn struct {
	client, server net.Conn
	share          float64       // this connection's fraction of the link's delay
	delay          atomic.Int64  // time.Duration
	lossy          atomic.Bool   // bytes are dropped, or may have been before it is reset
	dead           chan struct{} // closed when the connection has been reset
}

// NewLink opens a link to a URL that lasts as long as the environment's processes.
func NewLink(t testing.TB, e *harness.Env, target string) *Link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	l := &Link{URL: "http://" + listener.Addr().String(), listener: listener}
	l.mu.conns = map[*conn]struct{}{}
	if err := l.Lead(target); err != nil {
		t.Fatal(err)
	}
	l.group.Go(func() {
		for {
			client, err := listener.Accept()
			if err != nil {
				return
			}
			l.group.Go(func() { l.carry(client) })
		}
	})
	e.AtEnd(func() {
		l.Refuse(true)
		_ = listener.Close()
		l.group.Wait()
	})
	return l
}

// Lead sets the URL for new connections; its server need not run.
func (l *Link) Lead(target string) error {
	u, err := url.Parse(target)
	if err != nil {
		return fmt.Errorf("redirect a link: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.target = u.Host
	return nil
}

// Down returns the number of bytes from the server to clients.
func (l *Link) Down() int64 { return l.down.Load() }

// Refuse resets all connections and every new one, until it is called with false.
func (l *Link) Refuse(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.refuse = on
	l.resetLocked(func(*conn) bool { return on })
}

// Reset resets all connections once.
func (l *Link) Reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resetLocked(func(*conn) bool { return true })
}

// Delay delays all traffic by up to most, until it is called with 0. The delay is the same for all
// bytes of one connection, and differs between connections, so that bytes of one connection may
// overtake earlier bytes of another. A connection transfers at most 64 KiB per delay.
func (l *Link) Delay(most time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delayLocked(most, false)
}

// Slow delays all traffic of every connection by lag, as a long line does, and is its bandwidth
// too: a connection transfers 32 KiB per lag. It lasts until it is called with 0.
func (l *Link) Slow(lag time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.delayLocked(lag, true)
}

// delayLocked sets the delay of all connections; the caller holds mu.
func (l *Link) delayLocked(most time.Duration, even bool) {
	l.mu.delay, l.mu.even = most, even
	for c := range l.mu.conns {
		c.setDelay(most, even)
	}
}

func (c *conn) setDelay(most time.Duration, even bool) {
	share := c.share
	if even {
		share = 1
	}
	c.delay.Store(int64(share * float64(most)))
}

// Silence makes all connections half-open: they are accepted and stay open, and all bytes are
// dropped. At its end they are reset, as dropped bytes cannot be sent again.
func (l *Link) Silence(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.silent = on
	if on {
		for c := range l.mu.conns {
			c.lossy.Store(true)
		}
	}
	l.resetLocked(func(c *conn) bool { return !on && c.lossy.Load() })
}

// resetLocked resets the connections for which the function returns true; the caller holds mu.
func (l *Link) resetLocked(which func(*conn) bool) {
	for c := range l.mu.conns {
		if !which(c) {
			continue
		}
		for _, end := range []net.Conn{c.client, c.server} {
			_ = end.(*net.TCPConn).SetLinger(0)
			_ = end.Close()
		}
		close(c.dead)
		delete(l.mu.conns, c)
	}
}

// carry forwards the bytes of one connection until either end closes it.
func (l *Link) carry(client net.Conn) {
	defer client.Close()
	l.mu.Lock()
	target := l.mu.target
	l.mu.Unlock()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	c := &conn{client: client, server: server, share: share(l.opened.Add(1)), dead: make(chan struct{})}
	l.mu.Lock()
	l.mu.conns[c] = struct{}{}
	c.lossy.Store(l.mu.silent)
	c.setDelay(l.mu.delay, l.mu.even)
	l.resetLocked(func(o *conn) bool { return o == c && l.mu.refuse })
	l.mu.Unlock()

	var up sync.WaitGroup
	up.Go(func() { c.pass(server, client, new(atomic.Int64)) })
	c.pass(client, server, &l.down)
	up.Wait()
	l.mu.Lock()
	delete(l.mu.conns, c)
	l.mu.Unlock()
}

// share returns a pseudo-random number between 0 and 1 that depends on n alone.
func share(n int64) float64 {
	h := fnv.New32a()
	fmt.Fprint(h, n)
	return float64(h.Sum32()%1000) / 1000
}

// pass copies and counts bytes until one end closes the connection; then it closes the other.
func (c *conn) pass(to, from net.Conn, count *atomic.Int64) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if held := time.Duration(c.delay.Load()); held > 0 {
			select {
			case <-time.After(held):
			case <-c.dead:
			}
		}
		if c.lossy.Load() {
			if err != nil {
				<-c.dead // the close of one end is dropped too
				return
			}
			continue
		}
		if n > 0 {
			count.Add(int64(n))
			_, writeErr := to.Write(buf[:n])
			if err == nil {
				err = writeErr
			}
		}
		if err != nil {
			_ = to.Close()
			return
		}
	}
}
