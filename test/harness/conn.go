package harness

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"net/http"
	"strings"
	"syscall"

	"k8s.io/client-go/rest"
)

// Dial opens a TLS connection for HTTP/1.1 without a token. The caller closes it.
func (s *Server) Dial(ctx context.Context) (net.Conn, error) {
	config, err := rest.TLSConfigFor(s.Config)
	if err != nil {
		return nil, err
	}
	config.NextProtos = []string{"http/1.1"}
	s.Used(ctx)
	dialer := tls.Dialer{Config: config}
	return dialer.DialContext(ctx, "tcp", strings.TrimPrefix(s.URL, "https://"))
}

// SlowClient returns a client without the user's token that has connections of its own (with
// HTTP/1.1, one per request) and small buffers: unread data stays with the server, except for some
// kilobytes.
func (s *Server) SlowClient(http1 bool) (*http.Client, error) {
	config, err := rest.TLSConfigFor(s.Config)
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
		ForceAttemptHTTP2:  !http1,
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: window, MaxReceiveBufferPerStream: window},
		DisableCompression: true,
	}
	if http1 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetHTTP1(true)
	}
	return &http.Client{Transport: transport}, nil
}

// OwnConnections returns a copy of config whose clients share no connection with other copies.
func OwnConnections(config *rest.Config) *rest.Config {
	own := rest.CopyConfig(config)
	// client-go shares no connections of clients with their own dialer
	own.Dial = (&net.Dialer{}).DialContext
	return own
}
