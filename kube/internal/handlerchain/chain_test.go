package handlerchain

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	flowcontrol "k8s.io/api/flowcontrol/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer"
	auditinternal "k8s.io/apiserver/pkg/apis/audit"
	"k8s.io/apiserver/pkg/audit"
	"k8s.io/apiserver/pkg/authentication/authenticator"
	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/endpoints/request"
	genericapiserver "k8s.io/apiserver/pkg/server"
	"k8s.io/apiserver/pkg/server/mux"
	utilfeature "k8s.io/apiserver/pkg/util/feature"
	utilflowcontrol "k8s.io/apiserver/pkg/util/flowcontrol"
	fq "k8s.io/apiserver/pkg/util/flowcontrol/fairqueuing"
	flowcontrolrequest "k8s.io/apiserver/pkg/util/flowcontrol/request"
)

var chainCodecs = func() serializer.CodecFactory {
	scheme := runtime.NewScheme()
	metav1.AddToGroupVersion(scheme, schema.GroupVersion{Version: "v1"})
	scheme.AddUnversionedTypes(schema.GroupVersion{Version: "v1"}, &metav1.Status{})
	return serializer.NewCodecFactory(scheme)
}()

// chainConfig returns the configuration of a server without storage: requests with the
// header "Authorization: <name>" come from the user of that name, and
//
//	reader    may get, list and watch configmaps
//	deputy    may in addition impersonate reader, and is of the group system:masters
//	admin     may do everything
//	denied    is authenticated, but not authorized
//
// Priority and fairness admits all requests and counts their seats.
func chainConfig() (*genericapiserver.Config, *seats) {
	c := genericapiserver.NewConfig(chainCodecs)
	c.RequestInfoResolver = genericapiserver.NewRequestInfoResolver(c)
	c.FeatureGate = utilfeature.DefaultFeatureGate
	c.Authentication.Authenticator = authenticator.RequestFunc(func(req *http.Request) (*authenticator.Response, bool, error) {
		name := req.Header.Get("Authorization")
		if name == "" {
			return nil, false, nil
		}
		u := &user.DefaultInfo{Name: name}
		if name == "deputy" {
			u.Groups = []string{user.SystemPrivilegedGroup}
		}
		return &authenticator.Response{User: u}, true, nil
	})
	c.Authorization.Authorizer = authorizer.AuthorizerFunc(func(_ context.Context, a authorizer.Attributes) (authorizer.Decision, string, error) {
		switch name := a.GetUser().GetName(); {
		case a.GetVerb() == "impersonate" && a.GetResource() == "users":
			if name == "deputy" && a.GetName() == "reader" {
				return authorizer.DecisionAllow, "a deputy", nil
			}
		case a.GetResource() == "configmaps" && (name == "reader" || name == "deputy"):
			return authorizer.DecisionAllow, "a reader", nil
		case name == "admin":
			return authorizer.DecisionAllow, "an administrator", nil
		}
		return authorizer.DecisionNoOpinion, "no rule", nil
	})
	s := &seats{}
	c.FlowControl = s
	return c, s
}

// seats is a priority and fairness with one priority level, which admits a request unless it is
// full.
type seats struct {
	utilflowcontrol.Interface // nil: the filter does not call its methods
	full                      bool
	taken                     atomic.Int32 // by requests that are being executed
	estimate                  atomic.Pointer[flowcontrolrequest.WorkEstimate]
}

func (s *seats) Handle(_ context.Context, _ utilflowcontrol.RequestDigest,
	note func(*flowcontrol.FlowSchema, *flowcontrol.PriorityLevelConfiguration, string),
	estimate func() flowcontrolrequest.WorkEstimate, _ fq.QueueNoteFn, execute func()) {
	note(&flowcontrol.FlowSchema{ObjectMeta: metav1.ObjectMeta{Name: "schema", UID: "schema-uid"}},
		&flowcontrol.PriorityLevelConfiguration{ObjectMeta: metav1.ObjectMeta{Name: "level", UID: "level-uid"}}, "")
	work := estimate()
	s.estimate.Store(&work)
	if s.full {
		return
	}
	s.taken.Add(1)
	defer s.taken.Add(-1)
	execute()
}

func (s *seats) Run(stop <-chan struct{}) error                              { <-stop; return nil }
func (s *seats) Install(*mux.PathRecorderMux)                                {}
func (s *seats) RegisterWatch(*http.Request) utilflowcontrol.ForgetWatchFunc { return nil }
func (s *seats) GetInterestedWatchCount(*request.RequestInfo) int            { return 0 }
func (s *seats) GetMaxSeats(string) uint64                                   { return 0 }

// auditLog is an audit backend and its policy: every request at level Metadata.
type auditLog struct {
	mu     sync.Mutex
	events []*auditinternal.Event
}

func (l *auditLog) ProcessEvents(events ...*auditinternal.Event) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	for _, ev := range events {
		l.events = append(l.events, ev.DeepCopy())
	}
	return true
}

func (l *auditLog) EvaluatePolicyRule(authorizer.Attributes) audit.RequestAuditConfig {
	return audit.RequestAuditConfig{Level: auditinternal.LevelMetadata}
}

func (l *auditLog) Run(<-chan struct{}) error { return nil }
func (l *auditLog) Shutdown()                 {}
func (l *auditLog) String() string            { return "log" }

// stages returns the stages of the logged events, in order.
func (l *auditLog) stages() []auditinternal.Stage {
	l.mu.Lock()
	defer l.mu.Unlock()
	var stages []auditinternal.Stage
	for _, ev := range l.events {
		stages = append(stages, ev.Stage)
	}
	return stages
}

// last returns the last event, or an empty one.
func (l *auditLog) last() *auditinternal.Event {
	l.mu.Lock()
	defer l.mu.Unlock()
	if len(l.events) == 0 {
		return &auditinternal.Event{}
	}
	return l.events[len(l.events)-1]
}

// fastChain returns a chain of a started server, with handler as the read handler.
func fastChain(c *genericapiserver.Config, handler http.HandlerFunc) *Chain {
	h := New(nil, c, Options{Mount: func(http.Handler) http.Handler { return handler }})
	h.complete.Store(true)
	return h
}

// TestChain_Request_SelectsFastOrFullChain checks which requests take the fast chain.
func TestChain_Request_SelectsFastOrFullChain(t *testing.T) {
	const configmaps = "/api/v1/namespaces/ns/configmaps"
	get := func(path string) *http.Request { return httptest.NewRequest(http.MethodGet, path, nil) }
	with := func(req *http.Request, name, value string) *http.Request {
		req.Header.Set(name, value)
		return req
	}
	for name, test := range map[string]struct {
		req  *http.Request
		fast bool
	}{
		"get":                      {get(configmaps + "/cm"), true},
		"get in a group":           {get("/apis/apps/v1/namespaces/ns/deployments/d"), true},
		"get of a namespace":       {get("/api/v1/namespaces/ns"), true},
		"list":                     {get(configmaps), true},
		"list of all":              {get("/api/v1/configmaps?limit=500"), true},
		"list of a name":           {get(configmaps + "?fieldSelector=metadata.name%3Dcm"), true},
		"watch":                    {get(configmaps + "?watch=1"), true},
		"a resource of the engine": {get("/apis/example.com/v1/watches"), true},
		"metadata":                 {with(get(configmaps), "Accept", "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"), true},
		"table":                    {with(get(configmaps), "Accept", "application/json;as=Table;v=v1;g=meta.k8s.io,application/json"), false},
		"head":                     {httptest.NewRequest(http.MethodHead, configmaps, nil), false},
		"create":                   {httptest.NewRequest(http.MethodPost, configmaps, nil), false},
		"delete":                   {httptest.NewRequest(http.MethodDelete, configmaps+"/cm", nil), false},
		"subresource":              {get("/api/v1/namespaces/ns/pods/p/log?follow=true"), false},
		"proxy subresource":        {get("/api/v1/namespaces/ns/services/s/proxy/metrics"), false},
		"finalize":                 {get("/api/v1/namespaces/ns/finalize"), false},
		"watch in the path":        {get("/api/v1/watch/namespaces/ns/configmaps"), false},
		"watch in a group":         {get("/apis/apps/v1/watch/deployments"), false},
		"proxy in the path":        {get("/api/v1/proxy/namespaces/ns/services/s"), false},
		"watch and no more":        {get("/api/v1/watch"), false},
		"websocket":                {with(with(get(configmaps+"?watch=1"), "Connection", "Upgrade"), "Upgrade", "websocket"), false},
		"discovery":                {get("/apis/apps/v1"), false},
		"not of the API":           {get("/healthz"), false},
		"slash at the end":         {get(configmaps + "/"), false},
		"slashes twice":            {get("/api/v1/namespaces//configmaps"), false},
		"dots":                     {get("/api/v1/namespaces/ns/secrets/../configmaps"), false},
		"encoded slash":            {get(configmaps + "/a%2Fb"), false},
		"encoded though plain":     {get("/api/v1/namespaces/ns/%63onfigmaps/cm"), false},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := chainConfig()
			var took string
			h := New(nil, c, Options{
				Mount: func(next http.Handler) http.Handler { return next },
				Serves: func(req *http.Request, _ *request.RequestInfo) bool {
					return !strings.Contains(req.Header.Get("Accept"), "as=Table")
				},
			})
			h.complete.Store(true)
			h.full = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { took = "full" })
			h.fast = http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
				took = "fast"
				if _, ok := request.RequestInfoFrom(req.Context()); !ok {
					t.Error("there is no RequestInfo in the context")
				}
				if _, ok := request.ReceivedTimestampFrom(req.Context()); !ok {
					t.Error("there is no time of arrival in the context")
				}
			})
			want := "full"
			if test.fast {
				want = "fast"
			}
			h.ServeHTTP(httptest.NewRecorder(), test.req)
			if took != want {
				t.Errorf("took the %s chain, want the %s one", took, want)
			}
		})
	}
}

// countedResolver counts the requests that it parses.
type countedResolver struct {
	request.RequestInfoResolver
	parsed int
}

func (r *countedResolver) NewRequestInfo(req *http.Request) (*request.RequestInfo, error) {
	r.parsed++
	return r.RequestInfoResolver.NewRequestInfo(req)
}

// TestChain_PassedRead_IsParsedOnce: a request that the read handler passes on is parsed once, so
// that upstream logs an invalid selector once.
func TestChain_PassedRead_IsParsedOnce(t *testing.T) {
	for name, target := range map[string]string{
		"fast":                "/api/v1/configmaps",
		"not served":          "/api/v1/configmaps?pretty=1",
		"an invalid selector": "/api/v1/configmaps?pretty=1&labelSelector=a%3D%3D%3D",
		"a subresource":       "/api/v1/namespaces/ns/configmaps/a/status",
		"a verb in the path":  "/api/v1/watch/configmaps",
		"discovery":           "/apis/apps/v1",
		"another spelling":    "/api/v1/configmaps/",
		"a list of one name":  "/api/v1/configmaps?pretty=1&fieldSelector=metadata.name%3Da",
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) { // no parse is slow
				c, _ := chainConfig()
				resolver := &countedResolver{RequestInfoResolver: c.RequestInfoResolver}
				c.RequestInfoResolver = resolver
				var got *request.RequestInfo
				h := New(nil, c, Options{
					Mount: func(http.Handler) http.Handler {
						return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
							got, _ = request.RequestInfoFrom(req.Context())
						})
					},
					Serves: func(req *http.Request, _ *request.RequestInfo) bool { return req.URL.Query().Get("pretty") == "" },
				})
				h.complete.Store(true)
				if c.RequestInfoResolver != resolver {
					t.Error("New has replaced the resolver of the configuration")
				}
				req := httptest.NewRequest(http.MethodGet, target, nil)
				req.Header.Set("Authorization", "admin")
				h.ServeHTTP(httptest.NewRecorder(), req)
				if resolver.parsed != 1 {
					t.Errorf("parsed %d times, want once", resolver.parsed)
				}
				want, err := resolver.RequestInfoResolver.NewRequestInfo(req)
				if err != nil || !reflect.DeepEqual(got, want) {
					t.Errorf("the handler has %+v, want %+v (%v)", got, want, err)
				}
			})
		})
	}
}

// slowResolver takes half a second for a request.
type slowResolver struct{ request.RequestInfoResolver }

func (r slowResolver) NewRequestInfo(req *http.Request) (*request.RequestInfo, error) {
	time.Sleep(500 * time.Millisecond)
	return r.RequestInfoResolver.NewRequestInfo(req)
}

// TestChain_SlowResolver_IsInLatency: audit events have the latency since the time of receipt, to
// which a resolver of request infos contributes on both chains.
func TestChain_SlowResolver_IsInLatency(t *testing.T) {
	for _, served := range []bool{true, false} {
		t.Run(fmt.Sprintf("served=%t", served), func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, _ := chainConfig()
				c.RequestInfoResolver = slowResolver{c.RequestInfoResolver}
				var took time.Duration
				h := New(nil, c, Options{
					Mount: func(http.Handler) http.Handler {
						return http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
							received, _ := request.ReceivedTimestampFrom(req.Context())
							took = time.Since(received)
						})
					},
					Serves: func(*http.Request, *request.RequestInfo) bool { return served },
				})
				h.complete.Store(true)
				req := httptest.NewRequest(http.MethodGet, "/api/v1/configmaps", nil)
				req.Header.Set("Authorization", "admin")
				h.ServeHTTP(httptest.NewRecorder(), req)
				if took < 500*time.Millisecond {
					t.Errorf("the request has taken %v since its receipt", took)
				}
			})
		})
	}
}

// TestChain_UnsupportedConfig_HasNoFastChain: there is no fast chain for configurations whose
// decisions it could not repeat.
func TestChain_UnsupportedConfig_HasNoFastChain(t *testing.T) {
	own := func(apiHandler http.Handler, c *genericapiserver.Config) http.Handler {
		return genericapiserver.DefaultBuildHandlerChain(apiHandler, c)
	}
	for name, test := range map[string]struct {
		change func(*genericapiserver.Config)
		full   func(http.Handler, *genericapiserver.Config) http.Handler
		want   bool
	}{
		"default":                      {want: true},
		"upstream's default, by name":  {full: genericapiserver.DefaultBuildHandlerChain, want: true},
		"storage version precondition": {full: genericapiserver.BuildHandlerChainWithStorageVersionPrecondition, want: true},
		"a custom chain":               {full: own},
		"no priority and fairness":     {change: func(c *genericapiserver.Config) { c.FlowControl = nil }},
	} {
		t.Run(name, func(t *testing.T) {
			c, _ := chainConfig()
			if test.change != nil {
				test.change(c)
			}
			h := New(nil, c, Options{Full: test.full, Mount: func(next http.Handler) http.Handler { return next }})
			if got := h.fast != nil; got != test.want {
				t.Errorf("fast chain: %v, want %v", got, test.want)
			}
		})
	}

	t.Run("watches that shutdown waits for", func(t *testing.T) {
		c, _ := chainConfig()
		c.ShutdownWatchTerminationGracePeriod = 1
		h := fastChain(c, nil)
		if _, fast := h.fastRead(httptest.NewRequest(http.MethodGet, "/api/v1/configmaps?watch=1", nil)); fast {
			t.Error("a watch takes the fast chain")
		}
		if _, fast := h.fastRead(httptest.NewRequest(http.MethodGet, "/api/v1/configmaps", nil)); !fast {
			t.Error("a list takes the full chain")
		}
	})
}

// TestFastChain_WithoutFlowControl_LimitsInFlight: without priority and fairness, reads are limited
// by upstream's filter, and not above the limit.
func TestFastChain_WithoutFlowControl_LimitsInFlight(t *testing.T) {
	c, _ := chainConfig()
	c.FlowControl = nil
	c.MaxRequestsInFlight = 1
	entered, leave := make(chan struct{}), make(chan struct{})
	h := fastChain(c, func(http.ResponseWriter, *http.Request) {
		entered <- struct{}{}
		<-leave
	})
	get := func() *httptest.ResponseRecorder {
		w, req := httptest.NewRecorder(), httptest.NewRequest(http.MethodGet, "/api/v1/configmaps", nil)
		req.Header.Set("Authorization", "reader")
		h.ServeHTTP(w, req)
		return w
	}
	var first sync.WaitGroup
	first.Go(func() { get() })
	<-entered
	w := get()
	close(leave)
	first.Wait()
	if w.Code != http.StatusTooManyRequests || w.Header().Get("Retry-After") == "" {
		t.Errorf("the second request: status %d, Retry-After %q; want 429 and a time", w.Code, w.Header().Get("Retry-After"))
	}
}

// TestFastChain_Shutdown_WaitsForListOnly: shutdown waits until a list in the fast chain has
// returned; it does not wait for a watch, which lasts for as long as its client wants.
func TestFastChain_Shutdown_WaitsForListOnly(t *testing.T) {
	for query, waits := range map[string]bool{"?limit=1": true, "?watch=1": false} {
		t.Run(query, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				c, _ := chainConfig()
				leave := make(chan struct{})
				h := fastChain(c, func(http.ResponseWriter, *http.Request) { <-leave })
				go send(h, readBy("reader", query))
				synctest.Wait() // the request is in the handler
				var over atomic.Bool
				go func() {
					c.NonLongRunningRequestWaitGroup.Wait()
					over.Store(true)
				}()
				synctest.Wait()
				if over.Load() == waits {
					t.Errorf("shutdown waits: %t, want %t", !over.Load(), waits)
				}
				close(leave)
				synctest.Wait()
				if !over.Load() {
					t.Error("shutdown waits for a request that has returned")
				}
			})
		})
	}
}
