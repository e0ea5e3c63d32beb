package slowclient

import (
	"net"
	"net/http"
	"sync"
	"time"

	genericapiserver "k8s.io/apiserver/pkg/server"
)

// keepAlivePeriod is the period that upstream sets on connections of a plain TCP listener. Upstream
// does not recognise a TCP listener inside a Listener, so Accept sets it.
const keepAlivePeriod = 3 * time.Minute

// Listener is a net.Listener that indexes its open connections. It is safe for concurrent use.
type Listener struct {
	net.Listener
	conns sync.Map // connKey to *trackedConn
}

// connKey identifies a connection by its two addresses: a request exposes no other identity of its
// connection.
type connKey struct{ local, remote string }

// Track wraps listener so that single connections can be closed. It does not wrap a
// Listener twice.
func Track(listener net.Listener) *Listener {
	if tracked, ok := listener.(*Listener); ok {
		return tracked
	}
	return &Listener{Listener: listener}
}

// TrackServed tracks the connections of c's TLS listener; it returns nil if c has none.
func TrackServed(c *genericapiserver.Config) *Listener {
	if c.SecureServing == nil || c.SecureServing.Listener == nil {
		return nil
	}
	conns := Track(c.SecureServing.Listener)
	c.SecureServing.Listener = conns
	return conns
}

// Accept waits for the next connection.
func (l *Listener) Accept() (net.Conn, error) {
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

// CloseConnection closes the connection of req, if it is still open and was accepted by l.
func (l *Listener) CloseConnection(req *http.Request) {
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
	listener *Listener
	key      connKey
}

// Close removes the connection from the listener's index and closes it.
func (c *trackedConn) Close() error {
	// Remove it before the address can be reused by the next connection.
	c.listener.conns.CompareAndDelete(c.key, c)
	return c.Conn.Close()
}
