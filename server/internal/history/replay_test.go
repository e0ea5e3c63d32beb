package history

import (
	"context"
	"encoding/json"
	"math"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
)

func TestSpeed_Flag_IsParsed(t *testing.T) {
	for text, want := range map[string]speed{"10x": 10, "0.5": 0.5, "0x": 0, "max": speed(math.Inf(1))} {
		var s speed
		if err := s.Set(text); err != nil || s != want {
			t.Errorf("%s: %v, %v", text, s, err)
		}
	}
	for _, text := range []string{"", "fast", "-1x", "inf", "NaN", "1xx"} {
		if err := new(speed).Set(text); err == nil {
			t.Errorf("%q is a speed", text)
		}
	}
}

func TestClock_Revisions_AreReachedAtTheirTimes(t *testing.T) {
	w := window{times: observed(), from: 30, to: 70} // 50 after 20 s, 60 after 90 s, 70 after 100 s
	for name, c := range map[string]struct {
		speed speed
		after time.Duration
		want  int64
	}{
		"start":      {10, 0, 30},
		"before 50":  {10, 2*time.Second - 1, 30},
		"at 50":      {10, 2 * time.Second, 50},
		"before 60":  {10, 9*time.Second - 1, 50},
		"end":        {10, time.Minute, 70},
		"half speed": {0.5, 40 * time.Second, 50},
		"frozen":     {0, time.Hour, 30},
		"max":        {speed(math.Inf(1)), time.Nanosecond, 70},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				clock := newClock(w, time.Time{}, c.speed)
				clock.elapsed()
				time.Sleep(c.after)
				if got := clock.revision(); got != c.want {
					t.Errorf("revision %d, want %d", got, c.want)
				}
			})
		})
	}
}

func TestClock_Wait_EndsWithTheRevisionOrTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		clock := newClock(window{times: observed(), from: 30, to: 70}, time.Time{}, 10)
		began := time.Now()
		clock.elapsed()
		for revision, want := range map[int64]time.Duration{30: 0} {
			if err := clock.wait(t.Context(), revision); err != nil || time.Since(began) != want {
				t.Errorf("revision %d after %v, %v", revision, time.Since(began), err)
			}
		}
		if err := clock.wait(t.Context(), 50); err != nil || time.Since(began).Round(time.Millisecond) != 2*time.Second {
			t.Errorf("revision 50 after %v, %v", time.Since(began), err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		if err := clock.wait(ctx, 71); err == nil {
			t.Error("a revision after the end was reached")
		}
	})
}

func TestParsePath_Paths_HaveTheirResource(t *testing.T) {
	for path, want := range map[string]string{
		"/api/v1/pods":                              "/api/v1/pods pods  ",
		"/api/v1/namespaces":                        "/api/v1/namespaces namespaces  ",
		"/api/v1/namespaces/a":                      "/api/v1/namespaces namespaces a ",
		"/api/v1/namespaces/a/status":               "/api/v1/namespaces namespaces a status",
		"/api/v1/namespaces/a/pods":                 "/api/v1/namespaces/a/pods pods  ",
		"/api/v1/namespaces/a/pods/b":               "/api/v1/namespaces/a/pods pods b ",
		"/api/v1/namespaces/a/services/b/proxy/x/y": "/api/v1/namespaces/a/services services b proxy/x/y",
		"/apis/apps/v1/namespaces/a/deployments/b":  "/apis/apps/v1/namespaces/a/deployments deployments.apps b ",
		"/apis/example.com/v1/widgets/w/status":     "/apis/example.com/v1/widgets widgets.example.com w status",
		"/api":                                      "",
		"/api/v1":                                   "",
		"/apis/apps/v1":                             "",
		"/openapi/v3/apis/apps/v1":                  "",
	} {
		got := ""
		parts, _, clean := segments(path)
		if !clean {
			t.Fatalf("%s is not clean", path)
		}
		if p, ok := parsePath(parts); ok {
			got = strings.Join([]string{p.list, p.group.String(), p.name, p.subresource}, " ")
		}
		if got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func TestJSONForms_AcceptHeaders(t *testing.T) {
	for accept, want := range map[string]string{
		"":                 "application/json",
		"*/*":              "application/json",
		"application/json": "application/json",
		"application/json;as=Table;v=v1;g=meta.k8s.io, application/json": "application/json;as=Table;v=v1;g=meta.k8s.io,application/json",
		"application/vnd.kubernetes.protobuf,application/json":           "application/json",
		"application/vnd.kubernetes.protobuf":                            "",
		"application/yaml":                                               "",
	} {
		if got := jsonForms([]string{accept}); got != want {
			t.Errorf("%q: %q, want %q", accept, got, want)
		}
	}
}

func TestParseItems_Objects_GetTheirKind(t *testing.T) {
	list, err := parseItems([]byte(`{"kind":"ConfigMapList","apiVersion":"v1","items":[{"metadata":{"name":"a"}},{"kind":"X","apiVersion":"y"}]}`))
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []string{`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":"a"}}`, `{"apiVersion":"y","kind":"X"}`} {
		if string(list.Items[i]) != want {
			t.Errorf("item %d is %s, want %s", i, list.Items[i], want)
		}
	}
}

// TestPastServer_Requests_AreRefused tests the requests that are refused before the server of the
// present is asked.
func TestPastServer_Requests_AreRefused(t *testing.T) {
	s := &pastServer{host: "https://server", token: "secret", clock: newClock(window{times: observed(), from: 30, to: 70}, time.Time{}, 0)}
	for name, c := range map[string]struct {
		method, path, token, accept string
		code                        int
		message                     string
	}{
		"no token":        {"GET", "/api/v1/pods", "", "", 401, "token"},
		"wrong token":     {"GET", "/api/v1/pods", "wrong", "", 401, "token"},
		"create":          {"POST", "/api/v1/namespaces/a/pods", "secret", "", 405, "the past is read-only; write to https://server"},
		"update":          {"PUT", "/api/v1/namespaces/a/pods/b", "secret", "", 405, "read-only"},
		"patch":           {"PATCH", "/api/v1/namespaces/a/pods/b", "secret", "", 405, "read-only"},
		"delete":          {"DELETE", "/api/v1/namespaces/a/pods/b", "secret", "", 405, "read-only"},
		"exec":            {"GET", "/api/v1/namespaces/a/pods/b/exec", "secret", "", 404, "has no past"},
		"metrics":         {"GET", "/metrics", "secret", "", 404, "has no past"},
		"watch path":      {"GET", "/api/v1/watch/pods", "secret", "", 404, "has no past"},
		"protobuf":        {"GET", "/api/v1/pods", "secret", "application/vnd.kubernetes.protobuf", 406, "application/json only"},
		"future list":     {"GET", "/api/v1/pods?resourceVersion=31", "secret", "", 504, "Too large resource version: 31, current: 30"},
		"future get":      {"GET", "/api/v1/namespaces/a/pods/b?resourceVersion=31", "secret", "", 504, "Too large"},
		"no revision":     {"GET", "/api/v1/pods?resourceVersion=x", "secret", "", 400, "is no revision"},
		"future watch":    {"GET", "/api/v1/pods?watch=1&resourceVersion=31", "secret", "", 410, "in the future of the replay"},
		"watch elsewhere": {"GET", "/api/v1/pods?watch=1&resourceVersion=x", "secret", "", 400, "is no revision"},
	} {
		t.Run(name, func(t *testing.T) {
			req := httptest.NewRequest(c.method, c.path, nil)
			req.Header.Set("Authorization", "Bearer "+c.token)
			req.Header.Set("Accept", c.accept)
			w := httptest.NewRecorder()
			s.ServeHTTP(w, req)
			status := metav1.Status{}
			if err := json.Unmarshal(w.Body.Bytes(), &status); err != nil || w.Code != c.code || int(status.Code) != c.code || !strings.Contains(status.Message, c.message) {
				t.Errorf("%d %s, %v; want %d, %q", w.Code, w.Body, err, c.code, c.message)
			}
			if allow := w.Header().Get("Allow"); (allow != "") != (c.code == http.StatusMethodNotAllowed) {
				t.Errorf("Allow: %q", allow)
			}
		})
	}
}

func TestNewPastServer_AddressThatIsNotLoopback_IsRefused(t *testing.T) {
	for _, address := range []string{"0.0.0.0:0", "192.0.2.1:80", "localhost:0", "127.0.0.1", ":0"} {
		if _, err := newPastServer(&client{}, nil, address); err == nil || !strings.Contains(err.Error(), "loopback") {
			t.Errorf("%s: %v", address, err)
		}
	}
}
