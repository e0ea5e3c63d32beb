package kms

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/kms/pkg/service"

	"github.com/stratakube/strata/test/harness"
)

// plugin is a key management service (KMS v2) on a unix socket. It can hang, and it can be
// unavailable.
type plugin struct {
	socket string
	shut   atomic.Pointer[chan struct{}] // while it hangs
	held   atomic.Int64                  // blocked calls

	server  *service.GRPCService // nil while it is unavailable
	serving chan error
}

const keyID = "key-1"

// mask is a trivial cipher, sufficient for the test: the ciphertext differs from the plaintext.
const mask = 0x5a

func newPlugin(t *testing.T) *plugin {
	t.Helper()
	dir, err := os.MkdirTemp("", "kms-") // a socket's path is bounded to about a hundred bytes
	harness.Check(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	p := &plugin{socket: filepath.Join(dir, "kms.sock")}
	p.start(t)
	t.Cleanup(func() { p.open(); p.stop(t) })
	return p
}

// start makes the plugin available.
func (p *plugin) start(t *testing.T) {
	t.Helper()
	p.server = service.NewGRPCService(p.socket, 10*time.Second, p)
	p.serving = make(chan error, 1)
	go func(s *service.GRPCService, serving chan error) { serving <- s.ListenAndServe() }(p.server, p.serving)
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
		_, err := os.Stat(p.socket)
		return err == nil, err
	}))
}

// stop makes the plugin unavailable: the socket has no listener.
func (p *plugin) stop(t *testing.T) {
	t.Helper()
	if p.server == nil {
		return
	}
	p.server.Close()
	p.server = nil
	<-p.serving
}

// hang blocks calls until open is called or they are canceled.
func (p *plugin) hang() {
	c := make(chan struct{})
	p.shut.Store(&c)
}

// open may be called more than once.
func (p *plugin) open() {
	if c := p.shut.Swap(nil); c != nil {
		close(*c)
	}
}

func (p *plugin) pass(ctx context.Context) error {
	c := p.shut.Load()
	if c == nil {
		return nil
	}
	p.held.Add(1)
	defer p.held.Add(-1)
	select {
	case <-*c:
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
	}
}

func xor(data []byte) []byte {
	wrapped := make([]byte, len(data))
	for i, b := range data {
		wrapped[i] = b ^ mask
	}
	return wrapped
}

// Encrypt implements service.Service.
func (p *plugin) Encrypt(ctx context.Context, _ string, data []byte) (*service.EncryptResponse, error) {
	if err := p.pass(ctx); err != nil {
		return nil, err
	}
	return &service.EncryptResponse{Ciphertext: xor(data), KeyID: keyID}, nil
}

// Decrypt implements service.Service.
func (p *plugin) Decrypt(ctx context.Context, _ string, req *service.DecryptRequest) ([]byte, error) {
	if err := p.pass(ctx); err != nil {
		return nil, err
	}
	if req.KeyID != keyID {
		return nil, errors.New("unknown key")
	}
	return xor(req.Ciphertext), nil
}

// Status implements service.Service.
func (p *plugin) Status(ctx context.Context) (*service.StatusResponse, error) {
	if err := p.pass(ctx); err != nil {
		return nil, err
	}
	return &service.StatusResponse{Version: "v2", Healthz: "ok", KeyID: keyID}, nil
}
