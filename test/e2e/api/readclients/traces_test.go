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

	"github.com/stratakube/strata/test/harness"
)

// collector receives spans (OTLP over gRPC) and records those of traces that the tests began.
type collector struct {
	collectorpb.UnimplementedTraceServiceServer
	address string

	mu    sync.Mutex
	spans map[string][]*tracepb.Span // by trace id, in hexadecimal digits
}

func startCollector(e *harness.Env) *collector {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err) // without a free port on loopback the other tests fail too
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

// await returns the spans of a trace once it has the request's span, whose parent is the client's,
// and a span with the name handler. Spans arrive in the order in which they end, the request's span
// after those of its callees.
func (c *collector) await(ctx context.Context, trace, handler string) (root *tracepb.Span, all []*tracepb.Span, err error) {
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
		all = slices.Clone(c.spans[trace])
		return root != nil && slices.Contains(names, handler), fmt.Errorf("trace %s has the spans %q, want %s and that of the request", trace, names, handler)
	})
	return root, all, err
}

const clientSpan = "00f067aa0ba902b7"

// TestTraces: a traced request leaves the same spans with both engines, except those of etcd: a
// consistent GET or LIST of the engine shares a read of etcd's revision with others, and upstream
// answers a consistent GET from etcd.
func TestTraces(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	namespace := harness.Namespace(t, ctx, both.strata.API(), harness.NewName("traces"))
	created, err := both.strata.API().Create(ctx, maps(namespace), configMap("one", "data"))
	harness.Check(t, err)
	harness.Check(t, both.awaitRevision(ctx, maps(namespace), created.Metadata.ResourceVersion))
	const consistent = "  cacher.Get " // of the engine only
	for i, test := range []struct{ name, path, query, handler string }{
		{"get", maps(namespace) + "/one", "", "Get"},
		{"get a missing object", maps(namespace) + "/two", "", "Get"},
		{"get from memory", maps(namespace) + "/one", "resourceVersion=0", "Get"},
		{"get a missing object from memory", maps(namespace) + "/two", "resourceVersion=0", "Get"},
		{"get a table", maps(namespace) + "/one", "resourceVersion=0&table", "Get"},
		{"list", maps(namespace), "labelSelector=name%3Done", "List"},
		{"list everything", "/api/v1/configmaps", "", "List"},
		{"list a table", maps(namespace), "table", "List"},
		{"list not older than", maps(namespace), "resourceVersionMatch=NotOlderThan&resourceVersion=" + created.Metadata.ResourceVersion, "List"},
		{"list an exact revision", maps(namespace), "resourceVersionMatch=Exact&resourceVersion=" + created.Metadata.ResourceVersion, "List"},
		{"list no object", maps(namespace), "labelSelector=name%3Dthree", "List"},
		// its handler has no span
		{"watch", maps(namespace), "watch=true&timeoutSeconds=1", "audit"},
		{"watch with initial events", maps(namespace), "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=1", "WatchList"},
	} {
		t.Run(test.name, func(t *testing.T) {
			t.Parallel()
			once := func(attempt int) (differences []string) {
				trace := fmt.Sprintf("%032x", 0x7ace0000+0x100*attempt+i)
				seen := map[string]string{}
				header := http.Header{"Traceparent": {"00-" + trace + "-" + clientSpan + "-01"}}
				if strings.HasSuffix(test.query, "table") {
					header.Set("Accept", "application/json;as=Table;v=v1;g=meta.k8s.io")
				}
				for _, engine := range both.each() {
					r, err := engine.send(ctx, adminToken, http.MethodGet, test.path, test.query, header)
					harness.Check(t, err)
					if test.handler == "WatchList" && !strings.Contains(string(r.Body), "k8s.io/initial-events-end") {
						return []string{engine.name + ": the watch has ended before its initial events, and has no span of them"}
					}
					root, all, err := engine.traces.await(ctx, trace, test.handler)
					if err != nil {
						t.Fatalf("%s: %v", engine.name, err)
					}
					seen[engine.name] = root.Name + " " + attributes(root) + "\n" + inServer(all)
					if engine.name != harness.Strata || test.handler != "List" {
						continue
					}
					want := ""
					if strings.Contains(test.query, "labelSelector") {
						want = "plan=scan examined=1" // of one object in the namespace
					}
					if plan := planOf(all); plan != want {
						differences = append(differences, fmt.Sprintf("the span of the list has the plan %q, want %q", plan, want))
					}
				}
				if test.handler == "Get" && test.query == "" {
					if !strings.Contains(seen[harness.Strata], consistent) || strings.Contains(seen[harness.Upstream], consistent) {
						differences = append(differences, fmt.Sprintf("got the spans\n%s\nwant%sin them, as upstream has it for a GET from memory:\n%s",
							seen[harness.Strata], consistent, seen[harness.Upstream]))
					}
					seen[harness.Strata] = withoutLine(seen[harness.Strata], consistent)
				}
				if seen[harness.Strata] != seen[harness.Upstream] {
					differences = append(differences, fmt.Sprintf("got the spans\n%s\nwant\n%s", seen[harness.Strata], seen[harness.Upstream]))
				}
				return differences
			}
			// On a busy machine a read is refused, or left to etcd, and a watch of a second ends
			// before its first event: a difference counts if there is one each time.
			var differences []string
			for attempt := range 5 {
				if differences = once(attempt); len(differences) == 0 {
					return
				}
			}
			t.Error(strings.Join(differences, "\n"))
		})
	}
}

// attributes returns the attributes of a span that do not depend on the time, the port or the
// length of an answer.
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

// planOf returns the plan of a list with a selector in the span of the watch cache, and the number
// of objects that it examined.
func planOf(spans []*tracepb.Span) string {
	var pairs []string
	for _, span := range spans {
		for _, e := range span.Events {
			for _, a := range e.Attributes {
				switch {
				case span.Name != "cacher.GetList" || e.Name != "Filtered items":
				case a.Key == "plan":
					pairs = append(pairs, "plan="+a.Value.GetStringValue())
				case a.Key == "examined":
					pairs = append(pairs, fmt.Sprint("examined=", a.Value.GetIntValue()))
				}
			}
		}
	}
	return strings.Join(pairs, " ")
}

// withoutLine returns text without the line that begins with prefix.
func withoutLine(text, prefix string) string {
	return strings.Join(slices.DeleteFunc(strings.Split(text, "\n"), func(line string) bool { return strings.HasPrefix(line, prefix) }), "\n")
}

// inServer describes the spans of upstream's handlers and watch cache, and their events, one per
// line.
func inServer(spans []*tracepb.Span) string {
	var lines []string
	for _, span := range spans {
		switch span.Name {
		case "Get", "List", "WatchList", "SerializeObject", "WatchServer.HandleHTTP", "cacher.Get", "cacher.GetList", "cacher.Watch":
		default:
			continue
		}
		var attributes, events []string
		for _, a := range span.Attributes {
			if a.Key != "audit-id" {
				attributes = append(attributes, a.Key+"="+a.Value.GetStringValue())
			}
		}
		for _, e := range span.Events {
			events = append(events, e.Name)
		}
		slices.Sort(attributes)
		lines = append(lines, fmt.Sprintf("  %s %q, events %q", span.Name, attributes, events))
	}
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}
