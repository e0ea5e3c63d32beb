package load

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/kube/watchprogress"
	"github.com/stratakube/strata/server/test/internal/harness"
)

// reporters are open watches of one user, which record the newest bookmark of each.
type reporters struct {
	revisions []atomic.Int64
	arrived   []atomic.Int64 // the time of the newest bookmark, in ns
	close     func()
	ended     sync.WaitGroup
}

// report opens n idle watches with bookmarks for a user.
func (s *scene) report(t *testing.T, ctx context.Context, user string, n, perConnection int) *reporters {
	t.Helper()
	list := harness.Must[*harness.List](t)(s.api.List(ctx, namespace, "limit=1"))
	ctx, cancel := context.WithCancel(ctx)
	r := &reporters{revisions: make([]atomic.Int64, n), arrived: make([]atomic.Int64, n)}
	clients := make([]*client, (n+perConnection-1)/perConnection)
	for i := range clients {
		clients[i] = s.client(t, false)
	}
	r.close = func() {
		cancel()
		r.ended.Wait()
		for _, c := range clients {
			c.http.CloseIdleConnections()
		}
	}
	var opening errgroup.Group
	opening.SetLimit(50)
	for i := range n {
		opening.Go(func() error {
			url := s.server.URL + namespace + "?watch=true&allowWatchBookmarks=true&resourceVersion=" + list.Metadata.ResourceVersion
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
			if err != nil {
				return err
			}
			req.Header.Set("Authorization", "Bearer "+s.server.Config.BearerToken)
			req.Header.Set("Impersonate-User", user)
			req.Header.Set("Impersonate-Group", "system:masters")
			response, err := clients[i/perConnection].http.Do(req)
			if err != nil {
				return err
			}
			if response.StatusCode != http.StatusOK {
				response.Body.Close()
				return fmt.Errorf("watch of %s: %s", user, response.Status)
			}
			r.ended.Go(func() { r.read(i, response.Body) })
			return nil
		})
	}
	harness.Check(t, opening.Wait())
	t.Cleanup(r.close)
	return r
}

// read records the bookmarks of a watch until it ends.
func (r *reporters) read(i int, body io.ReadCloser) {
	defer body.Close()
	lines := bufio.NewReaderSize(body, 1<<10)
	for {
		line, err := lines.ReadSlice('\n')
		if err != nil {
			return
		}
		now := time.Now()
		_, version, ok := bytes.Cut(line, []byte(`"resourceVersion":"`))
		digits, _, _ := bytes.Cut(version, []byte(`"`))
		revision, err := strconv.ParseInt(string(digits), 10, 64)
		if ok && err == nil && bytes.HasPrefix(line, []byte(`{"type":"BOOKMARK"`)) {
			r.arrived[i].Store(now.UnixNano())
			r.revisions[i].Store(revision)
		}
	}
}

// await returns when every watch has reported the revision.
func (r *reporters) await(ctx context.Context, revision int64) error {
	return harness.Poll(ctx, func(context.Context) (bool, error) {
		for i := range r.revisions {
			if got := r.revisions[i].Load(); got < revision {
				return false, fmt.Errorf("watch %d has reported %d, want %d", i, got, revision)
			}
		}
		return true, nil
	})
}

// ask writes a key elsewhere and requests bookmarks for a user. It returns the revision.
func (s *scene) ask(ctx context.Context, api *harness.API) (int64, error) {
	if _, err := s.etcd.Put(ctx, "/registry/elsewhere", "x"); err != nil {
		return 0, err
	}
	r, err := api.DoAs(ctx, http.MethodGet, namespace, "", "", watchprogress.MediaType, nil)
	if err != nil {
		return 0, err
	}
	var p watchprogress.WatchProgress
	if r.Code != http.StatusOK {
		return 0, r.Err()
	}
	return p.ResourceVersion, json.Unmarshal(r.Body, &p)
}

// TestWatchProgress_ManyWatches_WakesThoseOfUser: requests wake the watches of the user, each once for a revision, and no others. In its
// long form it reports delays and CPU time with 10,000 watches.
func TestWatchProgress_ManyWatches_WakesThoseOfUser(t *testing.T) {
	harness.OnlyStrata(t)
	const perConnection = 200
	watches := harness.Pick(400, 10_000)
	ctx := harness.Context(t, testTimeout)
	s := newSceneWith(t, ctx, 10, perConnection, "--strata-feature-gates=BookmarkOnRequest=true")
	api := func(user string) *harness.API {
		config := rest.CopyConfig(s.server.Config)
		config.Impersonate = rest.ImpersonationConfig{UserName: user, Groups: []string{"system:masters"}}
		return s.server.APIFor(config)
	}
	many, one := s.report(t, ctx, "many", watches, perConnection), s.report(t, ctx, "one", 1, perConnection)
	for _, c := range []struct {
		user     string
		watches  *reporters
		requests int
		pause    time.Duration
	}{
		{"one", one, harness.Pick(20, 100), 100 * time.Millisecond},
		{"many", many, harness.Pick(3, 20), time.Second},
	} {
		client := api(c.user)
		before := harness.Must[float64](t)(s.api.Sum(ctx, "strata_watch_bookmarks_requested_total", `resource="configmaps"`))
		var delays []time.Duration
		answers := []time.Duration{}
		cpu := harness.Must[time.Duration](t)(s.server.CPU())
		began := time.Now()
		pace := time.NewTicker(c.pause)
		defer pace.Stop()
		for range c.requests {
			asked := time.Now()
			revision, err := s.ask(ctx, client)
			harness.Check(t, err)
			answers = append(answers, time.Since(asked))
			harness.Check(t, c.watches.await(ctx, revision))
			for i := range c.watches.arrived {
				delays = append(delays, time.Duration(c.watches.arrived[i].Load()-asked.UnixNano()))
			}
			if harness.Long() { // the rate decides the CPU time, not the result
				<-pace.C
			}
		}
		took := time.Since(began)
		used := harness.Must[time.Duration](t)(s.server.CPU()) - cpu
		slices.Sort(delays)
		slices.Sort(answers)
		t.Logf("%d watches of the user, %d of others: %d requests in %s, %.1f %% of a core; answer p50 %s p99 %s; request to bookmark p50 %s, p99 %s, max %s",
			len(c.watches.revisions), watches+1-len(c.watches.revisions), c.requests, took.Round(time.Millisecond), 100*used.Seconds()/took.Seconds(),
			answers[len(answers)/2], answers[len(answers)*99/100], delays[len(delays)/2], delays[len(delays)*99/100], delays[len(delays)-1])
		after := harness.Must[float64](t)(s.api.Sum(ctx, "strata_watch_bookmarks_requested_total", `resource="configmaps"`))
		if got, want := int(after-before), c.requests*len(c.watches.revisions); got != want {
			t.Errorf("%d bookmarks for %d requests and %d watches, want %d", got, c.requests, len(c.watches.revisions), want)
		}
	}
}
