package tables

import (
	"encoding/base64"
	"fmt"
	"maps"
	"math"
	"net/http"
	"slices"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// Tokens that no server has returned for such a list.
const (
	traversal  = "traversal"   // begins outside the request's prefix
	noStart    = "no start"    // has no start key
	noRevision = "no revision" // has no revision, or 0
	otherForm  = "other form"  // of an unknown version of the format
	notText    = "not text"    // is not base64
	latest     = "latest"      // has a revision below 0, which means the present
	// of a list of all namespaces, used for one namespace, and vice versa
	elsewhere = "elsewhere"
)

// none are the tokens that are refused.
var none = []string{traversal, noStart, noRevision, otherForm, notText}

// plain returns the token with a text.
func plain(text string) string { return base64.RawURLEncoding.EncodeToString([]byte(text)) }

// craft makes those tokens.
func (h *history) craft() {
	at := h.revisions[old]
	for i, s := range scopes {
		t := h.tokens[s.name]
		t[traversal] = token{value: plain(fmt.Sprintf(`{"v":"meta.k8s.io/v1","rv":%d,"start":"../../configmaps/default/a\u0000"}`, at))}
		t[noStart] = token{value: plain(fmt.Sprintf(`{"v":"meta.k8s.io/v1","rv":%d,"start":""}`, at))}
		t[noRevision] = token{value: plain(`{"v":"meta.k8s.io/v1","rv":0,"start":"a\u0000"}`)}
		t[otherForm] = token{value: plain(fmt.Sprintf(`{"v":"meta.k8s.io/v0","rv":%d,"start":"a\u0000"}`, at))}
		t[notText] = token{value: "&%/"}
		start, after := "a\\u0000", "table/a"
		if i == everywhere {
			start = "table/a\\u0000"
		}
		t[latest] = token{value: plain(`{"v":"meta.k8s.io/v1","rv":-5,"start":"` + start + `"}`), after: after}
		if i == everywhere { // all keys behind a
			t[elsewhere] = token{h.tokens[scopes[namespace].name][old].value, at, "a"}
		} else { // there is no table/table
			t[elsewhere] = token{h.tokens[scopes[everywhere].name][old].value, at, "table/" + h.tokens[scopes[everywhere].name][old].after}
		}
	}
}

// edgeRequests returns lists with such tokens, and with invalid limits.
func edgeRequests() (all []request) {
	for _, s := range scopes[:oneName] {
		for _, from := range append(slices.Clone(none), latest, elsewhere) {
			for _, version := range []string{unset, old} {
				for _, limit := range []int{0, 1, large} {
					all = append(all, request{verb: list, scope: s, version: version, from: from, limit: limit})
				}
			}
		}
		for _, limit := range []int{-1, math.MinInt64, math.MaxInt64} {
			for _, version := range []string{unset, zero, compacted, distant, old, future} {
				for _, match := range []string{unset, exact, notOlderThan} {
					for _, from := range []string{unset, compacted, old, inconsistent} {
						all = append(all, request{verb: list, scope: s, version: version, match: match, from: from, limit: limit})
					}
				}
			}
		}
	}
	return all
}

// edge returns the expectation for an edge request.
func (h *history) edge(r request, memory bool) expectation {
	if slices.Contains(none, r.from) && r.version == unset {
		return refused("a token that is none", http.StatusBadRequest, metav1.StatusReasonBadRequest)
	}
	same := r
	same.limit = max(0, r.limit) // a limit below 0 counts as none
	if r.from == latest {
		same.from = inconsistent
	}
	e := h.list(same, memory)
	if r.from == latest && e.aspects[code] == fmt.Sprint(http.StatusOK) {
		e = h.listNow(e.row, r, h.tokens[r.scope.name][latest].after, r.limit, consistent(memory))
	}
	return e
}

// looked are the aspects in which all engines agree at the edges; byDesign covers the others.
var looked = []aspect{code, reason, items, version, more, remaining}

// compareLooked compares the answers of all servers with their expectations, and with the last
// server's answers.
func compareLooked(t *testing.T, servers []*server, requests []request, want expect, got map[*server]answers) {
	t.Helper()
	rows := map[string][]request{}
	for _, r := range requests {
		row := want(r, servers[0]).row
		rows[row] = append(rows[row], r)
	}
	last := servers[len(servers)-1]
	for _, row := range slices.Sorted(maps.Keys(rows)) {
		t.Run(row, func(t *testing.T) {
			for _, r := range rows[row] {
				for _, s := range servers {
					e := want(r, s)
					if e.rule != (rule{}) {
						e.aspects[version] = e.rule.String()
					}
					if s.flags[len(s.flags)-1] != "--engine="+harness.Upstream {
						e.aspects[etcd] = e.reads.String()
					}
					for _, text := range differences(got[s][r].aspects, e.aspects) {
						t.Errorf("%s, %s: %s", r, s.name, text)
					}
					for about, text := range differences(got[s][r].aspects, got[last][r].aspects) {
						if d := designed(r, s, about); slices.Contains(looked, about) && d == nil {
							t.Errorf("%s, %s, and %s: %s", r, s.name, last.name, text)
						}
					}
				}
			}
		})
	}
}

// TestList_UnusualTokensAndLimits_MatchTable sends tokens that no server has returned, tokens of
// other lists, and invalid limits.
func TestList_UnusualTokensAndLimits_MatchTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	w := open(t, ctx)
	w.craft()
	want := func(r request, s *server) expectation { return w.edge(r, s.memory) }
	requests := edgeRequests()
	got, err := w.askAll(ctx, w.servers, requests, want)
	harness.Check(t, err)
	compareLooked(t, w.servers, requests, want, got)
}

// someListRequests returns the combinations for a LIST, except those that every server refuses.
func someListRequests() (all []request) {
	for _, r := range listRequests() {
		switch {
		case r.initial != unset, r.match == nonsense, r.scope == scopes[noName], r.from == present, r.limit == large && r.from != unset:
		default:
			all = append(all, r)
		}
	}
	return all
}

// uncached returns the expectation for a LIST of a resource that is not cached: etcd answers it,
// and the limit always applies.
func (h *history) uncached(r request) expectation {
	e := h.list(r, false)
	if e.aspects[code] != fmt.Sprint(http.StatusOK) {
		if c := e.aspects[code]; c == fmt.Sprint(http.StatusGatewayTimeout) {
			e.reads = values
		}
		return e
	}
	e.reads = values
	switch row := listRow(r); row {
	case "L6", "L9", "L11", "L16", "L17":
		limit := r.limit
		if r.scope.one != "" {
			limit = 0
		}
		e = h.listNow(row, r, "", limit, values)
	}
	return e
}

// TestList_UncachedResource_MatchesTable sends LISTs of a resource that neither engine caches.
// TestPagedList_UncachedResource_IsComplete is its short form.
func TestList_UncachedResource_MatchesTable(t *testing.T) {
	if !harness.Long() {
		t.Skip("starts two servers; STRATA_TEST_LONG=1 runs it")
	}
	ctx := harness.Context(t, testTimeout)
	const off = "--watch-cache-sizes=secrets#0"
	servers := []*server{
		{name: "strata, uncached", watchList: true, flags: []string{off, "--engine=" + harness.Strata}},
		{name: "upstream, uncached", watchList: true, flags: []string{off, "--engine=" + harness.Upstream}},
	}
	w := open(t, ctx, servers...)
	want := func(r request, _ *server) expectation { return w.uncached(r) }
	requests := someListRequests()
	got, err := w.askAll(ctx, servers, requests, want)
	harness.Check(t, err)
	compareLooked(t, servers, requests, want, got)
	for _, r := range requests {
		for about, text := range differences(got[servers[0]][r].aspects, got[servers[1]][r].aspects) {
			t.Errorf("%s: %s, and upstream: %s", r, about, text) // no difference is permitted
		}
	}
}

// whole returns the expectation for a LIST if limit and continue are ignored. The API itself still
// refuses combinations.
func (h *history) whole(r request, memory bool) expectation {
	if refusal := h.list(r, memory); refusal.aspects[code] == fmt.Sprint(http.StatusUnprocessableEntity) {
		return refusal
	}
	all := r
	all.limit, all.from = 0, unset
	return h.list(all, memory)
}

// TestList_ChunkingGateOff_MatchesTable sends LISTs to servers whose gate APIListChunking is off,
// in its long form to all forms of Strata. No answer has a token.
func TestList_ChunkingGateOff_MatchesTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	var further []*server
	if harness.Long() {
		further = []*server{
			{name: "strata, through upstream's handlers", memory: true, watchList: true,
				flags: []string{"--engine=" + harness.Strata, "--strata-feature-gates=ByteReadPath=false," + chunkingOff}},
			{name: "strata, gates off", watchList: true, flags: []string{"--engine=" + harness.Strata, gatesOff + "," + chunkingOff}},
		}
	}
	w := open(t, ctx, further...)
	servers := append(further, w.older[0])
	want := func(r request, s *server) expectation { return w.whole(r, s.memory) }
	requests := slices.DeleteFunc(someListRequests(), func(r request) bool {
		return r.limit == large || r.inVain() && r.scope != scopes[namespace] // these requests wait
	})
	got, err := w.askAll(ctx, servers, requests, want)
	harness.Check(t, err)
	compareLooked(t, servers, requests, want, got)
	for _, s := range servers {
		for r, a := range got[s] {
			if a.aspects[more] == "true" {
				t.Errorf("%s, %s: a token", r, s.name)
			}
		}
	}
}
