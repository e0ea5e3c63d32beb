// Package limit is a lower bound for the cost of an API server: a plain Go HTTPS server that writes
// bytes from memory. A benchmark runs it as a separate process beside the engines and reads from it
// with the same client.
//
// It replays the answers of an engine, its origin: it forwards the first request of each kind and
// caches the answer, so workloads run against it unchanged. It reads only the path with its query
// and two headers: no authentication, no authorization, no state of a cluster. Answers that change
// between two requests stay as they were first.
package limit

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"flag"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"sync"
	"sync/atomic"
)

// Command is the first argument with which the benchmark's executable is this server.
const Command = "limit-server"

// Paths by which the benchmark directs the server. All others are answered as the origin answered
// them.
const (
	// OriginPath, written to: forget all answers, and take new ones from the server whose URL the
	// body is.
	OriginPath = "/limit/origin"

	// MissesPath, read: the number of requests forwarded to the origin so far. Their latencies are
	// not measured.
	MissesPath = "/limit/misses"

	// FramePath, written to: send the body, a frame, to every open watch.
	FramePath = "/limit/frame"
)

// Run serves until ctx is done. The arguments are flags: the address, and the certificate.
func Run(ctx context.Context, args []string) error {
	fs := flag.NewFlagSet(Command, flag.ContinueOnError)
	address := fs.String("address", "127.0.0.1:0", "address to listen on")
	certFile := fs.String("cert", "", "serving certificate, also used to verify the certificate of the origin")
	keyFile := fs.String("key", "", "key of the serving certificate")
	if err := fs.Parse(args); err != nil {
		return err
	}
	roots := x509.NewCertPool()
	pem, err := os.ReadFile(*certFile)
	if err != nil {
		return fmt.Errorf("read the certificate: %w", err)
	}
	if !roots.AppendCertsFromPEM(pem) {
		return fmt.Errorf("%s holds no certificate", *certFile)
	}
	listener, err := net.Listen("tcp", *address)
	if err != nil {
		return fmt.Errorf("listen: %w", err)
	}
	server := &http.Server{
		Handler: NewHandler(&http.Client{Transport: &http.Transport{
			TLSClientConfig: &tls.Config{RootCAs: roots}, ForceAttemptHTTP2: true, DisableCompression: true,
		}}),
		TLSConfig: &tls.Config{MinVersion: tls.VersionTLS12}, // as the engines have it
		HTTP2:     &http.HTTP2Config{MaxConcurrentStreams: 250},
	}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.ServeTLS(listener, *certFile, *keyFile); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serve: %w", err)
	}
	return nil
}

// Handler answers from memory. It may be used concurrently.
type Handler struct {
	client *http.Client // to the origin
	misses atomic.Int64

	mu      sync.RWMutex
	origin  string
	answers map[question]*answer

	watchesMu sync.Mutex
	watches   map[chan []byte]struct{} // one per open watch
}

// question contains the fields of a request that select its answer.
type question struct{ uri, accept, encoding string }

// answer is a whole response.
type answer struct {
	contentType, contentEncoding string
	body                         []byte
}

// NewHandler returns a handler without answers and without an origin. The client is for the origin;
// it must not undo encodings.
func NewHandler(client *http.Client) *Handler {
	return &Handler{client: client, answers: map[question]*answer{}, watches: map[chan []byte]struct{}{}}
}

func (h *Handler) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	query := r.URL.Query()
	switch {
	case r.URL.Path == "/readyz" || r.URL.Path == "/version":
		io.WriteString(w, "ok")
	case r.URL.Path == MissesPath:
		fmt.Fprint(w, h.misses.Load())
	case r.URL.Path == OriginPath:
		h.setOrigin(w, r)
	case r.URL.Path == FramePath:
		h.sendFrame(w, r)
	case query.Has("watch"):
		h.watch(w, r)
	default:
		h.replay(w, r)
	}
}

func (h *Handler) setOrigin(w http.ResponseWriter, r *http.Request) {
	origin, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.origin = string(origin)
	clear(h.answers)
}

// replay writes an answer with one call of Write, as fast as Go's server takes it.
func (h *Handler) replay(w http.ResponseWriter, r *http.Request) {
	a, err := h.answer(r)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadGateway)
		return
	}
	w.Header().Set("Content-Type", a.contentType)
	if a.contentEncoding != "" {
		w.Header().Set("Content-Encoding", a.contentEncoding)
	}
	w.Write(a.body) // the error of a closed client is ignored
}

// answer returns the cached answer of the origin to the same request, or forwards the request.
func (h *Handler) answer(r *http.Request) (*answer, error) {
	q := question{r.URL.RequestURI(), r.Header.Get("Accept"), r.Header.Get("Accept-Encoding")}
	h.mu.RLock()
	a := h.answers[q]
	h.mu.RUnlock()
	if a != nil {
		return a, nil
	}
	h.misses.Add(1)
	// held during the request to the origin, so that equal concurrent requests are sent once
	h.mu.Lock()
	defer h.mu.Unlock()
	if a := h.answers[q]; a != nil {
		return a, nil
	}
	a, err := h.ask(r)
	if err != nil {
		return nil, fmt.Errorf("request to the origin: %w", err)
	}
	h.answers[q] = a
	return a, nil
}

// ask forwards a request to the origin. The caller holds h.mu.
func (h *Handler) ask(r *http.Request) (*answer, error) {
	request, err := http.NewRequestWithContext(r.Context(), r.Method, h.origin+r.URL.RequestURI(), nil)
	if err != nil {
		return nil, err
	}
	for _, name := range []string{"Accept", "Accept-Encoding", "Authorization", "User-Agent"} {
		if values := r.Header.Values(name); len(values) > 0 {
			request.Header[name] = values
		}
	}
	response, err := h.client.Do(request)
	if err != nil {
		return nil, err
	}
	defer response.Body.Close()
	a := &answer{
		contentType:     response.Header.Get("Content-Type"),
		contentEncoding: response.Header.Get("Content-Encoding"),
	}
	switch {
	case response.StatusCode != http.StatusOK:
		// the readable part is quoted; the status is the error
		body, _ := io.ReadAll(io.LimitReader(response.Body, 500))
		return nil, fmt.Errorf("%s: %s", response.Status, body)
	default:
		a.body, err = io.ReadAll(response.Body)
	}
	if err != nil {
		return nil, err
	}
	return a, nil
}

// frameBacklog is how many frames a watch may be behind before sendFrame waits for it.
const frameBacklog = 64

// watch writes the frames that come while the watch is open, each at once.
func (h *Handler) watch(w http.ResponseWriter, r *http.Request) {
	frames := make(chan []byte, frameBacklog)
	h.watchesMu.Lock()
	h.watches[frames] = struct{}{}
	h.watchesMu.Unlock()
	defer func() {
		h.watchesMu.Lock()
		delete(h.watches, frames)
		h.watchesMu.Unlock()
	}()
	flusher := w.(http.Flusher)
	w.Header().Set("Content-Type", "application/json")
	flusher.Flush() // the headers: the client waits for them
	for {
		select {
		case <-r.Context().Done():
			return
		case frame := <-frames:
			if _, err := w.Write(frame); err != nil {
				return
			}
			flusher.Flush()
		}
	}
}

// sendFrame sends the body to all watches.
func (h *Handler) sendFrame(w http.ResponseWriter, r *http.Request) {
	frame, err := io.ReadAll(r.Body)
	if err != nil {
		http.Error(w, err.Error(), http.StatusBadRequest)
		return
	}
	h.watchesMu.Lock()
	all := make([]chan []byte, 0, len(h.watches))
	for frames := range h.watches {
		all = append(all, frames)
	}
	h.watchesMu.Unlock()
	for _, frames := range all {
		select {
		case frames <- frame:
		case <-r.Context().Done(): // a watch whose client does not read is still open
			return
		}
	}
}
