package readpath

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// keepAlivePeriod is the period that upstream sets on connections of a plain TCP listener. Upstream
// does not recognise a TCP listener inside a trackedListener, so Accept sets it.
const keepAlivePeriod = 3 * time.Minute

// trackedListener is a net.Listener that indexes its open connections. It is safe for concurrent use.
type trackedListener struct {
	net.Listener
	conns sync.Map // connKey to *trackedConn
}

// connKey identifies a connection by its two addresses: a request exposes no other identity of its connection.
type connKey struct{ local, remote string }

// trackConnections wraps listener so that single connections can be closed. It does not wrap a
// trackedListener twice.
func trackConnections(listener net.Listener) *trackedListener {
	if tracked, ok := listener.(*trackedListener); ok {
		return tracked
	}
	return &trackedListener{Listener: listener}
}

// Accept waits for the next connection.
func (l *trackedListener) Accept() (net.Conn, error) {
	conn, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		// An error means that the connection is closed already; the next read reports that.
		_ = tcp.SetKeepAlivePeriod(keepAlivePeriod)
	}
	tracked := &trackedConn{
		Conn:     conn,
		listener: l,
		key:      connKey{local: conn.LocalAddr().String(), remote: conn.RemoteAddr().String()},
	}
	l.conns.Store(tracked.key, tracked)
	return tracked, nil
}

// close closes the connection of req, if it is still open and was accepted by l.
func (l *trackedListener) close(req *http.Request) {
	local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return
	}
	if conn, ok := l.conns.Load(connKey{local: local.String(), remote: req.RemoteAddr}); ok {
		_ = conn.(*trackedConn).Close() // a pending read returns an error
	}
}

type trackedConn struct {
	net.Conn
	listener *trackedListener
	key      connKey
}

// Close removes the connection from the listener's index and closes it.
func (c *trackedConn) Close() error {
	// Remove it before the address can be reused by the next connection.
	c.listener.conns.CompareAndDelete(c.key, c)
	return c.Conn.Close()
}
