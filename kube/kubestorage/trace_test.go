package kubestorage

import (
	"context"
	"slices"
	"sync"
	"sync/atomic"
	"testing"

	oteltrace "go.opentelemetry.io/otel/trace"
	"go.opentelemetry.io/otel/trace/noop"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/metrics"
	"github.com/stratakube/strata/kube/internal/trace"
)

// recordedSpan is a span of a collected trace that records the events of itself and of its
// children.
type recordedSpan struct {
	noop.Span
	mu     sync.Mutex
	events []string
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

// TestTrace_ListBySelector_HasIndexEventWithIndexOnly: the first list by a label finds candidates
// in stored values, the second one in the index.
func TestTrace_ListBySelector_HasIndexEventWithIndexOnly(t *testing.T) {
	w := foundTwin(t, 200, new(atomic.Int64))
	pred := storage.SelectionPredicate{Label: parseLabels(t, "n=7"), Field: fields.Everything(), GetAttrs: involvedAttrs}
	for _, c := range []struct{ plan, event string }{{metrics.PlanStored, trace.Latest}, {metrics.PlanIndex, trace.ByIndex}} {
		span := &recordedSpan{}
		r, err := w.Read(oteltrace.ContextWithSpan(contextFor(t), span), "/pods/", storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: pred})
		if err != nil {
			t.Fatal(err)
		}
		plan := r.PlanName()
		r.Close()
		var got []string
		for _, event := range []string{trace.Latest, trace.ByIndex} {
			if slices.Contains(span.events, event) {
				got = append(got, event)
			}
		}
		if plan != c.plan || !slices.Equal(got, []string{c.event}) {
			t.Errorf("the plan %s has the events %q, want %s and %q", plan, got, c.plan, c.event)
		}
	}
}
