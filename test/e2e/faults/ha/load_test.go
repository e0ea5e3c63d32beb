package ha

import (
	"bytes"
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
)

const (
	writePause = 20 * time.Millisecond // of each client, between two requests
	liveMaps   = 40                    // objects of one writer

	// requestTimeout bounds a request. Writes wait for the election of a leader of etcd, which
	// takes one to two seconds, and several times that while other tests take the processors.
	requestTimeout = 30 * time.Second

	// After leftOutWithin the balancer sends no requests to a process that was killed, and an
	// orderly leader of etcd has handed over. After electedWithin etcd has another leader in place
	// of a killed one: until then members forward writes to that one. On a busy machine either may
	// take longer; then requests may fail until settledWithin after the test has seen it.
	leftOutWithin = time.Second
	electedWithin = 4 * time.Second
	settledWithin = 500 * time.Millisecond
)

// failure is a request without an answer, or with one of 429 or 5xx.
type failure struct {
	began, ended time.Time
	code         int // 0 without an answer
	text         string
}

// load is the requests of readers and writers.
type load struct {
	stop  context.CancelFunc
	group sync.WaitGroup
	reads atomic.Int64 // answered ones
	wrote atomic.Int64

	mu struct { // leaf
		sync.Mutex
		failures []failure
		refused  map[string]int // other answers that are not expected
		slowest  time.Duration
	}
}

// startLoad starts writers and readers at both balancers.
func (s *scene) startLoad(t *testing.T, ctx context.Context) *load {
	t.Helper()
	l, seed := &load{}, testseed.New(t)
	l.mu.refused = map[string]int{}
	ctx, l.stop = context.WithCancel(ctx)
	t.Cleanup(l.end)
	api := func(config *rest.Config) *harness.API { return s.up.APIFor(harness.OwnConnections(config)) }
	for i, config := range []*rest.Config{s.servers, s.servers, s.servers, s.replicas, s.replicas} {
		writer := api(config)
		rnd := rand.New(rand.NewPCG(seed, uint64(i)))
		l.group.Go(func() { l.write(ctx, writer, rnd, fmt.Sprint("busy-", i)) })
	}
	for _, config := range []*rest.Config{s.servers, s.servers, s.servers, s.replicas, s.replicas} {
		reader := api(config)
		l.group.Go(func() { l.read(ctx, reader) })
	}
	return l
}

// end stops all clients. It may be called again.
func (l *load) end() {
	l.stop()
	l.group.Wait()
}

// write creates, changes and deletes ConfigMaps.
func (l *load) write(ctx context.Context, api *harness.API, rnd *rand.Rand, prefix string) {
	path := "/api/v1/namespaces/" + namespace + "/configmaps"
	shard := func() string { return fmt.Sprint(rnd.IntN(shards)) }
	for i := 0; ctx.Err() == nil; i++ {
		name := fmt.Sprintf("%s-%d", prefix, i)
		l.do(ctx, api, http.MethodPost, path, object{"metadata": object{"name": name, "labels": object{"shard": shard()}}})
		if old := i - 1 - rnd.IntN(liveMaps); old >= 0 {
			l.do(ctx, api, http.MethodPatch, fmt.Sprintf("%s/%s-%d", path, prefix, old), fmt.Sprintf(`{"metadata":{"labels":{"shard":%q}}}`, shard()))
		}
		if old := i - liveMaps; old >= 0 {
			l.do(ctx, api, http.MethodDelete, fmt.Sprintf("%s/%s-%d", path, prefix, old), nil)
		}
	}
}

// read gets an object and lists a quiet resource.
func (l *load) read(ctx context.Context, api *harness.API) {
	for ctx.Err() == nil {
		l.do(ctx, api, http.MethodGet, "/api/v1/namespaces/"+namespace+"/secrets/seed-0", nil)
		l.do(ctx, api, http.MethodGet, "/api/v1/secrets", nil)
	}
}

// do sends a request and records its answer.
func (l *load) do(ctx context.Context, api *harness.API, method, path string, body any) {
	contentType := ""
	if method == http.MethodPatch {
		contentType = "application/merge-patch+json"
	}
	request, cancel := context.WithTimeout(ctx, requestTimeout)
	defer cancel()
	began := time.Now()
	r, err := api.DoAs(request, method, path, "", contentType, "", body)
	for range 3 {
		// a member of etcd may be late without a fault, too; clients repeat such a read
		if err != nil || method != http.MethodGet || !r.Refused() || !bytes.Contains(r.Body, []byte("the watch cache cannot keep up with etcd")) {
			break
		}
		harness.Pause(request, time.Second)
		began = time.Now()
		r, err = api.DoAs(request, method, path, "", contentType, "", body)
	}
	if ctx.Err() != nil {
		return
	}
	ended := time.Now()
	took := ended.Sub(began)
	l.mu.Lock()
	defer l.mu.Unlock()
	l.mu.slowest = max(l.mu.slowest, took)
	switch {
	case err != nil:
		l.mu.failures = append(l.mu.failures, failure{began, ended, 0, fmt.Sprintf("%s %s after %v: %v", method, path, took, err)})
	case r.Code >= http.StatusInternalServerError, r.Code == http.StatusTooManyRequests:
		l.mu.failures = append(l.mu.failures, failure{began, ended, r.Code, fmt.Sprintf("%s %s after %v: %v", method, path, took, r.Err())})
	case r.Code/100 == 2 && method == http.MethodGet:
		l.reads.Add(1)
	case r.Code/100 == 2:
		l.wrote.Add(1)
	default:
		l.mu.refused[fmt.Sprint(method, " ", r.Code)]++
	}
	select {
	case <-time.After(writePause):
	case <-ctx.Done():
	}
}

// explains reports whether a request may have been in flight on the process that f ended, and may
// fail for that reason. API servers and replicas that end by SIGTERM answer all requests. The
// leader of etcd may lose writes in both cases: it drops those that a member forwards while it
// hands over, and the member waits for them until a timeout.
//
// A server that ends answers with 429, which clients repeat, if it no longer accepts requests:
// after a request of the same connection that was in progress all the time in which the server asks
// clients to reconnect. It does so too if a consistent read waits too long for the election.
func (f fault) explains(failed failure) bool {
	if failed.code == http.StatusTooManyRequests && !f.leader {
		return f.signal == term && failed.began.After(f.began) && failed.began.Before(f.ended)
	}
	within := leftOutWithin
	switch {
	case f.leader && f.signal == kill:
		within = electedWithin
	case !f.leader && f.signal == term:
		return false
	}
	last := f.began.Add(within)
	if settled := f.settled.Add(settledWithin); settled.After(last) {
		last = settled
	}
	return failed.began.Before(last) && failed.ended.After(f.began)
}

// fault is the end of a process, from the signal until another one is ready, or an election of etcd
// without a signal.
type fault struct {
	process, signal string
	leader          bool // of etcd
	began, ended    time.Time
	settled         time.Time // another member leads, or the balancer leaves the process out
}

// judge reports failures of requests that no fault explains, and answers that are not expected.
func (l *load) judge(t *testing.T, faults []fault) {
	t.Helper()
	slices.SortFunc(faults, func(a, b fault) int { return a.began.Compare(b.began) })
	l.mu.Lock()
	defer l.mu.Unlock()
	excused := 0
	for _, failed := range l.mu.failures {
		if slices.ContainsFunc(faults, func(f fault) bool { return f.explains(failed) }) {
			excused++
			t.Logf("explained by a fault: %s, begun %s", failed.text, when(faults, failed.began))
		} else {
			t.Errorf("a request failed that no fault explains: %s, begun %s", failed.text, when(faults, failed.began))
		}
	}
	t.Logf("%d writes and %d reads were answered; %d requests in flight on ended processes failed; other answers: %v; the slowest took %v",
		l.wrote.Load(), l.reads.Load(), excused, l.mu.refused, l.mu.slowest)
	for answer, n := range l.mu.refused {
		if !strings.HasSuffix(answer, " 404") && !strings.HasSuffix(answer, " 409") {
			// of objects whose creation had failed, or had no answer
			t.Errorf("%d requests were answered with %s", n, answer)
		}
	}
	if l.wrote.Load() == 0 || l.reads.Load() == 0 {
		t.Error("no write or no read was answered: the test checks nothing")
	}
}

// when describes a moment relative to the last fault before it.
func when(faults []fault, at time.Time) string {
	text := "before all faults"
	for _, f := range faults {
		if f.began.Before(at) {
			text = fmt.Sprintf("%v after %s of %s", at.Sub(f.began), f.signal, f.process)
		}
	}
	return text
}
