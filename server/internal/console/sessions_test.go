package console

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/authorization/authorizer"
	"k8s.io/apiserver/pkg/authorization/authorizerfactory"
	"k8s.io/klog/v2"
)

const (
	remote = "127.0.0.1:40000"
	host   = "127.0.0.1:6443"
)

// exchange posts a token of a link and returns the status and the token of the session.
func exchange(t *testing.T, s *Sessions, link string, change func(*http.Request)) (code int, session string) {
	t.Helper()
	_, token, _ := strings.Cut(link, "#token=")
	body, _ := json.Marshal(map[string]string{"token": token})
	r := httptest.NewRequest(http.MethodPost, sessionPath, strings.NewReader(string(body)))
	r.RemoteAddr, r.Host = remote, host
	r.Header.Set("Content-Type", "application/json")
	if change != nil {
		change(r)
	}
	w := httptest.NewRecorder()
	s.Outermost(http.NotFoundHandler()).ServeHTTP(w, r)
	var answer struct{ Token string }
	if w.Code == http.StatusOK {
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil {
			t.Fatalf("%v: %s", err, w.Body)
		}
	}
	return w.Code, answer.Token
}

// user returns the user that a server authenticates for a bearer token, nil if there is none.
func userOf(s *Sessions, token, from string) user.Info {
	r := httptest.NewRequest(http.MethodGet, "/api", nil)
	r.RemoteAddr, r.Host = from, host
	r.Header.Set("Authorization", "Bearer "+token)
	answer, ok, err := s.AuthenticateRequest(r)
	if err != nil || !ok {
		return nil
	}
	return answer.User
}

func TestLink_SecondUse_IsRefused(t *testing.T) {
	s := NewSessions()
	link, _ := s.NewLink()
	code, session := exchange(t, s, link, nil)
	if code != http.StatusOK || userOf(s, session, remote) == nil {
		t.Fatalf("first use: %d, session %q", code, session)
	}
	if code, _ := exchange(t, s, link, nil); code != http.StatusForbidden {
		t.Errorf("second use: %d", code)
	}
	if userOf(s, session, remote) == nil {
		t.Error("the second use of a link ended the session of the first")
	}
	if _, token, _ := strings.Cut(link, "="); userOf(s, token, remote) != nil || userOf(s, sessionPrefix+token, remote) != nil {
		t.Error("the token of a link authenticates")
	}
}

func TestLink_AfterTenMinutes_IsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSessions()
		first, ends := s.NewLink()
		if until := time.Until(ends); until != linkLife {
			t.Errorf("the link ends in %v", until)
		}
		time.Sleep(linkLife - time.Second)
		second, _ := s.NewLink()
		time.Sleep(time.Second)
		if code, _ := exchange(t, s, first, nil); code != http.StatusForbidden {
			t.Errorf("a link after %v: %d", linkLife, code)
		}
		code, session := exchange(t, s, second, nil)
		if code != http.StatusOK || userOf(s, session, remote) == nil {
			t.Fatalf("a link after a second: %d", code)
		}
		time.Sleep(sessionLife)
		if userOf(s, session, remote) != nil {
			t.Errorf("a session is valid after %v", sessionLife)
		}
	})
}

func TestLink_ForeignRequests_AreRefusedAndDoNotUseIt(t *testing.T) {
	s := NewSessions()
	link, _ := s.NewLink()
	for name, c := range map[string]struct {
		change func(*http.Request)
		want   int
	}{
		"another machine":    {func(r *http.Request) { r.RemoteAddr = "192.0.2.7:40000" }, http.StatusForbidden},
		"another name":       {func(r *http.Request) { r.Host = "example.com:6443" }, http.StatusForbidden},
		"form":               {func(r *http.Request) { r.Header.Set("Content-Type", "text/plain") }, http.StatusForbidden},
		"page of other port": {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-site") }, http.StatusForbidden},
		"page of other site": {func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "cross-site") }, http.StatusForbidden},
		"GET":                {func(r *http.Request) { r.Method = http.MethodGet }, http.StatusMethodNotAllowed},
		"no body":            {func(r *http.Request) { r.Body = http.NoBody }, http.StatusBadRequest},
		"long body": {func(r *http.Request) { // a valid object, if it were shorter
			body, _ := io.ReadAll(r.Body)
			r.Body = io.NopCloser(strings.NewReader(strings.Replace(string(body), "{", `{"more":"`+strings.Repeat("x", 1<<10)+`",`, 1)))
		}, http.StatusBadRequest},
	} {
		if code, session := exchange(t, s, link, c.change); code != c.want || session != "" {
			t.Errorf("%s: %d, want %d", name, code, c.want)
		}
	}
	if code, _ := exchange(t, s, "#token=", nil); code != http.StatusForbidden {
		t.Errorf("an empty token: %d", code)
	}
	if code, _ := exchange(t, s, link, func(r *http.Request) { r.Header.Set("Sec-Fetch-Site", "same-origin") }); code != http.StatusOK {
		t.Errorf("the page itself: %d", code)
	}
}

func TestLink_ManyRefusals_AreLoggedAtLimitedRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var log bytes.Buffer
		defer klog.CaptureState().Restore()
		klog.LogToStderr(false)
		klog.SetOutput(&log)
		s := NewSessions()
		refuse := func(n int) int {
			log.Reset()
			for range n {
				if code, _ := exchange(t, s, "#token=none", nil); code != http.StatusForbidden {
					t.Fatal(code)
				}
			}
			klog.Flush()
			return strings.Count(log.String(), "Refused a session")
		}
		if n := refuse(1000); n != refusalLogs {
			t.Errorf("%d entries for 1000 refusals, want %d", n, refusalLogs)
		}
		time.Sleep(refusalInterval)
		if n := refuse(1000); n != 1 || !strings.Contains(log.String(), "refusals=1001") {
			t.Errorf("%d entries for 1000 refusals after %v, want 1: %s", n, refusalInterval, &log)
		}
	})
}

func TestLocal_Requests_AreThoseOfLoopbackAddresses(t *testing.T) {
	for _, c := range []struct {
		from, to string
		want     bool
	}{
		{remote, host, true},
		{"[::1]:40000", "[::1]:6443", true},
		{"[::1]:40000", "[::1]", true},
		{remote, "localhost:6443", true},
		{remote, "localhost", true},
		{remote, "127.8.9.10", true},
		{remote, "localhost.example.com:6443", false},
		{remote, "127.0.0.1.example.com", false},
		{remote, "192.0.2.1:6443", false},
		{remote, "0.0.0.0:6443", false},
		{remote, "", false},
		{"192.0.2.7:40000", host, false},
		{"@", host, false},
	} {
		r := httptest.NewRequest(http.MethodGet, "/", nil)
		r.RemoteAddr, r.Host = c.from, c.to
		if got := local(r); got != c.want {
			t.Errorf("from %q to %q: %v", c.from, c.to, got)
		}
	}
}

func TestSession_OtherMachineOrEnd_IsRefused(t *testing.T) {
	s := NewSessions()
	link, _ := s.NewLink()
	_, session := exchange(t, s, link, nil)
	if u := userOf(s, session, "[::1]:40000"); u == nil || u.GetName() != UserName {
		t.Errorf("the session is that of %v", u)
	}
	for _, from := range []string{"192.0.2.7:40000", "@", ""} {
		if userOf(s, session, from) != nil {
			t.Errorf("the session is valid from %q", from)
		}
	}
	other := httptest.NewRequest(http.MethodGet, "/api", nil)
	other.RemoteAddr, other.Host = remote, "example.com:6443"
	other.Header.Set("Authorization", "Bearer "+session)
	if _, ok, _ := s.AuthenticateRequest(other); ok {
		t.Error("the session is valid for the name of another site")
	}
	if userOf(s, session+"x", remote) != nil || userOf(s, "", remote) != nil {
		t.Error("another token is valid")
	}
	r := httptest.NewRequest(http.MethodDelete, sessionPath, nil)
	r.RemoteAddr, r.Host = remote, host
	r.Header.Set("Authorization", "Bearer "+session)
	w := httptest.NewRecorder()
	s.Outermost(http.NotFoundHandler()).ServeHTTP(w, r)
	if w.Code != http.StatusNoContent || userOf(s, session, remote) != nil {
		t.Errorf("end of the session: %d; it is still valid: %v", w.Code, userOf(s, session, remote) != nil)
	}
}

func TestTokens_Many_AreBounded(t *testing.T) {
	s := NewSessions()
	first, _ := s.NewLink()
	for range maxTokens {
		s.NewLink()
	}
	if len(s.links) != maxTokens {
		t.Errorf("%d links are stored, want %d", len(s.links), maxTokens)
	}
	if code, _ := exchange(t, s, first, nil); code != http.StatusForbidden {
		t.Errorf("the oldest link: %d", code)
	}
}

func TestReadOnly_Sessions_GetAndListOnly(t *testing.T) {
	session := &sessionUser{&user.DefaultInfo{Name: UserName}}
	a := ReadOnly(authorizerfactory.NewAlwaysAllowAuthorizer())
	resource := func(verb, group, resource, subresource string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{User: session, ResourceRequest: true, Verb: verb, APIGroup: group, APIVersion: "v1", Resource: resource, Subresource: subresource}
	}
	page := func(verb, path string) authorizer.AttributesRecord {
		return authorizer.AttributesRecord{User: session, Verb: verb, Path: path}
	}
	for _, c := range []struct {
		attributes authorizer.AttributesRecord
		want       authorizer.Decision
	}{
		{resource("list", "", "pods", ""), authorizer.DecisionAllow},
		{resource("get", "apps", "deployments", ""), authorizer.DecisionAllow},
		{resource("list", "coordination.k8s.io", "leases", ""), authorizer.DecisionAllow},
		{resource("list", "example.com", "secrets", ""), authorizer.DecisionAllow},
		{resource("get", "", "secrets", ""), authorizer.DecisionDeny},
		{resource("list", "", "secrets", ""), authorizer.DecisionDeny},
		{resource("watch", "", "pods", ""), authorizer.DecisionDeny},
		{resource("create", "", "pods", ""), authorizer.DecisionDeny},
		{resource("update", "", "pods", ""), authorizer.DecisionDeny},
		{resource("patch", "", "pods", ""), authorizer.DecisionDeny},
		{resource("delete", "", "pods", ""), authorizer.DecisionDeny},
		{resource("deletecollection", "", "pods", ""), authorizer.DecisionDeny},
		{resource("impersonate", "", "users", ""), authorizer.DecisionDeny},
		{resource("get", "", "pods", "log"), authorizer.DecisionDeny},
		{resource("get", "", "pods", "exec"), authorizer.DecisionDeny},
		{resource("get", "", "services", "proxy"), authorizer.DecisionDeny},
		{resource("proxy", "", "nodes", ""), authorizer.DecisionDeny},
		{page("get", "/api"), authorizer.DecisionAllow},
		{page("get", "/apis/apps/v1"), authorizer.DecisionAllow},
		{page("get", "/debug/strata/status"), authorizer.DecisionAllow},
		{page("get", "/debug/strata/consistency"), authorizer.DecisionAllow},
		{page("get", "/debug/strata/console/main.js"), authorizer.DecisionAllow},
		{page("post", "/debug/strata/consistency"), authorizer.DecisionDeny},
		{page("post", "/debug/strata/console/link"), authorizer.DecisionDeny},
		{page("get", "/metrics"), authorizer.DecisionDeny},
		{page("get", "/debug/pprof/heap"), authorizer.DecisionDeny},
		{page("get", "/logs/"), authorizer.DecisionDeny},
		{page("get", "/apisecret"), authorizer.DecisionDeny},
	} {
		got, reason, err := a.Authorize(t.Context(), c.attributes)
		if got != c.want || err != nil || got == authorizer.DecisionDeny && reason == "" {
			t.Errorf("%+v: %v (%s), %v; want %v", c.attributes, got, reason, err, c.want)
		}
		aware := a.ConditionsAwareAuthorize(t.Context(), c.attributes)
		if aware.IsAllow() != (c.want == authorizer.DecisionAllow) {
			t.Errorf("%+v with conditions: %v", c.attributes, aware)
		}
	}
	// A user of the same name, for example an impersonated one, has the rights that the other
	// authorizers give.
	never := ReadOnly(authorizerfactory.NewAlwaysDenyAuthorizer())
	named := resource("list", "", "pods", "")
	named.User = &user.DefaultInfo{Name: UserName, Groups: []string{user.AllAuthenticated}}
	if got, _, _ := never.Authorize(t.Context(), named); got == authorizer.DecisionAllow {
		t.Error("a user with the name of sessions has their rights")
	}
}
