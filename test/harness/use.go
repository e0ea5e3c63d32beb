package harness

import (
	"context"
	"net/http"
	"sync"
	"testing"
)

// use is what one test has used of the servers that all tests of its package share.
type use struct {
	mu sync.Mutex
	at map[*Server]state // at the first request
}

// state is how much a server had logged.
type state struct {
	starts int
	sizes  []int64 // of the logs of the last start
}

// useKey is the key of a test's use in its contexts.
type useKey struct{}

// uses are those of running tests: a test may have several contexts.
var uses sync.Map // from testing.TB to *use

// withUse returns the test's context with its use. The end of a failed test logs it.
func withUse(t testing.TB) context.Context {
	u, found := uses.LoadOrStore(t, &use{at: map[*Server]state{}})
	if !found {
		t.Cleanup(func() {
			uses.Delete(t)
			if text := u.(*use).ends(); t.Failed() && text != "" {
				t.Log(text)
			}
		})
	}
	return context.WithValue(t.Context(), useKey{}, u)
}

// Used records that the test of ctx uses the server, unless the server is the test's own. Requests
// of APIs, of clients with a Config of the server, and of its commands are recorded without a call.
func (s *Server) Used(ctx context.Context) {
	u, _ := ctx.Value(useKey{}).(*use)
	if u == nil || !s.env.shared {
		return
	}
	u.mu.Lock()
	defer u.mu.Unlock()
	if _, found := u.at[s]; found {
		return
	}
	s.starting.Lock()
	defer s.starting.Unlock()
	u.at[s] = state{len(s.before), s.Process.sizes()}
}

// ends returns the ends of the logs of the servers since their first requests.
func (u *use) ends() (text string) {
	u.mu.Lock()
	defer u.mu.Unlock()
	for s, at := range u.at {
		s.starting.Lock()
		processes := append(s.before[:len(s.before):len(s.before)], s.Process)
		s.starting.Unlock()
		from := at.sizes
		for _, p := range processes[at.starts:] {
			text += p.ends(from)
			from = nil
		}
	}
	return text
}

// observed records the use of a server by the contexts of requests.
type observed struct {
	http.RoundTripper
	server *Server
}

func (o *observed) RoundTrip(r *http.Request) (*http.Response, error) {
	o.server.Used(r.Context())
	return o.RoundTripper.RoundTrip(r)
}

// WrappedRoundTripper gives client-go's upgrades the transport.
func (o *observed) WrappedRoundTripper() http.RoundTripper { return o.RoundTripper }
