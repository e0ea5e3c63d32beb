package samebytes

import (
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"crypto/tls"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// engine is a server with clients that add, decode and retry nothing.
type engine struct {
	name         string
	server       *harness.Server
	http1, http2 *http.Client
}

func newEngine(name string, server *harness.Server) *engine {
	return &engine{name: name, server: server, http1: newClient(server, true), http2: newClient(server, false)}
}

// newClient returns a client with connections of its own.
func newClient(server *harness.Server, http1 bool) *http.Client {
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

// request is a request to both servers. The zero value is the administrator's GET over HTTP/2
// without an Accept header.
type request struct {
	method string
	path   string
	query  string // without the question mark
	accept string // "" sends no Accept
	gzip   bool   // sends Accept-Encoding: gzip
	http1  bool
	token  string // "" for the administrator's token
	agent  string // User-Agent; "" for Go's
}

// String describes a request in a line.
func (r request) String() string {
	words := []string{cmp.Or(r.method, http.MethodGet), r.path}
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

// response is an answer that was read to the end.
type response struct {
	proto  string
	code   int
	header http.Header
	body   []byte // decompressed
	err    error  // the error of reading the body
}

// begin sends a request and returns when the headers of the answer have arrived.
func (e *engine) begin(ctx context.Context, r request) (*http.Response, error) {
	url := e.server.URL + r.path
	if r.query != "" {
		url += "?" + r.query
	}
	req, err := http.NewRequestWithContext(ctx, cmp.Or(r.method, http.MethodGet), url, nil)
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
	if token := cmp.Or(r.token, adminToken); token != tokenAnonymous {
		req.Header.Set("Authorization", "Bearer "+token)
	}
	client := e.http2
	switch {
	case r.http1:
		client = e.http1
	case r.token == tokenAnonymous || r.token == tokenUnknown:
		// The server closes the HTTP/2 connection of an unauthenticated request, with the last
		// bytes of other responses on it (UnauthenticatedHTTP2DOSMitigation).
		client = newClient(e.server, false)
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

// patient is ask for a request that no server has a reason to refuse: on a busy machine one may not
// catch up with etcd in time. It repeats a refused request, a few times.
func (e *engine) patient(ctx context.Context, r request) (*response, error) {
	answer, err := e.ask(ctx, r)
	for range 4 {
		if err != nil || answer.code != http.StatusTooManyRequests || answer.header.Get("Retry-After") == "" {
			break
		}
		harness.Pause(ctx, time.Second)
		answer, err = e.ask(ctx, r)
	}
	return answer, err
}

// decompress returns the content of a single gzip member. Anything else in data is an error.
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

// ask sends a request to both servers concurrently.
func (w *world) ask(t *testing.T, ctx context.Context, r request) (answers [2]*response) {
	t.Helper()
	errs := make(chan error)
	for i, e := range w.engines {
		go func() {
			var err error
			answers[i], err = e.patient(ctx, r)
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
