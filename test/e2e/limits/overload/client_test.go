package overload

import (
	"context"
	"errors"
	"net"
	"net/http"
	"syscall"

	"k8s.io/client-go/rest"
)

// options of a client.
type options struct {
	token string
	http1 bool
}

// client has a connection of its own (with HTTP/1.1, one per request) and small buffers: unread
// data stays with the server, except for some kilobytes.
type client struct {
	options
	s    *scene
	http *http.Client
}

func (s *scene) client(o options) (*client, error) {
	config, err := rest.TLSConfigFor(s.server.Config)
	if err != nil {
		return nil, err
	}
	dialer := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		controlErr := raw.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10)
		})
		return errors.Join(controlErr, err)
	}}
	const window = 64 << 10 // the minimum of Go's client
	transport := &http.Transport{
		DialContext:        dialer.DialContext,
		TLSClientConfig:    config,
		ForceAttemptHTTP2:  !o.http1,
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: window},
		DisableCompression: true,
	}
	if o.http1 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetHTTP1(true)
	}
	return &client{o, s, &http.Client{Transport: transport}}, nil
}

func (c *client) close() { c.http.CloseIdleConnections() }

// get sends a GET and returns the response with its body unread.
func (c *client) get(ctx context.Context, path, query, accept, encoding string) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, c.s.server.URL+path+"?"+query, nil)
	if err != nil {
		return nil, err
	}
	request.Header.Set("Authorization", "Bearer "+c.token)
	if accept != "" {
		request.Header.Set("Accept", accept)
	}
	if encoding != "" {
		request.Header.Set("Accept-Encoding", encoding)
	}
	request.Header.Set("User-Agent", "overload")
	return c.http.Do(request)
}
