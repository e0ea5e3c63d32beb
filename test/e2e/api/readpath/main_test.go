// Package readpath tests changes that could make bytes from memory differ from the answers of
// upstream's handlers: definitions that change, API groups that move to other servers, objects that
// are changed on read, deprecated versions. Each answer is compared with that of a second server on
// the same etcd, which runs with --engine=upstream; and each test verifies that the answer was
// bytes from memory.
package readpath

import (
	"bufio"
	"bytes"
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// testTimeout bounds a failing test.
const testTimeout = 10 * time.Minute

// Two servers on one etcd. Neither runs controllers.
var (
	etcd     *clientv3.Client
	api      *harness.API // of the engine under test
	upstream *harness.API
)

func TestMain(m *testing.M) {
	harness.Main(m, func(e *harness.Env) {
		server := e.Etcd()
		etcd = server.Client()
		flags := []string{"--disable-admission-plugins=ServiceAccount"}
		api = e.APIServer(server, flags...).API()
		upstream = e.APIServer(server, append(flags, "--engine="+harness.Upstream)...).API()
	})
}

// object is an object to write; its shape is that of the API.
type object = map[string]any

// newNamespace creates a namespace and returns when both servers have observed it.
func newNamespace(t *testing.T, ctx context.Context, name string) {
	t.Helper()
	harness.Namespace(t, ctx, api, name)
	same(t, ctx, "/api/v1/namespaces/"+name, "")
}

// get reads from one server.
func get(t *testing.T, ctx context.Context, from *harness.API, path, query string) *harness.Response {
	t.Helper()
	return harness.Must[*harness.Response](t)(from.Read(ctx, path, query, ""))
}

// listVersion is the resource version of a list, which advances with the servers' own writes.
var listVersion = regexp.MustCompile(`"metadata":\{("continue":"",)?"resourceVersion":"[0-9]+"`)

// same reads from both servers and fails unless the answers have equal code, warnings and body. It
// returns the answer. A watch of a second that a busy machine ends before its first event, on one
// server at least, is repeated with more time.
func same(t *testing.T, ctx context.Context, path, query string) *harness.Response {
	t.Helper()
	got, want := both(t, ctx, path, query)
	longer := strings.Replace(query, "timeoutSeconds=1", "timeoutSeconds=10", 1)
	if longer != query && (differ(got, want) || len(got.Body) == 0) {
		got, want = both(t, ctx, path, longer)
	}
	if differ(got, want) {
		t.Errorf("%s?%s: %d %s\nupstream: %d %s", path, query, got.Code, got.Body, want.Code, want.Body)
	}
	if g, w := strings.Join(got.Header["Warning"], "\n"), strings.Join(want.Header["Warning"], "\n"); g != w {
		t.Errorf("%s?%s: warnings %q\nupstream: %q", path, query, g, w)
	}
	return got
}

// both reads from both servers concurrently: the request may be a watch.
func both(t *testing.T, ctx context.Context, path, query string) (got, want *harness.Response) {
	t.Helper()
	var errs [2]error
	var asking sync.WaitGroup
	asking.Go(func() { got, errs[0] = api.Read(ctx, path, query, "") })
	asking.Go(func() { want, errs[1] = upstream.Read(ctx, path, query, "") })
	asking.Wait()
	harness.Check(t, errors.Join(errs[:]...))
	return got, want
}

// differ reports whether two answers have another code or body.
func differ(got, want *harness.Response) bool {
	return got.Code != want.Code || !bytes.Equal(listVersion.ReplaceAll(got.Body, nil), listVersion.ReplaceAll(want.Body, nil))
}

// until waits until both servers answer a read as wanted. On the server under test it polls
// upstream's own handlers, by a request with an escaped path, which is passed to them: once they
// answer as wanted, every other read has to, at once and from then on.
func until(t *testing.T, ctx context.Context, path, query string, wanted func(*harness.Response) bool) *harness.Response {
	t.Helper()
	poll := func(server *harness.API, path string) {
		t.Helper()
		ctx, cancel := context.WithTimeoutCause(ctx, 2*time.Minute, fmt.Errorf("%s?%s is not answered as wanted", path, query))
		defer cancel()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := server.Do(ctx, http.MethodGet, path, query, nil)
			if err != nil {
				return false, err
			}
			return wanted(r), r.Err()
		}))
	}
	poll(api, escaped(path))
	reads := 20
	if strings.Contains(query, "watch=true") {
		reads = 1 // a slow read
	}
	for i := range reads {
		if r := get(t, ctx, api, path, query); !wanted(r) {
			t.Fatalf("%s?%s: upstream's handlers answer as wanted, read number %d does not: %v", path, query, i, r.Err())
		}
	}
	poll(upstream, path)
	return same(t, ctx, path, query)
}

// escaped returns the path in a form that the read path does not answer.
func escaped(path string) string { return strings.Replace(path, "/api", "/%61pi", 1) }

func untilCode(t *testing.T, ctx context.Context, path, query string, code int) {
	t.Helper()
	until(t, ctx, path, query, func(r *harness.Response) bool { return r.Code == code })
}

// untilGone waits until neither server has the path of a deleted definition. Before that, they
// report a missing object.
func untilGone(t *testing.T, ctx context.Context, path, query string) {
	t.Helper()
	until(t, ctx, path, query, func(r *harness.Response) bool {
		return r.Code == http.StatusNotFound && bytes.HasPrefix(r.Body, []byte("404 page not found"))
	})
}

func untilBody(t *testing.T, ctx context.Context, path, query, contains string) *harness.Response {
	t.Helper()
	return until(t, ctx, path, query, func(r *harness.Response) bool {
		return r.Code == http.StatusOK && bytes.Contains(r.Body, []byte(contains))
	})
}

// byBytes fails unless a read is answered with bytes from memory.
func byBytes(t *testing.T, ctx context.Context, path, query string) {
	t.Helper()
	allByBytes(t, ctx, [2]string{path, query})
}

// allByBytes is byBytes for reads of a path and a query each, which are sent at the same time. The
// metrics count other readers too, mainly those of a server that has just started and of parallel
// tests, so each read is retried by itself when one was passed on.
func allByBytes(t *testing.T, ctx context.Context, reads ...[2]string) {
	t.Helper()
	if harness.Engine() == harness.Upstream {
		return
	}
	together, err := passedBeside(t, ctx, reads)
	harness.Check(t, err)
	if len(together) == 0 {
		return
	}
	for _, read := range reads {
		ctx, cancel := context.WithTimeoutCause(ctx, time.Minute, fmt.Errorf("%s?%s: reads are passed on", read[0], read[1]))
		defer cancel()
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			why, err := passedBeside(t, ctx, [][2]string{read})
			return err == nil && len(why) == 0, errors.Join(err, fmt.Errorf("at the same time as this one were counted: %q", why))
		}))
	}
}

const (
	answeredReads = "strata_readpath_requests_total"
	passedReads   = "strata_readpath_passed_total"
)

// passedBeside sends reads at the same time and returns the series of reads that were passed on
// meanwhile. Reads of unusual paths do not count: those of until in parallel tests. At least as
// many reads have to be counted as answered with bytes.
func passedBeside(t *testing.T, ctx context.Context, reads [][2]string) (why []string, err error) {
	t.Helper()
	before := series(t, ctx, api, answeredReads, passedReads)
	errs := make([]error, len(reads))
	var asking sync.WaitGroup
	for i, read := range reads {
		asking.Go(func() { _, errs[i] = api.Do(ctx, http.MethodGet, read[0], read[1], nil) })
	}
	asking.Wait()
	if err := errors.Join(errs...); err != nil {
		return nil, err
	}
	answered := 0.0
	for series, n := range series(t, ctx, api, answeredReads, passedReads) {
		switch {
		case strings.HasPrefix(series, answeredReads):
			answered += n - before[series]
		case n != before[series] && !strings.Contains(series, `reason="path"`):
			why = append(why, series)
		}
	}
	if int(answered) < len(reads) {
		why = append(why, fmt.Sprintf("%s: %v for %d reads", answeredReads, answered, len(reads)))
	}
	return why, nil
}

// passedOn fails unless reads of path are passed on to upstream's handlers.
func passedOn(t *testing.T, ctx context.Context, path, reason string) {
	t.Helper()
	if harness.Engine() == harness.Upstream {
		return
	}
	const reads = 10
	name := fmt.Sprintf("%s{reason=%q}", passedReads, reason)
	passed := metric(t, ctx, api, name)
	for range reads {
		get(t, ctx, api, path, "")
	}
	if n := metric(t, ctx, api, name) - passed; n < reads {
		t.Errorf("%s: %v of %v reads were passed on", path, n, reads)
	}
}

// metric returns the sum of all series whose text begins with prefix, which has a whole name.
func metric(t *testing.T, ctx context.Context, of *harness.API, prefix string) (sum float64) {
	t.Helper()
	for _, n := range series(t, ctx, of, prefix) {
		sum += n
	}
	return sum
}

// series returns the values of all series whose text begins with a prefix, which has a whole name.
func series(t *testing.T, ctx context.Context, of *harness.API, prefixes ...string) map[string]float64 {
	t.Helper()
	names := url.Values{}
	for _, prefix := range prefixes {
		name, _, _ := strings.Cut(prefix, "{")
		names.Add("name[]", strings.TrimSuffix(name, "_count")) // of a histogram
	}
	r, err := of.DoAs(ctx, http.MethodGet, "/metrics", names.Encode(), "", "text/plain", nil)
	harness.Check(t, err)
	if r.Code != http.StatusOK {
		t.Fatalf("metrics: %v", r.Err())
	}
	values := map[string]float64{}
	lines := bufio.NewScanner(bytes.NewReader(r.Body))
	lines.Buffer(nil, len(r.Body)+1)
	for lines.Scan() {
		line := lines.Text()
		begins := func(prefix string) bool { return strings.HasPrefix(line, prefix) }
		if i := strings.LastIndexByte(line, ' '); slices.ContainsFunc(prefixes, begins) {
			value, err := strconv.ParseFloat(line[i+1:], 64)
			harness.Check(t, err)
			values[line[:i]] = value
		}
	}
	return values
}

// startWatch starts a watch on a server that lasts as long as the test. It retries while a new
// storage is not ready.
func startWatch(t *testing.T, ctx context.Context, on *harness.API, path, query string) *harness.Watch {
	t.Helper()
	var w *harness.Watch
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		started, refused, err := on.Watch(t.Context(), path, query)
		if err != nil {
			return false, err
		}
		if refused == nil {
			w = started
			return true, nil
		}
		if refused.Code != http.StatusTooManyRequests {
			t.Fatalf("watch %s?%s: %v", path, query, refused.Err())
		}
		return false, refused.Err()
	}))
	t.Cleanup(w.Close)
	return w
}
