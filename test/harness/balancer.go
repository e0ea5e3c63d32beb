package harness

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"time"

	"k8s.io/client-go/rest"
)

const (
	// healthInterval is a balancer's interval and timeout of health checks: short, for short tests.
	healthInterval = 100 * time.Millisecond
	healthTimeout  = 2 * time.Second
)

// Balancer forwards TCP connections to API servers, round robin among servers whose /readyz
// succeeds, like an ordinary layer 4 balancer: a connection stays on its server until one of its
// ends closes it. While no server is ready, or when the chosen one refuses the connection, a new
// connection waits for a ready server.
//
// Its methods may be called concurrently.
type Balancer struct {
	URL    string
	Config *rest.Config // for the administrator

	group sync.WaitGroup

	mu struct { // leaf
		sync.Mutex
		servers []*backend
		next    int
		changed chan struct{} // closed and replaced when a server becomes ready
	}
}

type backend struct {
	address string
	ready   bool
}

// Balancer starts a balancer in front of servers, which runs as long as the environment's
// processes. The servers may be stopped and started.
func (e *Env) Balancer(servers ...*Server) *Balancer {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	e.check(err)
	b := &Balancer{URL: "https://" + listener.Addr().String()}
	b.mu.changed = make(chan struct{})
	b.Config = rest.CopyConfig(servers[0].Config)
	b.Config.Host = b.URL
	ctx, cancel := context.WithCancel(context.Background())
	for _, s := range servers {
		_, address, _ := strings.Cut(s.URL, "://")
		server := &backend{address: address}
		b.mu.servers = append(b.mu.servers, server)
		client, err := rest.HTTPClientFor(s.ConfigFor(adminToken))
		e.check(err)
		b.group.Go(func() { b.watchHealth(ctx, server, client, s.URL+"/readyz") })
	}
	b.group.Go(func() {
		for {
			client, err := listener.Accept()
			if errors.Is(err, net.ErrClosed) {
				return
			}
			if err != nil { // too many open files, until some are closed
				fmt.Fprintln(os.Stderr, "balancer:", err)
				time.Sleep(healthInterval)
				continue
			}
			b.group.Go(func() { b.pass(ctx, client) })
		}
	})
	e.AtEnd(func() {
		cancel()
		listener.Close()
		b.group.Wait()
	})
	return b
}

// watchHealth updates a server's readiness until ctx ends.
func (b *Balancer) watchHealth(ctx context.Context, server *backend, client *http.Client, url string) {
	ticker := time.NewTicker(healthInterval)
	defer ticker.Stop()
	for ctx.Err() == nil {
		b.set(server, healthy(ctx, client, url))
		select {
		case <-ticker.C:
		case <-ctx.Done():
		}
	}
}

func healthy(ctx context.Context, client *http.Client, url string) bool {
	ctx, cancel := context.WithTimeout(ctx, healthTimeout)
	defer cancel()
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return false
	}
	resp, err := client.Do(req)
	if err != nil {
		return false
	}
	defer resp.Body.Close()
	_, err = io.Copy(io.Discard, resp.Body)
	return err == nil && resp.StatusCode == http.StatusOK
}

func (b *Balancer) set(server *backend, ready bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if ready && !server.ready {
		close(b.mu.changed)
		b.mu.changed = make(chan struct{})
	}
	server.ready = ready
}

// choose returns the next ready server; if there is none, a channel that is closed when one becomes
// ready.
func (b *Balancer) choose() (*backend, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for range b.mu.servers {
		server := b.mu.servers[b.mu.next%len(b.mu.servers)]
		b.mu.next++
		if server.ready {
			return server, nil
		}
	}
	return nil, b.mu.changed
}

// pass chooses a server for a connection and copies bytes until one of the two ends is closed.
func (b *Balancer) pass(ctx context.Context, client net.Conn) {
	defer client.Close()
	end := context.AfterFunc(ctx, func() { client.Close() })
	defer end()
	var server net.Conn
	for server == nil {
		chosen, changed := b.choose()
		if chosen == nil {
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return
			}
		}
		conn, err := (&net.Dialer{Timeout: healthTimeout}).DialContext(ctx, "tcp", chosen.address)
		if err != nil {
			b.set(chosen, false)
			continue
		}
		server = conn
	}
	defer server.Close()
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, server) // the client sees how it ends
		client.Close()
		server.Close()
	})
	_, _ = io.Copy(server, client)
	client.Close()
	server.Close()
	back.Wait()
}
