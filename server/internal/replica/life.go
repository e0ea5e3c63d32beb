package replica

import (
	"context"
	"errors"
	"io"
	"net/http"
	"sync"
)

// errSilent is the cause with which requests in flight end at a primary that has not answered its
// health check for healthUnanswered.
var errSilent = errors.New("the API server has not answered its health check for " + healthUnanswered.String())

// life is the time during which a primary answers. Its end cancels all requests that were bound to
// it. The zero value needs renew.
type life struct {
	mu  sync.Mutex // leaf
	ctx context.Context
	end context.CancelCauseFunc
}

// renew begins a life if the last one has ended.
func (l *life) renew() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ctx == nil || l.ctx.Err() != nil {
		l.ctx, l.end = context.WithCancelCause(context.Background())
	}
}

// cut ends the life with errSilent.
func (l *life) cut() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.end(errSilent)
}

// binding ties a request to a life.
type binding struct {
	ctx     context.Context // of the request; ends with the life too, with errSilent as cause
	life    context.Context
	release func() // ends ctx; to be called when the request has ended
}

// bind ties a request with the context to the current life.
func (l *life) bind(ctx context.Context) binding {
	l.mu.Lock()
	life := l.ctx
	l.mu.Unlock()
	bound, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(life, func() { cancel(context.Cause(life)) })
	return binding{bound, life, func() {
		stop()
		cancel(nil)
	}}
}

// follow releases the binding when the body of the response is closed. The connection of a response
// that changes the protocol is no longer subject to the context of its request, so it is closed at
// the end of the life.
func (b binding) follow(resp *http.Response) {
	conn, upgraded := resp.Body.(io.ReadWriteCloser)
	if !upgraded || resp.StatusCode != http.StatusSwitchingProtocols {
		resp.Body = &boundBody{resp.Body, b.release}
		return
	}
	stop := context.AfterFunc(b.life, func() { conn.Close() })
	resp.Body = &boundConn{conn, func() {
		stop()
		b.release()
	}}
}

// boundBody is a body that calls end when it is closed, which cancels the request.
type boundBody struct {
	io.ReadCloser
	end func()
}

// Close implements io.Closer. The cancellation comes first: over HTTP/2, closing the body of a
// response that came before the body of its request was sent waits for the end of that body, or of
// the request. A client that has stopped to send because of the response's code would wait for this
// one.
func (b *boundBody) Close() error {
	b.end()
	return b.ReadCloser.Close()
}

// boundConn is a connection that calls end when it is closed.
type boundConn struct {
	io.ReadWriteCloser
	end func()
}

// Close implements io.Closer.
func (c *boundConn) Close() error {
	defer c.end()
	return c.ReadWriteCloser.Close()
}

// CloseWrite half-closes the connection if it can be.
func (c *boundConn) CloseWrite() error {
	if half, ok := c.ReadWriteCloser.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return http.ErrNotSupported
}
