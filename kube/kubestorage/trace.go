package kubestorage

import (
	"context"
	"time"

	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/component-base/tracing"
)

// readSpan is the span of a read that memory answers. Names, attributes and events are those of
// upstream's watch cache (k8s.io/apiserver/pkg/storage/cacher). Memory has no lock: the event of
// upstream's lock marks the begin of the wait for a revision. nil is the span of a request that
// belongs to no collected trace; its methods do nothing.
type readSpan struct{ span *tracing.Span }

// Names of spans.
const (
	spanGet   = "cacher.Get"
	spanList  = "cacher.GetList"
	spanWatch = "cacher.Watch"
	// spanInitial is not upstream's: from the begin of a watch with a selector to the delivery of
	// its last initial event.
	spanInitial = "cacher.InitialEvents"
)

// Names of events.
const (
	eventReady     = "Ready"
	eventRevision  = "getCurrentRV success"
	eventWaiting   = "watchCache locked acquired"
	eventFresh     = "watchCache fresh enough"
	eventByKey     = "GetByKey success"
	eventByIndex   = "GetByIndexSnapshot success"
	eventExact     = "GetExactSnapshotLocked success"
	eventLatest    = "GetLatestSnapshotOrBuildLocked success"
	eventListed    = "Listed items from cache"
	eventResized   = "Resized result"
	eventFiltered  = "Filtered items"
	slowCachedRead = 500 * time.Millisecond // a span that takes longer is logged, as in upstream
)

// traced reports whether the request belongs to a trace that is collected.
func traced(ctx context.Context) bool { return oteltrace.SpanContextFromContext(ctx).IsValid() }

// traceGet starts the span of a GET. The caller calls its end.
func traceGet(ctx context.Context, key, resourceVersion string) *readSpan {
	if !traced(ctx) {
		return nil
	}
	_, s := startSpan(ctx, spanGet, attribute.String("key", key), attribute.String("resource-version", resourceVersion))
	return s
}

// traceGroup starts the span of a LIST or a WATCH. The caller calls its end; spans of calls with
// the returned context are its children.
func traceGroup(ctx context.Context, name string, group schema.GroupResource) (context.Context, *readSpan) {
	if !traced(ctx) {
		return ctx, nil
	}
	return startSpan(ctx, name, attribute.Stringer("type", group))
}

func startSpan(ctx context.Context, name string, attributes ...attribute.KeyValue) (context.Context, *readSpan) {
	ctx, span := tracing.Start(ctx, name, append(attributes, attribute.String("audit-id", audit.GetAuditIDTruncated(ctx)))...)
	return ctx, &readSpan{span}
}

func (s *readSpan) event(name string) {
	if s != nil {
		s.span.AddEvent(name)
	}
}

// counted adds an event with a number of objects.
func (s *readSpan) counted(name string, objects int) {
	if s != nil {
		s.span.AddEvent(name, attribute.Int("count", objects))
	}
}

// filtered adds the event of upstream's filter. For a list or initial events with a selector it has
// two further attributes: the plan, and the number of objects that were compared with the selector.
func (s *readSpan) filtered(returned int, selective bool, plan string, examined int) {
	if s == nil {
		return
	}
	attributes := []attribute.KeyValue{attribute.Int("count", returned)}
	if selective {
		attributes = append(attributes, attribute.String("plan", plan), attribute.Int("examined", examined))
	}
	s.span.AddEvent(eventFiltered, attributes...)
}

func (s *readSpan) end() {
	if s != nil {
		s.span.End(slowCachedRead)
	}
}
