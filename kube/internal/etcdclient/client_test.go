package etcdclient

import (
	"context"
	"errors"
	"net"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc"
	"k8s.io/apiserver/pkg/storage/storagebackend"

	"github.com/stratakube/strata/internal/loopback"
	"github.com/stratakube/strata/internal/test/testcheck"
)

// TestNew_NoServer_FailsWithCause: a client is connected when New returns. Without a server, New
// waits for its time limit or for the end of its context, and names what failed.
func TestNew_NoServer_FailsWithCause(t *testing.T) {
	t.Parallel()
	port, config := reserved(t)
	for limit := 50 * time.Millisecond; ; limit *= 2 { // until an attempt has failed within it
		_, err := New(t.Context(), limit, config, false)
		if errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), port.Address()) && strings.Contains(err.Error(), "connection refused") {
			break
		}
		if !errors.Is(err, context.DeadlineExceeded) || limit > time.Minute {
			t.Fatalf("New without a server for %v: %v; want that %s refuses the connection", limit, err, port.Address())
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := New(ctx, time.Hour, config, false); !errors.Is(err, context.Canceled) {
		t.Errorf("New with an ended context: %v, want %v", err, context.Canceled)
	}
}

// TestNew_ServerStartsLater_Connects: New returns when the server listens.
func TestNew_ServerStartsLater_Connects(t *testing.T) {
	t.Parallel()
	port, config := reserved(t)
	connected := make(chan error, 1)
	go func() {
		client, err := New(t.Context(), time.Minute, config, false)
		if err == nil {
			err = client.Close()
		}
		connected <- err
	}()
	if _, err := New(t.Context(), 50*time.Millisecond, config, false); err == nil {
		t.Error("connected without a server")
	}
	select {
	case err := <-connected:
		t.Fatalf("New returned without a server: %v", err)
	default:
	}
	listener, err := net.Listen("tcp", port.Address())
	testcheck.NoError(t, err)
	server := grpc.NewServer()
	t.Cleanup(server.Stop)
	go func() { _ = server.Serve(listener) }() // until Stop
	if err := <-connected; err != nil {
		t.Error(err)
	}
}

// reserved returns a port on which nothing listens, and the config of a client of it.
func reserved(t *testing.T) (*loopback.Port, storagebackend.TransportConfig) {
	t.Helper()
	port, err := loopback.Reserve()
	testcheck.NoError(t, err)
	t.Cleanup(func() { _ = port.Release() })
	return port, storagebackend.TransportConfig{ServerList: []string{"http://" + port.Address()}}
}
