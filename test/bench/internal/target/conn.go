package target

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"syscall"
)

// ErrStatus: the server answered with a status that the request did not expect.
var ErrStatus = errors.New("unexpected status")

// Request is one HTTP request.
type Request struct {
	Method      string // "" means GET
	Path        string // with the query
	Accept      string // "" means JSON
	Encoding    string // Accept-Encoding; "" means identity
	Body        []byte
	ContentType string // of Body; "" means JSON
	Status      int    // expected status of the answer; 0 means 200
}

func (r Request) method() string {
	if r.Method == "" {
		return http.MethodGet
	}
	return r.Method
}

// Conn is one HTTP/2 connection to an engine, made by its first request. It may be used
// concurrently; requests are its streams. A Conn of DialNarrow may be HTTP/1.1 instead.
type Conn struct {
	client  http.Client
	baseURL string
	header  http.Header
	http1   bool
}

// Dial returns a new connection. The caller must Close it.
func (e *Engine) Dial() *Conn {
	return e.conn(&http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: e.credentials.roots},
		ForceAttemptHTTP2:  true,
		DisableCompression: true, // workloads that measure encodings request and decode them
	})
}

// DialAs returns a new connection of a user that buffers few unread bytes, so that thousands of
// them fit into memory. The caller must Close it.
func (e *Engine) DialAs(user User) *Conn {
	const buffer = 256 << 10
	conn := e.conn(&http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: e.credentials.roots},
		ForceAttemptHTTP2:  true,
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: buffer, MaxReceiveBufferPerStream: buffer},
		DisableCompression: true,
	})
	conn.header.Set("Authorization", "Bearer "+e.credentials.tokens[user])
	return conn
}

// narrow is the size of the buffers of a connection of DialNarrow, in bytes: for HTTP/2 the least
// of Go's client.
const narrow = 64 << 10

// DialNarrow returns a new connection that buffers few unread bytes: its socket has a small receive
// buffer, and so has HTTP/2's flow control. With http1 it speaks HTTP/1.1, which has a connection
// for each request. The caller must Close it.
func (e *Engine) DialNarrow(http1 bool) *Conn {
	dialer := net.Dialer{Control: func(_, _ string, raw syscall.RawConn) error {
		var err error
		controlErr := raw.Control(func(fd uintptr) {
			err = syscall.SetsockoptInt(int(fd), syscall.SOL_SOCKET, syscall.SO_RCVBUF, 4<<10)
		})
		return errors.Join(controlErr, err)
	}}
	transport := &http.Transport{
		DialContext:        dialer.DialContext,
		TLSClientConfig:    &tls.Config{RootCAs: e.credentials.roots},
		ForceAttemptHTTP2:  !http1,
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: narrow, MaxReceiveBufferPerStream: narrow},
		DisableCompression: true,
	}
	if http1 {
		transport.Protocols = new(http.Protocols)
		transport.Protocols.SetHTTP1(true)
	}
	conn := e.conn(transport)
	conn.http1 = http1
	return conn
}

func (e *Engine) conn(transport *http.Transport) *Conn {
	return &Conn{
		client:  http.Client{Transport: transport},
		baseURL: e.baseURL,
		header:  http.Header{"Authorization": {"Bearer " + e.credentials.tokens[Admin]}, "User-Agent": {"bench"}},
	}
}

// DialAll returns n new connections.
func (e *Engine) DialAll(n int) []*Conn {
	conns := make([]*Conn, n)
	for i := range conns {
		conns[i] = e.Dial()
	}
	return conns
}

// CloseAll closes connections.
func CloseAll(conns []*Conn) {
	for _, c := range conns {
		c.Close()
	}
}

// Close closes the connection once its streams have ended.
func (c *Conn) Close() { c.client.CloseIdleConnections() }

// Send sends a request and returns the response, of any status, with its body unread.
func (c *Conn) Send(ctx context.Context, r Request) (*http.Response, error) {
	request, err := http.NewRequestWithContext(ctx, r.method(), c.baseURL+r.Path, bytes.NewReader(r.Body))
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.method(), r.Path, err)
	}
	if len(r.Body) == 0 {
		request.Body = nil
	}
	header := make(http.Header, 5)
	for key, values := range c.header {
		header[key] = values
	}
	header["Accept"] = []string{orJSON(r.Accept)}
	if r.Encoding != "" {
		header["Accept-Encoding"] = []string{r.Encoding}
	}
	if len(r.Body) > 0 {
		header["Content-Type"] = []string{orJSON(r.ContentType)}
	}
	request.Header = header

	response, err := c.client.Do(request)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", r.method(), r.Path, err)
	}
	return response, nil
}

// Do is Send, except that a status other than the expected one is ErrStatus, with the body quoted.
func (c *Conn) Do(ctx context.Context, r Request) (*http.Response, error) {
	response, err := c.Send(ctx, r)
	if err != nil {
		return nil, err
	}
	want := r.Status
	if want == 0 {
		want = http.StatusOK
	}
	if response.StatusCode != want || response.ProtoMajor != map[bool]int{false: 2, true: 1}[c.http1] {
		defer response.Body.Close()
		// the readable part is quoted; the status is the error
		quoted, _ := io.ReadAll(io.LimitReader(response.Body, 500))
		return nil, fmt.Errorf("%s %s: %w %s over %s: %s", r.method(), r.Path, ErrStatus, response.Status, response.Proto, quoted)
	}
	return response, nil
}

// Open makes the connection, so that the first request that is measured does not wait for it.
func (c *Conn) Open(ctx context.Context) error {
	return c.Read(ctx, Request{Path: "/version"}, new(bytes.Buffer))
}

// Read sends a request and reads the body of the answer into body, replacing its content.
func (c *Conn) Read(ctx context.Context, r Request, body *bytes.Buffer) error {
	response, err := c.Do(ctx, r)
	if err != nil {
		return err
	}
	defer response.Body.Close()
	body.Reset()
	if _, err := body.ReadFrom(response.Body); err != nil {
		return fmt.Errorf("%s %s: %w", r.method(), r.Path, err)
	}
	return nil
}

func orJSON(mediaType string) string {
	if mediaType == "" {
		return "application/json"
	}
	return mediaType
}
