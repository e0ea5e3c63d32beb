package readclients

import (
	"context"
	"encoding/hex"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"

	collectorpb "go.opentelemetry.io/proto/otlp/collector/trace/v1"
	tracepb "go.opentelemetry.io/proto/otlp/trace/v1"
	"google.golang.org/grpc"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// collector receives spans (OTLP over gRPC) and keeps those of traces that the tests began.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer
	address string

	mu    sync.Mutex
	spans map[string][]*tracepb.Span // by trace id, in hexadecimal digits
}

func startCollector(e *harness.Env) *collector {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err) // loopback has a free port, or nothing else will work either
	}
	c := &collector{address: listener.Addr().String(), spans: map[string][]*tracepb.Span{}}
	server := grpc.NewServer()
	collectorpb.RegisterTraceServiceServer(server, c)
	serving := make(chan struct{})
	go func() {
		defer close(serving)
		_ = server.Serve(listener) // nil after Stop
	}()
	e.AtEnd(func() { server.Stop(); <-serving })
	return c
}

// config is the content of --tracing-config-file: a request is traced if its client traces it.
func (c *collector) config() string {
	return "apiVersion: apiserver.config.k8s.io/v1\nkind: TracingConfiguration\nendpoint: " + c.address + "\n"
}

func (c *collector) Export(_ context.Context, r *collectorpb.ExportTraceServiceRequest) (*collectorpb.ExportTraceServiceResponse, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, resource := range r.ResourceSpans {
		for _, scope := range resource.ScopeSpans {
			for _, span := range scope.Spans {
				id := hex.EncodeToString(span.TraceId)
				c.spans[id] = append(c.spans[id], span)
			}
		}
	}
	return &collectorpb.ExportTraceServiceResponse{}, nil
}

// await returns the request's span, which is that whose parent the client is, when the trace has a span with that name too.
func (c *collector) await(ctx context.Context, trace, handler string) (root *tracepb.Span, err error) {
	err = harness.Poll(ctx, func(context.Context) (bool, error) {
		c.mu.Lock()
		defer c.mu.Unlock()
		var names []string
		for _, span := range c.spans[trace] {
			if hex.EncodeToString(span.ParentSpanId) == clientSpan {
				root = span
			}
			names = append(names, span.Name)
		}
		return root != nil && slices.Contains(names, handler), fmt.Errorf("trace %s has the spans %q, want %s and that of the request", trace, names, handler)
	})
	return root, err
}

const clientSpan = "00f067aa0ba902b7"

// TestTraces: a traced request leaves the same span with either engine, and in its trace that of its handler.
func TestTraces(t *testing.T) {
	t.Parallel()
	ctx := newContext(t)
	namespace := newNamespace(t, ctx, both.strata.API(), "traces")
	created, err := both.strata.API().Create(ctx, maps(namespace), configMap("one", "data"))
	check(t, err)
	check(t, both.awaitRevision(ctx, maps(namespace), created.Metadata.ResourceVersion))
	for i, test := range []struct{ name, path, query, handler string }{
		{"get", maps(namespace) + "/one", "", "Get"},
		{"get what is not there", maps(namespace) + "/two", "", "Get"},
		{"list", maps(namespace), "labelSelector=name%3Done", "List"},
		{"list everything", "/api/v1/configmaps", "", "List"},
		{"watch", maps(namespace), "watch=true&timeoutSeconds=1", "audit"}, // its handler has no span
		{"watch with initial events", maps(namespace), "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=1", "WatchList"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			trace := fmt.Sprintf("%032x", 0x7ace0000+i)
			seen := map[string]string{}
			for _, engine := range both.each() {
				_, err := engine.send(ctx, adminToken, http.MethodGet, test.path, test.query, http.Header{"Traceparent": {"00-" + trace + "-" + clientSpan + "-01"}})
				check(t, err)
				root, err := engine.traces.await(ctx, trace, test.handler)
				if err != nil {
					t.Fatalf("%s: %v", engine.name, err)
				}
				seen[engine.name] = root.Name + " " + attributes(root)
			}
			if seen[harness.Strata] != seen[harness.Upstream] {
				t.Errorf("got the span  %s\nwant          %s", seen[harness.Strata], seen[harness.Upstream])
			}
		})
	}
}

// attributes returns what of a span does not depend on the time, the port and the length of an answer.
func attributes(span *tracepb.Span) string {
	var pairs []string
	for _, a := range span.Attributes {
		switch a.Key {
		case "http.target", "http.route", "http.method", "http.request.method", "http.status_code", "http.response.status_code", "url.path":
			pairs = append(pairs, a.Key+"="+a.Value.String())
		}
	}
	slices.Sort(pairs)
	return strings.Join(pairs, " ")
}
