package readclients

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"strings"
	"testing"

	"github.com/gorilla/websocket"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// TestWatch_WebSocket_SendsMessagePerEvent: each event is one message, with both engines.
func TestWatch_WebSocket_SendsMessagePerEvent(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	namespace := fillPaths(t, ctx, "websocket")
	for _, path := range []string{maps(namespace), gizmos(namespace)} {
		for _, query := range []string{"?watch=true&resourceVersion=0", "?watch=true&resourceVersion=0&fieldSelector=metadata.name%3Done"} {
			seen := map[string]string{}
			for _, engine := range both.each() {
				seen[engine.name] = harness.Must[string](t)(engine.firstMessage(ctx, path+query))
			}
			if seen[harness.Strata] != seen[harness.Upstream] || !strings.Contains(seen[harness.Strata], `"name":"one"`) {
				t.Errorf("watch of %s%s: the first message is\n%s\nwant\n%s", path, query, seen[harness.Strata], seen[harness.Upstream])
			}
		}
	}
}

// firstMessage watches over a WebSocket and returns the first message.
func (e *engine) firstMessage(ctx context.Context, target string) (string, error) {
	tlsConfig, err := rest.TLSConfigFor(e.Config)
	if err != nil {
		return "", err
	}
	e.Used(ctx)
	dialer := websocket.Dialer{TLSClientConfig: tlsConfig}
	conn, resp, err := dialer.DialContext(ctx, "wss"+strings.TrimPrefix(e.URL, "https")+target, http.Header{
		// without an Origin header the handshake fails
		"Authorization": {"Bearer " + adminToken}, "Origin": {e.URL},
	})
	if err != nil {
		if resp != nil {
			err = errors.Join(err, errors.New(resp.Status))
		}
		return "", err
	}
	defer conn.Close()
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetReadDeadline(deadline); err != nil {
			return "", err
		}
	}
	_, message, err := conn.ReadMessage()
	if err == nil && !json.Valid(message) {
		err = errors.New("the message is no JSON: " + string(message))
	}
	return string(message), err
}
