package access

import (
	"bufio"
	"bytes"
	"cmp"
	"compress/gzip"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sync/errgroup"
	auditv1 "k8s.io/apiserver/pkg/apis/audit/v1"

	"github.com/stratakube/strata/test/harness"
)

// request is a request of a user.
type request struct {
	user   string
	method string // GET if empty
	target string // as sent in the request line
	header http.Header
	http10 bool

	// list, if not empty, is the target of a paged list by a user with permission to read all
	// objects. The continue token of its answer replaces TOKEN in target.
	list string
	// from is the engine that answers list; nil for the engine under test.
	from *engine
}

func (r request) String() string {
	text := fmt.Sprintf("%s: %s %s", r.user, cmp.Or(r.method, http.MethodGet), r.target)
	if r.list != "" {
		text += " with the token of " + r.list
	}
	if r.http10 {
		text += " HTTP/1.0"
	}
	for _, name := range slices.Sorted(maps.Keys(r.header)) {
		text += fmt.Sprintf(" %s=%q", name, r.header[name])
	}
	return text
}

// wire is an HTTP/1.1 connection.
type wire struct {
	net.Conn
	in   *bufio.Reader
	idle time.Time // since then
}

// idleBound is how long a connection is kept: less than the 90 s after which a server closes it.
const idleBound = 30 * time.Second

// connect returns an idle connection, or a new one.
func (e *engine) connect(ctx context.Context) (*wire, error) {
	for kept := true; kept; {
		select {
		case w := <-e.wires:
			if time.Since(w.idle) < idleBound {
				return w, nil
			}
			w.Close()
		default:
			kept = false
		}
	}
	conn, err := e.Dial(ctx)
	if err != nil {
		return nil, err
	}
	return &wire{Conn: conn, in: bufio.NewReader(conn)}, nil
}

// letGo keeps a connection for the next request, once its response has been read to the end.
func (e *engine) letGo(w *wire, resp *http.Response) {
	if !resp.Close {
		w.idle = time.Now()
		select {
		case e.wires <- w:
			return
		default:
		}
	}
	w.Close()
}

// send sends a request unchanged: no library canonicalizes it. A compressed body is returned
// decompressed.
func (e *engine) send(ctx context.Context, r request) (*harness.Response, error) {
	e.Used(ctx) // also of a connection that another test has opened
	w, err := e.connect(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { w.Close() })
	defer stop()
	method := cmp.Or(r.method, http.MethodGet)
	var text bytes.Buffer
	version := "1.1"
	if r.http10 {
		version = "1.0"
	}
	fmt.Fprintf(&text, "%s %s HTTP/%s\r\nHost: 127.0.0.1\r\n", method, r.target, version)
	if token := tokenOf(r.user); token != "" && r.header.Get("Authorization") == "" {
		fmt.Fprintf(&text, "Authorization: Bearer %s\r\n", token)
	}
	_ = r.header.Write(&text) // to memory
	text.WriteString("\r\n")
	fail := func(err error) (*harness.Response, error) {
		w.Close()
		return nil, fmt.Errorf("%s: %s: %w", e.name, r, err)
	}
	if _, err := w.Write(text.Bytes()); err != nil {
		return fail(err)
	}
	resp, err := http.ReadResponse(w.in, &http.Request{Method: method})
	if err != nil {
		return fail(err)
	}
	data, err := io.ReadAll(resp.Body)
	if err != nil {
		return fail(err)
	}
	e.letGo(w, resp)
	if resp.Header.Get("Content-Encoding") == "gzip" {
		unzip, err := gzip.NewReader(bytes.NewReader(data))
		if err == nil {
			data, err = io.ReadAll(unzip)
		}
		if err != nil {
			return nil, fmt.Errorf("%s: %s: %w", e.name, r, err)
		}
	}
	return &harness.Response{Code: resp.StatusCode, Header: resp.Header, Body: data}, nil
}

// ask is send, with the request's continue token and an ID for its audit events.
func (e *engine) ask(ctx context.Context, r request, id string) (*harness.Response, error) {
	if r.list != "" {
		from := e
		if r.from != nil {
			from = r.from
		}
		token, err := from.token(ctx, r.list)
		if err != nil {
			return nil, err
		}
		r.target = strings.ReplaceAll(r.target, "TOKEN", token)
	}
	r.header = r.header.Clone()
	if r.header == nil {
		r.header = http.Header{}
	}
	r.header.Set("Audit-Id", id)
	return e.send(ctx, r)
}

// patient is send. A server that is overloaded by other tests is asked again.
func (e *engine) patient(ctx context.Context, r request) (answer *harness.Response, err error) {
	err = harness.Poll(ctx, func(ctx context.Context) (done bool, err error) {
		answer, err = e.send(ctx, r)
		return err == nil && answer.Code != http.StatusTooManyRequests, err
	})
	return answer, err
}

// token returns the continue token of the list at target, as answered to the user with permission
// to read all objects.
func (e *engine) token(ctx context.Context, target string) (string, error) {
	answer, err := e.patient(ctx, request{user: all, target: target})
	if err != nil {
		return "", err
	}
	list, err := answer.List()
	if err != nil {
		return "", err
	}
	if list.Metadata.Continue == "" {
		return "", fmt.Errorf("%s: %s has no continue token", e.name, target)
	}
	return list.Metadata.Continue, nil
}

// answer is the compared part of a response.
type answer struct {
	code  int
	media string
	body  string   // of a refusal
	marks []string // the marks in the body
	// audited reports whether the request leaves events in the audit log. A path that denotes a
	// watch but no resource leaves none.
	audited bool
	again   bool // not answered: the request is sent again
}

var tokenInText = regexp.MustCompile(`continue=[^& "\\]*`)

func answerOf(r *harness.Response) answer {
	a := answer{code: r.Code, media: r.Header.Get("Content-Type"), marks: marks(r.Body), audited: r.Header.Get("Audit-Id") != ""}
	if bytes.Contains(r.Body, []byte("unable to determine kind and namespace from url")) {
		a.audited = false
	}
	if r.Code >= 400 {
		a.body, a.again = string(r.Body), r.Refused() || r.NotSent()
	}
	return a
}

// expectation of both answers, in addition to their being equal.
type expectation struct {
	// sees reports whether the user may see the object with the mark; nil if the user may see none.
	sees func(mark string) bool
	// refused is the code of a refusal by authentication or authorization, -1 if any code is
	// allowed, and 0 if the request is not refused.
	refused int
}

func (x expectation) check(a answer) error {
	for _, m := range a.marks {
		if x.sees == nil || !x.sees(m) {
			return fmt.Errorf("the answer shows %s", m)
		}
	}
	refused := a.code == http.StatusUnauthorized || a.code == http.StatusForbidden
	switch {
	case x.refused < 0:
	case x.refused == 0 && refused:
		return fmt.Errorf("refused: %d %s", a.code, a.body)
	case x.refused > 0 && a.code != x.refused:
		return fmt.Errorf("code %d, want %d: %s", a.code, x.refused, a.body)
	}
	return nil
}

// asked is a request with its expectation.
type asked struct {
	request
	want expectation
}

// workers is the number of concurrent requests. Most of them are watches that are idle.
const workers = 64

// askAll sends all requests to one engine, and fails the test unless answers and audit events meet
// the expectations. It returns the answers, and the events of each request. Those that are refused
// on a busy machine, by priority and fairness or by a replica without a healthy primary, are sent
// again.
func (e *engine) askAll(t *testing.T, ctx context.Context, prefix string, requests []asked) ([]answer, [][]auditv1.Event) {
	t.Helper()
	answers, ids := make([]answer, len(requests)), make([]string, len(requests))
	due := 0 // requests that leave audit events
	left := make([]int, len(requests))
	for i := range left {
		left[i] = i
	}
	for round := 0; len(left) > 0; round++ {
		group, asking := errgroup.WithContext(ctx)
		group.SetLimit(workers)
		for _, i := range left {
			ids[i] = fmt.Sprintf("%s-%d-%d", prefix, i, round)
			group.Go(func() error {
				resp, err := e.ask(asking, requests[i].request, ids[i])
				if err == nil {
					answers[i] = answerOf(resp)
				}
				return err
			})
		}
		harness.Check(t, group.Wait())
		left = slices.DeleteFunc(left, func(i int) bool {
			if answers[i].audited {
				due++
			}
			return !answers[i].again
		})
	}
	byID, err := e.audited(ctx, prefix+"-", due)
	harness.Check(t, err)
	events := make([][]auditv1.Event, len(requests))
	for i, r := range requests {
		if err := r.want.check(answers[i]); err != nil {
			t.Errorf("%s: %s: %v", e.name, r.request, err)
		}
		events[i] = byID[ids[i]]
		if answers[i].audited {
			if err := consistent(r.request, answers[i].code, events[i]); err != nil {
				t.Errorf("%s: %s: %v", e.name, r.request, err)
			}
		}
	}
	return answers, events
}

// same is askAll for both engines, and fails the test unless their answers and audit events are
// equal. A watch that ended before one engine had sent what the other did is repeated with more
// time.
func (w *world) same(t *testing.T, ctx context.Context, prefix string, requests []asked) {
	t.Helper()
	if cut := w.compare(t, ctx, prefix, requests); len(cut) > 0 {
		for i := range cut {
			cut[i].target = shortWatch.ReplaceAllString(cut[i].target, "${1}20")
		}
		w.compare(t, ctx, prefix+"-repeated", cut)
	}
}

// shortWatch matches the time limit of a watch that ends as soon as possible.
var shortWatch = regexp.MustCompile(`(\btimeoutSeconds=)1\b`)

// compare is same without repetition. It returns the short watches that do not show the same
// objects, without a failure.
func (w *world) compare(t *testing.T, ctx context.Context, prefix string, requests []asked) (cut []asked) {
	t.Helper()
	want, wantEvents := w.upstream.askAll(t, ctx, prefix, requests)
	got, gotEvents := w.strata.askAll(t, ctx, prefix, requests)
	for i, r := range requests {
		if got[i].code == want[i].code && !slices.Equal(got[i].marks, want[i].marks) && shortWatch.MatchString(r.target) {
			cut = append(cut, r)
			continue
		}
		if d := differing(got[i], want[i]); d != "" {
			t.Errorf("%s: %s", r.request, d)
		}
		if got400for500(got[i], want[i]) {
			continue
		}
		if got, want := auditText(t, gotEvents[i]), auditText(t, wantEvents[i]); got != want {
			t.Errorf("%s: audit events\n%s\nupstream\n%s", r.request, got, want)
		}
	}
	return cut
}

// got400for500 reports whether two answers differ by design: a GET with an invalid resourceVersion
// is the client's mistake, and 500 by upstream's cacher (docs/keps.md).
func got400for500(got, want answer) bool {
	return got.code == http.StatusBadRequest && want.code == http.StatusInternalServerError &&
		strings.Contains(got.body, "invalid resource version: ") && strings.Contains(want.body, "resourceVersion: Invalid value: ")
}

// differing describes the difference between two answers; "" if they are equal.
func differing(got, want answer) string {
	switch {
	case got400for500(got, want):
	case got.code != want.code:
		return fmt.Sprintf("code %d, upstream %d\n  strata   %.300s\n  upstream %.300s", got.code, want.code, got.body, want.body)
	case got.media != want.media:
		return fmt.Sprintf("content type %q, upstream %q", got.media, want.media)
	case got.body != want.body:
		return fmt.Sprintf("body\n  %s\nupstream\n  %s", got.body, want.body)
	case got.audited != want.audited:
		return fmt.Sprintf("audited: %v, upstream %v", got.audited, want.audited)
	case !slices.Equal(got.marks, want.marks):
		return fmt.Sprintf("shows %v, upstream %v", got.marks, want.marks)
	}
	return ""
}

// audited returns the events of n requests whose IDs begin with prefix, by ID, when all are
// complete.
func (e *engine) audited(ctx context.Context, prefix string, n int) (events map[string][]auditv1.Event, err error) {
	err = harness.Poll(ctx, func(context.Context) (bool, error) {
		file, err := os.Open(e.auditLog)
		if err != nil {
			return false, err
		}
		defer file.Close()
		events = map[string][]auditv1.Event{}
		complete := map[string]bool{}
		lines := bufio.NewReader(file)
		for {
			line, err := lines.ReadBytes('\n')
			if err != nil {
				break // the line is not complete yet
			}
			if !bytes.Contains(line, []byte(`"auditID":"`+prefix)) {
				continue
			}
			var event auditv1.Event
			if err := json.Unmarshal(line, &event); err != nil {
				return false, fmt.Errorf("%s: %w", line, err)
			}
			id := string(event.AuditID)
			events[id] = append(events[id], event)
			// its only event
			unauthorized := event.ResponseStatus != nil && event.ResponseStatus.Code == http.StatusUnauthorized
			complete[id] = complete[id] || unauthorized || event.Stage == auditv1.StageResponseComplete || event.Stage == auditv1.StagePanic
		}
		return len(complete) == n, fmt.Errorf("%s: %d of %d requests %s... are complete in the audit log", e.name, len(complete), n, prefix)
	})
	return events, err
}

// consistent returns an error unless the events of a request record its code and its user.
func consistent(r request, code int, events []auditv1.Event) error {
	last := events[len(events)-1]
	if last.ResponseStatus == nil || int(last.ResponseStatus.Code) != code {
		return fmt.Errorf("answered with %d, and audited as %v", code, last.ResponseStatus)
	}
	if last.Stage == auditv1.StagePanic {
		return fmt.Errorf("panicked: %v", last.ResponseStatus)
	}
	name := r.user
	switch r.user {
	case anonymous:
		name = "system:anonymous"
	case notInGroup:
		name = nodeA
	case stranger:
		name = ""
	case constrained, impersonator:
		// The impersonated user is in a separate field.
	}
	if r.header.Get("Authorization") == "" && last.User.Username != name {
		return fmt.Errorf("audited as of user %q, want %q", last.User.Username, name)
	}
	return nil
}

// auditText returns the events without the fields that differ between two requests.
func auditText(t *testing.T, events []auditv1.Event) string {
	t.Helper()
	var text strings.Builder
	for _, event := range events {
		event.AuditID = "" // that of a repeated request differs
		event.RequestReceivedTimestamp.Reset()
		event.StageTimestamp.Reset()
		event.RequestURI = tokenInText.ReplaceAllString(event.RequestURI, "continue=TOKEN")
		// The set of recorded latencies depends on the duration of the request.
		maps.DeleteFunc(event.Annotations, func(key, _ string) bool { return strings.HasPrefix(key, "apiserver.latency.k8s.io/") })
		// Several roles allow all users to read a page, and the event names any one of them.
		if event.ObjectRef == nil {
			delete(event.Annotations, "authorization.k8s.io/reason")
		}
		line, err := json.Marshal(event)
		harness.Check(t, err)
		text.Write(line)
		text.WriteByte('\n')
	}
	return text.String()
}
