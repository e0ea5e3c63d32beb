// Package trace has the spans of reads that memory answers. Names, attributes and events are those
// of upstream's watch cache (k8s.io/apiserver/pkg/storage/cacher).
package trace

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/component-base/tracing"
)

// Span is the span of a read that memory answers. nil is the span of a request without a collected
// trace; its methods do nothing.
type Span struct{ span *tracing.Span }

// Names of spans.
const (
	Get   = "cacher.Get"
	List  = "cacher.GetList"
	Watch = "cacher.Watch"
	// InitialEvents is not upstream's: from the start of a watch with a selector to the delivery of
	// its last initial event.
	InitialEvents = "cacher.InitialEvents"
)

// Names of events. Memory has no lock: the event of upstream's lock marks the start of the wait for
// a revision.
const (
	Ready    = "Ready"
	Revision = "getCurrentRV success"
	Waiting  = "watchCache locked acquired"
	Fresh    = "watchCache fresh enough"
	ByKey    = "GetByKey success"
	ByIndex  = "GetByIndexSnapshot success"
	Exact    = "GetExactSnapshotLocked success"
	Latest   = "GetLatestSnapshotOrBuildLocked success"
	Listed   = "Listed items from cache"
	Resized  = "Resized result"
	filtered = "Filtered items"
)

// slowCachedRead is the duration above which a span is logged, as in upstream.
const slowCachedRead = 500 * time.Millisecond

// traced reports whether the request belongs to a trace that is collected.
func traced(ctx context.Context) bool { return oteltrace.SpanContextFromContext(ctx).IsValid() }

// StartGet starts the span of a GET. The caller ends it.
func StartGet(ctx context.Context, key, resourceVersion string) *Span {
	if !traced(ctx) {
		return nil
	}
	_, s := startSpan(ctx, Get, attribute.String("key", key), attribute.String("resource-version", resourceVersion))
	return s
}

// Start starts the span of a LIST or a WATCH. The caller ends it; spans of calls with the returned
// context are its children.
func Start(ctx context.Context, name string, group schema.GroupResource) (context.Context, *Span) {
	if !traced(ctx) {
		return ctx, nil
	}
	return startSpan(ctx, name, attribute.Stringer("type", group))
}

func startSpan(ctx context.Context, name string, attributes ...attribute.KeyValue) (context.Context, *Span) {
	ctx, span := tracing.Start(ctx, name, append(attributes, attribute.String("audit-id", audit.GetAuditIDTruncated(ctx)))...)
	return ctx, &Span{span}
}

// Event adds an event.
func (s *Span) Event(name string) {
	if s != nil {
		s.span.AddEvent(name)
	}
}

// Counted adds an event with a number of objects.
func (s *Span) Counted(name string, objects int) {
	if s != nil {
		s.span.AddEvent(name, attribute.Int("count", objects))
	}
}

// Filtered adds the event of upstream's filter. For a list or initial events with a selector it has
// two further attributes: the plan, and the number of objects that were compared with the selector.
func (s *Span) Filtered(returned int, selective bool, plan string, examined int) {
	if s == nil {
		return
	}
	attributes := []attribute.KeyValue{attribute.Int("count", returned)}
	if selective {
		attributes = append(attributes, attribute.String("plan", plan), attribute.Int("examined", examined))
	}
	s.span.AddEvent(filtered, attributes...)
}

// End ends the span.
func (s *Span) End() {
	if s != nil {
		s.span.End(slowCachedRead)
	}
}
