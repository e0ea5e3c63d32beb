package target

import (
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"os"
	"sync/atomic"
)

// Traffic counts the bytes of connections, as TCP carries them. Several connections may share one.
type Traffic struct {
	Received atomic.Int64 // by the client
	Sent     atomic.Int64
}

// DialCounting returns a new connection, HTTP/2 with small receive buffers, whose bytes t counts.
// The caller must Close it.
func (e *Engine) DialCounting(t *Traffic) *Conn {
	const buffer = 256 << 10
	dialer := new(net.Dialer)
	return e.conn(&http.Transport{
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			conn, err := dialer.DialContext(ctx, network, address)
			if err != nil {
				return nil, err
			}
			return &countedConn{conn, t}, nil
		},
		TLSClientConfig:    &tls.Config{RootCAs: e.credentials.roots},
		ForceAttemptHTTP2:  true,
		HTTP2:              &http.HTTP2Config{MaxReceiveBufferPerConnection: buffer, MaxReceiveBufferPerStream: buffer},
		DisableCompression: true,
	})
}

type countedConn struct {
	net.Conn
	traffic *Traffic
}

func (c *countedConn) Read(b []byte) (int, error) {
	n, err := c.Conn.Read(b)
	c.traffic.Received.Add(int64(n))
	return n, err
}

func (c *countedConn) Write(b []byte) (int, error) {
	n, err := c.Conn.Write(b)
	c.traffic.Sent.Add(int64(n))
	return n, err
}

// WriteKubeconfig writes a kubeconfig of Admin, in JSON, for other clients of the engine.
func (e *Engine) WriteKubeconfig(path string) error {
	type named map[string]any
	const name = "bench"
	data, err := json.Marshal(named{
		"apiVersion": "v1", "kind": "Config", "current-context": name,
		"clusters": []named{{"name": name, "cluster": named{"server": e.baseURL, "certificate-authority": e.credentials.certFile}}},
		"users":    []named{{"name": name, "user": named{"token": e.credentials.tokens[Admin]}}},
		"contexts": []named{{"name": name, "context": named{"cluster": name, "user": name}}},
	})
	if err != nil {
		return fmt.Errorf("kubeconfig: %w", err)
	}
	return os.WriteFile(path, data, 0o600)
}
