package samebytes

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"net/http"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// same sends the request to both servers and fails the test unless the answers are equal. It
// returns upstream's answer.
func (w *world) same(t *testing.T, ctx context.Context, r request) *response {
	t.Helper()
	want, all := w.compare(t, ctx, r)
	for len(all) > 0 {
		// A server may have written by itself, and the two servers may have received the change at
		// different times. A difference without a change is a failure.
		before, err := w.revision(ctx)
		harness.Check(t, err)
		if w.comparedAt(r.path) != before {
			w.ask(t, ctx, request{path: r.path}) // a consistent list
			w.compared.Store(r.path, before)
		}
		if want, all = w.compare(t, ctx, r); len(all) == 0 {
			break
		}
		after, err := w.revision(ctx)
		harness.Check(t, err)
		if before != after {
			continue
		}
		for _, d := range all {
			t.Errorf("%s: %s", r, d)
		}
		break
	}
	return want
}

// compare sends the request to both servers once, and returns upstream's answer and the
// differences that byDesign does not permit.
func (w *world) compare(t *testing.T, ctx context.Context, r request) (want *response, all []string) {
	t.Helper()
	answers := w.ask(t, ctx, r)
	got, want := answers[0], answers[1]
	applyDesign(r, got, want)
	return want, differences(got, want)
}

// comparedAt returns the last revision at which both servers were known to be current for a path:
// that of an earlier comparison, or that at which they had become quiet before the tests began.
func (w *world) comparedAt(path string) int64 {
	if rev, ok := w.compared.Load(path); ok {
		return rev.(int64)
	}
	return w.quiet
}

// differences describes the differences between two answers.
func differences(got, want *response) []string {
	var all []string
	add := func(format string, args ...any) { all = append(all, fmt.Sprintf(format, args...)) }
	if got.code != want.code {
		add("code %d, upstream %d (%s)\n  strata   %s\n  upstream %s", got.code, want.code, want.header.Get("Content-Type"), excerpt(got.body, 0), excerpt(want.body, 0))
		return all
	}
	if got.proto != want.proto {
		add("%s, upstream %s", got.proto, want.proto)
	}
	if got.err != nil || want.err != nil {
		add("the body cannot be read: %v, upstream %v", got.err, want.err)
	}
	headers := slices.Sorted(maps.Keys(got.header))
	for name := range want.header {
		if !slices.Contains(headers, name) {
			headers = append(headers, name)
		}
	}
	for _, name := range headers {
		if g, w := got.header[name], want.header[name]; !slices.Equal(g, w) {
			add("header %s is %q, upstream %q", name, g, w)
		}
	}
	if d := differingBytes(got.body, want.body); d != "" {
		add("body: %s", d)
	}
	return all
}

// differingBytes describes the first difference between two bodies, with its context, and whether
// the bodies are semantically equal; "" if they are equal.
func differingBytes(got, want []byte) string {
	if bytes.Equal(got, want) {
		return ""
	}
	at := 0
	for at < min(len(got), len(want)) && got[at] == want[at] {
		at++
	}
	text := fmt.Sprintf("differs at byte %d of %d, upstream %d\n  strata   %s\n  upstream %s", at, len(got), len(want), excerpt(got, at), excerpt(want, at))
	var g, w any
	if json.Unmarshal(got, &g) == nil && json.Unmarshal(want, &w) == nil {
		if reflect.DeepEqual(g, w) {
			return text + "\n  the same when decoded"
		}
		return text + "\n  not the same when decoded either"
	}
	return text
}

// excerpt quotes the bytes around offset at.
func excerpt(data []byte, at int) string {
	const before, after = 60, 140
	from, to := max(0, at-before), min(len(data), at+after)
	if from >= to {
		return fmt.Sprintf("(ends at %d)", len(data))
	}
	return fmt.Sprintf("%q", data[from:to])
}

// cases names requests for subtests.
type cases map[string]request

// run sends each request, in a subtest of its name.
func (w *world) run(t *testing.T, ctx context.Context, all cases) {
	t.Helper()
	for _, name := range slices.Sorted(maps.Keys(all)) {
		t.Run(name, func(t *testing.T) { w.same(t, ctx, all[name]) })
	}
}

// settle brings both servers to the current revision for the resource at path: a LIST from memory
// without a consistent read is only as new as the last event that its server has received.
func (w *world) settle(t *testing.T, ctx context.Context, path string) {
	t.Helper()
	harness.Check(t, w.awaitList(ctx, path))
}

// eachSubject runs a parallel test for each subject, with the revision to which both servers are
// settled.
func (w *world) eachSubject(t *testing.T, ctx context.Context, test func(t *testing.T, s subject, present int64)) {
	for _, s := range subjects {
		t.Run(s.String(), func(t *testing.T) {
			t.Parallel()
			w.settle(t, ctx, s.path())
			present, err := w.revision(ctx)
			harness.Check(t, err)
			test(t, s, present)
		})
	}
}

// awaitList returns when both servers list path: a resource without earlier requests may not be in
// memory.
func (w *world) awaitList(ctx context.Context, path string) error {
	return harness.Poll(ctx, func(ctx context.Context) (bool, error) {
		for _, e := range w.engines {
			answer, err := e.ask(ctx, request{path: path})
			if err != nil {
				return false, err
			}
			if answer.code != http.StatusOK {
				return false, fmt.Errorf("list %s: %d %s", path, answer.code, strings.TrimSpace(string(answer.body)))
			}
		}
		return true, nil
	})
}
