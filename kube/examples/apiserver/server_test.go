package main

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"regexp"
	"strings"
	"testing"
	"time"

	utilruntime "k8s.io/apimachinery/pkg/util/runtime"
	examplev1 "k8s.io/apiserver/pkg/apis/example/v1"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testetcd"
)

// patience bounds every wait.
const patience = 2 * time.Minute

// TestServer_Reads_AreServedFromMemory: the server works, and the byte path answers GET, LIST and
// WATCH.
func TestServer_Reads_AreServedFromMemory(t *testing.T) {
	url := start(t, testetcd.Start(t, testetcd.Config{}).Endpoint())
	pods := url + "/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods"
	for i := range 3 {
		name := fmt.Sprintf("pod-%d", i)
		body := fmt.Sprintf(`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":%q}}`, name)
		if resp, got := send(t, http.MethodPost, pods, body); resp.StatusCode != http.StatusCreated {
			t.Fatalf("create %s: %s: %s", name, resp.Status, got)
		}
	}

	// Before the mirror is loaded, single objects and small pages are read from etcd.
	loaded := regexp.MustCompile(`(?m)^strata_mirror_resource_ready\{.*\} 1$`)
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		if _, metrics := send(t, http.MethodGet, url+"/metrics", ""); loaded.MatchString(metrics) {
			break
		} else if time.Now().After(deadline) {
			t.Fatalf("the pods are not loaded:\n%s", metrics)
		}
	}

	var list examplev1.PodList
	read(t, pods+"?limit=2", &list)
	if list.Kind != "PodList" || len(list.Items) != 2 || list.Continue == "" {
		t.Errorf("got %s of %d items, continue %q; want a page of 2", list.Kind, len(list.Items), list.Continue)
	}
	// Memory has reached this revision. A GET without one may go to etcd while the machine is full.
	var pod examplev1.Pod
	read(t, pods+"/pod-1?resourceVersion="+list.ResourceVersion, &pod)
	if pod.Kind != "Pod" || pod.Name != "pod-1" || pod.UID == "" {
		t.Errorf("got %s %q with uid %q", pod.Kind, pod.Name, pod.UID)
	}
	var n int
	var events string
	for deadline := time.Now().Add(patience); n < 3 && time.Now().Before(deadline); n = strings.Count(events, `"type":"ADDED"`) {
		_, events = send(t, http.MethodGet, pods+"?watch=1&resourceVersion=0&timeoutSeconds=5", "")
	}
	if n != 3 {
		t.Errorf("a watch from the beginning has %d events, want 3: %s", n, events)
	}

	_, metrics := send(t, http.MethodGet, url+"/metrics", "")
	for _, verb := range []string{"get", "list", "watch"} {
		if !regexp.MustCompile(`(?m)^strata_readpath_requests_total\{verb="` + verb + `"\} [1-9]`).MatchString(metrics) {
			t.Errorf("/metrics has no %s", verb)
		}
	}
	if strings.Contains(metrics, "strata_readpath_passed_total{") {
		t.Error("reads were passed on")
	}
}

// openWatch starts a watch in the protocol.
func openWatch(t *testing.T, client *http.Client, proto, url, accept string) *http.Response {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, url, nil)
	testcheck.NoError(t, err)
	req.Header.Set("Accept", accept)
	resp, err := client.Do(req)
	testcheck.NoError(t, err)
	if resp.StatusCode != http.StatusOK || resp.Proto != proto {
		t.Fatalf("%s, %s", resp.Status, resp.Proto)
	}
	t.Cleanup(func() { resp.Body.Close() })
	return resp
}

// eventTypes returns the types of the events of a watch in JSON.
func eventTypes(stream []byte) (types []string) {
	for decoder := json.NewDecoder(bytes.NewReader(stream)); ; {
		var event struct{ Type string }
		if err := decoder.Decode(&event); err != nil {
			return types
		}
		types = append(types, event.Type)
	}
}

// TestServer_Shutdown_EndsWatchesInOrder: each watch gets its pending events, then a bookmark if it
// requested those, then its end without an error; and the server stops soon. This is true for the
// byte path and for upstream's handlers (tables), in HTTP/1.1 and HTTP/2. The long form has clients
// that do not read.
func TestServer_Shutdown_EndsWatchesInOrder(t *testing.T) {
	url, stop := startUntil(t, testetcd.Start(t, testetcd.Config{}).Endpoint())
	pods := url + "/apis/example.apiserver.k8s.io/v1/namespaces/ns/pods"
	create := func(name string, filler int) {
		t.Helper()
		body := fmt.Sprintf(`{"kind":"Pod","apiVersion":"example.apiserver.k8s.io/v1","metadata":{"name":%q,"annotations":{"filler":%q}}}`, name, strings.Repeat("x", filler))
		if resp, got := send(t, http.MethodPost, pods, body); resp.StatusCode != http.StatusCreated {
			t.Fatalf("create %s: %s: %s", name, resp.Status, got)
		}
	}
	create("first", 0)
	var first examplev1.Pod
	read(t, pods+"/first", &first)

	clients := map[string]*http.Client{}
	for _, proto := range []string{"HTTP/1.1", "HTTP/2.0"} {
		transport := client.Transport.(*http.Transport).Clone()
		transport.ForceAttemptHTTP2 = proto == "HTTP/2.0"
		clients[proto] = &http.Client{Transport: transport}
		t.Cleanup(transport.CloseIdleConnections)
	}
	watch := func(proto, accept, query string) *http.Response {
		t.Helper()
		return openWatch(t, clients[proto], proto, pods+"?watch=1"+query, accept)
	}
	type open struct {
		name string
		resp *http.Response
		want []string
	}
	var watches []open
	for proto := range clients {
		for _, accept := range []string{"application/json", "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1", "application/json;as=Table;g=meta.k8s.io;v=v1"} {
			for query, want := range map[string][]string{
				"":                          {"ADDED"},
				"&allowWatchBookmarks=true": {"ADDED", "BOOKMARK"},
				"&allowWatchBookmarks=true&fieldSelector=metadata.name=none": {"BOOKMARK"},
			} {
				query += "&resourceVersion=" + first.ResourceVersion
				watches = append(watches, open{strings.Join([]string{proto, accept, query}, " "), watch(proto, accept, query), want})
			}
		}
	}
	if os.Getenv("STRATA_TEST_LONG") != "" {
		for i := range 60 {
			create(fmt.Sprintf("large-%d", i), 250<<10)
		}
		for proto := range clients {
			watch(proto, "application/json", "&resourceVersion=0")
			watch(proto, "application/json;as=Table;g=meta.k8s.io;v=v1", "&resourceVersion=0&includeObject=Object")
		}
		for i := range watches {
			watches[i].want = nil // many
		}
	} else {
		create("second", 0)
		// Memory has the pod: the server does not wait for etcd when it stops.
		var second examplev1.Pod
		read(t, pods+"/second", &second)
		read(t, pods+"?resourceVersion="+second.ResourceVersion, &examplev1.PodList{})
	}
	began := time.Now()
	stopped := make(chan struct{})
	go func() { defer close(stopped); stop() }()
	for _, w := range watches {
		rest, err := io.ReadAll(w.resp.Body)
		if err != nil {
			t.Errorf("%s ends with %v", w.name, err)
		}
		if w.want == nil {
			continue
		}
		got := eventTypes(rest)
		if fmt.Sprint(got) != fmt.Sprint(w.want) {
			t.Errorf("%s: got %s, want %s: %s", w.name, got, w.want, rest)
		}
	}
	<-stopped
	if took := time.Since(began); took > 30*time.Second { // upstream: a minute
		t.Errorf("the server exited after %s", took)
	}
}

// start runs the server on an etcd until the test ends, and returns its URL when it is ready.
func start(t *testing.T, etcd string) string {
	t.Helper()
	url, _ := startUntil(t, etcd)
	return url
}

// startUntil is start with a function that stops the server, and returns when it has stopped.
func startUntil(t *testing.T, etcd string) (url string, stop func()) {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	testcheck.NoError(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := run(ctx, []string{etcd}, listener, ""); err != nil {
			t.Errorf("run: %v", err)
		}
	}()
	stop = func() {
		cancel()
		select {
		case <-done:
		case <-time.After(patience):
			t.Error("the server does not stop")
		}
	}
	t.Cleanup(stop)
	base := "https://" + listener.Addr().String()
	for deadline := time.Now().Add(patience); ; time.Sleep(10 * time.Millisecond) {
		resp, err := client.Get(base + "/readyz")
		if err == nil {
			resp.Body.Close()
			if resp.StatusCode == http.StatusOK {
				return base, stop
			}
		}
		select {
		case <-done:
			t.FailNow()
		default:
		}
		if time.Now().After(deadline) {
			t.Fatalf("the server does not get ready: %v", err)
		}
	}
}

var client = &http.Client{
	Timeout: patience,
	// the certificate is self-signed
	Transport: &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}},
}

func send(t *testing.T, method, url, body string) (*http.Response, string) {
	t.Helper()
	req, err := http.NewRequest(method, url, strings.NewReader(body))
	testcheck.NoError(t, err)
	req.Header.Set("Content-Type", "application/json")
	resp, err := client.Do(req)
	testcheck.NoError(t, err)
	defer resp.Body.Close()
	var got bytes.Buffer
	if _, err := io.Copy(&got, resp.Body); err != nil {
		t.Fatal(err)
	}
	return resp, got.String()
}

// read reads an object, again while memory is late.
func read(t *testing.T, url string, into any) {
	t.Helper()
	resp, got := send(t, http.MethodGet, url, "")
	late := func() bool {
		return resp.StatusCode == http.StatusTooManyRequests || resp.StatusCode == http.StatusGatewayTimeout
	}
	for end := time.Now().Add(patience); late() && time.Now().Before(end); time.Sleep(100 * time.Millisecond) {
		resp, got = send(t, http.MethodGet, url, "")
	}
	if resp.StatusCode != http.StatusOK {
		t.Fatalf("%s: %s: %s", url, resp.Status, got)
	}
	utilruntime.Must(json.Unmarshal([]byte(got), into))
}
