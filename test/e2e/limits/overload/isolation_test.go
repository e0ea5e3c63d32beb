package overload

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/stratakube/strata/test/harness"
)

// TestSlowClients_OthersAreServed runs clients that read slowly or not at all, or that vanish,
// beside others.
func TestSlowClients_OthersAreServed(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, harness.Pick(8*time.Minute, 20*time.Minute))
	var flags []string
	strata := harness.Engine() == harness.Strata
	if strata {
		flags = append(flags, "--strata-list-bytes-in-flight=64Mi") // three lists of 23 MB
	}
	s := newScene(t, ctx, 20_000, 0, flags...)
	t.Run("clients vanish", func(t *testing.T) { s.releaseVanished(t, ctx) })
	if strata { // upstream bounds neither the time of a watch's seat nor lists under way
		t.Run("stalled initial events", func(t *testing.T) { s.releaseSeats(t, ctx) })
		t.Run("slow lists", func(t *testing.T) { s.serveOtherLevels(t, ctx) })
	}
}

const initialEvents = "watch=true&sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&timeoutSeconds=86400"

// executing returns the number of seats in use at a priority level.
func (s *scene) executing(ctx context.Context, level string) (float64, error) {
	return s.api.Sum(ctx, "apiserver_flowcontrol_current_executing_seats", fmt.Sprintf("priority_level=%q", level))
}

// probePause is the time between two rounds of probe.
const probePause = 50 * time.Millisecond

// probe reads and writes as a user until stop is called, which returns the latencies. Any failure
// fails the test.
func (s *scene) probe(t *testing.T, ctx context.Context, token string) (stop func() []time.Duration) {
	t.Helper()
	const path = "/api/v1/namespaces/default/configmaps"
	api := s.server.APIFor(s.server.ConfigFor(token))
	stopping := make(chan struct{})
	var took []time.Duration
	var probing sync.WaitGroup
	probing.Go(func() {
		ticker := time.NewTicker(probePause)
		defer ticker.Stop()
		for n := 0; ; n++ {
			select {
			case <-stopping:
				return
			case <-ctx.Done():
				return
			case <-ticker.C:
			}
			began := time.Now()
			name := fmt.Sprintf("probe-%s-%d", token, n)
			_, err := api.Create(ctx, path, map[string]any{"metadata": map[string]any{"name": name}})
			if err == nil {
				_, err = api.Get(ctx, path+"/"+name, "")
			}
			if err == nil {
				err = api.Delete(ctx, path+"/"+name)
			}
			if err != nil {
				t.Errorf("%s, round %d, after %v: %v", token, n, time.Since(began), err)
				return
			}
			took = append(took, time.Since(began))
		}
	})
	return func() []time.Duration {
		close(stopping)
		probing.Wait()
		return took
	}
}

// releaseSeats: clients of a priority level that do not read the initial events of their watches,
// for a day, occupy its seats for seconds only; other requests of the level are served, including
// writes.
func (s *scene) releaseSeats(t *testing.T, ctx context.Context) {
	_, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
	harness.Check(t, err)

	ended := func(ctx context.Context) (float64, error) {
		return s.api.Sum(ctx, "strata_watches_ended_total", `reason="slow_client"`)
	}
	before, err := ended(ctx)
	harness.Check(t, err)
	const clients = 24 // of 10 seats each: all seats of the level
	// closed when the level has no free seats, or all clients have had theirs
	full := make(chan struct{})
	var answered atomic.Int32
	read := make(chan struct{}) // closed when the clients start to read
	// clients that were answered after that: they had been queued, and disconnect
	var late atomic.Int32
	codes := make([]int, clients)
	var watching errgroup.Group
	for i := range clients {
		watching.Go(func() error {
			c, err := s.client(options{token: greedyToken, http1: i%2 == 0})
			if err != nil {
				return err
			}
			defer c.close()
			// Tables are made by upstream's handlers.
			response, err := c.get(ctx, mapsPath, initialEvents, []string{jsonType, protobufType, tableType}[i%3], "")
			if err != nil {
				return err
			}
			defer response.Body.Close()
			if response.StatusCode != http.StatusOK {
				return fmt.Errorf("a watch was answered with %s", response.Status)
			}
			answered.Add(1)
			select {
			case <-full:
				late.Add(1)
				codes[i] = -1
				return nil
			default:
			}
			select {
			case <-read:
			case <-ctx.Done():
				return context.Cause(ctx)
			}
			if i%3 == 1 {
				_, _ = io.Copy(io.Discard, response.Body) // ends
				codes[i] = -1
			} else if codes[i], err = lastStatus(response.Body); err != nil {
				codes[i] = -1
			}
			return nil
		})
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		seats, err := s.executing(ctx, "workload-low")
		return seats >= 200 || answered.Load() == clients, fmt.Errorf("%v seats, %d of %d clients were answered, %w", seats, answered.Load(), clients, err)
	}))
	close(full)
	stop := s.probe(t, ctx, modestToken)
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		seats, err := s.executing(ctx, "workload-low")
		return seats < 10, fmt.Errorf("%v seats, %w", seats, err)
	}))
	// A client that starts to read now receives the reason for the end of its watch, unless its
	// connection was closed already.
	close(read)
	harness.Check(t, watching.Wait())
	rejected := 0
	for _, code := range codes {
		switch code {
		case http.StatusTooManyRequests:
			rejected++
		case -1:
		default:
			t.Errorf("a watch ends with status %d", code)
		}
	}
	t.Logf("of %d watches %d were ended with 429, the others were broken off", clients, rejected)
	if rejected == 0 {
		t.Error("no client got the reason for the end of its watch")
	}
	took := stop()
	t.Logf("during this, %d rounds of create, get and delete by another user of the level; the longest took %v", len(took), slices.Max(append(took, 0)))
	if len(took) == 0 {
		t.Error("another user of the level was not served once")
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		slow, err := ended(ctx)
		slow -= before
		return slow >= float64(clients-late.Load()), fmt.Errorf("%v watches are counted as ended because their clients did not read, want %d of %d, %w", slow, clients-late.Load(), clients, err)
	}))
}

// lastStatus reads the rest of a watch and returns the code of its final status; 0 for none.
func lastStatus(body io.Reader) (code int, err error) {
	lines := bufio.NewScanner(body)
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		var event struct {
			Type   string
			Object struct{ Code int }
		}
		if err := json.Unmarshal(lines.Bytes(), &event); err != nil {
			return 0, err
		}
		if code = 0; event.Type == "ERROR" {
			code = event.Object.Code
		}
	}
	return code, lines.Err()
}

// serveOtherLevels: clients of two levels that read large lists slowly block neither lists of other
// levels, in any form, nor exempt ones, and are disconnected when they read too slowly.
func (s *scene) serveOtherLevels(t *testing.T, ctx context.Context) {

	attack, stop := context.WithCancel(ctx)
	var attacking sync.WaitGroup
	for i := range 24 {
		accept, query := []string{jsonType, protobufType}[i%2], "resourceVersion=0"
		if i%3 == 0 {
			accept, query = yamlType, "limit=500"
		}
		attacking.Go(func() {
			for attack.Err() == nil {
				s.readSlowly(attack, options{token: []string{greedyToken, systemToken}[i/2%2], http1: i%2 == 0}, mapsPath, query, accept, 64<<10, 800*time.Millisecond)
			}
		})
	}
	for _, level := range []string{"workload-low", "workload-high"} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			waiting, err := s.api.Sum(ctx, "strata_lists_waiting", fmt.Sprintf("priority_level=%q", level))
			return waiting > 0, fmt.Errorf("%v lists of %s wait, %w", waiting, level, err)
		}))
	}
	for _, token := range []string{readerToken, adminToken} {
		api := s.server.APIFor(s.server.ConfigFor(token))
		for _, accept := range []string{jsonType, protobufType, tableType, yamlType} {
			query := "resourceVersion=0"
			switch accept {
			case yamlType:
				query = "limit=100"
			case tableType:
				query = "limit=2000"
			}
			began := time.Now()
			r, err := api.DoAs(ctx, http.MethodGet, mapsPath, query, "", accept, nil)
			harness.Check(t, err)
			if took := time.Since(began); r.Code != http.StatusOK {
				t.Errorf("%s: a list in %s is answered with %d after %v", token, accept, r.Code, took)
			} else {
				t.Logf("%s: %d bytes in %s after %v", token, len(r.Body), accept, took)
			}
		}
		for _, level := range []string{"global-default", "exempt"} {
			refused, err := s.api.Sum(ctx, "strata_lists_refused_total", fmt.Sprintf("priority_level=%q", level))
			harness.Check(t, err)
			if refused > 0 {
				t.Errorf("%v lists of level %s were refused", refused, level)
			}
		}
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		slow, err := s.api.Sum(ctx, "strata_lists_refused_total", `reason="slow_client"`, `priority_level="workload-low"`)
		return slow > 0, fmt.Errorf("%v lists of slow clients were ended, %w", slow, err)
	}))
	stop()
	attacking.Wait()
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		bytes, err := s.api.Sum(ctx, "strata_lists_in_flight_bytes")
		return bytes == 0, fmt.Errorf("%v bytes of lists are in flight after all clients have disconnected, %w", bytes, err)
	}))
}

// readSlowly reads an answer in pieces, to its end.
func (s *scene) readSlowly(ctx context.Context, o options, path, query, accept string, piece int64, every time.Duration) {
	c, err := s.client(o)
	if err != nil {
		return
	}
	defer c.close()
	response, err := c.get(ctx, path, query, accept, "")
	if err != nil {
		return
	}
	defer response.Body.Close()
	ticker := time.NewTicker(every) // after a refusal it waits, too
	defer ticker.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticker.C:
			if _, err := io.CopyN(io.Discard, response.Body, piece); err != nil {
				return
			}
		}
	}
}

// serveAudited: an informer can list a collection whose audit events contain the response, however
// small the memory limit of lists is.
func (s *scene) serveAudited(t *testing.T, ctx context.Context) {
	reader := s.server.APIFor(s.server.ConfigFor(readerToken))
	for _, accept := range []string{jsonType, protobufType} {
		r, err := reader.DoAs(ctx, http.MethodGet, mapsPath, "resourceVersion=0&limit=500", "", accept, nil)
		harness.Check(t, err)
		if r.Code != http.StatusOK || len(r.Body) < 20_000_000 {
			t.Errorf("a list in %s is answered with %d and %d bytes", accept, r.Code, len(r.Body))
		}
	}
}

// auditLists returns the flags with which audit events contain lists.
func auditLists(t *testing.T) []string {
	policy := harness.New(t).WriteFile("policy.yaml", []byte("apiVersion: audit.k8s.io/v1\nkind: Policy\nrules:\n"+
		"- level: RequestResponse\n  verbs: [list]\n  resources: [{group: \"\", resources: [configmaps]}]\n- level: None\n"))
	return []string{"--audit-policy-file=" + policy, "--audit-log-path=/dev/null"}
}
