package overload

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// burden is a kind of client that reads slowly or requests too much. run sends one request, or a
// few, and is called again when it returns.
type burden struct {
	name string
	run  func(ctx context.Context, s *scene, o options)
}

const (
	// below is a slow client's bytes per read, for 32 KiB/s: an eighth of the minimum rate that the
	// server requires of a list.
	below      = 16 << 10
	belowEvery = 500 * time.Millisecond
	// above is the bytes per read of a client that is slow, but above the minimum rate: 512 KiB/s.
	above      = 64 << 10
	aboveEvery = 125 * time.Millisecond
)

// slow returns a client that reads an answer piece by piece.
func slow(path, query, accept string, piece int64, every time.Duration) func(context.Context, *scene, options) {
	return func(ctx context.Context, s *scene, o options) {
		s.readSlowly(ctx, o, path, query, accept, piece, every)
	}
}

// eager returns a client that reads each answer at once, and repeats the request a moment later.
func eager(path, query, accept, encoding string) func(context.Context, *scene, options) {
	return func(ctx context.Context, s *scene, o options) {
		if c, err := s.client(o); err == nil {
			defer c.close()
			if response, err := c.get(ctx, path, query, accept, encoding); err == nil {
				_, _ = io.Copy(io.Discard, response.Body) // a refusal, too
				response.Body.Close()
			}
		}
		harness.Pause(ctx, 100*time.Millisecond)
	}
}

// ended runs an attack and ignores its result.
func ended(run func(context.Context, *scene) error) func(context.Context, *scene, options) {
	return func(ctx context.Context, s *scene, _ options) {
		ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
		defer cancel()
		_ = run(ctx, s)
		harness.Pause(ctx, 100*time.Millisecond)
	}
}

// burdens returns all kinds; old is a revision that is not in memory.
func burdens(old int64) []burden {
	const cached, all = "resourceVersion=0", ""
	return []burden{
		{"a list that is not read", slow(mapsPath, cached, jsonType, 0, time.Minute)},
		{"a slow list, JSON", slow(mapsPath, cached, jsonType, below, belowEvery)},
		{"a slow list, protobuf", slow(mapsPath, cached, protobufType, below, belowEvery)},
		{"a list at 512 KiB/s", slow(mapsPath, cached, jsonType, above, aboveEvery)},
		{"a slow list of YAML", slow(mapsPath, "limit=2000", yamlType, below, belowEvery)},
		{"a slow table", slow(mapsPath, "limit=10000", tableType, below, belowEvery)},
		{"a slow list of metadata", slow(mapsPath, cached, metadataType, below, belowEvery)},
		{"a slow page", slow(mapsPath, "limit=5000", jsonType, below, belowEvery)},
		{"a slow list that memory does not have", slow(mapsPath, fmt.Sprintf("resourceVersion=%d&resourceVersionMatch=Exact", old), jsonType, below, belowEvery)},
		{"a slow list of custom resources", slow(widgetsPath, all, jsonType, below, belowEvery)},
		{"initial events that are not read", slow(mapsPath, initialEvents, jsonType, 0, time.Minute)},
		{"slow initial events, protobuf", slow(mapsPath, initialEvents, protobufType, below, belowEvery)},
		{"a slow watch from revision 0", slow(mapsPath, "watch=true&resourceVersion=0&timeoutSeconds=600", jsonType, below, belowEvery)},
		{"headers at a byte a second", ended(slowHeaders)},
		{"a body at a byte a second", ended(slowBody(true))},
		{"lists of everything, again and again", eager(mapsPath, cached, jsonType, "")},
		{"consistent lists of everything, compressed", eager(mapsPath, all, protobufType, "gzip")},
		{"lists that select nothing", eager(mapsPath, "labelSelector=no%3Dsuch", jsonType, "")},
		{"lists of YAML that time out", eager(mapsPath, "timeout=100ms&limit=2000", yamlType, "")},
		{"tables of everything", eager(mapsPath, "limit=5000", tableType, "gzip")},
		{"watches that end after their first bytes", func(ctx context.Context, s *scene, o options) {
			if c, err := s.client(o); err == nil {
				defer c.close()
				if response, err := c.get(ctx, mapsPath, initialEvents, jsonType, ""); err == nil {
					_, _ = io.CopyN(io.Discard, response.Body, above)
					response.Body.Close()
				}
			}
			harness.Pause(ctx, 100*time.Millisecond)
		}},
	}
}

// greedyTokens are tokens of users at three priority levels.
var greedyTokens = []string{greedyToken, readerToken, systemToken}

const (
	// greedyEnv makes the test program run the greedy clients of a scene, in JSON, until its
	// standard input ends.
	greedyEnv = "STRATA_TEST_GREEDY"
	// idleEnv tells the test program that it has been scheduled with idle priority.
	idleEnv = "STRATA_TEST_IDLE"
)

// greedyScene is the part of a scene that clients need.
type greedyScene struct {
	URL, CAFile string
	Old         int64
}

// startGreedy runs one client of each kind and level in a separate process with idle priority: in
// production clients run on other machines, and decoding answers is not part of the server's load.
// stop returns the number of requests.
func startGreedy(t *testing.T, ctx context.Context, s *scene) (stop func() int64) {
	t.Helper()
	described, err := json.Marshal(greedyScene{s.server.URL, s.server.CAFile, s.old})
	harness.Check(t, err)
	cmd := exec.CommandContext(ctx, os.Args[0], "-test.run=^TestPriorityLevels_GreedyClients_OtherLevelIsServed$", "-test.count=1")
	cmd.Env = append(os.Environ(), greedyEnv+"="+string(described))
	in, err := cmd.StdinPipe()
	harness.Check(t, err)
	var out bytes.Buffer
	cmd.Stdout, cmd.Stderr = &out, &out
	harness.Check(t, cmd.Start())
	return func() int64 {
		in.Close()
		if err := cmd.Wait(); err != nil {
			t.Fatalf("the process of the clients: %v\n%s", err, &out)
		}
		var requests int64
		if _, err := fmt.Sscanf(out.String(), "requests %d", &requests); err != nil {
			t.Fatalf("the process of the clients: %v\n%s", err, &out)
		}
		return requests
	}
}

// runGreedy is the process of startGreedy.
func runGreedy(t *testing.T, described string) {
	var of greedyScene
	harness.Check(t, json.Unmarshal([]byte(described), &of))
	if os.Getenv(idleEnv) == "" {
		// the scheduling policy belongs to the thread; the exec that replaces this program inherits
		// it
		runtime.LockOSThread()
		harness.Check(t, unix.SchedSetAttr(0, &unix.SchedAttr{Size: unix.SizeofSchedAttr, Policy: unix.SCHED_IDLE}, 0))
		harness.Check(t, syscall.Exec(os.Args[0], os.Args, append(os.Environ(), idleEnv+"=1")))
	}
	config := &rest.Config{Host: of.URL, TLSClientConfig: rest.TLSClientConfig{CAFile: of.CAFile}}
	s := &scene{server: &harness.Server{URL: of.URL, CAFile: of.CAFile, Config: config}, old: of.Old}
	attack, stop := context.WithCancel(t.Context())
	var attacking sync.WaitGroup
	var requests atomic.Int64
	for _, token := range greedyTokens {
		for i, b := range burdens(s.old) {
			attacking.Go(func() {
				for attack.Err() == nil {
					requests.Add(1)
					b.run(attack, s, options{token: token, http1: i%2 == 0})
				}
			})
		}
	}
	_, _ = io.Copy(io.Discard, os.Stdin)
	stop()
	attacking.Wait()
	fmt.Printf("requests %d\n", requests.Load())
}

// latencies are the latencies of one verb.
type latencies []time.Duration

// at returns a quantile, 0 if there are none.
func (l latencies) at(q float64) time.Duration {
	if len(l) == 0 {
		return 0
	}
	sorted := slices.Sorted(slices.Values(l))
	return sorted[min(len(sorted)-1, int(q*float64(len(sorted))))]
}

// behaved reads and writes one object at a time, about 50 of each per second, until ctx ends. It
// returns the latencies and the number of refused or failed requests, with the last error.
func (s *scene) behaved(ctx context.Context, token string) (took map[string]latencies, failed int, last error) {
	const path = "/api/v1/namespaces/default/configmaps"
	api := s.server.APIFor(s.server.ConfigFor(token))
	took = map[string]latencies{}
	for n := 0; ctx.Err() == nil; n++ {
		name := fmt.Sprintf("map-%06d", n*997%s.objects)
		for _, request := range []struct {
			verb string
			send func(context.Context) error
		}{
			{"read", func(ctx context.Context) error { _, err := api.Get(ctx, path+"/"+name, ""); return err }},
			{"write", func(ctx context.Context) error {
				_, err := api.Patch(ctx, path+"/"+name, fmt.Sprintf(`{"metadata":{"annotations":{"n":"%d"}}}`, n))
				return err
			}},
		} {
			began := time.Now()
			if err := request.send(context.WithoutCancel(ctx)); err != nil {
				failed, last = failed+1, err
			} else {
				took[request.verb] = append(took[request.verb], time.Since(began))
			}
		}
		harness.Pause(ctx, 10*time.Millisecond)
	}
	return took, failed, last
}

// TestPriorityLevels_GreedyClients_OtherLevelIsServed: many kinds of slow or greedy client, at
// three priority levels, beside a well-behaved one at another level. Strata refuses none of its
// requests. The latencies with each engine are logged: the goal is a p99 below twice that without
// the others. STRATA_TEST_LONG=1.
func TestPriorityLevels_GreedyClients_OtherLevelIsServed(t *testing.T) {
	if described := os.Getenv(greedyEnv); described != "" {
		runGreedy(t, described)
		return
	}
	if !harness.Long() {
		t.Skip("takes minutes; STRATA_TEST_LONG=1 runs it")
	}
	const quiet, busy = 40 * time.Second, 90 * time.Second
	var table strings.Builder
	for _, engine := range []string{harness.Strata, harness.Upstream} {
		t.Run(engine, func(t *testing.T) {
			ctx := harness.Context(t, 8*time.Minute)
			s := newScene(t, ctx, 20_000, 0, "--engine="+engine)
			_, err := s.api.Do(ctx, http.MethodGet, mapsPath, "", nil)
			harness.Check(t, err)
			during := func(d time.Duration) (map[string]latencies, int, error) {
				ctx, cancel := context.WithTimeout(ctx, d)
				defer cancel()
				return s.behaved(ctx, nodeToken)
			}
			during(5 * time.Second) // fill connections and caches
			before, failed, err := during(quiet)
			if failed > 0 {
				t.Fatalf("%d requests failed before there were others: %v", failed, err)
			}
			stopMemory := s.watchMemory(t, 12<<30)
			stop := startGreedy(t, ctx, s)
			during(5 * time.Second) // until all have started
			meanwhile, failed, err := during(busy)
			requests := stop()
			peak := stopMemory()
			for _, verb := range []string{"read", "write"} {
				a, b := before[verb], meanwhile[verb]
				fmt.Fprintf(&table, "%-9s %-6s quiet p50 %8v p99 %8v (%d); beside the others p50 %8v p99 %8v (%d): %.2f times\n", engine, verb,
					a.at(.5).Round(10*time.Microsecond), a.at(.99).Round(10*time.Microsecond), len(a),
					b.at(.5).Round(10*time.Microsecond), b.at(.99).Round(10*time.Microsecond), len(b), float64(b.at(.99))/float64(max(a.at(.99), 1)))
			}
			fmt.Fprintf(&table, "%-9s %d requests of %d clients of %d kinds; %d of the other failed; the server held at most %d MB\n", engine, requests,
				len(greedyTokens)*len(burdens(0)), len(burdens(0)), failed, peak>>20)
			if failed > 0 && engine == harness.Strata {
				t.Errorf("%d requests of a client that behaves failed, the last with %v", failed, err)
			}
			if engine == harness.Strata {
				s.works(t, ctx)
			}
		})
	}
	t.Log("\n" + table.String())
}
