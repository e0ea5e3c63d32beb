package limit

import (
	"bufio"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
)

// serve returns the URL of the limit of an origin, and the number of requests to the origin.
func serve(t *testing.T, origin http.HandlerFunc) (url string, asked *atomic.Int64) {
	t.Helper()
	asked = new(atomic.Int64)
	originServer := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		asked.Add(1)
		origin(w, r)
	}))
	t.Cleanup(originServer.Close)
	server := httptest.NewServer(NewHandler(originServer.Client()))
	t.Cleanup(server.Close)
	do(t, http.MethodPut, server.URL+OriginPath, originServer.URL, nil)
	return server.URL, asked
}

func do(t *testing.T, method, url, body string, header http.Header) (*http.Response, string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	if header != nil {
		request.Header = header
	}
	response, err := http.DefaultTransport.RoundTrip(request) // no encoding but the requested one
	if err != nil {
		t.Fatal(err)
	}
	defer response.Body.Close()
	answer, err := io.ReadAll(response.Body)
	if err != nil {
		t.Fatal(err)
	}
	return response, string(answer)
}

func TestLimit_RepeatedRequest_ReadsOriginOnce(t *testing.T) {
	url, asked := serve(t, func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/"+r.Header.Get("Accept"))
		if encoding := r.Header.Get("Accept-Encoding"); encoding != "" {
			w.Header().Set("Content-Encoding", encoding)
		}
		fmt.Fprint(w, r.URL.RequestURI(), " ", r.Header.Get("Authorization"))
	})
	for range 3 {
		for _, path := range []string{"/a", "/a?limit=1"} {
			for _, accept := range []string{"x", "y"} {
				response, body := do(t, http.MethodGet, url+path, "", http.Header{
					"Accept": {accept}, "Accept-Encoding": {"gzip"}, "Authorization": {"token"},
				})
				if body != path+" token" || response.Header.Get("Content-Type") != "text/"+accept || response.Header.Get("Content-Encoding") != "gzip" {
					t.Errorf("%s for %s: got %q with %v", path, accept, body, response.Header)
				}
			}
		}
	}
	if _, misses := do(t, http.MethodGet, url+MissesPath, "", nil); misses != "4" || asked.Load() != 4 {
		t.Errorf("%s misses, %d requests to the origin, want 4", misses, asked.Load())
	}
}

func TestLimit_OriginRefusal_IsNotCached(t *testing.T) {
	refuse := true
	url, _ := serve(t, func(w http.ResponseWriter, _ *http.Request) {
		if refuse {
			http.Error(w, "not now", http.StatusTooManyRequests)
		}
		refuse = false
	})
	if response, body := do(t, http.MethodGet, url+"/a", "", nil); response.StatusCode != http.StatusBadGateway || !strings.Contains(body, "not now") {
		t.Errorf("got %s %q", response.Status, body)
	}
	if response, _ := do(t, http.MethodGet, url+"/a", "", nil); response.StatusCode != http.StatusOK {
		t.Errorf("got %s after the origin had recovered", response.Status)
	}
}

func TestLimit_Frame_ReachesEveryWatch(t *testing.T) {
	url, asked := serve(t, http.NotFound)
	var watches []*bufio.Reader
	for range 3 {
		response, err := http.Get(url + "/a?watch=1&resourceVersion=5")
		if err != nil {
			t.Fatal(err)
		}
		defer response.Body.Close()
		watches = append(watches, bufio.NewReader(response.Body))
	}
	for i := range 200 { // more than a backlog
		frame := fmt.Sprintf("frame %d\n", i)
		do(t, http.MethodPost, url+FramePath, frame, nil)
		for _, w := range watches {
			if got, err := w.ReadString('\n'); err != nil || got != frame {
				t.Fatalf("got %q, %v, want %q", got, err, frame)
			}
		}
	}
	if asked.Load() != 0 {
		t.Errorf("%d requests to the origin, want 1", asked.Load())
	}
}
