package feed

import (
	"net"
	"net/url"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// link is a way over TCP to an etcd, which can be broken in the ways in which networks break. Its methods may be called
// concurrently.
type link struct {
	URL string

	listener net.Listener
	group    sync.WaitGroup
	down     atomic.Int64 // bytes that have passed from etcd to clients

	mu struct {
		sync.Mutex // leaf
		target     string
		conns      map[*conn]struct{}
		refuse     bool // connections are reset
		silent     bool // all bytes are swallowed
	}
}

// conn is a connection through a link.
type conn struct {
	client, server net.Conn
	lossy          atomic.Bool   // bytes are swallowed, and may have been when it is reset
	dead           chan struct{} // closed when it has been reset
}

// newLink opens a link to an etcd that lasts as long as the environment's processes.
func newLink(t *testing.T, e *harness.Env, target string) *link {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	check(t, err)
	l := &link{URL: "http://" + listener.Addr().String(), listener: listener}
	l.mu.conns = map[*conn]struct{}{}
	l.lead(t, target)
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
		l.refuse(true)
		_ = listener.Close()
		l.group.Wait()
	})
	return l
}

// lead makes new connections lead to an etcd; it need not run.
func (l *link) lead(t *testing.T, target string) {
	t.Helper()
	u, err := url.Parse(target)
	check(t, err)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.target = u.Host
}

// refuse resets all connections and every new one, until it is called with false.
func (l *link) refuse(on bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.refuse = on
	l.resetLocked(func(*conn) bool { return on })
}

// reset resets all connections once.
func (l *link) reset() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.resetLocked(func(*conn) bool { return true })
}

// silence makes all connections half-open: they are accepted and stay open, and all bytes are swallowed. When it ends they
// are reset, as what was lost cannot be had again.
func (l *link) silence(on bool) {
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

// resetLocked resets some connections; the caller holds mu.
func (l *link) resetLocked(which func(*conn) bool) {
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

// carry passes what comes over one connection until either end closes it.
func (l *link) carry(client net.Conn) {
	defer client.Close()
	l.mu.Lock()
	target := l.mu.target
	l.mu.Unlock()
	server, err := net.Dial("tcp", target)
	if err != nil {
		return
	}
	defer server.Close()
	c := &conn{client: client, server: server, dead: make(chan struct{})}
	l.mu.Lock()
	l.mu.conns[c] = struct{}{}
	c.lossy.Store(l.mu.silent)
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

// pass copies bytes, and counts them, until one end closes the connection; then it closes the other.
func (c *conn) pass(to, from net.Conn, count *atomic.Int64) {
	buf := make([]byte, 32<<10)
	for {
		n, err := from.Read(buf)
		if c.lossy.Load() {
			if err != nil {
				<-c.dead // that one end has closed it is swallowed too
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
