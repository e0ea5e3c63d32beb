package balancer

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// timeout bounds a wait that has failed.
const timeout = 30 * time.Second

// server is a backend that answers each line with its name. Its check returns the error that the
// test sets.
type server struct {
	Backend
	listener net.Listener
	err      atomic.Pointer[error]
	hangs    atomic.Bool // checks do not return
}

func startServer(t *testing.T, name string) *server {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	t.Cleanup(func() { l.Close() })
	s := &server{listener: l}
	s.Backend = Backend{Name: name, Address: l.Addr().String(), Check: s.check}
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			go func() {
				defer conn.Close()
				lines := bufio.NewScanner(conn)
				for lines.Scan() {
					fmt.Fprintln(conn, name)
				}
				fmt.Fprintln(conn, name+" ends")
			}()
		}
	}()
	return s
}

func (s *server) check(ctx context.Context) error {
	if s.hangs.Load() {
		<-ctx.Done()
		return ctx.Err()
	}
	if err := s.err.Load(); err != nil {
		return *err
	}
	return nil
}

func (s *server) fail(err error) { s.err.Store(&err) }

// start starts a balancer and waits until all servers are ready.
func start(t *testing.T, o Options, servers ...*server) (*Balancer, string) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	for _, s := range servers {
		o.Backends = append(o.Backends, s.Backend)
	}
	b := Start(l, o)
	t.Cleanup(b.Close)
	ctx, cancel := context.WithTimeout(t.Context(), timeout)
	defer cancel()
	for {
		names, changed := b.notReady()
		if len(names) == 0 {
			break
		}
		select {
		case <-changed:
		case <-ctx.Done():
			t.Fatalf("%v are not ready", names)
		}
	}
	return b, l.Addr().String()
}

// client is a connection through a balancer.
type client struct {
	net.Conn
	lines *bufio.Reader
}

func dial(t *testing.T, address string) *client {
	t.Helper()
	conn, err := net.Dial("tcp", address)
	testcheck.NoError(t, err)
	t.Cleanup(func() { conn.Close() })
	testcheck.NoError(t, conn.SetDeadline(time.Now().Add(timeout)))
	return &client{conn, bufio.NewReader(conn)}
}

// ask returns the name of the server of a connection.
func (c *client) ask(t *testing.T) string {
	t.Helper()
	if _, err := fmt.Fprintln(c, "name?"); err != nil {
		t.Fatal(err)
	}
	name, err := c.lines.ReadString('\n')
	testcheck.NoError(t, err)
	return strings.TrimSpace(name)
}

// await polls until condition is true.
func await(t *testing.T, what string, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(timeout); !condition(); {
		if time.Now().After(deadline) {
			t.Fatalf("not %s within %v", what, timeout)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func (b *Balancer) healthOf(name string) health {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, s := range b.backends {
		if s.Name == name {
			return s.health
		}
	}
	return -1
}

func TestBalancer_NewConnections_GoToServerWithFewest(t *testing.T) {
	one, two := startServer(t, "one"), startServer(t, "two")
	_, address := start(t, Options{}, one, two)
	counts := map[string]int{}
	for range 10 {
		counts[dial(t, address).ask(t)]++
	}
	if counts["one"] != 5 || counts["two"] != 5 {
		t.Errorf("connections are %v, want 5 on each server", counts)
	}
}

func TestBalancer_UnreadyServer_KeepsItsConnectionsAndGetsNoOthers(t *testing.T) {
	changes := make(chan string, 100)
	one, two := startServer(t, "one"), startServer(t, "two")
	b, address := start(t, Options{OnChange: func(name string, err error) { changes <- fmt.Sprint(name, " ", err) }}, one, two)
	old := dial(t, address)
	for old.ask(t) != "one" {
		old = dial(t, address)
	}
	one.fail(fmt.Errorf("%w: drains", ErrUnready))
	await(t, "unready", func() bool { return b.healthOf("one") == unready })
	for range 10 {
		if name := dial(t, address).ask(t); name != "two" {
			t.Fatalf("a new connection is on server %s", name)
		}
	}
	if name := old.ask(t); name != "one" {
		t.Errorf("an old connection is on server %s", name)
	}
	b.Close()
	close(changes)
	var got []string
	for change := range changes {
		got = append(got, change)
	}
	if n := len(got); n != 3 || got[2] != "one not ready: drains" {
		t.Errorf("reported %q", got)
	}
}

func TestBalancer_NoServerReady_UnreadyOneGetsConnections(t *testing.T) {
	one, two := startServer(t, "one"), startServer(t, "two")
	b, address := start(t, Options{}, one, two)
	one.fail(ErrUnready)
	two.fail(errors.New("refused"))
	await(t, "unready", func() bool { return b.healthOf("one") == unready && b.healthOf("two") == refusing })
	for range 5 {
		if name := dial(t, address).ask(t); name != "one" {
			t.Fatalf("a connection is on server %s", name)
		}
	}
}

func TestBalancer_ServerRefusesConnection_NextOneGetsIt(t *testing.T) {
	one, two := startServer(t, "one"), startServer(t, "two")
	_, address := start(t, Options{}, one, two)
	one.listener.Close() // its check still succeeds
	for range 10 {
		if name := dial(t, address).ask(t); name != "two" {
			t.Fatalf("a connection is on server %s", name)
		}
	}
}

func TestBalancer_AllServersRefuse_ConnectionWaits(t *testing.T) {
	one := startServer(t, "one")
	b, address := start(t, Options{}, one)
	one.fail(errors.New("refused"))
	await(t, "refusing", func() bool { return b.healthOf("one") == refusing })
	c := dial(t, address)
	if _, err := fmt.Fprintln(c, "name?"); err != nil {
		t.Fatal(err)
	}
	one.err.Store(nil)
	if name, err := c.lines.ReadString('\n'); err != nil || name != "one\n" {
		t.Errorf("the waiting connection received %q, %v", name, err)
	}
}

func TestBalancer_ReadyOnly_ConnectionWaitsForReadyServer(t *testing.T) {
	one, two := startServer(t, "one"), startServer(t, "two")
	b, address := start(t, Options{ReadyOnly: true}, one, two)
	one.fail(ErrUnready)
	two.fail(ErrUnready)
	await(t, "unready", func() bool { return b.healthOf("one") == unready && b.healthOf("two") == unready })
	c := dial(t, address)
	if _, err := fmt.Fprintln(c, "name?"); err != nil {
		t.Fatal(err)
	}
	two.err.Store(nil)
	if name, err := c.lines.ReadString('\n'); err != nil || name != "two\n" {
		t.Errorf("the waiting connection received %q, %v", name, err)
	}
}

func TestBalancer_SilentServer_IsLeftOutAndItsConnectionsAreCut(t *testing.T) {
	one, two := startServer(t, "one"), startServer(t, "two")
	b, address := start(t, Options{}, one, two)
	old := dial(t, address)
	for old.ask(t) != "one" {
		old = dial(t, address)
	}
	one.hangs.Store(true)
	await(t, "silent", func() bool { return b.healthOf("one") == silent })
	if name := dial(t, address).ask(t); name != "two" {
		t.Errorf("a new connection is on server %s", name)
	}
	s := b.backends[0]
	if n := len(b.overdue(s, s.failed.Add(cutAfter-time.Millisecond))); n != 0 {
		t.Errorf("%d connections are overdue before %v", n, cutAfter)
	}
	conns := b.overdue(s, s.failed.Add(cutAfter))
	if len(conns) == 0 {
		t.Fatalf("no connection is overdue after %v", cutAfter)
	}
	for _, conn := range conns {
		conn.Close()
	}
	if _, err := old.lines.ReadString('\n'); err == nil {
		t.Error("the old connection is open")
	}
}

func TestBalancer_ClientEndsItsStream_ReceivesTheRest(t *testing.T) {
	_, address := start(t, Options{}, startServer(t, "one"))
	c := dial(t, address)
	if _, err := fmt.Fprintln(c, "name?"); err != nil {
		t.Fatal(err)
	}
	testcheck.NoError(t, c.Conn.(*net.TCPConn).CloseWrite())
	if rest, err := io.ReadAll(c.lines); err != nil || string(rest) != "one\none ends\n" {
		t.Errorf("received %q, %v", rest, err)
	}
}

func TestBalancer_Close_EndsConnectionsAndListener(t *testing.T) {
	b, address := start(t, Options{}, startServer(t, "one"))
	c := dial(t, address)
	c.ask(t)
	b.Close()
	if _, err := c.lines.ReadString('\n'); err == nil {
		t.Error("the connection is open")
	}
	if conn, err := net.Dial("tcp", address); err == nil {
		conn.Close()
		t.Error("the balancer listens")
	}
}

func TestReadyz_Answers_AreClassified(t *testing.T) {
	body, code := "", http.StatusOK
	web := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(code)
		io.WriteString(w, body)
	}))
	defer web.Close()
	check := func() error { return readyz(t.Context(), web.Client(), web.URL) }
	if err := check(); err != nil {
		t.Errorf("200: %v", err)
	}
	body, code = "[+]ping ok\n[-]etcd failed: reason withheld\n[-]shutdown failed: reason withheld\n", http.StatusInternalServerError
	if err := check(); !errors.Is(err, ErrUnready) || !strings.HasSuffix(err.Error(), ", failed: etcd shutdown") {
		t.Errorf("500: %v", err)
	}
	web.Close()
	if err := check(); err == nil || errors.Is(err, ErrUnready) || strings.Contains(err.Error(), "http://") {
		t.Errorf("no server: %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if err := readyz(ctx, web.Client(), web.URL); !errors.Is(err, context.Canceled) {
		t.Errorf("a cancelled check: %v", err)
	}
}
