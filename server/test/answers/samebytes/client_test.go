package samebytes

import (
	"bytes"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// engine is a server and how to speak with it without anything in between that adds, decodes or repeats.
type engine struct {
	name         string
	server       *harness.Server
	http1, http2 *http.Client
}

func newEngine(name string, server *harness.Server) *engine {
	client := func(http1 bool) *http.Client {
		config, err := rest.TLSConfigFor(server.Config)
		if err != nil {
			panic(err) // the certificates are those of the harness
		}
		transport := &http.Transport{TLSClientConfig: config, DisableCompression: true, ForceAttemptHTTP2: !http1, MaxIdleConnsPerHost: 16}
		if http1 {
			transport.TLSNextProto = map[string]func(string, *tls.Conn) http.RoundTripper{}
		}
		return &http.Client{Transport: transport, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }}
	}
	return &engine{name: name, server: server, http1: client(true), http2: client(false)}
}

// request is what both servers are asked. The zero value is a GET by the administrator over HTTP/2 that accepts anything
// in any form by not saying so.
type request struct {
	method string
	path   string
	query  string // without the question mark
	accept string // "" sends no Accept
	gzip   bool   // accepts it, that is
	http1  bool
	token  string // "" for the administrator's
	agent  string // User-Agent; "" for Go's
}

// String describes a request in a line.
func (r request) String() string {
	words := []string{or(r.method, http.MethodGet), r.path}
	if r.query != "" {
		words[1] += "?" + r.query
	}
	if r.accept != "" {
		words = append(words, "Accept: "+r.accept)
	}
	if r.gzip {
		words = append(words, "gzip")
	}
	if r.http1 {
		words = append(words, "HTTP/1.1")
	}
	if r.token != "" {
		words = append(words, "as "+r.token)
	}
	if r.agent != "" {
		words = append(words, "User-Agent: "+r.agent)
	}
	return strings.Join(words, " ")
}

func or(s, otherwise string) string {
	if s != "" {
		return s
	}
	return otherwise
}

// response is an answer that was read to its end.
type response struct {
	proto  string
	code   int
	header http.Header
	body   []byte // decompressed
	err    error  // how reading the body failed
}

// begin sends a request and returns when the headers of the answer are there.
func (e *engine) begin(ctx context.Context, r request) (*http.Response, error) {
	url := e.server.URL + r.path
	if r.query != "" {
		url += "?" + r.query
	}
	req, err := http.NewRequestWithContext(ctx, or(r.method, http.MethodGet), url, nil)
	if err != nil {
		return nil, err
	}
	if r.accept != "" {
		req.Header.Set("Accept", r.accept)
	}
	if r.gzip {
		req.Header.Set("Accept-Encoding", "gzip")
	}
	if r.agent != "" {
		req.Header.Set("User-Agent", r.agent)
	}
	if token := or(r.token, adminToken); token != tokenAnonymous {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := e.http2
	if r.http1 {
		client = e.http1
	}
	return client.Do(req)
}

// ask sends a request and reads the answer.
func (e *engine) ask(ctx context.Context, r request) (*response, error) {
	resp, err := e.begin(ctx, r)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", e.name, err)
	}
	defer resp.Body.Close()
	answer := &response{proto: resp.Proto, code: resp.StatusCode, header: resp.Header}
	answer.body, answer.err = io.ReadAll(resp.Body)
	if answer.err == nil && resp.Header.Get("Content-Encoding") == "gzip" {
		answer.body, answer.err = decompress(answer.body)
	}
	return answer, nil
}

// decompress returns what is in a gzip member. There must be one, and nothing else.
func decompress(data []byte) ([]byte, error) {
	source := bytes.NewReader(data)
	reader, err := gzip.NewReader(source)
	if err != nil {
		return nil, err
	}
	reader.Multistream(false)
	plain, err := io.ReadAll(reader)
	if err == nil && source.Len() > 0 {
		err = fmt.Errorf("%d bytes after the gzip member", source.Len())
	}
	return plain, err
}

// ask sends a request to both servers at the same time.
func (w *world) ask(t *testing.T, ctx context.Context, r request) (answers [2]*response) {
	t.Helper()
	errs := make(chan error)
	for i, e := range w.engines {
		go func() {
			var err error
			answers[i], err = e.ask(ctx, r)
			errs <- err
		}()
	}
	for range w.engines {
		if err := <-errs; err != nil {
			t.Errorf("%s: %v", r, err)
		}
	}
	if t.Failed() && (answers[0] == nil || answers[1] == nil) {
		t.FailNow()
	}
	return answers
}
