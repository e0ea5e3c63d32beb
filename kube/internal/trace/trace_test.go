package trace

import (
	"context"
	"fmt"
	"slices"
	"testing"

	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/embedded"
	"go.opentelemetry.io/otel/trace/noop"
	"k8s.io/apimachinery/pkg/runtime/schema"
)

// collector is a tracer that records the events of its spans as lines.
type collector struct {
	embedded.Tracer
	lines []string
}

func (c *collector) Start(ctx context.Context, name string, opts ...oteltrace.SpanStartOption) (context.Context, oteltrace.Span) {
	parent, _ := oteltrace.SpanFromContext(ctx).(*span)
	s := &span{collector: c, name: name}
	if parent != nil && parent.name != "" {
		s.name = parent.name + "/" + name
	}
	config := oteltrace.NewSpanStartConfig(opts...)
	c.add(s.name+" starts", config.Attributes())
	return oteltrace.ContextWithSpan(ctx, s), s
}

func (c *collector) add(what string, attributes []attribute.KeyValue) {
	for _, a := range attributes {
		what += fmt.Sprintf(" %s=%s", a.Key, a.Value.String())
	}
	c.lines = append(c.lines, what)
}

// provider provides one tracer.
type provider struct {
	embedded.TracerProvider
	*collector
}

func (p provider) Tracer(string, ...oteltrace.TracerOption) oteltrace.Tracer { return p.collector }

// span is a span of a collected trace; the name of a request's is "".
type span struct {
	noop.Span
	*collector
	name string
}

func (s *span) TracerProvider() oteltrace.TracerProvider { return provider{collector: s.collector} }

func (s *span) SpanContext() oteltrace.SpanContext {
	return oteltrace.NewSpanContext(oteltrace.SpanContextConfig{TraceID: oteltrace.TraceID{1}, SpanID: oteltrace.SpanID{1}})
}

func (s *span) AddEvent(name string, opts ...oteltrace.EventOption) {
	config := oteltrace.NewEventConfig(opts...)
	s.add(s.name+": "+name, config.Attributes())
}

func (s *span) End(...oteltrace.SpanEndOption) { s.add(s.name+" ends", nil) }

// requireLines fails unless the reads of f in a collected trace record the lines.
func requireLines(t *testing.T, f func(ctx context.Context), want ...string) {
	t.Helper()
	c := &collector{}
	f(oteltrace.ContextWithSpan(t.Context(), &span{collector: c}))
	if !slices.Equal(c.lines, want) {
		t.Errorf("the trace has\n%q\nwant\n%q", c.lines, want)
	}
}

var pods = schema.GroupResource{Resource: "pods"}

func TestGet_CollectedTrace_HasUpstreamSpan(t *testing.T) {
	requireLines(t, func(ctx context.Context) {
		s := StartGet(ctx, "/pods/ns/a", "7")
		s.Event(Ready)
		s.Event(ByKey)
		s.End()
	},
		"cacher.Get starts key=/pods/ns/a resource-version=7 audit-id=",
		"cacher.Get: Ready",
		"cacher.Get: GetByKey success",
		"cacher.Get ends")
}

// TestList_CollectedTrace_HasUpstreamSpan: the events have upstream's names and counts. Only a list
// with a selector has a plan.
func TestList_CollectedTrace_HasUpstreamSpan(t *testing.T) {
	requireLines(t, func(ctx context.Context) {
		_, s := Start(ctx, List, schema.GroupResource{Group: "apps", Resource: "deployments"})
		s.Event(Revision)
		s.Event(Waiting)
		s.Event(Fresh)
		s.Counted(Listed, 4)
		s.Filtered(3, true, "index", 4)
		s.Filtered(2, false, "index", 4)
		s.End()
	},
		"cacher.GetList starts type=deployments.apps audit-id=",
		"cacher.GetList: getCurrentRV success",
		"cacher.GetList: watchCache locked acquired",
		"cacher.GetList: watchCache fresh enough",
		"cacher.GetList: Listed items from cache count=4",
		"cacher.GetList: Filtered items count=3 plan=index examined=4",
		"cacher.GetList: Filtered items count=2",
		"cacher.GetList ends")
}

func TestStart_ReturnedContext_MakesChildSpans(t *testing.T) {
	requireLines(t, func(ctx context.Context) {
		ctx, watch := Start(ctx, Watch, pods)
		_, initial := Start(ctx, InitialEvents, pods)
		initial.End()
		watch.End()
	},
		"cacher.Watch starts type=pods audit-id=",
		"cacher.Watch/cacher.InitialEvents starts type=pods audit-id=",
		"cacher.Watch/cacher.InitialEvents ends",
		"cacher.Watch ends")
}

// TestSpan_NoCollectedTrace_IsNil: a request without a trace costs no span, and all methods of its
// span may be called.
func TestSpan_NoCollectedTrace_IsNil(t *testing.T) {
	ctx, list := Start(t.Context(), List, pods)
	if ctx != t.Context() {
		t.Error("the context of a list without a trace is another one")
	}
	for name, s := range map[string]*Span{Get: StartGet(t.Context(), "/pods/ns/a", ""), List: list} {
		if s != nil {
			t.Errorf("%s has a span without a trace", name)
		}
		s.Event(Ready)
		s.Counted(Listed, 1)
		s.Filtered(1, true, "index", 1)
		s.End()
	}
}
