package readclients

import (
	"bufio"
	"bytes"
	"context"
	"fmt"
	"io"
	"net"
	"net/http"
	"path/filepath"
	"regexp"
	"strings"
	"sync"
	"testing"
	"time"

	"k8s.io/client-go/rest"

	"github.com/stratakube/strata/test/harness"
)

// Users of the engines, by token. Only the administrator is exempt from priority and fairness.
const (
	adminToken    = "admin-token"
	readerToken   = "reader-token"  // may read all objects
	noRightsToken = "nobody-token"  // has no rights
	oneNameToken  = "onename-token" // TestRBAC_SingleName_ReadsThatObjectOnly grants its rights

	tokens = adminToken + ",admin,admin,system:masters\n" +
		readerToken + ",reader,reader,readers\n" +
		noRightsToken + ",nobody,nobody,\n" +
		oneNameToken + ",onename,onename,\n"
)

// auditPolicy sets the level by namespace. Bodies of requests in other namespaces are never logged.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
rules:
- {level: RequestResponse, namespaces: [audit-response]}
- {level: Request, namespaces: [audit-request]}
- {level: Metadata, namespaces: [audit-metadata]}
- {level: Metadata, namespaces: [audit-stages], omitStages: [RequestReceived, ResponseStarted]}
- {level: None}
`

// engines are two API servers on one etcd that differ in the engine and in their output files.
type engines struct {
	strata, upstream *engine
}

type engine struct {
	*harness.Server
	name     string
	auditLog string
	traces   *collector
}

func startEngines(e *harness.Env) *engines {
	etcd := e.Etcd()
	start := func(name string) *engine {
		dir := e.Dir(name)
		engine := &engine{name: name, auditLog: filepath.Join(dir, "audit.log"), traces: startCollector(e)}
		engine.Server = e.APIServer(etcd,
			"--engine="+name,
			"--disable-admission-plugins=ServiceAccount",
			"--token-auth-file="+e.WriteFile("tokens.csv", []byte(tokens)),
			"--audit-policy-file="+e.WriteFile("audit.yaml", []byte(auditPolicy)),
			"--audit-log-path="+engine.auditLog,
			"--audit-log-mode=blocking",
			"--tracing-config-file="+e.WriteFile("tracing.yaml", []byte(engine.traces.config())),
			"--cors-allowed-origins=//127\\.0\\.0\\.1(:|$)",
		)
		return engine
	}
	pair := &engines{}
	var starting sync.WaitGroup
	starting.Go(func() { pair.strata = start(harness.Strata) })
	starting.Go(func() { pair.upstream = start(harness.Upstream) })
	starting.Wait()
	return pair
}

// each returns both engines, upstream's first.
func (e *engines) each() []*engine { return []*engine{e.upstream, e.strata} }

// awaitRevision returns when both engines have reached the revision.
func (e *engines) awaitRevision(ctx context.Context, path, resourceVersion string) error {
	for _, engine := range e.each() {
		if err := harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			// a server waits 3 s for the revision
			_, err := engine.API().List(ctx, path, "limit=1&resourceVersion="+resourceVersion)
			return err == nil, err
		}); err != nil {
			return fmt.Errorf("%s: %w", engine.name, err)
		}
	}
	return nil
}

// send sends a request without a body. An answer with any code is not an error.
func (e *engine) send(ctx context.Context, token, method, path, query string, header http.Header) (*harness.Response, error) {
	client, err := rest.HTTPClientFor(e.ConfigFor(token))
	if err != nil {
		return nil, err
	}
	target := e.URL + path
	if query != "" {
		target += "?" + query
	}
	req, err := http.NewRequestWithContext(ctx, method, target, nil)
	if err != nil {
		return nil, err
	}
	for name, values := range header {
		req.Header[name] = values
	}
	return do(client, req)
}

func do(client *http.Client, req *http.Request) (*harness.Response, error) {
	resp, err := client.Do(req)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", req.Method, req.URL, err)
	}
	return &harness.Response{Code: resp.StatusCode, Header: resp.Header, Body: body}, nil
}

// dial opens a connection for HTTP/1.1 that ends with ctx. The caller closes it.
func (e *engine) dial(ctx context.Context) (net.Conn, error) {
	conn, err := e.Dial(ctx)
	if err != nil {
		return nil, err
	}
	if deadline, ok := ctx.Deadline(); ok {
		err = conn.SetDeadline(deadline)
	}
	return conn, err
}

// patient is raw for a request that no server has a reason to refuse: a busy machine may keep it
// from catching up with etcd in time, or from serving a queued request. It repeats a refused
// request, a few times.
func (e *engine) patient(ctx context.Context, token, method, target string, header http.Header) (*harness.Response, error) {
	r, err := e.raw(ctx, token, method, target, header)
	for range 4 {
		if err != nil || !r.Refused() {
			break
		}
		harness.Pause(ctx, time.Second)
		r, err = e.raw(ctx, token, method, target, header)
	}
	return r, err
}

// longer returns the target of a watch of a second with more time: a busy machine may end it before
// its first event, or not confirm the present state within a second.
func longer(target string) string {
	return strings.Replace(target, "timeoutSeconds=1", "timeoutSeconds=10", 1)
}

// raw sends a request with target unchanged in the request line: no library canonicalizes it.
func (e *engine) raw(ctx context.Context, token, method, target string, header http.Header) (*harness.Response, error) {
	conn, err := e.dial(ctx)
	if err != nil {
		return nil, err
	}
	defer conn.Close()
	var request bytes.Buffer
	fmt.Fprintf(&request, "%s %s HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %s\r\nConnection: close\r\n", method, target, token)
	if err := header.Write(&request); err != nil {
		return nil, err
	}
	request.WriteString("\r\n")
	if _, err := conn.Write(request.Bytes()); err != nil {
		return nil, err
	}
	resp, err := http.ReadResponse(bufio.NewReader(conn), &http.Request{Method: method})
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	body, err := io.ReadAll(resp.Body)
	if err != nil {
		return nil, fmt.Errorf("%s %s: %w", method, target, err)
	}
	return &harness.Response{Code: resp.StatusCode, Header: resp.Header, Body: body}, nil
}

// listRevision finds the revision of a list, as JSON or YAML, which advances when other tests
// write.
var listRevision = regexp.MustCompile(`("metadata":\s*\{(?:\s*"continue":\s*"",)?\s*"resourceVersion":\s*"|(?m:^metadata:\n(?:  continue: ""\n)?  resourceVersion: "))[0-9]+"`)

// age finds the age of an object in a table.
var age = regexp.MustCompile(`"([0-9]+[smhdy])+"`)

// comparable returns the answer without its parts that depend on time or on the transfer encoding.
func comparable(r *harness.Response) string {
	header := r.Header.Clone()
	for _, name := range []string{"Date", "Audit-Id", "Content-Length"} {
		header.Del(name)
	}
	var text strings.Builder
	fmt.Fprintf(&text, "%d\n", r.Code)
	_ = header.Write(&text) // to memory
	text.WriteByte('\n')
	text.Write(age.ReplaceAll(listRevision.ReplaceAll(r.Body, []byte(`${1}0"`)), []byte(`"0s"`)))
	return text.String()
}

// request is a request of sameAnswers.
type request struct {
	token, method, target string
	header                http.Header
	// an additional condition on the answer; it always has to equal upstream's
	also func(*harness.Response) error
}

// sameAnswers fails the test unless each request is answered by both engines with the same code,
// headers and body. Where watches of a second differ, longer ones decide.
func (e *engines) sameAnswers(t *testing.T, ctx context.Context, requests []request) {
	t.Helper()
	harness.Check(t, harness.InParallel(ctx, len(requests), func(ctx context.Context, i int) error {
		r := requests[i]
		got, want, err := e.answers(ctx, r)
		if more := longer(r.target); err == nil && more != r.target && (comparable(got) != comparable(want) || r.also != nil && r.also(got) != nil) {
			r.target = more
			got, want, err = e.answers(ctx, r)
		}
		if err != nil {
			return err
		}
		if comparable(got) != comparable(want) {
			t.Errorf("%s %s (%v): got\n%s\nwant\n%s", r.method, r.target, r.header, comparable(got), comparable(want))
		}
		if r.also != nil {
			if err := r.also(got); err != nil {
				t.Errorf("%s %s (%v): %v", r.method, r.target, r.header, err)
			}
		}
		return nil
	}))
}

// answers sends a request to both engines.
func (e *engines) answers(ctx context.Context, r request) (got, want *harness.Response, err error) {
	for _, engine := range e.each() {
		answer, err := engine.patient(ctx, r.token, r.method, r.target, r.header)
		if err != nil {
			return nil, nil, fmt.Errorf("%s: %s %s (%v): %w", engine.name, r.method, r.target, r.header, err)
		}
		if want == nil { // upstream's first
			want = answer
		} else {
			got = answer
		}
	}
	return got, want, nil
}
