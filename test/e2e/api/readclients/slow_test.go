package readclients

import (
	"bufio"
	"context"
	"crypto/rand"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptrace"
	"strings"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

const (
	bigObjects     = 40
	bigObjectBytes = 900 << 10
	// bigListBytes is far above the capacity of the socket buffers (about 10 MB on Linux's
	// loopback).
	bigListBytes = bigObjects * bigObjectBytes
)

// TestSlowReader_IsEndedAtRequestTimeout: the request timeout ends clients that read a big list at
// one byte a second, and releases their seats; meanwhile memory does not grow by their unread
// bytes.
func TestSlowReader_IsEndedAtRequestTimeout(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	const requestTimeout = 12 * time.Second
	server := &engine{name: harness.Strata, Server: env.APIServer(env.Etcd(),
		"--engine="+harness.Strata,
		"--disable-admission-plugins=ServiceAccount",
		"--token-auth-file="+env.WriteFile("tokens.csv", []byte(tokens)),
		"--request-timeout="+requestTimeout.String(),
	)}
	api := server.API()
	createCrowd(t, ctx, server)
	path := maps("default")
	harness.Check(t, harness.InParallel(ctx, bigObjects, func(ctx context.Context, i int) error {
		data := make([]byte, bigObjectBytes/2)
		if _, err := rand.Read(data); err != nil {
			return err
		}
		_, err := api.Create(ctx, path, configMap(fmt.Sprintf("big-%d", i), hex.EncodeToString(data)))
		return err
	}))

	_, err := api.List(ctx, path, "limit=1") // memory has received all of it
	harness.Check(t, err)
	open := map[string]func(ctx context.Context, token string) (*slowReader, error){
		"HTTP 1.1": func(ctx context.Context, token string) (*slowReader, error) {
			return openCurrent(ctx, func() (*slowReader, error) { return server.openHTTP1(ctx, token, path) })
		},
		"HTTP 2": func(ctx context.Context, token string) (*slowReader, error) {
			return openCurrent(ctx, func() (*slowReader, error) { return server.openHTTP2(ctx, token, path) })
		},
	}
	for name, open := range open {
		t.Run(name, func(t *testing.T) {
			ctx, cancel := context.WithTimeoutCause(ctx, 10*requestTimeout, fmt.Errorf("not done after %v", 10*requestTimeout))
			defer cancel()
			slow, err := open(ctx, readerToken)
			harness.Check(t, err)
			if executing, _, err := seats(ctx, api); err != nil || executing == 0 {
				t.Errorf("%v seats are taken by a list that is being read, want at least one (%v)", executing, err)
			}
			harness.Check(t, slow.another(ctx, server.URL+path+"/big-0"))
			if err := awaitFreeSeats(ctx, api); err != nil {
				t.Errorf("the request timeout is %v: %v", requestTimeout, err)
			}
			harness.Check(t, slow.another(ctx, server.URL+path+"/big-0"))
			n, err := slow.finish()
			if err == nil || n >= bigListBytes {
				t.Errorf("read %d bytes of a list of %d after its time, and then %v", n, bigListBytes, err)
			}
			r := harness.Must[*harness.Response](t)(server.send(ctx, readerToken, http.MethodGet, path+"/big-0", "", nil))
			if r.Code != http.StatusOK {
				t.Errorf("a request after that: %v", r.Err())
			}
		})
	}

	t.Run("memory", func(t *testing.T) {
		ctx := harness.Context(t, testTimeout)
		// Live heap, not resident memory: the latter includes freed memory.
		live := func() float64 {
			t.Helper()
			r := harness.Must[*harness.Response](t)(api.Do(ctx, http.MethodGet, "/debug/pprof/heap", "gc=1", nil))
			if r.Code != http.StatusOK {
				t.Fatal(r.Err())
			}
			return total(harness.Must[[]sample](t)(scrape(ctx, api, "go_memstats_heap_alloc_bytes")), nil)
		}
		r := harness.Must[*harness.Response](t)(server.send(ctx, adminToken, http.MethodGet, path, "", http.Header{"Accept-Encoding": {"identity"}}))
		if len(r.Body) < bigListBytes { // now the cached encodings exist
			t.Fatalf("the list has %d bytes, want at least %d", len(r.Body), bigListBytes)
		}
		before := live()
		const readers = 10
		var slow []*slowReader
		for range readers / 2 {
			for _, open := range open {
				reader, err := open(ctx, adminToken)
				harness.Check(t, err)
				slow = append(slow, reader)
			}
		}
		grown := live() - before
		t.Logf("%d readers of %d MB each: the live heap has grown by %.1f MB", readers, bigListBytes>>20, grown/(1<<20))
		if grown > bigListBytes {
			t.Errorf("%d readers of %d MB each: the live heap has grown by %.0f MB", readers, bigListBytes>>20, grown/(1<<20))
		}
		for _, reader := range slow {
			_, _ = reader.finish()
		}
	})
}

// openCurrent opens a LIST again where memory was late, as clients do.
func openCurrent(ctx context.Context, open func() (*slowReader, error)) (r *slowReader, err error) {
	for range 5 {
		if r, err = open(); err == nil || !strings.Contains(err.Error(), "429 ") {
			break
		}
		harness.Pause(ctx, time.Second)
	}
	return r, err
}

// openHTTP1 sends a LIST over a connection of its own and returns when the headers of the answer
// arrive.
func (e *engine) openHTTP1(ctx context.Context, token, path string) (*slowReader, error) {
	conn, err := e.dial(ctx)
	if err != nil {
		return nil, err
	}
	_, err = fmt.Fprintf(conn, "GET %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\n\r\n", path, token)
	var resp *http.Response
	if err == nil {
		resp, err = http.ReadResponse(bufio.NewReaderSize(conn, 16), nil)
	}
	if err == nil && resp.StatusCode != http.StatusOK {
		err = errors.New(resp.Status)
	}
	if err != nil {
		conn.Close()
		return nil, err
	}
	return readSlowly(resp.Body, func() { conn.Close() }, nil), nil
}

// openHTTP2 sends a LIST and returns when the headers of the answer arrive.
func (e *engine) openHTTP2(ctx context.Context, token, path string) (*slowReader, error) {
	client, err := rest.HTTPClientFor(e.ConfigFor(token))
	if err != nil {
		return nil, err
	}
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, e.URL+path, nil)
	if err != nil {
		return nil, err
	}
	req.Header.Set("Accept-Encoding", "identity")
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	if resp.ProtoMajor != 2 || resp.StatusCode != http.StatusOK {
		resp.Body.Close()
		return nil, fmt.Errorf("%s over %s", resp.Status, resp.Proto)
	}
	return readSlowly(resp.Body, func() { resp.Body.Close() }, client), nil
}

// slowReader reads one byte a second until finish is called.
type slowReader struct {
	close  func()
	client *http.Client  // sends other requests over the same connection; nil for HTTP/1.1
	hurry  chan struct{} // closed: read the rest at full speed
	ended  chan struct{} // closed at the end of the body; n and err are set before
	n      int64
	err    error // nil if the body was complete
}

func readSlowly(body io.Reader, close func(), client *http.Client) *slowReader {
	r := &slowReader{close: close, client: client, hurry: make(chan struct{}), ended: make(chan struct{})}
	go r.read(body)
	return r
}

func (r *slowReader) read(body io.Reader) {
	defer close(r.ended)
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		if _, r.err = io.ReadFull(body, make([]byte, 1)); r.err != nil {
			return
		}
		r.n++
		select {
		case <-ticker.C:
		case <-r.hurry:
			n, err := io.Copy(io.Discard, body)
			r.n, r.err = r.n+n, err
			return
		}
	}
}

// another sends the administrator's request over the connection of the list, if possible, and
// requires its success.
func (r *slowReader) another(ctx context.Context, url string) error {
	if r.client == nil {
		return nil
	}
	var reused bool
	ctx = httptrace.WithClientTrace(ctx, &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { reused = info.Reused }})
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	req.Header.Set("Authorization", "Bearer "+adminToken)
	resp, err := do(r.client, req)
	if err != nil {
		return err
	}
	if resp.Code != http.StatusOK || !reused {
		return fmt.Errorf("another request: %w; over the same connection: %v", resp.Err(), reused)
	}
	return nil
}

// finish reads the rest and returns the total number of bytes, with an error unless the body was
// complete.
func (r *slowReader) finish() (int64, error) {
	close(r.hurry)
	<-r.ended
	r.close()
	return r.n, r.err
}
