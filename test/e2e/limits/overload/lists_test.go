package overload

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
)

const (
	jsonType     = "application/json"
	protobufType = "application/vnd.kubernetes.protobuf"
	yamlType     = "application/yaml"
	tableType    = "application/json;as=Table;v=v1;g=meta.k8s.io"
	metadataType = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
)

// kind is a way to list all objects.
type kind struct{ name, path, query, accept, encoding string }

// kinds returns all kinds; past is a revision in memory, old one that is not in memory.
func kinds(past string, old int64) []kind {
	return []kind{
		{"JSON", mapsPath, "", jsonType, ""},
		{"JSON, version 0", mapsPath, "resourceVersion=0", jsonType, ""},
		{"protobuf", mapsPath, "", protobufType, ""},
		{"protobuf, version 0", mapsPath, "resourceVersion=0", protobufType, ""},
		{"gzip", mapsPath, "resourceVersion=0", jsonType, "gzip"},
		{"metadata", mapsPath, "", metadataType, ""},
		{"metadata, protobuf", mapsPath, "", strings.Replace(metadataType, jsonType, protobufType, 1), ""},
		{"exact", mapsPath, "resourceVersionMatch=Exact&resourceVersion=" + past, jsonType, ""},
		{"older than memory", mapsPath, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", old), protobufType, ""},
		{"selector", mapsPath, "labelSelector=even%3Dtrue", jsonType, ""},
		{"selector, none", mapsPath, "labelSelector=even%3Dmaybe", jsonType, ""},
		{"table", mapsPath, "", tableType, ""},
		{"table, version 0", mapsPath, "resourceVersion=0", tableType, ""},
		{"table, selector", mapsPath, "labelSelector=even%3Dtrue", tableType, ""},
		{"table, exact", mapsPath, "resourceVersionMatch=Exact&resourceVersion=" + past, tableType, ""},
		{"YAML", mapsPath, "", yamlType, ""},
		{"YAML, older than memory", mapsPath, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", old), yamlType, ""},
		{"pretty", mapsPath, "pretty=true", jsonType, ""},
		{"page of 500", mapsPath, "limit=500", jsonType, ""},
		{"custom, JSON", widgetsPath, "", jsonType, ""},
		{"custom, table", widgetsPath, "", tableType, ""},
		{"custom, YAML", widgetsPath, "resourceVersion=0", yamlType, ""},
	}
}

// answers counts the answers, by kind of list and outcome.
type answers struct {
	mu     sync.Mutex
	counts map[string]map[string]int
	bytes  map[string]int64
}

func (a *answers) add(kind, outcome string, bytes int64) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.counts == nil {
		a.counts, a.bytes = map[string]map[string]int{}, map[string]int64{}
	}
	if a.counts[kind] == nil {
		a.counts[kind] = map[string]int{}
	}
	a.counts[kind][outcome]++
	a.bytes[kind] += bytes
}

func (a *answers) String() string {
	var b strings.Builder
	var names []string
	for name := range a.counts {
		names = append(names, name)
	}
	slices.Sort(names)
	for _, name := range names {
		fmt.Fprintf(&b, "\n%-28s %v, %.1f MB", name, a.counts[name], float64(a.bytes[name])/1e6)
	}
	return b.String()
}

// total returns the number of answers with the outcome.
func (a *answers) total(outcome string) (n int) {
	for _, c := range a.counts {
		n += c[outcome]
	}
	return n
}

const (
	whole  = "whole"
	broken = "broken off" // after the response header
)

// TestList_ManyConcurrentClients_MemoryIsBounded: hundreds of clients list all objects at the same
// moment, in every form. The server's memory stays below a bound, health checks are answered,
// excess requests are refused with 429 and Retry-After, and afterwards memory and goroutines are as
// before.
func TestList_ManyConcurrentClients_MemoryIsBounded(t *testing.T) {
	var (
		objects = harness.Pick(20_000, 300_000)
		clients = harness.Pick(66, 500)
		bound   = int64(harness.Pick(768<<20, 1536<<20))
	)
	ctx := harness.Context(t, harness.Pick(4*time.Minute, 20*time.Minute))
	// resident memory outside the Go runtime's accounting: mainly pages of the executable
	const uncounted = 192 << 20
	s := newScene(t, ctx, objects, bound-uncounted)
	s.listAll(t, ctx, clients, bound, options{token: readerToken})
}

func (s *scene) listAll(t *testing.T, ctx context.Context, clients int, bound int64, o options) {
	t.Helper()
	list, err := s.api.List(ctx, mapsPath, "limit=1")
	harness.Check(t, err)
	all := kinds(list.Metadata.ResourceVersion, s.old)
	before, err := s.server.Held(ctx, s.api)
	harness.Check(t, err)
	t.Log("before:", before)

	stopMemory := s.watchMemory(t, bound)
	stopHealth := s.health(t, ctx, harness.Pick(30*time.Second, 10*time.Second))
	var (
		asking sync.WaitGroup
		got    answers
		start  = make(chan struct{})
	)
	for i := range clients {
		c, err := s.client(o)
		harness.Check(t, err)
		k := all[i%len(all)]
		resp, err := c.get(ctx, "/version", "", "", "") // opens the connection in advance
		harness.Check(t, err)
		resp.Body.Close()
		asking.Go(func() {
			defer c.close()
			<-start
			outcome, n := ask(ctx, c, k)
			got.add(k.name, outcome, n)
		})
	}
	began := time.Now()
	close(start)
	asking.Wait()
	t.Logf("%d clients were answered within %v:%v", clients, time.Since(began).Round(time.Millisecond), &got)
	took := stopHealth()
	peak := stopMemory()
	if longest := s.logHealth(t, took); harness.Long() && longest > time.Second && harness.Engine() == harness.Strata {
		t.Errorf("a health check took %v, want at most a second", longest)
	}
	t.Logf("at most %.1f MB were resident", float64(peak)/1e6)
	if refusedAll := got.total(whole) == 0; refusedAll && harness.Engine() == harness.Strata {
		t.Error("no client got a list")
	}
	for _, outcome := range []string{"429 without Retry-After", "500", "503"} {
		if n := got.total(outcome); n > 0 && harness.Engine() == harness.Strata {
			t.Errorf("%d clients got: %s", n, outcome)
		}
	}
	if peak > bound {
		t.Errorf("at most %.1f MB were resident, want at most %.1f", float64(peak)/1e6, float64(bound)/1e6)
	}
	s.works(t, ctx)
	// encodings cached for later requests, an eighth, and garbage
	s.server.AwaitReleased(t, ctx, s.api, before, 64<<20+bound/4, 50, harness.Pick(time.Minute, 2*time.Minute))
}

// ask lists all objects and reads the answer to its end.
func ask(ctx context.Context, c *client, k kind) (outcome string, n int64) {
	resp, err := c.get(ctx, k.path, k.query, k.accept, k.encoding)
	if err != nil {
		return "error: " + cause(err), 0
	}
	defer resp.Body.Close()
	n, err = io.Copy(io.Discard, resp.Body)
	switch {
	case resp.StatusCode == http.StatusTooManyRequests && resp.Header.Get("Retry-After") == "":
		return "429 without Retry-After", n
	case resp.StatusCode != http.StatusOK:
		return fmt.Sprint(resp.StatusCode), n
	case err != nil:
		return broken, n
	}
	return whole, n
}

// cause returns the innermost error's text, without addresses.
func cause(err error) string {
	text := err.Error()
	return text[strings.LastIndex(text, ": ")+1:]
}
