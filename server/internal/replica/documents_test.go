package replica

import (
	"bytes"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/authentication/user"
	"k8s.io/apiserver/pkg/endpoints/handlers/negotiation"
	"k8s.io/apiserver/pkg/endpoints/request"
	"k8s.io/kubernetes/pkg/api/legacyscheme"
)

// fakePrimary answers documents, with an entity tag.
type fakePrimary struct {
	text     string
	down     bool
	requests []*http.Request
}

func (p *fakePrimary) RoundTrip(req *http.Request) (*http.Response, error) {
	p.requests = append(p.requests, req)
	if p.down {
		return nil, errors.New("connection refused")
	}
	w := httptest.NewRecorder()
	etag := fmt.Sprintf("%q", p.text)
	w.Header().Set("Etag", etag)
	if req.Header.Get("If-None-Match") == etag {
		w.WriteHeader(http.StatusNotModified)
	} else {
		_, _ = io.WriteString(w, p.text)
	}
	return w.Result(), nil
}

// ask requests a document and returns the code and the body.
func ask(d *documents, path string, header http.Header) (int, string) {
	req := httptest.NewRequest(http.MethodGet, path, nil)
	for name, values := range header {
		req.Header[name] = values
	}
	req = req.WithContext(request.WithUser(req.Context(), &user.DefaultInfo{Name: "reader"}))
	w := httptest.NewRecorder()
	d.handler(http.NotFoundHandler()).ServeHTTP(w, req)
	return w.Code, w.Body.String()
}

// TestDocuments_AgeAndChanges_DecideRequests: an answer is repeated for a second, then confirmed by
// its entity tag; a change of a definition makes it stale at once; it is the last resort while the
// primary is down.
func TestDocuments_AgeAndChanges_DecideRequests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := &fakePrimary{text: "one"}
		d := newDocuments(primary, newClaims(nil), legacyscheme.Codecs, false)
		step := func(what, want string, requests int) {
			t.Helper()
			if code, text := ask(d, "/apis", nil); code != http.StatusOK || text != want || len(primary.requests) != requests {
				t.Errorf("%s: %d %q after %d requests, want %q after %d", what, code, text, len(primary.requests), want, requests)
			}
		}
		step("first", "one", 1)
		step("again", "one", 1)
		time.Sleep(documentAge + time.Millisecond) // of the bubble
		step("a second later", "one", 2)
		if tag := primary.requests[1].Header.Get("If-None-Match"); tag != `"one"` {
			t.Errorf("the second request has the entity tag %q", tag)
		}
		if name := primary.requests[1].Header.Get("X-Remote-User"); name != "reader" {
			t.Errorf("requested for user %q, want reader", name)
		}
		primary.text = "two"
		step("changed, not known yet", "one", 2)
		d.changed()
		step("after a definition has changed", "two", 3)
		primary.down = true
		time.Sleep(time.Hour)
		step("without a primary", "two", 4)
		if code, _ := ask(d, "/apis", http.Header{"If-None-Match": {`"one", "two"`}}); code != http.StatusNotModified {
			t.Errorf("a client with the entity tag: %d, want 304", code)
		}
	})
}

// prettyPrimary indents a document as negotiation in k8s.io/apiserver decides, under one entity
// tag.
type prettyPrimary struct{ requests int }

func (p *prettyPrimary) RoundTrip(req *http.Request) (*http.Response, error) {
	p.requests++
	_, info, err := negotiation.NegotiateOutputMediaType(req, legacyscheme.Codecs, negotiation.DefaultEndpointRestrictions)
	if err != nil {
		return nil, err
	}
	w := httptest.NewRecorder()
	w.Header().Set("Etag", `"one"`)
	switch {
	case req.Header.Get("If-None-Match") == `"one"`:
		w.WriteHeader(http.StatusNotModified)
	case info.Serializer == info.PrettySerializer:
		_, _ = io.WriteString(w, "indented")
	default:
		_, _ = io.WriteString(w, "compact")
	}
	return w.Result(), nil
}

// TestDocuments_UserAgents_ShareOneForm requests a document with agents for which primaries indent,
// and with others, before and after its confirmation: every client gets the form that a primary
// sends to it, and clients of one form share a request.
func TestDocuments_UserAgents_ShareOneForm(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := &prettyPrimary{}
		d := newDocuments(primary, newClaims(nil), legacyscheme.Codecs, false)
		for round := range 2 {
			for _, client := range []struct{ agent, want string }{
				{"curl/8.5.0", "indented"}, {"kubectl/v1.37.2", "compact"}, {"Wget/1.24", "indented"}, {"", "compact"},
				{"Mozilla/5.0 (X11)", "indented"}, {"Mozilla/4.0", "compact"}, {"libcurl", "compact"},
			} {
				header := http.Header{"Accept": {"application/json"}, "User-Agent": {client.agent}}
				if _, text := ask(d, "/apis", header); text != client.want {
					t.Errorf("round %d: User-Agent %q has the %s form, want the %s one", round, client.agent, text, client.want)
				}
			}
			if want := 2 * (round + 1); primary.requests != want {
				t.Errorf("round %d: %d requests, want %d", round, primary.requests, want)
			}
			time.Sleep(documentAge + time.Millisecond) // of the bubble
		}
	})
}

// TestDocuments_GzipRefused_IsRequestedAsIdentity: q=0 means that the client does not accept gzip.
func TestDocuments_GzipRefused_IsRequestedAsIdentity(t *testing.T) {
	primary := &fakePrimary{}
	d := newDocuments(primary, newClaims(nil), legacyscheme.Codecs, false)
	for _, test := range []struct{ accepts, want string }{
		{"deflate, gzip", "gzip"}, {"gzip;q=0", "identity"}, {"deflate,gzip ; q=0, *;q=0", "identity"}, {"x-gzip", "identity"}, {"", "identity"},
	} {
		d.changed()
		ask(d, "/apis", http.Header{"Accept-Encoding": {test.accepts}})
		if got := primary.requests[len(primary.requests)-1].Header.Get("Accept-Encoding"); got != test.want {
			t.Errorf("%q: requested with %q, want %q", test.accepts, got, test.want)
		}
	}
}

// TestDocuments_BeyondBound_EvictsLeastRecent: I7.
func TestDocuments_BeyondBound_EvictsLeastRecent(t *testing.T) {
	d := newDocuments(&fakePrimary{}, newClaims(nil), legacyscheme.Codecs, false)
	big := bytes.Repeat([]byte("x"), documentBytes/4)
	for _, key := range []string{"a", "b", "c"} {
		d.store(&document{key: key, body: big}, 0)
	}
	d.load("a", false)
	d.store(&document{key: "d", body: big}, 0)
	var left strings.Builder
	for _, key := range []string{"a", "b", "c", "d"} {
		if d.load(key, false) != nil {
			left.WriteString(key)
		}
	}
	if left.String() != "acd" || d.bytes > documentBytes {
		t.Errorf("documents %s are left with %d bytes, want acd and at most %d", left.String(), d.bytes, documentBytes)
	}
	d.store(&document{key: "a", body: []byte("small")}, 0)
	d.store(&document{key: "c", body: []byte("small")}, 0)
	if want := len(big) + len("small")*2 + 3*(1+documentOverhead); d.bytes != want {
		t.Errorf("%d bytes after replacements, want %d", d.bytes, want)
	}
}

// heldPrimary sends the bodies of its answers when it is released.
type heldPrimary struct {
	release chan struct{}
	asked   atomic.Int32
}

func (p *heldPrimary) RoundTrip(*http.Request) (*http.Response, error) {
	p.asked.Add(1)
	return &http.Response{StatusCode: http.StatusOK, Body: heldBody{p.release, strings.NewReader("one")}}, nil
}

type heldBody struct {
	release chan struct{}
	io.Reader
}

func (b heldBody) Read(p []byte) (int, error) {
	<-b.release
	return b.Reader.Read(p)
}

func (b heldBody) Close() error { return nil }

// TestDocuments_ManyForms_FewAreReadAtOnce: requests for more forms of a document are passed on,
// so that the replica holds few answers that it does not know.
func TestDocuments_ManyForms_FewAreReadAtOnce(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		primary := &heldPrimary{release: make(chan struct{})}
		d := newDocuments(primary, newClaims(nil), legacyscheme.Codecs, false)
		passed := 0
		d.pass = http.HandlerFunc(func(http.ResponseWriter, *http.Request) { passed++ })
		var asking sync.WaitGroup
		form := func(i int) http.Header { return http.Header{"Accept": {fmt.Sprint("application/form-", i)}} }
		for i := range documentReads {
			asking.Go(func() {
				if code, text := ask(d, "/openapi/v2", form(i)); code != http.StatusOK || text != "one" {
					t.Errorf("form %d: %d %q", i, code, text)
				}
			})
		}
		synctest.Wait()
		ask(d, "/openapi/v2", form(documentReads))
		if asked := primary.asked.Load(); asked != documentReads+1 || passed != 1 {
			t.Errorf("%d forms were requested and %d passed on, want %d and 1", asked, passed, documentReads+1)
		}
		close(primary.release)
		asking.Wait()
		if code, text := ask(d, "/openapi/v2", form(documentReads)); code != http.StatusOK || text != "one" || passed != 1 {
			t.Errorf("after the others: %d %q, %d passed on", code, text, passed)
		}
	})
}
