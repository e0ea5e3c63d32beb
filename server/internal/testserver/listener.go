package testserver

import (
	"net"
	"sync"
)

// cutListener is a listener that can close the connections that it accepted.
type cutListener struct {
	net.Listener

	mu    sync.Mutex // leaf
	conns map[*cutConn]struct{}
	isCut bool
}

func newCutListener(inner net.Listener) *cutListener {
	return &cutListener{Listener: inner, conns: map[*cutConn]struct{}{}}
}

// Accept implements net.Listener.
func (l *cutListener) Accept() (net.Conn, error) {
	inner, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	conn := &cutConn{Conn: inner, listener: l}
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.isCut {
		inner.Close()
	} else {
		l.conns[conn] = struct{}{}
	}
	return conn, nil
}

// cut closes all connections, and each that is accepted later.
func (l *cutListener) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.isCut = true
	for conn := range l.conns {
		conn.Conn.Close()
	}
	clear(l.conns)
}

// cutConn removes itself from its listener when it is closed.
type cutConn struct {
	net.Conn
	listener *cutListener
}

func (c *cutConn) Close() error {
	c.listener.mu.Lock()
	delete(c.listener.conns, c)
	c.listener.mu.Unlock()
	return c.Conn.Close()
}
