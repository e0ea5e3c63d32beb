package list

import (
	"context"
	"slices"
	"sync"
	"testing"

	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/internal/trace"
)

// recordedSpan is a span of a collected trace that records the events of itself and of its
// children, and how often they end.
type recordedSpan struct {
	noop.Span
	mu     sync.Mutex // leaf; guards the fields below
	events []string
	ended  int
}

func (s *recordedSpan) SpanContext() oteltrace.SpanContext {
	return oteltrace.NewSpanContext(oteltrace.SpanContextConfig{TraceID: oteltrace.TraceID{1}, SpanID: oteltrace.SpanID{1}, TraceFlags: oteltrace.FlagsSampled})
}
func (s *recordedSpan) IsRecording() bool                        { return true }
func (s *recordedSpan) TracerProvider() oteltrace.TracerProvider { return recordingProvider{span: s} }

func (s *recordedSpan) AddEvent(name string, _ ...oteltrace.EventOption) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.events = append(s.events, name)
}

func (s *recordedSpan) End(...oteltrace.SpanEndOption) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.ended++
}

// recordingProvider makes spans that record to the span.
type recordingProvider struct {
	noop.TracerProvider
	span *recordedSpan
}

func (p recordingProvider) Tracer(string, ...oteltrace.TracerOption) oteltrace.Tracer {
	return recordingTracer{span: p.span}
}

type recordingTracer struct {
	noop.Tracer
	span *recordedSpan
}

func (t recordingTracer) Start(ctx context.Context, _ string, _ ...oteltrace.SpanStartOption) (context.Context, oteltrace.Span) {
	return oteltrace.ContextWithSpan(ctx, t.span), t.span
}

// TestTrace_ListBySelector_HasIndexEventWithIndexOnly: the events of upstream's cacher. The first
// list by a label finds candidates in stored values, the second one in the index. The span ends
// once, with the list or its error.
func TestTrace_ListBySelector_HasIndexEventWithIndexOnly(t *testing.T) {
	f := newFixture(t, finding)
	f.Fill(t, 200)
	rev := f.Etcd.Revision()
	consistent := []string{trace.Ready, trace.Revision, trace.Waiting, trace.Fresh}
	selected := selecting(podtest.Selecting(t, "i=3", ""))
	const filtered = "Filtered items"
	for _, c := range []struct {
		name string
		opts storage.ListOptions
		want []string
	}{
		{"all", everything(), append(consistent, trace.Latest, trace.Listed, filtered)},
		{"first use of a label", selected, append(consistent, trace.Latest, trace.Listed, trace.Resized, filtered)},
		{"index", selected, append(consistent, trace.ByIndex, trace.Listed, trace.Resized, filtered)},
		{"nothing selected", selecting(podtest.Selecting(t, "i=none", "")), append(consistent, trace.ByIndex, trace.Listed, filtered)},
		{"exact", exactly(everything(), rev), []string{trace.Ready, trace.Waiting, trace.Fresh, trace.Exact, trace.Listed, filtered}},
		{"future", exactly(everything(), rev+10), []string{trace.Ready, trace.Waiting}},
	} {
		span := &recordedSpan{}
		err := f.env.GetList(oteltrace.ContextWithSpan(podtest.Context(t), span), "/pods/", c.opts, &example.PodList{})
		if (err != nil) != (c.name == "future") {
			t.Fatalf("%s: %v", c.name, err)
		}
		if !slices.Equal(span.events, c.want) || span.ended != 1 {
			t.Errorf("%s: events %q, want %q; ended %d times", c.name, span.events, c.want, span.ended)
		}
	}
}
