package tables

import (
	"net/http"
	"strconv"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// getRequests returns every combination for a GET, of an existing and of a missing object.
func getRequests() (all []request) {
	for _, s := range []*scope{scopes[oneName], scopes[noName]} {
		for _, version := range []string{unset, zero, compacted, distant, old, present, future, far, garbage} {
			all = append(all, request{verb: get, scope: s, version: version})
		}
	}
	return all
}

// get returns the expectation for a GET. KEP-2340 has no table for GET: without a resource version
// it is consistent, with one the answer is at that version or later.
func (h *history) get(r request, memory bool) expectation {
	const row = "GET"
	asked := nothing
	switch r.version {
	case garbage:
		return refused(row, http.StatusBadRequest, metav1.StatusReasonBadRequest)
	case future, far:
		return tooLarge(row, nothing)
	case unset:
		asked = consistent(memory)
	}
	found, _, _ := h.page(r.scope, h.revisions[present], "", 0)
	if len(found) == 0 {
		e := refused(row, http.StatusNotFound, metav1.StatusReasonNotFound)
		e.reads = asked
		return e
	}
	return expectation{row: row, reads: asked, aspects: aspects{code: strconv.Itoa(http.StatusOK), items: found[0]}}
}

// TestGET_EveryCombination_MatchesTable sends every GET.
func TestGET_EveryCombination_MatchesTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	w := open(t, ctx)
	want := func(r request, s *server) expectation { return w.get(r, s.memory) }
	requests := getRequests()
	got, err := w.askAll(ctx, w.servers, requests, want)
	harness.Check(t, err)
	compare(t, w.servers, requests, want, got)
}
