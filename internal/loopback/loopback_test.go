package loopback

import (
	"errors"
	"net"
	"os"
	"os/exec"
	"runtime"
	"syscall"
	"testing"

	"github.com/stratakube/strata/internal/test/testcheck"
)

// listenerEnv makes the test binary a server that accepts one connection on the address it names,
// and then ends.
const listenerEnv = "STRATA_TEST_LISTEN"

func TestMain(m *testing.M) {
	address := os.Getenv(listenerEnv)
	if address == "" {
		os.Exit(m.Run())
	}
	l, err := net.Listen("tcp", address)
	if err != nil {
		os.Stdout.WriteString(err.Error())
		os.Exit(1)
	}
	os.Stdout.WriteString("listening")
	if conn, err := l.Accept(); err == nil {
		conn.Close()
	}
}

func reservePort(t *testing.T) *Port {
	t.Helper()
	p, err := Reserve()
	testcheck.NoError(t, err)
	return p
}

func requireRefused(t *testing.T, address string) {
	t.Helper()
	if conn, err := net.Dial("tcp", address); !errors.Is(err, syscall.ECONNREFUSED) {
		if err == nil {
			conn.Close()
		}
		t.Errorf("dial %s: %v, want connection refused", address, err)
	}
}

func TestReservedPort_AnotherProcessRestarts_ListensAgain(t *testing.T) {
	p := reservePort(t)
	defer p.Release()
	requireRefused(t, p.Address())
	for range 3 {
		cmd := exec.Command(os.Args[0])
		cmd.Env = append(os.Environ(), listenerEnv+"="+p.Address())
		out, err := cmd.StdoutPipe()
		testcheck.NoError(t, err)
		testcheck.NoError(t, cmd.Start())
		buf := make([]byte, 200)
		n, _ := out.Read(buf)
		if got := string(buf[:n]); got != "listening" {
			t.Fatalf("the server on a reserved port returned %q", got)
		}
		if l, err := net.Listen("tcp", p.Address()); err == nil {
			l.Close()
			t.Error("a second server listens on the same port")
		}
		conn, err := net.Dial("tcp", p.Address())
		testcheck.NoError(t, err)
		conn.Close()
		testcheck.NoError(t, cmd.Wait())
		requireRefused(t, p.Address())
	}
}

// A reserved port is never chosen for a listener or for a connection, in so many attempts that a
// free port would be chosen with near certainty.
func TestReserveNumber_PortInUse_Fails(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	number := l.Addr().(*net.TCPAddr).Port
	if p, err := ReserveNumber(number); !errors.Is(err, syscall.EADDRINUSE) {
		t.Errorf("a port with a listener: %v, %v, want address in use", p, err)
	}
	l.Close()
	p, err := ReserveNumber(number)
	testcheck.NoError(t, err)
	defer p.Release()
	if p.Number() != number {
		t.Errorf("reserved %d, want %d", p.Number(), number)
	}
}

func TestReservedPort_AnyPortRequested_IsNeverChosen(t *testing.T) {
	if runtime.GOOS != "linux" {
		t.Skip("other systems than Linux reserve no ports")
	}
	const ports, listens, dials = 50, 5000, 2000
	reserved := map[int]bool{}
	for range ports {
		p := reservePort(t)
		defer p.Release()
		if reserved[p.Number()] {
			t.Fatalf("port %d is reserved twice", p.Number())
		}
		reserved[p.Number()] = true
	}
	server, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	defer server.Close()
	for range listens {
		l, err := net.Listen("tcp", "127.0.0.1:0")
		testcheck.NoError(t, err)
		if port := l.Addr().(*net.TCPAddr).Port; reserved[port] {
			t.Fatalf("a listener got the reserved port %d", port)
		}
		l.Close()
	}
	for range dials { // each leaves its port in TIME_WAIT
		conn, err := net.Dial("tcp", server.Addr().String())
		testcheck.NoError(t, err)
		if port := conn.LocalAddr().(*net.TCPAddr).Port; reserved[port] {
			t.Fatalf("a connection got the reserved port %d", port)
		}
		accepted, err := server.Accept()
		testcheck.NoError(t, err)
		accepted.Close()
		conn.Close()
	}
}
