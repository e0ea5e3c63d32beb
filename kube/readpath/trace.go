package readpath

import (
	"time"

	"go.opentelemetry.io/otel/attribute"
	oteltrace "go.opentelemetry.io/otel/trace"
	"k8s.io/apimachinery/pkg/runtime"
	utilnet "k8s.io/apimachinery/pkg/util/net"
	"k8s.io/apiserver/pkg/audit"
	endpointmetrics "k8s.io/apiserver/pkg/endpoints/metrics"
	"k8s.io/component-base/tracing"
	"k8s.io/klog/v2"
)

// Spans of the byte read path have the names, attributes and events of the spans of upstream's
// handlers (k8s.io/apiserver/pkg/endpoints/handlers). Those of upstream's watch cache are in
// kubestorage.

// Thresholds above which a span is also logged.
const (
	slowRead      = 500 * time.Millisecond
	slowSerialize = 5 * time.Second
)

// traced reports whether the request belongs to a trace that is collected.
func (r *readRequest) traced() bool {
	return oteltrace.SpanContextFromContext(r.req.Context()).IsValid()
}

// trace starts a span; the caller calls its End.
func (r *readRequest) trace(name string) *tracing.Span {
	ctx, span := tracing.Start(r.req.Context(), name, r.attributes()...)
	r.req = r.req.WithContext(ctx)
	return span
}

// traceSlow is trace for a read of a few microseconds, where computing the span's attributes would
// be a large part of the cost. Unless the request is traced, span is nil and only a slow read is
// logged. The caller calls end when the read is complete.
func (r *readRequest) traceSlow(name string) (span *tracing.Span, end func()) {
	if r.traced() {
		span := r.trace(name)
		return span, func() { span.End(slowRead) }
	}
	began := time.Now()
	return nil, func() {
		if took := time.Since(began); took >= slowRead {
			logger := klog.FromContext(r.req.Context()).WithValues("began", began, "took", took)
			for _, a := range r.attributes() {
				logger = logger.WithValues(string(a.Key), a.Value.AsInterface())
			}
			logger.Info("Trace: slow " + name)
		}
	}
}

// addEvent adds an event to a span, which may be nil.
func addEvent(span *tracing.Span, name string) {
	if span != nil {
		span.AddEvent(name)
	}
}

// traceBody calls write, which writes the body of the response, in a separate span if the request
// is traced.
func (r *readRequest) traceBody(write func()) {
	if !r.traced() {
		write()
		return
	}
	span := r.traceWriting("SerializeObject", r.contentType(), r.enc.encoder)
	defer span.End(slowSerialize)
	written := false
	defer func() { // also if write panics because the client has disconnected
		if written {
			span.AddEvent("Write call succeeded")
		} else {
			span.AddEvent("Write call failed")
		}
	}()
	span.AddEvent("About to start writing response")
	write()
	written = true
}

// traceWriting starts a span for writing to the client with the encoder.
func (r *readRequest) traceWriting(name, mediaType string, encoder runtime.Encoder) *tracing.Span {
	_, span := tracing.Start(r.req.Context(), name,
		attribute.String("audit-id", audit.GetAuditIDTruncated(r.req.Context())),
		attribute.String("method", r.req.Method),
		attribute.String("url", r.req.URL.Path),
		attribute.String("protocol", r.req.Proto),
		attribute.String("mediaType", mediaType),
		attribute.String("encoder", string(encoder.Identifier())))
	return span
}

// streamEncoder returns the encoder of upstream's watches; only its name is recorded.
func (r *readRequest) streamEncoder() runtime.Encoder {
	encoder := r.enc.encoder
	if info, ok := runtime.SerializerInfoForMediaType(r.resource.Serializer.SupportedMediaTypes(), string(r.enc.media)); ok && info.StreamSerializer != nil {
		encoder = info.StreamSerializer.Serializer
	}
	return r.resource.Serializer.EncoderForVersion(encoder, r.resource.Kind.GroupVersion())
}

// maxUserAgent is the number of bytes of a user agent that upstream records.
const maxUserAgent = 1024

func (r *readRequest) attributes() []attribute.KeyValue {
	agent := utilnet.GetHTTPClient(r.req)
	if len(agent) > maxUserAgent {
		agent = agent[:maxUserAgent] + "...TRUNCATED"
	}
	client := "unknown"
	if ip := utilnet.GetClientIP(r.req); ip != nil {
		client = ip.String()
	}
	return []attribute.KeyValue{
		attribute.String("accept", r.req.Header.Get("Accept")),
		attribute.String("audit-id", audit.GetAuditIDTruncated(r.req.Context())),
		attribute.String("client", client),
		attribute.String("api-group", r.resource.GVR.Group),
		attribute.String("api-version", r.resource.GVR.Version),
		attribute.String("name", r.info.Name),
		attribute.String("subresource", r.info.Subresource),
		attribute.String("namespace", r.info.Namespace),
		attribute.String("protocol", r.req.Proto),
		attribute.String("resource", r.resource.GVR.Resource),
		attribute.String("scope", endpointmetrics.CleanScope(r.info)),
		attribute.String("url", r.req.URL.Path),
		attribute.String("user-agent", agent),
		attribute.String("verb", endpointmetrics.NormalizedVerb(r.req)),
	}
}
