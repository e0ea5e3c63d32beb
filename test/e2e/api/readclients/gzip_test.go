package readclients

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// compressed is a LIST that is large enough to be compressed (128 KiB), at a fixed revision, with
// its uncompressed body.
type compressed struct {
	Target string `json:"target"` // path and query
	Accept string `json:"accept"`

	plain []byte
}

const (
	gzipObjects = 400
	gzipChanged = 12 // objects that change between the two revisions
)

var (
	gzipOnce  sync.Once
	gzipLists []compressed
)

// compressedLists fills a namespace, reads it with gzip, changes some objects and returns LISTs of
// both states: all namespaces, one namespace, pages and selections. Their responses join parts that
// were compressed before and after the change.
func compressedLists(t *testing.T, ctx context.Context) []compressed {
	t.Helper()
	gzipOnce.Do(func() { gzipLists = makeCompressedLists(t, ctx) })
	if len(gzipLists) == 0 {
		t.Fatal("there are no lists to read: another test could not make them")
	}
	return gzipLists
}

func makeCompressedLists(t *testing.T, ctx context.Context) []compressed {
	t.Helper()
	engine := both.strata
	api := engine.API()
	namespace := harness.Namespace(t, ctx, api, harness.NewName("gzip"))
	words := strings.Fields("revision compact tombstone snapshot event batch cursor progress bookmark prefix index äöü \"quoted\" <tag> & \u2028")
	random := rand.New(rand.NewPCG(1, 2))
	text := func() string {
		var b strings.Builder
		for b.Len() < 900 {
			b.WriteString(words[random.IntN(len(words))])
			b.WriteByte(' ')
		}
		return b.String()
	}
	texts := make([]string, gzipObjects)
	for i := range texts {
		texts[i] = text()
	}
	write := func(method func(context.Context, string, any) (harness.Object, error), path func(i int) string, from, to int) {
		t.Helper()
		harness.Check(t, harness.InParallel(ctx, to-from, func(ctx context.Context, i int) error {
			o := configMap(fmt.Sprintf("map-%04d", from+i), texts[from+i])
			o["metadata"].(object)["labels"] = object{"even": fmt.Sprint(i%2 == 0)}
			_, err := method(ctx, path(from+i), o)
			return err
		}))
	}
	write(api.Create, func(int) string { return maps(namespace) }, 0, gzipObjects)

	var lists []compressed
	add := func() {
		t.Helper()
		list, err := api.List(ctx, maps(namespace), "")
		harness.Check(t, err)
		exact := "&resourceVersionMatch=Exact&resourceVersion=" + list.Metadata.ResourceVersion
		for _, accept := range []string{"application/json", "application/vnd.kubernetes.protobuf"} {
			for _, target := range []string{
				"/api/v1/configmaps?" + exact[1:],
				maps(namespace) + "?" + exact[1:],
				maps(namespace) + "?limit=333" + exact,
				maps(namespace) + "?labelSelector=" + url.QueryEscape("even=true") + exact,
				maps(namespace) + "?pretty=false" + exact,
			} {
				l := compressed{Target: target, Accept: accept}
				r := harness.Must[*harness.Response](t)(engine.send(ctx, adminToken, http.MethodGet, target, "", http.Header{"Accept": {accept}, "Accept-Encoding": {"identity"}}))
				if l.plain = r.Body; r.Code != http.StatusOK || len(r.Body) < 128<<10 || r.Header.Get("Content-Encoding") != "" {
					t.Fatalf("GET %s: %d, %d bytes in %q, want 200 and at least 128 KiB that are not compressed", target, r.Code, len(r.Body), r.Header.Get("Content-Encoding"))
				}
				r = harness.Must[*harness.Response](t)(engine.send(ctx, adminToken, http.MethodGet, target, "", http.Header{"Accept": {accept}, "Accept-Encoding": {"gzip"}}))
				if r.Header.Get("Content-Encoding") != "gzip" {
					t.Fatalf("GET %s: the content encoding is %q, want gzip", target, r.Header.Get("Content-Encoding"))
				}
				lists = append(lists, l)
			}
		}
	}
	add()
	for range gzipChanged {
		i := random.IntN(gzipObjects)
		texts[i] = text()
		write(api.Update, func(i int) string { return maps(namespace) + fmt.Sprintf("/map-%04d", i) }, i, i+1)
	}
	add()
	return lists
}

// reading is a LIST as decoded by a client.
type reading struct {
	How      string `json:"how"`
	Target   string `json:"target"`
	Accept   string `json:"accept"`
	Encoding string `json:"encoding"` // the Content-Encoding, if the client can read it
	SHA256   string `json:"sha256"`
	Bytes    int    `json:"bytes"`
	Error    string `json:"error"`
}

// expectReadings fails the test unless each list was read in each way, and equals its uncompressed
// form.
func expectReadings(t *testing.T, lists []compressed, ways []string, readings []reading) {
	t.Helper()
	if got, want := len(readings), len(lists)*len(ways); got != want {
		t.Errorf("%d answers were read, want %d: %d lists in the ways %q", got, want, len(lists), ways)
	}
	for _, r := range readings {
		i := slices.IndexFunc(lists, func(l compressed) bool { return l.Target == r.Target && l.Accept == r.Accept })
		if i < 0 || !slices.Contains(ways, r.How) {
			t.Errorf("no request GET %s (%s) by %s", r.Target, r.Accept, r.How)
			continue
		}
		want := lists[i].plain
		if sum := fmt.Sprintf("%x", sha256.Sum256(want)); r.Error != "" || r.SHA256 != sum {
			t.Errorf("GET %s (%s) by %s: decoded to %d bytes (%s), want %d: %s", r.Target, r.Accept, r.How, r.Bytes, r.Encoding, len(want), r.Error)
		}
		if r.Encoding != "gzip" {
			t.Errorf("GET %s (%s) by %s: the content encoding is %q, want gzip", r.Target, r.Accept, r.How, r.Encoding)
		}
	}
}

func TestGzip_GoClient_DecodesLists(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	lists := compressedLists(t, ctx)
	for _, http2 := range []bool{false, true} {
		config := both.strata.ConfigFor(adminToken)
		if !http2 {
			config.NextProtos = []string{"http/1.1"}
		}
		client, err := rest.HTTPClientFor(config)
		harness.Check(t, err)
		for _, l := range lists {
			req, err := http.NewRequestWithContext(ctx, http.MethodGet, both.strata.URL+l.Target, nil)
			harness.Check(t, err)
			req.Header.Set("Accept", l.Accept)
			resp, err := client.Do(req)
			harness.Check(t, err)
			var body bytes.Buffer
			_, err = body.ReadFrom(resp.Body)
			resp.Body.Close()
			if err != nil || !resp.Uncompressed || !bytes.Equal(body.Bytes(), l.plain) || http2 != (resp.ProtoMajor == 2) {
				t.Errorf("GET %s (%s) over %s: decoded to %d bytes (was compressed: %v), want %d; %v",
					l.Target, l.Accept, resp.Proto, body.Len(), resp.Uncompressed, len(l.plain), err)
			}
		}
	}
}

func TestGzip_Curl_DecodesLists(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	curl := program(t, "curl")
	lists := compressedLists(t, ctx)
	server := both.strata
	var readings []reading
	ways := []string{"--http1.1", "--http2"}
	for _, way := range ways {
		dir := t.TempDir()
		for i, l := range lists {
			body, header := filepath.Join(dir, fmt.Sprint(i)), filepath.Join(dir, fmt.Sprint(i, ".header"))
			// curl's default agent gets indented JSON, unless the query disables it
			agent := "reader/1"
			if strings.Contains(l.Target, "pretty=false") {
				agent = "curl/7"
			}
			out, err := exec.CommandContext(ctx, curl, "--silent", "--show-error", "--fail", "--compressed", way, "--noproxy", "*", "--cacert", server.CAFile,
				"--header", "Authorization: Bearer "+adminToken, "--header", "Accept: "+l.Accept, "--user-agent", agent,
				"--dump-header", header, "--output", body, server.URL+l.Target).CombinedOutput()
			if err != nil {
				t.Fatalf("curl %s: %v\n%s", l.Target, err, out)
			}
			r := reading{How: way, Target: l.Target, Accept: l.Accept}
			data := harness.Must[[]byte](t)(os.ReadFile(body))
			r.Bytes, r.SHA256 = len(data), fmt.Sprintf("%x", sha256.Sum256(data))
			for _, line := range strings.Split(string(harness.Must[[]byte](t)(os.ReadFile(header))), "\r\n") {
				if name, value, _ := strings.Cut(line, ": "); strings.EqualFold(name, "Content-Encoding") {
					r.Encoding = value
				}
			}
			readings = append(readings, r)
		}
	}
	expectReadings(t, lists, ways, readings)
}

// TestGzip_CurlIndentedJSON_DecodesLists: the default request of curl, which gets indented JSON.
func TestGzip_CurlIndentedJSON_DecodesLists(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	curl := program(t, "curl")
	l := compressedLists(t, ctx)[0]
	out, err := exec.CommandContext(ctx, curl, "--silent", "--show-error", "--fail", "--compressed", "--noproxy", "*", "--cacert", both.strata.CAFile,
		"--header", "Authorization: Bearer "+adminToken, both.strata.URL+l.Target).Output()
	harness.Check(t, err)
	if !bytes.Contains(out, []byte("\n  \"kind\": \"ConfigMapList\"")) {
		t.Errorf("the list is not indented; it begins with\n%.200s", out)
	}
	var got, want any
	harness.Check(t, json.Unmarshal(out, &got))
	harness.Check(t, json.Unmarshal(l.plain, &want))
	if fmt.Sprint(got) != fmt.Sprint(want) {
		t.Error("the indented list is another one")
	}
}

// TestGzip_NodeClient_DecodesLists: fetch decompresses by itself; with https and http2 the test
// uses zlib.
func TestGzip_NodeClient_DecodesLists(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	node := program(t, "node")
	lists := compressedLists(t, ctx)
	input := harness.Must[[]byte](t)(json.Marshal(map[string]any{"url": both.strata.URL, "token": adminToken, "lists": lists}))
	cmd := exec.CommandContext(ctx, node, "testdata/js/gzip.mjs")
	cmd.Env = append(os.Environ(), "NODE_EXTRA_CA_CERTS="+both.strata.CAFile)
	cmd.Stdin = bytes.NewReader(input)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("node: %v\n%s", err, stderr.String())
	}
	var readings []reading
	harness.Check(t, json.Unmarshal(out, &readings))
	expectReadings(t, lists, []string{"fetch", "https", "http2"}, readings)
}
