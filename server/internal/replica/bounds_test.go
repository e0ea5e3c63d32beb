package replica

import (
	"context"
	"net/http"
	"net/http/httptest"
	"testing"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
)

// TestSendableIdentity_NameThatHeadersChange_IsForbidden: HTTP/1.1 trims the values of headers, so
// that the primary would see the group of administrators.
func TestSendableIdentity_NameThatHeadersChange_IsForbidden(t *testing.T) {
	for name, c := range map[string]struct {
		u    user.DefaultInfo
		code int
	}{
		"plain":                   {user.DefaultInfo{Name: "jane doe", UID: "1", Groups: []string{"a b"}, Extra: map[string][]string{"k": {"v", ""}}}, http.StatusOK},
		"no name":                 {user.DefaultInfo{Groups: []string{"a"}}, http.StatusForbidden},
		"space after the group":   {user.DefaultInfo{Name: "eve", Groups: []string{user.SystemPrivilegedGroup + " "}}, http.StatusForbidden},
		"space before the name":   {user.DefaultInfo{Name: " admin"}, http.StatusForbidden},
		"tab after the name":      {user.DefaultInfo{Name: "root\t"}, http.StatusForbidden},
		"newline in the name":     {user.DefaultInfo{Name: "a\nX-Remote-Group: b"}, http.StatusForbidden},
		"space after the UID":     {user.DefaultInfo{Name: "a", UID: "1 "}, http.StatusForbidden},
		"space after a value":     {user.DefaultInfo{Name: "a", Extra: map[string][]string{"k": {"v "}}}, http.StatusForbidden},
		"group that is one space": {user.DefaultInfo{Name: "a", Groups: []string{" "}}, http.StatusForbidden},
	} {
		sent := false
		handler := withSendableIdentity(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { sent = true }), legacyscheme.Codecs)
		w := httptest.NewRecorder()
		req := httptest.NewRequest(http.MethodGet, "/api/v1/pods", nil)
		handler.ServeHTTP(w, req.WithContext(request.WithUser(req.Context(), &c.u)))
		if w.Code != c.code || sent != (c.code == http.StatusOK) {
			t.Errorf("%s: code %d, sent: %t; want %d", name, w.Code, sent, c.code)
		}
	}
}

// TestInFlightBound_Strangers_HaveABoundOfTheirOwn: requests without authentication take no place
// of others, long-running ones included.
func TestInFlightBound_Strangers_HaveABoundOfTheirOwn(t *testing.T) {
	const bound = 2 * strangersShare
	inside, leave := make(chan struct{}), make(chan struct{})
	handler := withInFlightBound(http.HandlerFunc(func(http.ResponseWriter, *http.Request) { inside <- struct{}{}; <-leave }), bound,
		func(*http.Request, *request.RequestInfo) bool { return true }, legacyscheme.Codecs)
	stranger := func() int {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, "/api/v1/pods/x/exec", nil), user.Anonymous, user.AllUnauthenticated))
		return w.Code
	}
	done := make(chan int)
	for range bound / strangersShare {
		go func() { done <- stranger() }()
		<-inside
	}
	if code := stranger(); code != http.StatusTooManyRequests {
		t.Errorf("a stranger above the bound got %d, want 429", code)
	}
	go func() {
		w := httptest.NewRecorder()
		handler.ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, "/api/v1/pods", nil), "jane", user.AllAuthenticated))
		done <- w.Code
	}()
	<-inside
	close(leave)
	for range bound/strangersShare + 1 {
		if code := <-done; code != http.StatusOK {
			t.Errorf("code %d, want 200", code)
		}
	}
}

// deadlines is a response that records its deadlines.
type deadlines struct {
	http.ResponseWriter
	read, write time.Time
}

func (d *deadlines) SetReadDeadline(at time.Time) error  { d.read = at; return nil }
func (d *deadlines) SetWriteDeadline(at time.Time) error { d.write = at; return nil }

// TestDeadlines_ProxiedRequest_IsBounded: a request that is not long-running, and every refusal.
// The deadline of writes is gone when the request has ended: an HTTP/1.1 connection is used again.
func TestDeadlines_ProxiedRequest_IsBounded(t *testing.T) {
	const timeout = time.Minute
	for name, c := range map[string]struct {
		long, refused bool
		want          time.Duration // 0: none
	}{
		"short":                 {false, false, timeout + 2*proxyGrace},
		"short, refused":        {false, true, refusalTime},
		"long-running":          {true, false, 0},
		"long-running, refused": {true, true, refusalTime},
	} {
		w := &deadlines{ResponseWriter: httptest.NewRecorder()}
		began := time.Now()
		withDeadlines(http.HandlerFunc(func(_ http.ResponseWriter, req *http.Request) {
			if c.refused {
				boundRefusal(req.Context())
			}
			if _, limited := req.Context().Deadline(); limited == c.long {
				t.Errorf("%s: the context has a deadline: %t", name, limited)
			}
			for _, at := range []time.Time{w.read, w.write} {
				if at.IsZero() != (c.want == 0) || !at.IsZero() && (at.Before(began.Add(c.want)) || at.After(time.Now().Add(c.want))) {
					t.Errorf("%s: a deadline after %v, want %v", name, at.Sub(began), c.want)
				}
			}
		}), timeout, func(*http.Request, *request.RequestInfo) bool { return c.long }).
			ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, "/api/v1/pods", nil), "jane"))
		if !w.write.IsZero() {
			t.Errorf("%s: a deadline of writes remains", name)
		}
	}
}

// TestProxy_NoAnswerInTime_Is504: a primary that does not answer.
func TestProxy_NoAnswerInTime_Is504(t *testing.T) {
	proxy := newProxy(roundTrip(func(req *http.Request) (*http.Response, error) {
		<-req.Context().Done()
		return nil, req.Context().Err()
	}), newClaims(nil), legacyscheme.Codecs, false)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	w := httptest.NewRecorder()
	proxy.ServeHTTP(w, as(httptest.NewRequest(http.MethodPost, "/api/v1/pods", nil).WithContext(ctx), "jane"))
	if w.Code != http.StatusGatewayTimeout {
		t.Errorf("code %d, want 504", w.Code)
	}
}

type roundTrip func(*http.Request) (*http.Response, error)

func (f roundTrip) RoundTrip(req *http.Request) (*http.Response, error) { return f(req) }
