package target

import (
	"bytes"
	"cmp"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"net/http"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"
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

func (r Request) method() string { return cmp.Or(r.Method, http.MethodGet) }

// Conn is one HTTP/2 connection to an engine, made by its first request. It may be used
// concurrently; requests are its streams.
type Conn struct {
	client  http.Client
	baseURL string
	header  http.Header
}

// Dial returns a new connection. The caller must Close it.
func (e *Engine) Dial() *Conn { return e.dial(Admin, nil) }

// DialAs returns a new connection of a user that buffers few unread bytes, so that thousands of
// them fit into memory. The caller must Close it.
func (e *Engine) DialAs(user User) *Conn {
	const buffer = 256 << 10
	return e.dial(user, &http.HTTP2Config{MaxReceiveBufferPerConnection: buffer, MaxReceiveBufferPerStream: buffer})
}

func (e *Engine) dial(user User, config *http.HTTP2Config) *Conn {
	return &Conn{
		client:  http.Client{Transport: e.transport(config)},
		baseURL: e.baseURL,
		header:  http.Header{"Authorization": {"Bearer " + e.credentials.tokens[user]}, "User-Agent": {"bench"}},
	}
}

func (e *Engine) transport(config *http.HTTP2Config) *http.Transport {
	return &http.Transport{
		TLSClientConfig:    &tls.Config{RootCAs: e.credentials.roots},
		ForceAttemptHTTP2:  true,
		HTTP2:              config,
		DisableCompression: true, // workloads that measure encodings request and decode them
	}
}

// Clientset returns a client of client-go, of Admin, that speaks protobuf over a connection of its
// own, without a limit of its rate. The caller must call closeAll.
func (e *Engine) Clientset() (client kubernetes.Interface, closeAll func(), err error) {
	transport := e.transport(nil)
	token := "Bearer " + e.credentials.tokens[Admin]
	client, err = kubernetes.NewForConfigAndClient(
		&rest.Config{Host: e.baseURL, QPS: -1, ContentConfig: rest.ContentConfig{ContentType: runtime.ContentTypeProtobuf}},
		&http.Client{Transport: authorized(func(r *http.Request) (*http.Response, error) {
			r = r.Clone(r.Context())
			r.Header.Set("Authorization", token)
			return transport.RoundTrip(r)
		})})
	return client, transport.CloseIdleConnections, err
}

type authorized func(*http.Request) (*http.Response, error)

func (a authorized) RoundTrip(r *http.Request) (*http.Response, error) { return a(r) }

// DialAll returns n new connections, which are made. The caller must CloseAll.
func (e *Engine) DialAll(ctx context.Context, n int) ([]*Conn, error) {
	conns := make([]*Conn, n)
	for i := range conns {
		conns[i] = e.Dial()
		if err := conns[i].Open(ctx); err != nil {
			CloseAll(conns[:i+1])
			return nil, err
		}
	}
	return conns, nil
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
	header["Accept"] = []string{cmp.Or(r.Accept, "application/json")}
	if r.Encoding != "" {
		header["Accept-Encoding"] = []string{r.Encoding}
	}
	if len(r.Body) > 0 {
		header["Content-Type"] = []string{cmp.Or(r.ContentType, "application/json")}
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
	if response.StatusCode != cmp.Or(r.Status, http.StatusOK) || response.ProtoMajor != 2 {
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
