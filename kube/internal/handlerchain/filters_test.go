package handlerchain

import (
	"bytes"
	"context"
	"errors"
	"flag"
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericfeatures "k8s.io/apiserver/pkg/features"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/routine"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	"k8s.io/apiserver/pkg/warning"
	"k8s.io/component-base/featuregate"
	"k8s.io/component-base/tracing"
	tracingapi "k8s.io/component-base/tracing/api/v1"
	"k8s.io/klog/v2"
)

// filterCheck checks the purpose of a filter, as observed by a client, the handler or an operator.
type filterCheck struct {
	name string
	// filter is the name of the filter; without this filter the check must fail.
	filter string
	// change changes the configuration, if the filter has to be enabled.
	change func(*genericapiserver.Config)
	// handler replaces the read handler; nil answers 200.
	handler http.HandlerFunc
	// check sends requests and returns an error if the filter had no effect. read returns a request
	// for configmaps by the user reader.
	check func(t *testing.T, c *genericapiserver.Config, h http.Handler) error
	// fastOnly means that the check does not apply to upstream's chain.
	fastOnly bool
}

const configmapsPath = "/api/v1/namespaces/ns/configmaps"

func readBy(name, query string) *http.Request {
	req := httptest.NewRequest(http.MethodGet, configmapsPath+query, nil)
	if name != "" {
		req.Header.Set("Authorization", name)
	}
	return req
}

func send(h http.Handler, req *http.Request) *http.Response {
	w := httptest.NewRecorder()
	h.ServeHTTP(w, req)
	return w.Result()
}

// wantHeader sends req and compares the status and one header; a want of "*" stands for any value.
func wantHeader(h http.Handler, req *http.Request, status int, name, want string) error {
	resp := send(h, req)
	got := resp.Header.Get(name)
	if resp.StatusCode != status || got != want && (want != "*" || got == "") {
		return fmt.Errorf("status %d, %s %q; want %d, %q", resp.StatusCode, name, got, status, want)
	}
	return nil
}

func withAuditLog(c *genericapiserver.Config) {
	log := &auditLog{}
	c.AuditBackend, c.AuditPolicyRuleEvaluator = log, log
}

func wantStages(c *genericapiserver.Config, want ...auditinternal.Stage) error {
	if got := c.AuditBackend.(*auditLog).stages(); !slices.Equal(got, want) {
		return fmt.Errorf("audit events of the stages %v, want %v", got, want)
	}
	return nil
}

var filterChecks = []filterCheck{
	{
		name: "an Audit-ID is generated", filter: "audit-init",
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return wantHeader(h, readBy("reader", ""), 200, "Audit-Id", "*")
		},
	},
	{
		name: "the Audit-ID of the client is used", filter: "audit-init",
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			req := readBy("reader", "")
			req.Header.Set("Audit-Id", "mine")
			return wantHeader(h, req, 200, "Audit-Id", "mine")
		},
	},
	{
		name: "a panic is a 500, and logged", filter: "panic-recovery",
		handler: func(http.ResponseWriter, *http.Request) { panic("of a test") },
		check: func(t *testing.T, _ *genericapiserver.Config, h http.Handler) (err error) {
			crash, handlers := utilruntime.ReallyCrash, utilruntime.PanicHandlers
			t.Cleanup(func() { utilruntime.ReallyCrash, utilruntime.PanicHandlers = crash, handlers })
			logged := false
			utilruntime.ReallyCrash = false
			utilruntime.PanicHandlers = []func(context.Context, any){func(context.Context, any) { logged = true }}
			defer func() {
				if r := recover(); r != nil {
					err = errors.New("the panic has left the chain")
				}
			}()
			resp := send(h, readBy("reader", ""))
			if resp.StatusCode != 500 || !logged {
				return fmt.Errorf("status %d, logged: %v", resp.StatusCode, logged)
			}
			return nil
		},
	},
	{
		name: "the task of a watch is run; upstream needs a gate", filter: "routine",
		change: func(c *genericapiserver.Config) {
			c.FeatureGate = gates{c.FeatureGate, map[featuregate.Feature]bool{genericfeatures.APIServingWithRoutine: true}}
		},
		handler: func(w http.ResponseWriter, req *http.Request) {
			if task := routine.TaskFrom(req.Context()); task != nil { // the first task
				task.Func = func() { w.Header().Set("Ran", "as a task") }
			}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, readBy("reader", "?watch=1"))
			if w.Header().Get("Ran") == "" {
				return errors.New("there is no task")
			}
			return nil
		},
	},
	{
		name: "there are latency trackers for the SLI metrics", filter: "latency-trackers",
		handler: func(w http.ResponseWriter, req *http.Request) {
			if _, ok := request.LatencyTrackersFrom(req.Context()); !ok {
				w.WriteHeader(http.StatusNoContent)
			}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			if resp := send(h, readBy("reader", "")); resp.StatusCode != 200 {
				return errors.New("the context of a list has no latency trackers")
			}
			if resp := send(h, readBy("reader", "?watch=1")); resp.StatusCode != http.StatusNoContent {
				return errors.New("the context of a watch has latency trackers")
			}
			return nil
		},
	},
	{
		name: "writes are timed for audit events", filter: "latency-trackers", change: withAuditLog,
		handler: func(w http.ResponseWriter, req *http.Request) {
			_, _ = w.Write([]byte("was"))
			if trackers, ok := request.LatencyTrackersFrom(req.Context()); ok && trackers.ResponseWriteTracker.GetLatency() > 0 {
				_, _ = w.Write([]byte(" timed"))
			}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, readBy("reader", ""))
			if got := w.Body.String(); got != "was timed" {
				return fmt.Errorf("the write %q", got)
			}
			return nil
		},
	},
	{
		name: "requests are logged at verbosity 3, from the moment it is set", filter: "http-logging",
		check: func(t *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			logged, setVerbosity := captureLog(t)
			setVerbosity("2")
			send(h, readBy("reader", ""))
			if got := logged(); strings.Contains(got, configmapsPath) {
				return fmt.Errorf("logged at verbosity 2: %s", got)
			}
			setVerbosity("3")
			send(h, readBy("reader", ""))
			got := logged()
			for _, want := range []string{`"HTTP"`, `verb="LIST"`, `URI="` + configmapsPath + `"`, "resp=200", `apf_pl="level"`} {
				if !strings.Contains(got, want) {
					return fmt.Errorf("logged %q, want %s in it", got, want)
				}
			}
			return nil
		},
	},
	{
		name: "Strict-Transport-Security", filter: "hsts",
		change: func(c *genericapiserver.Config) { c.HSTSDirectives = []string{"max-age=1", "preload"} },
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return wantHeader(h, readBy("reader", ""), 200, "Strict-Transport-Security", "max-age=1; preload")
		},
	},
	{
		name: "Cache-Control", filter: "cache-control",
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return wantHeader(h, readBy("reader", ""), 200, "Cache-Control", "no-cache, private")
		},
	},
	{
		name: "HTTP/2 connections get GOAWAY at random", filter: "goaway",
		change: func(c *genericapiserver.Config) {
			c.GoawayChance, c.SecureServing = 1, &genericapiserver.SecureServingInfo{}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			req := readBy("reader", "")
			req.Proto, req.ProtoMajor, req.ProtoMinor = "HTTP/2.0", 2, 0
			return wantHeader(h, req, 200, "Connection", "close")
		},
	},
	{
		name: "a request after shutdown has waited for all others gets 503", filter: "wait-group",
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			c.NonLongRunningRequestWaitGroup.Wait()
			return wantHeader(h, readBy("reader", ""), 503, "Retry-After", "1")
		},
	},
	{
		name: "the context ends after the request timeout", filter: "request-deadline",
		change: func(c *genericapiserver.Config) { c.RequestTimeout = time.Hour },
		handler: func(w http.ResponseWriter, req *http.Request) {
			if deadline, ok := req.Context().Deadline(); ok {
				w.Header().Set("Left", time.Until(deadline).Round(time.Minute).String())
			}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return errors.Join(
				wantHeader(h, readBy("reader", ""), 200, "Left", "1h0m0s"),
				wantHeader(h, readBy("reader", "?timeout=30m"), 200, "Left", "30m0s"),
				wantHeader(h, readBy("reader", "?watch=1"), 200, "Left", ""))
		},
	},
	{
		name: "a timeout that cannot be read is refused, and audited", filter: "request-deadline", change: withAuditLog,
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			if resp := send(h, readBy("reader", "?timeout=soon")); resp.StatusCode != 400 {
				return fmt.Errorf("status %d, want 400", resp.StatusCode)
			}
			return wantStages(c, auditinternal.StageResponseStarted)
		},
	},
	{
		name: "a response that has not started at the deadline is a 504", filter: "write-deadline",
		handler: func(w http.ResponseWriter, req *http.Request) {
			<-req.Context().Done()
			w.Header().Set("Content-Type", "application/json")
			w.WriteHeader(http.StatusInternalServerError)
			_, _ = w.Write([]byte("the handler's error"))
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			w := httptest.NewRecorder()
			h.ServeHTTP(w, readBy("reader", "?timeout=1ms"))
			if w.Code != 504 || !strings.Contains(w.Body.String(), `"reason":"Timeout"`) || strings.Contains(w.Body.String(), "handler's") {
				return fmt.Errorf("status %d, body %s; want 504 and a Status", w.Code, w.Body)
			}
			return nil
		},
		fastOnly: true, // there the handler may answer before the timeout does
	},
	{
		name: "warnings", filter: "warnings",
		handler: func(_ http.ResponseWriter, req *http.Request) {
			warning.AddWarning(req.Context(), "agent", "v1beta1 is old")
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return wantHeader(h, readBy("reader", ""), 200, "Warning", `299 agent "v1beta1 is old"`)
		},
	},
	{
		name: "CORS", filter: "cors",
		change: func(c *genericapiserver.Config) { c.CorsAllowedOriginList = []string{"//example.com$"} },
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			ours, theirs := readBy("reader", ""), readBy("reader", "")
			ours.Header.Set("Origin", "https://example.com")
			theirs.Header.Set("Origin", "https://example.org")
			const header = "Access-Control-Allow-Origin"
			return errors.Join(wantHeader(h, ours, 200, header, "https://example.com"), wantHeader(h, theirs, 200, header, ""))
		},
	},
	{
		name: "an unauthenticated request gets 401 and an audit event", filter: "authentication", change: withAuditLog,
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			if resp := send(h, readBy("", "")); resp.StatusCode != 401 {
				return fmt.Errorf("status %d, want 401", resp.StatusCode)
			}
			log := c.AuditBackend.(*auditLog)
			if ev := log.last(); ev.ResponseStatus == nil || ev.ResponseStatus.Code != 401 {
				return fmt.Errorf("audit event %s", describe(ev))
			}
			return wantStages(c, auditinternal.StageResponseStarted)
		},
	},
	{
		name: "credentials do not reach the handler", filter: "authentication",
		handler: func(w http.ResponseWriter, req *http.Request) {
			w.Header().Set("Saw", req.Header.Get("Authorization")+req.Header.Get("X-Remote-User"))
			if u, ok := request.UserFrom(req.Context()); ok {
				w.Header().Set("User", u.GetName())
			}
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			req := readBy("reader", "")
			req.Header.Set("X-Remote-User", "other")
			resp := send(h, req)
			if saw, user := resp.Header.Get("Saw"), resp.Header.Get("User"); saw != "" || user != "reader" {
				return fmt.Errorf("the handler saw credentials %q of user %q", saw, user)
			}
			return nil
		},
	},
	{
		name: "the span continues the client's trace", filter: "tracing",
		handler: func(w http.ResponseWriter, req *http.Request) {
			tracing.Propagators().Inject(req.Context(), headerCarrier(w.Header()))
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			const trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
			req := readBy("reader", "")
			req.Header.Set("Traceparent", trace)
			return wantHeader(h, req, 200, "Traceparent", trace)
		},
	},
	{
		name: "a tracer creates a span for each request", filter: "tracing",
		change: func(c *genericapiserver.Config) { c.TracerProvider = tracerProvider() },
		handler: func(w http.ResponseWriter, req *http.Request) {
			tracing.Propagators().Inject(req.Context(), headerCarrier(w.Header()))
		},
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			const trace = "00-0af7651916cd43dd8448eb211c80319c-"
			req := readBy("deputy", "") // member of a group whose trace context is accepted
			req.Header.Set("Traceparent", trace+"b7ad6b7169203331-01")
			got := send(h, req).Header.Get("Traceparent")
			if !strings.HasPrefix(got, trace) || strings.Contains(got, "b7ad6b7169203331") {
				return fmt.Errorf("span %q, want a new one in the trace %s", got, trace)
			}
			return nil
		},
	},
	{
		name: "a list is audited", filter: "audit", change: withAuditLog,
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			send(h, readBy("reader", ""))
			ev := c.AuditBackend.(*auditLog).last()
			if ev.Level != auditinternal.LevelMetadata || ev.User.Username != "reader" || ev.Verb != "list" ||
				ev.ResponseStatus == nil || ev.ResponseStatus.Code != 200 ||
				ev.Annotations["authorization.k8s.io/decision"] != "allow" || ev.ObjectRef == nil || ev.ObjectRef.Namespace != "ns" {
				return fmt.Errorf("audit event %s", describe(ev))
			}
			return wantStages(c, auditinternal.StageRequestReceived, auditinternal.StageResponseComplete)
		},
	},
	{
		name: "a watch is audited", filter: "audit", change: withAuditLog,
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			send(h, readBy("reader", "?watch=1"))
			return wantStages(c, auditinternal.StageRequestReceived, auditinternal.StageResponseStarted, auditinternal.StageResponseComplete)
		},
	},
	{
		name: "constrained impersonation is limited to the permitted user", filter: "constrainedimpersonation",
		handler: showUser, check: checkImpersonation,
	},
	{
		name: "unconstrained impersonation is limited to the permitted user", filter: "impersonation",
		change: func(c *genericapiserver.Config) {
			c.FeatureGate = gates{c.FeatureGate, map[featuregate.Feature]bool{genericfeatures.ConstrainedImpersonation: false}}
		},
		handler: showUser, check: checkImpersonation,
	},
	{
		name: "a rejected request gets 429 with Retry-After", filter: "priorityandfairness",
		change: func(c *genericapiserver.Config) { c.FlowControl.(*seats).full = true },
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return errors.Join(
				wantHeader(h, readBy("reader", ""), 429, "Retry-After", "*"),
				wantHeader(h, readBy("reader", "?watch=1"), 429, "Retry-After", "*"),
				wantHeader(h, readBy("reader", ""), 429, "X-Kubernetes-Pf-Prioritylevel-Uid", "level-uid"))
		},
	},
	{
		name: "an admitted request gets the flow schema header", filter: "priorityandfairness",
		check: func(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
			return wantHeader(h, readBy("reader", ""), 200, "X-Kubernetes-Pf-Flowschema-Uid", "schema-uid")
		},
	},
	{
		name: "an unauthorized request gets 403 and an audit event", filter: "authorization", change: withAuditLog,
		check: func(_ *testing.T, c *genericapiserver.Config, h http.Handler) error {
			if resp := send(h, readBy("denied", "")); resp.StatusCode != 403 {
				return fmt.Errorf("status %d, want 403", resp.StatusCode)
			}
			ev := c.AuditBackend.(*auditLog).last()
			if ev.Annotations["authorization.k8s.io/decision"] != "forbid" || ev.ResponseStatus.Code != 403 {
				return fmt.Errorf("audit event %s", describe(ev))
			}
			return nil
		},
	},
}

func describe(ev *auditinternal.Event) string {
	return fmt.Sprintf("at level %s, of %s by %q, answered %+v, annotated %v",
		ev.Level, ev.Verb, ev.User.Username, ev.ResponseStatus, ev.Annotations)
}

func showUser(w http.ResponseWriter, req *http.Request) {
	if u, ok := request.UserFrom(req.Context()); ok {
		w.Header().Set("User", u.GetName())
	}
}

func checkImpersonation(_ *testing.T, _ *genericapiserver.Config, h http.Handler) error {
	as := func(who, whom string) *http.Request {
		req := readBy(who, "")
		req.Header.Set("Impersonate-User", whom)
		return req
	}
	return errors.Join(
		wantHeader(h, as("deputy", "reader"), 200, "User", "reader"),
		wantHeader(h, as("deputy", "admin"), 403, "User", ""),
		wantHeader(h, as("reader", "deputy"), 403, "User", ""))
}

// TestFastChain_EveryFilter_Acts: each check passes in the fast chain and in upstream's chain,
// because the filters are upstream's, and fails in the fast chain without the filter.
func TestFastChain_EveryFilter_Acts(t *testing.T) {
	for _, test := range filterChecks {
		t.Run(test.name, func(t *testing.T) {
			run := func(build func(*genericapiserver.Config, http.Handler) http.Handler) error {
				c, _ := chainConfig()
				if test.change != nil {
					test.change(c)
				}
				return test.check(t, c, build(c, http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
					if test.handler != nil {
						test.handler(w, req)
					}
					w.WriteHeader(http.StatusOK) // unless the handler has written a status
				})))
			}
			if err := run(func(c *genericapiserver.Config, handler http.Handler) http.Handler {
				return requireFast{t, fastChain(c, handler.ServeHTTP)}
			}); err != nil {
				t.Errorf("in the fast chain: %v", err)
			}
			if !test.fastOnly {
				if err := run(func(c *genericapiserver.Config, handler http.Handler) http.Handler {
					return fastChain(c, handler.ServeHTTP).full
				}); err != nil {
					t.Errorf("in upstream's chain: %v", err)
				}
			}
			if err := run(func(c *genericapiserver.Config, handler http.Handler) http.Handler {
				h := fastChain(c, nil)
				filters := fastFilters(c, nil, nil)
				kept := slices.DeleteFunc(slices.Clone(filters), func(f filter) bool { return f.name == test.filter })
				if len(kept) != len(filters)-1 {
					t.Fatalf("%d filters are called %s, want one", len(filters)-len(kept), test.filter)
				}
				h.fast = wrap(handler, kept)
				return requireFast{t, h}
			}); err == nil {
				t.Errorf("passes without the filter %s", test.filter)
			}
		})
	}
}

// TestFastChain_EveryFilter_HasCheck: each filter of the fast chain, in every configuration above,
// is checked by TestFastChain_EveryFilter_Acts.
func TestFastChain_EveryFilter_HasCheck(t *testing.T) {
	checked := map[string]bool{}
	for _, test := range filterChecks {
		checked[test.filter] = true
	}
	for _, test := range filterChecks {
		c, _ := chainConfig()
		if test.change != nil {
			test.change(c)
		}
		for _, f := range fastFilters(c, nil, nil) {
			if !checked[f.name] {
				t.Errorf("filter %s has no test", f.name)
			}
		}
	}
}

// requireFast is a chain that fails the test if a request does not take the fast chain.
type requireFast struct {
	t *testing.T
	*Chain
}

func (h requireFast) ServeHTTP(w http.ResponseWriter, req *http.Request) {
	if _, fast := h.fastRead(req); !fast {
		h.t.Errorf("%s takes the full chain", req.URL)
	}
	h.Chain.ServeHTTP(w, req)
}

// gates is a feature gate that overrides some features.
type gates struct {
	featuregate.FeatureGate
	set map[featuregate.Feature]bool
}

func (g gates) Enabled(f featuregate.Feature) bool {
	if on, ok := g.set[f]; ok {
		return on
	}
	return utilfeature.DefaultFeatureGate.Enabled(f)
}

// headerCarrier lets a propagator write to a header.
type headerCarrier http.Header

func (c headerCarrier) Get(key string) string { return http.Header(c).Get(key) }
func (c headerCarrier) Set(key, value string) { http.Header(c).Set(key, value) }
func (c headerCarrier) Keys() []string        { return nil }

// tracerProvider returns a tracer that samples everything and whose exporter has no endpoint.
func tracerProvider() tracing.TracerProvider {
	endpoint, rate := "127.0.0.1:1", int32(1_000_000) // port 1 has no listener
	provider, err := tracing.NewProvider(context.Background(),
		&tracingapi.TracingConfiguration{Endpoint: &endpoint, SamplingRatePerMillion: &rate}, nil, nil)
	if err != nil {
		panic(err)
	}
	return provider
}

// captureLog redirects klog for the duration of the test.
func captureLog(t *testing.T) (logged func() string, setVerbosity func(string)) {
	var flags flag.FlagSet
	klog.InitFlags(&flags)
	set := func(name, value string) {
		t.Helper()
		old := flags.Lookup(name).Value.String()
		if err := flags.Set(name, value); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = flags.Set(name, old) })
	}
	set("logtostderr", "false")
	set("alsologtostderr", "false")
	set("stderrthreshold", "FATAL")
	var out bytes.Buffer
	klog.SetOutput(&out)
	t.Cleanup(func() { klog.Flush(); klog.SetOutput(nil) })
	return func() string { klog.Flush(); return out.String() }, func(v string) { set("v", v) }
}
