package readpath

import (
	"net"
	"net/http"
	"sync"
	"time"
)

// keepAlivePeriod is what upstream sets on the connections of a plain TCP listener, which
// it does not recognise behind a trackedListener.
const keepAlivePeriod = 3 * time.Minute

// trackedListener knows the connections that it has accepted until they are closed. It
// is safe for concurrent use.
type trackedListener struct {
	net.Listener
	conns sync.Map // connKey to *trackedConn
}

// connKey names a connection by both of its ends: a request knows no more of it.
type connKey struct{ local, remote string }

// trackConnections returns listener as one whose connections can be closed one by one.
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
		// An error means that the connection is gone already, which reading will tell.
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

// close closes the connection that req came by, if it is still open and this listener's.
func (l *trackedListener) close(req *http.Request) {
	local, ok := req.Context().Value(http.LocalAddrContextKey).(net.Addr)
	if !ok {
		return
	}
	if conn, ok := l.conns.Load(connKey{local: local.String(), remote: req.RemoteAddr}); ok {
		_ = conn.(*trackedConn).Close() // whoever reads from it learns of it
	}
}

type trackedConn struct {
	net.Conn
	listener *trackedListener
	key      connKey
}

// Close closes the connection.
func (c *trackedConn) Close() error {
	// Before the address is free to be used by the next connection.
	c.listener.conns.CompareAndDelete(c.key, c)
	return c.Conn.Close()
}
