package etcdcluster

import (
	"context"
	"errors"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strconv"
	"sync"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// door is an HTTP proxy between a member and its peers that can block traffic in both directions.
// Peers identify themselves in the header fromHeader; all addresses are on loopback.
type door struct {
	url string

	mu struct { // leaf
		sync.Mutex
		all     bool            // all traffic is blocked
		answers bool            // answers to peers are blocked
		from    map[string]bool // traffic from and to these peers is blocked
		posts   map[string]bool // messages of these peers are blocked, the streams to them are not
		changed chan struct{}   // closed and replaced at each change
	}
}

// fromHeader is etcd's header with the ID of the sending member, in hexadecimal.
const fromHeader = "X-Server-From"

// openDoor opens the door of the member with the peer address target, for as long as the
// environment.
func openDoor(t testing.TB, e *harness.Env, target string) *door {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	d := &door{url: "http://" + listener.Addr().String()}
	d.mu.from, d.mu.posts, d.mu.changed = map[string]bool{}, map[string]bool{}, make(chan struct{})

	to, err := url.Parse(target)
	harness.Check(t, err)
	transport := &http.Transport{}
	proxy := &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(to) },
		Transport:     transport,
		FlushInterval: -1, // an answer is a stream of messages
		ErrorLog:      log.New(io.Discard, "", 0),
		ModifyResponse: func(r *http.Response) error {
			r.Body = &held{r.Body, r.Request.Context(), d, r.Request.Header.Get(fromHeader)}
			return nil
		},
	}
	ctx, cancel := context.WithCancel(context.Background())
	server := &http.Server{
		BaseContext: func(net.Listener) context.Context { return ctx },
		ErrorLog:    log.New(io.Discard, "", 0),
		Handler: http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			if d.pass(r.Context(), r.Header.Get(fromHeader), r.Method) == nil {
				proxy.ServeHTTP(w, r)
			}
		}),
	}
	var group sync.WaitGroup
	group.Go(func() {
		if err := server.Serve(listener); !errors.Is(err, http.ErrServerClosed) {
			log.Print("door of an etcd member: ", err) // its peers see a refused connection
		}
	})
	e.AtEnd(func() {
		cancel()
		_ = server.Close()
		transport.CloseIdleConnections()
		group.Wait()
	})
	return d
}

// shutAll blocks or unblocks all traffic.
func (d *door) shutAll(shut bool) { d.change(func() { d.mu.all = shut }) }

// shutFrom blocks or unblocks the peer's requests, and the answers to them.
func (d *door) shutFrom(peer uint64, shut bool) {
	d.change(func() { d.mu.from[strconv.FormatUint(peer, 16)] = shut })
}

// muteAnswers blocks or unblocks the member's part of the streams that its peers have opened.
func (d *door) muteAnswers(shut bool) { d.change(func() { d.mu.answers = shut }) }

// mutePosts blocks or unblocks the messages that the peer sends as requests.
func (d *door) mutePosts(peer uint64, shut bool) {
	d.change(func() { d.mu.posts[strconv.FormatUint(peer, 16)] = shut })
}

func (d *door) change(f func()) {
	d.mu.Lock()
	defer d.mu.Unlock()
	f()
	close(d.mu.changed)
	d.mu.changed = make(chan struct{})
}

// answer is the method of pass for the body of an answer.
const answer = "answer"

// pass returns when the peer's request with the method, or the answer to it, may pass, or with
// ctx's error.
func (d *door) pass(ctx context.Context, peer, method string) error {
	for {
		d.mu.Lock()
		shut, changed := d.mu.all || d.mu.from[peer], d.mu.changed
		shut = shut || method == answer && d.mu.answers || method == http.MethodPost && d.mu.posts[peer]
		d.mu.Unlock()
		if !shut {
			return ctx.Err()
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// held is the body of an answer to a peer.
type held struct {
	io.ReadCloser
	ctx  context.Context
	door *door
	peer string
}

func (h *held) Read(p []byte) (int, error) {
	n, err := h.ReadCloser.Read(p)
	if passErr := h.door.pass(h.ctx, h.peer, answer); passErr != nil {
		return 0, passErr
	}
	return n, err
}
