package handlerchain

import (
	"net/http"
	"reflect"

	"k8s.io/apiserver/pkg/endpoints/filterlatency"
	genericapifilters "k8s.io/apiserver/pkg/endpoints/filters"
	"k8s.io/apiserver/pkg/endpoints/filters/impersonation"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericfeatures "k8s.io/apiserver/pkg/features"
	genericapiserver "k8s.io/apiserver/pkg/server"
	genericfilters "k8s.io/apiserver/pkg/server/filters"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
	"k8s.io/component-base/tracing"

	"github.com/stratakube/strata/kube/internal/slowclient"
)

// filter is one named wrapper of a handler chain.
type filter struct {
	name string
	wrap func(http.Handler) http.Handler
}

// wrap returns handler wrapped in the filters, the first of them outermost.
func wrap(handler http.Handler, filters []filter) http.Handler {
	for i := len(filters) - 1; i >= 0; i-- {
		handler = filters[i].wrap(handler)
	}
	return handler
}

// fastFilters returns the filters of a plain read, outermost first. They are upstream's own, in
// upstream's order; the write deadline takes the place of upstream's timeout filter, and
// withRoutine that of upstream's routine filter, also without its gate. The request context carries
// the RequestInfo and the received timestamp.
//
// Upstream has in addition:
//
//   - the timeout filter, which runs each request on a new goroutine, whose stack has to grow each
//     time. A read that is passed on to upstream's handlers only after it took the fast chain (a
//     revision that only etcd has, an audit event that contains the response) is answered without
//     that filter, within the same deadline: those handlers stop when the request's context ends,
//     and hold its seat until they return;
//   - the trackers that measure each filter (apiserver_request_filter_duration_seconds);
//     they are present here only if spans are recorded, because they create one span per filter;
//   - tracing, for a request without a trace header while no tracer is configured;
//   - the wrapper that times each Write, if no audit backend can record the result;
//   - the filters for the server's startup and shutdown (New).
func fastFilters(c *genericapiserver.Config, cost CostFunc, conns *slowclient.Listener) []filter {
	l := &filterList{config: c, spans: recordsSpans(c)}
	l.routine = !l.spans || c.FeatureGate.Enabled(genericfeatures.APIServingWithRoutine)
	l.addTransport(conns)
	l.addDecisions(cost)
	return l.filters
}

// filterList builds a list of filters, outermost first.
type filterList struct {
	config *genericapiserver.Config
	spans  bool // a tracer is configured
	// watches use withRoutine; without the gate, spans of a watch last as long as the watch
	routine bool
	filters []filter
}

func (l *filterList) add(name string, wrap func(http.Handler) http.Handler) {
	l.filters = append(l.filters, filter{name, wrap})
}

// measured adds a filter together with its span, if a tracer is configured.
func (l *filterList) measured(name string, wrap func(http.Handler) http.Handler) {
	if !l.spans {
		l.add(name, wrap)
		return
	}
	l.add(name, func(h http.Handler) http.Handler {
		return filterlatency.TrackStarted(wrap(filterlatency.TrackCompleted(h)), l.config.TracerProvider, name)
	})
}

// addTransport adds the filters that apply to every request, independent of its user: headers,
// deadlines, logs and recovery.
func (l *filterList) addTransport(conns *slowclient.Listener) {
	c := l.config
	l.add("audit-init", genericapifilters.WithAuditInit)
	l.add("panic-recovery", func(h http.Handler) http.Handler {
		return genericfilters.WithPanicRecovery(h, c.RequestInfoResolver)
	})
	if l.routine {
		l.add("routine", withRoutine)
	}
	if c.AuditBackend != nil {
		l.add("latency-trackers", genericapifilters.WithLatencyTrackers)
	} else {
		l.add("latency-trackers", withLatencyTrackersOnly)
	}
	// It checks klog's verbosity for each request and does nothing below 3.
	l.add("http-logging", genericfilters.WithHTTPLogging)
	if len(c.HSTSDirectives) > 0 {
		l.add("hsts", func(h http.Handler) http.Handler {
			return genericfilters.WithHSTS(h, c.HSTSDirectives)
		})
	}
	l.add("cache-control", genericapifilters.WithCacheControl)
	if c.SecureServing != nil && !c.SecureServing.DisableHTTP2 && c.GoawayChance > 0 {
		l.add("goaway", func(h http.Handler) http.Handler {
			return genericfilters.WithProbabilisticGoaway(h, c.GoawayChance)
		})
	}
	l.add("wait-group", func(h http.Handler) http.Handler {
		return genericfilters.WithWaitGroup(h, c.LongRunningFunc, c.NonLongRunningRequestWaitGroup)
	})
	l.add("request-deadline", func(h http.Handler) http.Handler {
		return genericapifilters.WithRequestDeadline(h, c.AuditBackend, c.AuditPolicyRuleEvaluator,
			c.LongRunningFunc, c.Serializer, c.RequestTimeout)
	})
	l.add("write-deadline", func(h http.Handler) http.Handler {
		return slowclient.WithWriteDeadline(h, conns)
	})
	l.add("warnings", genericapifilters.WithWarningRecorder)
	if len(c.CorsAllowedOriginList) > 0 {
		l.add("cors", func(h http.Handler) http.Handler {
			return genericfilters.WithCORS(h, c.CorsAllowedOriginList, nil, nil, nil, "true")
		})
	}
}

// addDecisions adds the filters that depend on the user: authentication, audit, impersonation,
// priority and fairness, authorization.
func (l *filterList) addDecisions(cost CostFunc) {
	c := l.config
	unauthenticated := genericapifilters.WithFailedAuthenticationAudit(
		genericapifilters.Unauthorized(c.Serializer), c.AuditBackend, c.AuditPolicyRuleEvaluator)
	l.measured("authentication", func(h http.Handler) http.Handler {
		return genericapifilters.WithAuthentication(h, c.Authentication.Authenticator, unauthenticated,
			c.Authentication.APIAudiences, c.Authentication.RequestHeaderConfig)
	})
	// Behind a feature gate until 0.37, but locked on.
	l.add("tracing", func(h http.Handler) http.Handler {
		return withTracing(h, c)
	})
	l.measured("audit", func(h http.Handler) http.Handler {
		if c.AuditBackend == nil || !l.routine {
			return genericapifilters.WithAudit(h, c.AuditBackend, c.AuditPolicyRuleEvaluator, c.LongRunningFunc)
		}
		// The last audit event of a watch is sent when the watch has ended.
		return onCaller(genericapifilters.WithAudit(withRoutine(h), c.AuditBackend, c.AuditPolicyRuleEvaluator, c.LongRunningFunc))
	})
	if c.FeatureGate.Enabled(genericfeatures.ConstrainedImpersonation) {
		l.measured("constrainedimpersonation", func(h http.Handler) http.Handler {
			return impersonation.WithConstrainedImpersonation(h, c.Authorization.Authorizer, c.Serializer)
		})
	} else {
		l.measured("impersonation", func(h http.Handler) http.Handler {
			return impersonation.WithImpersonation(h, c.Authorization.Authorizer, c.Serializer)
		})
	}
	l.measured("priorityandfairness", func(h http.Handler) http.Handler {
		estimate := flowcontrolrequest.NewWorkEstimator(c.StorageObjectCountTracker.Get,
			c.FlowControl.GetInterestedWatchCount, flowcontrolrequest.DefaultWorkEstimatorConfig(), c.FlowControl.GetMaxSeats)
		estimate = workEstimator(estimate, cost, c.FlowControl.GetMaxSeats)
		return genericfilters.WithPriorityAndFairness(h, c.LongRunningFunc, flowControl{c.FlowControl}, estimate, c.RequestTimeout/4)
	})
	l.measured("authorization", func(h http.Handler) http.Handler {
		return genericapifilters.WithAuthorization(h, c.Authorization.Authorizer, c.Serializer)
	})
}

// withLatencyTrackersOnly adds the latency trackers from which
// apiserver_request_sli_duration_seconds is computed to a request that is not a watch. It does not
// time writes: only an audit event would show them.
func withLatencyTrackersOnly(handler http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		ctx := req.Context()
		if info, ok := request.RequestInfoFrom(ctx); !ok || info.Verb != "watch" {
			req = req.WithContext(request.WithLatencyTrackers(ctx))
		}
		handler.ServeHTTP(w, req)
	})
}

// recordsSpans reports whether a tracer is configured.
func recordsSpans(c *genericapiserver.Config) bool {
	return reflect.TypeOf(c.TracerProvider) != reflect.TypeOf(tracing.NewNoopTracerProvider())
}

// withTracing is upstream's tracing filter. Without a configured tracer that filter only propagates
// the trace context of the request, so a request without a trace header bypasses it.
func withTracing(handler http.Handler, c *genericapiserver.Config) http.Handler {
	traced := genericapifilters.WithTracing(handler, c.TracerProvider)
	if recordsSpans(c) {
		return traced
	}
	headers := tracing.Propagators().Fields()
	for i := range headers {
		headers[i] = http.CanonicalHeaderKey(headers[i])
	}
	return http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		for _, header := range headers {
			if len(req.Header[header]) > 0 {
				traced.ServeHTTP(w, req)
				return
			}
		}
		handler.ServeHTTP(w, req)
	})
}
