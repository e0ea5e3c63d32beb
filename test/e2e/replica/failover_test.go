package replica

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"strings"
	"sync"
	"testing"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/faulty"
)

// front is a server of the test process in front of the primary. It can be stopped and started
// again on its address.
type front struct {
	url, address string
	start, stop  func()
}

// newFront starts a front, which serves requests that need kubelets by pod, and passes all others
// on to the primary.
func newFront(t *testing.T, s *scene, pod http.Handler) *front {
	t.Helper()
	primary, err := url.Parse(s.primary.URL)
	harness.Check(t, err)
	serving, client := s.front.InPlaceOfPrimary(env)
	handler := http.NewServeMux()
	handler.Handle(podPath+"/", pod)
	handler.Handle("/", &httputil.ReverseProxy{
		Rewrite:       func(r *httputil.ProxyRequest) { r.SetURL(primary) },
		Transport:     &http.Transport{TLSClientConfig: client, ForceAttemptHTTP2: true},
		FlushInterval: -1,
		ErrorHandler:  func(w http.ResponseWriter, _ *http.Request, _ error) { w.WriteHeader(http.StatusBadGateway) },
	})
	f := &front{address: strings.TrimPrefix(env.FreeURL(), "http://"), stop: func() {}}
	f.url = "https://" + f.address
	f.start = func() {
		listener, err := net.Listen("tcp", f.address)
		harness.Check(t, err)
		server := &http.Server{TLSConfig: serving.Clone(), Handler: handler, ErrorLog: log.New(io.Discard, "", 0)}
		done := make(chan struct{})
		go func() {
			defer close(done)
			if err := server.ServeTLS(listener, "", ""); !errors.Is(err, http.ErrServerClosed) {
				t.Error(err)
			}
		}()
		f.stop = func() {
			server.Close()
			<-done
		}
	}
	f.start()
	t.Cleanup(func() { f.stop() })
	return f
}

// fronted is a replica whose primaries are two fronts of one primary.
type fronted struct {
	*scene
	first, other *front
	link         *faulty.Link // between the replica and other
	replica      *harness.Server

	lines   chan string   // of the followed log of the pod
	arrived chan struct{} // receives when an eviction of the pod has arrived, which is not answered

	mu       sync.Mutex
	received []*http.Request // for the pod
}

// TestReplica_Primaries starts a replica, and runs its parts in order: first requests that only a
// primary can serve, then failures of primaries. Each can also be run alone.
func TestReplica_Primaries(t *testing.T) {
	t.Parallel()
	_, s := open(t)
	f := &fronted{scene: s, lines: make(chan string), arrived: make(chan struct{})}
	f.first, f.other = newFront(t, s, f.pod()), newFront(t, s, f.pod())
	f.link = faulty.NewLink(t, env, f.other.url)
	f.replica = s.start(t, s.readOnly, []string{f.first.url, "https" + strings.TrimPrefix(f.link.URL, "http")})
	t.Run("WebSocketOfExec_PassesBothWays", f.webSocket)
	t.Run("SPDYUpgrade_PassesBothWays", f.spdy)
	t.Run("FollowedLog_ArrivesLineByLine", f.followedLog)
	t.Run("PrimaryStops_OtherTakesOver", f.primaryStops)
	t.Run("PrimaryIsSilent_RequestInFlightEnds", f.primaryIsSilent)
	t.Run("WithoutPrimary_ReadsAreServed", f.withoutPrimary)
}

// awaitHealthy waits until n primaries are healthy.
func (f *fronted) awaitHealthy(ctx context.Context, t *testing.T, n float64) {
	t.Helper()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		got, err := f.replica.API().Sum(ctx, "strata_replica_primary_healthy")
		return err == nil && got == n, fmt.Errorf("%v healthy primaries, want %v: %w", got, n, err)
	}))
}

// hold sends a write that the healthy primary receives and does not answer. It returns a function
// that waits for the response.
func (f *fronted) hold(ctx context.Context, t *testing.T) (answer func() *harness.Response) {
	t.Helper()
	var r *harness.Response
	var err error
	var write sync.WaitGroup
	write.Go(func() {
		err = harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
			r, err = f.replica.API().Do(ctx, http.MethodPost, podPath+"/eviction", "", object{})
			return err == nil && !r.NotSent(), err
		})
	})
	select {
	case <-f.arrived:
	case <-ctx.Done():
		t.Fatal(context.Cause(ctx))
	}
	return func() *harness.Response {
		t.Helper()
		write.Wait()
		harness.Check(t, err)
		return r
	}
}

// primaryStops: writes go to the healthy primaries only; a primary that returns is used again.
func (f *fronted) primaryStops(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	api, maps := f.replica.API(), f.maps(ctx, t)
	sent := func() float64 {
		t.Helper()
		n, err := api.Sum(ctx, "strata_replica_proxy_requests_total", `code="201"`)
		harness.Check(t, err)
		return n
	}
	write := func(name string) {
		t.Helper()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodPost, maps, "", configMap(name, nil))
			harness.Check(t, err)
			if r.NotSent() {
				return false, r.Err()
			}
			if r.Code != http.StatusCreated {
				t.Fatalf("create %s: %v", name, r.Err())
			}
			return true, nil
		}))
	}
	f.awaitHealthy(ctx, t, 2)
	f.other.stop()
	f.awaitHealthy(ctx, t, 1)
	broken := f.hold(ctx, t)
	f.other.start()
	f.awaitHealthy(ctx, t, 2)
	before := sent()
	for i := range 10 {
		write(fmt.Sprintf("both-%d", i))
	}
	f.first.stop()
	if r := broken(); r.Code != http.StatusBadGateway {
		// by then the replica has noticed the end of the connection
		t.Errorf("the write in flight was answered with %d, want 502: %s", r.Code, r.Body)
	}
	for i := range 10 { // the first one to meet the stopped primary is sent to the other
		write(fmt.Sprintf("other-%d", i))
	}
	f.awaitHealthy(ctx, t, 1)
	f.first.start()
	f.awaitHealthy(ctx, t, 2)
	for i := range 10 {
		write(fmt.Sprintf("again-%d", i))
	}
	if n := sent() - before; n != 30 {
		t.Errorf("%v creations were answered by primaries, want 30: none is sent twice", n)
	}
}

// primaryIsSilent: a process that is stopped (SIGSTOP) closes no connection, and answers nothing. A
// write in flight to it ends with 502 by the bound of health checks, and later ones succeed when it
// continues.
func (f *fronted) primaryIsSilent(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	api, maps := f.replica.API(), f.maps(ctx, t)
	f.awaitHealthy(ctx, t, 2)
	f.first.stop()
	defer f.first.start()
	f.awaitHealthy(ctx, t, 1)
	silenced := f.hold(ctx, t)
	f.link.Silence(true)
	defer f.link.Silence(false)
	r := silenced()
	if r.Code != http.StatusBadGateway {
		t.Errorf("the write in flight was answered with %d, want 502: %s", r.Code, r.Body)
	}
	f.link.Silence(false)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		r, err := api.Do(ctx, http.MethodPost, maps, "", configMap("after", nil))
		// 409 after a write whose answer was lost
		return err == nil && (r.Code == http.StatusCreated || r.Code == http.StatusConflict), fmt.Errorf("a write after the primary continues: %v, %w", r, err)
	}))
}

// withoutPrimary: documents are the last answers, reads are served from memory, and writes are
// refused.
func (f *fronted) withoutPrimary(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	api, maps := f.replica.API(), f.maps(ctx, t)
	paths := []string{"/version", "/apis/apps/v1", "/openapi/v2"}
	get := func(path string) *harness.Response {
		t.Helper()
		r, err := api.Do(ctx, http.MethodGet, path, "", nil)
		harness.Check(t, err)
		return r
	}
	f.awaitHealthy(ctx, t, 2)
	for _, path := range paths {
		if r := get(path); r.Code != http.StatusOK {
			t.Errorf("%s: %v", path, r.Err())
		}
	}
	f.first.stop()
	f.other.stop()
	defer f.first.start()
	defer f.other.start()
	f.awaitHealthy(ctx, t, 0)
	for _, path := range paths {
		if r := get(path); r.Code != http.StatusOK {
			t.Errorf("%s without a primary: %v, want the last answer", path, r.Err())
		}
	}
	list, err := api.List(ctx, "/api/v1/namespaces", "")
	harness.Check(t, err)
	if len(list.Items) == 0 {
		t.Error("no namespaces are listed from memory")
	}
	r, err := api.Do(ctx, http.MethodPost, maps, "", configMap("refused", nil))
	harness.Check(t, err)
	status := r.Status()
	if r.Code != http.StatusServiceUnavailable || r.Header.Get("Retry-After") == "" || status.Details == nil || status.Details.RetryAfterSeconds == 0 ||
		!strings.Contains(status.Message, "--primary") {
		t.Errorf("a write without a primary: %d, Retry-After %q, %+v", r.Code, r.Header.Get("Retry-After"), status)
	}
}
