package overload

import (
	"bytes"
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/net/http2"
	"golang.org/x/net/http2/hpack"
	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

const (
	// requestTimeout is the server's, short for short tests.
	requestTimeout = 40 * time.Second
	// watchSeconds is the timeoutSeconds of watches.
	watchSeconds = 40
	// patience is the tolerance for the server's limits: the machine may be busy.
	patience = time.Minute

	createPath = "/api/v1/namespaces/default/configmaps"
)

// attack is a client that tries to occupy the server. run returns nil when the server has ended it,
// at the latest when ctx ends.
type attack struct {
	name  string
	limit time.Duration // the time after which the server ends it
	run   func(ctx context.Context, s *scene) error
}

var attacks = []attack{
	{"a LIST that is never read, HTTP/1.1", requestTimeout, stalledList(true, 0)},
	{"a LIST that is never read, HTTP/2", requestTimeout, stalledList(false, 0)},
	{"a LIST at a byte a second, HTTP/1.1", requestTimeout, stalledList(true, 1)},
	{"a LIST at a byte a second, HTTP/2", requestTimeout, stalledList(false, 1)},
	{"initial events that are never read, HTTP/1.1", watchSeconds * time.Second, stalledWatch(true, 0)},
	{"initial events that are never read, HTTP/2", watchSeconds * time.Second, stalledWatch(false, 0)},
	{"initial events at a byte a second", watchSeconds * time.Second, stalledWatch(false, 1)},
	{"a handshake that is never started", 32 * time.Second, silent("")},
	{"headers that do not begin", 32 * time.Second, silent("http/1.1")},
	{"headers at a byte a second", 32 * time.Second, slowHeaders},
	{"a preface that is never sent", 10 * time.Second, silent("h2")},
	{"headers without an end, HTTP/1.1", patience, endlessHeaders1},
	{"headers without an end, HTTP/2", patience, endlessHeaders2},
	{"a body without an end", patience, endlessBody},
	{"a body at a byte a second, HTTP/1.1", requestTimeout, slowBody(true)},
	{"a body at a byte a second, HTTP/2", requestTimeout, slowBody(false)},
}

// idleAttacks take too long for the short form.
var idleAttacks = []attack{
	{"HTTP/2 and no request", 90 * time.Second, idleHTTP2(nil)},
	{"HTTP/2 and headers that do not end", 90 * time.Second, idleHTTP2(func(f *http2.Framer) error {
		return f.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(":method", "GET"), EndHeaders: false})
	})},
}

// TestSlowClients_AreEndedAtLimits: clients that do not read, that read or send a byte a second,
// that do not start or do not end a request. The server ends each of them at a limit; meanwhile it
// answers others with little memory for each attack; and after their end none of it remains.
func TestSlowClients_AreEndedAtLimits(t *testing.T) {
	t.Parallel()
	var (
		each    = harness.Pick(6, 100) // clients of each kind
		most    = 160e3                // bytes per client
		objects = harness.Pick(20_000, 100_000)
	)
	ctx := harness.Context(t, harness.Pick(4*time.Minute, 12*time.Minute))
	s := newScene(t, ctx, objects, 0, "--request-timeout="+requestTimeout.String(), "--min-request-timeout=60")
	all := attacks
	if harness.Long() {
		all = append(all, idleAttacks...)
	}
	// one-time allocations come before the measurement
	_, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
	harness.Check(t, err)
	before, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Log("before:", before)

	stopHealth := s.health(t, ctx, 30*time.Second)
	var (
		attacking errgroup.Group
		lasted    longest
	)
	for _, a := range all {
		for range each {
			attacking.Go(func() error {
				ctx, cancel := context.WithTimeoutCause(ctx, a.limit+patience, fmt.Errorf("not ended by the server %v after its limit of %v", patience, a.limit))
				defer cancel()
				began := time.Now()
				if err := a.run(ctx, s); err != nil {
					return fmt.Errorf("%s: %w", a.name, err)
				}
				lasted.note(a.name, time.Since(began))
				return nil
			})
		}
	}
	// Memory that the server allocates for all of them is garbage at once; memory for their
	// requests is referenced until the first limit.
	clients := each * len(all)
	bound := int64(16e6 + float64(clients)*most)
	const headers = 32 * time.Second // upstream's limit of a handshake and of the headers
	settled, cancel := context.WithTimeoutCause(ctx, min(requestTimeout, headers)-2*time.Second, errors.New("before the first of their requests is ended"))
	defer cancel()
	var meanwhile harness.Held
	err = harness.Poll(settled, func(ctx context.Context) (ok bool, err error) {
		if meanwhile, err = s.server.Held(ctx, s.api); err != nil {
			return false, err
		}
		more := meanwhile.Heap + meanwhile.Stacks - before.Heap - before.Stacks
		return more <= bound, fmt.Errorf("the server holds %.1f MB for %d clients, want at most %.1f", float64(more)/1e6, clients, float64(bound)/1e6)
	})
	t.Logf("with %d clients: %v", clients, meanwhile)
	if err != nil && harness.Engine() == harness.Strata {
		t.Error(err)
	}
	if err := attacking.Wait(); err != nil {
		t.Error(err)
	}
	t.Logf("the server has ended them after%v", &lasted)
	s.logHealth(t, stopHealth())
	s.works(t, ctx)
	s.server.AwaitReleased(t, ctx, s.api, before, 32<<20, 50, harness.Pick(time.Minute, 2*time.Minute))
}

// longest records the longest time for each name.
type longest struct {
	mu sync.Mutex
	of map[string]time.Duration
}

func (l *longest) note(name string, took time.Duration) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.of == nil {
		l.of = map[string]time.Duration{}
	}
	l.of[name] = max(l.of[name], took)
}

func (l *longest) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, name := range slices.Sorted(maps.Keys(l.of)) {
		fmt.Fprintf(&b, "\n%-50s %v", name, l.of[name].Round(100*time.Millisecond))
	}
	return b.String()
}

// dial returns a TLS connection with the protocol negotiated; "" is a connection without a
// handshake.
func (s *scene) dial(ctx context.Context, protocol string) (*tls.Conn, error) {
	config, err := rest.TLSConfigFor(s.server.Config)
	if err != nil {
		return nil, err
	}
	config.NextProtos = []string{protocol}
	config.ServerName = "127.0.0.1"
	raw, err := (&net.Dialer{}).DialContext(ctx, "tcp", strings.TrimPrefix(s.server.URL, "https://"))
	if err != nil {
		return nil, err
	}
	conn := tls.Client(raw, config)
	if deadline, ok := ctx.Deadline(); ok {
		err = conn.SetDeadline(deadline)
	}
	if err == nil && protocol != "" {
		err = conn.HandshakeContext(ctx)
	}
	if err != nil {
		raw.Close()
		return nil, err
	}
	return conn, nil
}

// isTimeout reports whether the client's own deadline has passed.
func isTimeout(err error) bool {
	var timeout net.Error
	return errors.As(err, &timeout) && timeout.Timeout()
}

// silent opens a connection and sends nothing more.
func silent(protocol string) func(ctx context.Context, s *scene) error {
	return func(ctx context.Context, s *scene) error {
		conn, err := s.dial(ctx, protocol)
		if err != nil {
			return err
		}
		defer conn.Close()
		var r io.Reader = conn
		if protocol == "" {
			r = conn.NetConn()
		}
		if _, err := io.Copy(io.Discard, r); isTimeout(err) {
			return context.Cause(ctx)
		}
		return nil
	}
}

// trickle writes a byte a second until the server closes the connection, which has to happen before
// the end of text.
func trickle(ctx context.Context, conn net.Conn, text io.Reader) error {
	closed := make(chan error, 1)
	go func() {
		_, err := io.Copy(io.Discard, conn)
		closed <- err
	}()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for {
		select {
		case err := <-closed:
			if isTimeout(err) {
				return context.Cause(ctx)
			}
			return nil
		case <-ctx.Done():
			conn.Close()
			<-closed
			return context.Cause(ctx)
		case <-ticker.C:
			// An error means that the server has closed the connection, which the reading goroutine
			// detects.
			_, _ = io.CopyN(conn, text, 1)
		}
	}
}

// endless repeats text.
type endless struct {
	text string
	at   int
}

func (e *endless) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = e.text[e.at%len(e.text)]
		e.at++
	}
	return len(p), nil
}

func slowHeaders(ctx context.Context, s *scene) error {
	conn, err := s.dial(ctx, "http/1.1")
	if err != nil {
		return err
	}
	defer conn.Close()
	return trickle(ctx, conn, io.MultiReader(strings.NewReader("GET / HTTP/1.1\r\n"), &endless{text: "A: b\r\n"}))
}

// endlessHeaders1 sends headers until the server closes the connection, which has to happen before
// 64 MiB.
func endlessHeaders1(ctx context.Context, s *scene) error {
	conn, err := s.dial(ctx, "http/1.1")
	if err != nil {
		return err
	}
	defer conn.Close()
	return flood(ctx, conn, io.MultiReader(strings.NewReader("GET / HTTP/1.1\r\nHost: a\r\n"), &endless{text: "A: 0123456789012345678901234567890123456789\r\n"}))
}

// flood writes until the server has closed the connection.
func flood(ctx context.Context, conn net.Conn, text io.Reader) error {
	const most = 64 << 20
	n, err := io.CopyN(conn, text, most)
	switch {
	case isTimeout(err):
		return context.Cause(ctx)
	case err == nil:
		return fmt.Errorf("the server has taken %d MiB", n>>20)
	}
	return nil
}

func block(names ...string) []byte {
	var b bytes.Buffer
	encoder := hpack.NewEncoder(&b)
	for i := 0; i < len(names); i += 2 {
		if err := encoder.WriteField(hpack.HeaderField{Name: names[i], Value: names[i+1]}); err != nil {
			panic(err) // to memory
		}
	}
	return b.Bytes()
}

// begin sends the preface of an HTTP/2 connection, and starts to read the server's frames.
func begin(conn net.Conn) (*http2.Framer, error) {
	if _, err := io.WriteString(conn, http2.ClientPreface); err != nil {
		return nil, err
	}
	framer := http2.NewFramer(conn, conn)
	return framer, framer.WriteSettings()
}

func endlessHeaders2(ctx context.Context, s *scene) error {
	conn, err := s.dial(ctx, "h2")
	if err != nil {
		return err
	}
	defer conn.Close()
	framer, err := begin(conn)
	if err != nil {
		return err
	}
	go func() { _, _ = io.Copy(io.Discard, conn) }() // until the connection is closed
	err = framer.WriteHeaders(http2.HeadersFrameParam{StreamID: 1, BlockFragment: block(":method", "GET", ":scheme", "https", ":path", "/", ":authority", "a")})
	const most = 64 << 20
	more := bytes.Repeat(block("a", "0123456789012345678901234567890123456789"), 200)
	for sent := 0; err == nil; sent += len(more) {
		if sent > most {
			return fmt.Errorf("the server has taken %d MiB", sent>>20)
		}
		err = framer.WriteContinuation(1, false, more)
	}
	if isTimeout(err) {
		return context.Cause(ctx)
	}
	return nil
}

func idleHTTP2(more func(*http2.Framer) error) func(ctx context.Context, s *scene) error {
	return func(ctx context.Context, s *scene) error {
		conn, err := s.dial(ctx, "h2")
		if err != nil {
			return err
		}
		defer conn.Close()
		framer, err := begin(conn)
		if err == nil && more != nil {
			err = more(framer)
		}
		if err != nil {
			return err
		}
		if _, err := io.Copy(io.Discard, conn); isTimeout(err) {
			return context.Cause(ctx)
		}
		return nil
	}
}

// post starts a create whose body never ends.
func (s *scene) post(ctx context.Context, http1 bool, body io.Reader) (*http.Response, func(), error) {
	c, err := s.client(options{token: readerToken, http1: http1})
	if err != nil {
		return nil, nil, err
	}
	request, err := http.NewRequestWithContext(ctx, http.MethodPost, s.server.URL+createPath, body)
	if err != nil {
		return nil, nil, err
	}
	request.Header.Set("Authorization", "Bearer "+c.token)
	request.Header.Set("Content-Type", jsonType)
	response, err := c.http.Do(request)
	return response, c.close, err
}

func endlessBody(ctx context.Context, s *scene) error {
	response, done, err := s.post(ctx, false, io.MultiReader(strings.NewReader(`{"data":{"a":"`), &endless{text: "0123456789"}))
	if err != nil {
		if ctx.Err() != nil {
			return context.Cause(ctx)
		}
		return nil // the stream was reset
	}
	defer done()
	defer response.Body.Close()
	if code := response.StatusCode; code != http.StatusRequestEntityTooLarge && code != http.StatusTooManyRequests {
		return fmt.Errorf("%s, want 413, or 429 of a busy server", response.Status)
	}
	return nil
}

// slowly reads a byte per second from its reader, until its context ends.
type slowly struct {
	ctx context.Context
	r   io.Reader
}

func (s slowly) Read(p []byte) (int, error) {
	select {
	case <-time.After(time.Second):
		return s.r.Read(p[:1])
	case <-s.ctx.Done():
		return 0, context.Cause(s.ctx)
	}
}

func slowBody(http1 bool) func(ctx context.Context, s *scene) error {
	return func(ctx context.Context, s *scene) error {
		sending, stop := context.WithCancel(ctx)
		defer stop()
		response, done, err := s.post(ctx, http1, slowly{sending, &endless{text: " "}})
		if err != nil {
			if ctx.Err() != nil {
				return context.Cause(ctx)
			}
			return nil // the connection was closed
		}
		defer done()
		defer response.Body.Close()
		if code := response.StatusCode; code != http.StatusGatewayTimeout && code != http.StatusTooManyRequests {
			return fmt.Errorf("%s, want 504, or 429 of a busy server", response.Status)
		}
		return nil
	}
}

// stalledList lists all objects and reads rate bytes per second until the request timeout has
// passed; then it reads the rest.
func stalledList(http1 bool, rate int) func(ctx context.Context, s *scene) error {
	return func(ctx context.Context, s *scene) error {
		n, err := s.stall(ctx, http1, rate, mapsPath, "resourceVersion=0", requestTimeout)
		if err != nil || n < 0 {
			return err
		}
		return fmt.Errorf("the whole list came, %d bytes, from a server that should have closed the connection", n)
	}
}

// stalledWatch does the same with initial events.
func stalledWatch(http1 bool, rate int) func(ctx context.Context, s *scene) error {
	return func(ctx context.Context, s *scene) error {
		query := fmt.Sprintf("watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=%d", watchSeconds)
		_, err := s.stall(ctx, http1, rate, mapsPath, query, (watchSeconds+6)*time.Second)
		return err // an orderly end of the watch is as good as a broken connection
	}
}

// stall sends a request, reads rate bytes per second for the duration slow, and then the rest. It
// returns the size of a complete answer, -1 for one that was refused or broken off.
func (s *scene) stall(ctx context.Context, http1 bool, rate int, path, query string, slow time.Duration) (int64, error) {
	// exempt: no other limit refuses it
	c, err := s.client(options{token: adminToken, http1: http1})
	if err != nil {
		return 0, err
	}
	defer c.close()
	response, err := c.get(ctx, path, query, jsonType, "")
	if err != nil {
		if ctx.Err() != nil {
			return 0, context.Cause(ctx)
		}
		return -1, nil
	}
	defer response.Body.Close()
	over := time.NewTimer(slow)
	defer over.Stop()
	ticker := time.NewTicker(time.Second)
	defer ticker.Stop()
	for reading := response.StatusCode == http.StatusOK; reading; {
		select {
		case <-over.C:
			reading = false
		case <-ticker.C:
			if rate > 0 {
				if _, err := io.CopyN(io.Discard, response.Body, int64(rate)); err != nil {
					reading = false
				}
			}
		}
	}
	n, err := io.Copy(io.Discard, response.Body)
	if ctx.Err() != nil {
		return 0, context.Cause(ctx)
	}
	if err != nil || response.StatusCode != http.StatusOK {
		return -1, nil
	}
	return n, nil
}
