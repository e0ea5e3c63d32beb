// Package balancer forwards TCP connections to the healthy ones of several backends, on the same
// machine or another.
//
// A connection stays on its backend until one of its ends closes it. A new connection goes to the
// backend with the fewest connections among those in the best health:
//
//	ready       the check succeeds
//	unready     the backend answers its check with a failure: it starts, drains, or has lost its store
//	silent      the check runs into its timeout
//	refusing    the check or a connection fails at once; such a backend gets no connection
//
// So a single failing dependency of all backends does not make the whole set unreachable. A
// connection without any backend waits for one. With Options.ReadyOnly, only a ready backend gets a
// connection.
package balancer

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"slices"
	"sync"
	"time"
)

// Defaults of Options. A backend that fails is left out of new connections after CheckInterval +
// CheckTimeout at the latest, which is less than a second.
const (
	CheckInterval = 200 * time.Millisecond
	CheckTimeout  = 700 * time.Millisecond

	// cutAfter is how long a backend may be silent or refusing until its connections are closed, so
	// that their clients reconnect: a stopped process closes none. It exceeds pauses of a loaded
	// machine. A guess.
	cutAfter = 10 * time.Second

	// dialTimeout bounds one connection to a backend, waitLimit the wait of a client for a backend
	// without Options.ReadyOnly.
	dialTimeout = time.Second
	waitLimit   = 10 * time.Second

	// acceptPause is the pause after an error of accept, such as too many open files.
	acceptPause = 50 * time.Millisecond
)

// ErrUnready is returned by a check that a backend has answered with a failure. It may be wrapped.
var ErrUnready = errors.New("not ready")

// Backend is one destination of connections.
type Backend struct {
	Name    string // in reports and logs
	Address string // host and port

	// Check returns nil if the backend is ready, an error that wraps ErrUnready if it has answered
	// that it is not, and any other error if it has not answered. Its context ends after the
	// timeout of a check. It is called by one goroutine.
	Check func(context.Context) error
}

// Options configures Start. Backends is required.
type Options struct {
	Backends []Backend

	// ReadyOnly makes a new connection wait, without a limit, until a backend is ready.
	ReadyOnly bool

	// Logger receives messages for the operator. Default: slog.Default().
	Logger *slog.Logger

	// OnChange, if not nil, is called when a backend becomes ready (with nil), or is no longer
	// ready (with the reason). Calls for one backend are sequential. It must not call the balancer.
	OnChange func(name string, reason error)
}

// Balancer forwards connections until Close. Its methods may be called concurrently.
type Balancer struct {
	onChange func(string, error)
	logger   *slog.Logger
	worst    health        // of a backend that gets connections
	wait     time.Duration // of a connection for a backend; 0 is no limit
	listener net.Listener
	ctx      context.Context
	cancel   context.CancelFunc
	group    sync.WaitGroup
	backends []*backend

	mu struct { // leaf
		sync.Mutex
		turn    int           // the backend that is preferred among equal ones
		changed chan struct{} // closed and replaced when the health of a backend improves
	}
}

// health orders backends: a lower one is better.
type health int

const (
	ready health = iota
	unready
	silent
	refusing
)

// backend is a Backend with its state, which is guarded by the balancer's mutex.
type backend struct {
	Backend
	health  health
	checked bool      // at least once
	failed  time.Time // since when it is silent or refusing; zero if it is not
	conns   map[net.Conn]struct{}
}

// Start forwards connections of listener, which the balancer closes, until Close.
func Start(listener net.Listener, o Options) *Balancer {
	b := &Balancer{onChange: o.OnChange, logger: o.Logger, worst: silent, wait: waitLimit, listener: listener}
	if b.onChange == nil {
		b.onChange = func(string, error) {}
	}
	if b.logger == nil {
		b.logger = slog.Default()
	}
	if o.ReadyOnly {
		b.worst, b.wait = ready, 0
	}
	b.mu.changed = make(chan struct{})
	b.ctx, b.cancel = context.WithCancel(context.Background())
	for _, each := range o.Backends {
		s := &backend{Backend: each, health: refusing, conns: map[net.Conn]struct{}{}}
		b.backends = append(b.backends, s)
	}
	for _, s := range b.backends {
		b.group.Go(func() { b.observe(s) })
	}
	b.group.Go(b.accept)
	return b
}

// Close closes the listener and all connections, and returns when no goroutine of the balancer
// runs.
func (b *Balancer) Close() {
	b.cancel()
	b.listener.Close()
	b.group.Wait()
}

// AwaitAny waits until a backend is ready. Errors: the cause of ctx.
func (b *Balancer) AwaitAny(ctx context.Context) error {
	for {
		names, changed := b.notReady()
		if len(names) < len(b.backends) {
			return nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return fmt.Errorf("%v not ready: %w", names, context.Cause(ctx))
		}
	}
}

func (b *Balancer) notReady() (names []string, changed <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.backends {
		if s.health != ready {
			names = append(names, s.Name)
		}
	}
	return names, b.mu.changed
}

// observe checks a backend until the balancer is closed.
func (b *Balancer) observe(s *backend) {
	ticker := time.NewTicker(CheckInterval)
	defer ticker.Stop()
	for b.ctx.Err() == nil {
		b.check(s)
		select {
		case <-ticker.C:
		case <-b.ctx.Done():
		}
	}
}

// check sets the health of a backend by one check, and cuts its connections if it has failed for
// cutAfter.
func (b *Balancer) check(s *backend) {
	ctx, cancel := context.WithTimeout(b.ctx, CheckTimeout)
	defer cancel()
	err := s.Check(ctx)
	if b.ctx.Err() != nil {
		return
	}
	found := refusing
	switch {
	case err == nil:
		found = ready
	case errors.Is(err, ErrUnready):
		found = unready
	case ctx.Err() != nil, isTimeout(err):
		found = silent
	}
	b.set(s, found, err)
	for _, conn := range b.overdue(s, time.Now()) {
		conn.Close()
	}
}

func isTimeout(err error) bool {
	timeout, is := errors.AsType[net.Error](err)
	return is && timeout.Timeout()
}

// set records the health of a backend and reports a change. reason is nil if found is ready.
func (b *Balancer) set(s *backend, found health, reason error) {
	b.mu.Lock()
	before, first := s.health, !s.checked
	if found < before {
		close(b.mu.changed)
		b.mu.changed = make(chan struct{})
	}
	s.health, s.checked = found, true
	switch {
	case found < silent:
		s.failed = time.Time{}
	case s.failed.IsZero():
		s.failed = time.Now()
	}
	b.mu.Unlock()
	if (before == ready) != (found == ready) && !(first && found != ready) {
		b.logger.Info("Backend changed", "backend", s.Name, "address", s.Address, "ready", found == ready, "err", reason)
		b.onChange(s.Name, reason)
	}
}

// overdue returns the connections to close of a backend that has failed for cutAfter.
func (b *Balancer) overdue(s *backend, now time.Time) (conns []net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.failed.IsZero() || now.Sub(s.failed) < cutAfter {
		return nil
	}
	for conn := range s.conns {
		conns = append(conns, conn)
	}
	return conns
}

// accept forwards connections until the balancer is closed.
func (b *Balancer) accept() {
	for {
		client, err := b.listener.Accept()
		if errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil {
			b.logger.Error("Failed to accept a connection; retrying", "address", b.listener.Addr(), "err", err)
			select {
			case <-time.After(acceptPause):
			case <-b.ctx.Done():
			}
			continue
		}
		b.group.Go(func() { b.forward(client) })
	}
}

// forward connects a client with a backend until one of them ends the connection.
func (b *Balancer) forward(client net.Conn) {
	defer client.Close()
	defer context.AfterFunc(b.ctx, func() { client.Close() })()
	s, server, err := b.connect()
	if err != nil {
		if b.ctx.Err() == nil {
			b.logger.Error("Closing a connection", "client", client.RemoteAddr(), "err", err)
		}
		return
	}
	defer b.release(s, server)
	join(client, server)
}

// connect returns a connection to the best backend. It waits while none may have connections.
func (b *Balancer) connect() (*backend, net.Conn, error) {
	ctx := b.ctx
	if b.wait > 0 {
		limited, cancel := context.WithTimeoutCause(ctx, b.wait, fmt.Errorf("no backend accepts connections within %v", b.wait))
		defer cancel()
		ctx = limited
	}
	var tried []*backend // of the health in which they are
	for {
		s, changed := b.choose(tried)
		if s == nil {
			tried = nil
			select {
			case <-changed:
				continue
			case <-ctx.Done():
				return nil, nil, context.Cause(ctx)
			}
		}
		dialer := net.Dialer{Timeout: dialTimeout}
		server, err := dialer.DialContext(ctx, "tcp", s.Address)
		if err == nil {
			b.keep(s, server)
			return s, server, nil
		}
		if ctx.Err() != nil {
			return nil, nil, context.Cause(ctx)
		}
		if tried = append(tried, s); !isTimeout(err) {
			b.set(s, refusing, err)
		}
	}
}

// choose returns the best backend that was not tried, and nil if the rest may have no connections,
// with a channel that is closed when the health of one improves.
func (b *Balancer) choose(tried []*backend) (*backend, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	var best *backend
	b.mu.turn++
	for i := range b.backends {
		s := b.backends[(i+b.mu.turn)%len(b.backends)]
		if s.health > b.worst || slices.Contains(tried, s) {
			continue
		}
		if best == nil || s.health < best.health || s.health == best.health && len(s.conns) < len(best.conns) {
			best = s
		}
	}
	return best, b.mu.changed
}

func (b *Balancer) keep(s *backend, conn net.Conn) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.conns[conn] = struct{}{}
}

func (b *Balancer) release(s *backend, conn net.Conn) {
	b.mu.Lock()
	delete(s.conns, conn)
	b.mu.Unlock()
	if err := conn.Close(); err != nil && !errors.Is(err, net.ErrClosed) && !errors.Is(err, os.ErrClosed) {
		b.logger.Debug("Failed to close a connection", "backend", s.Name, "err", err)
	}
}

// join copies bytes in both directions and closes both connections when the server has ended, when
// the client has ended and the server has received its last bytes and ended too, or after an error.
// It returns when both directions have ended.
func join(client, server net.Conn) {
	var back sync.WaitGroup
	back.Go(func() {
		_, _ = io.Copy(client, server) // either end may fail; both ends are closed then
		client.Close()
		server.Close()
	})
	if _, err := io.Copy(server, client); err != nil || closeWrite(server) != nil {
		client.Close()
		server.Close()
	}
	back.Wait()
}

// closeWrite sends the end of the stream and continues to receive.
func closeWrite(conn net.Conn) error {
	if half, ok := conn.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return conn.Close()
}
