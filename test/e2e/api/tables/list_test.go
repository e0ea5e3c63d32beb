package tables

import (
	"net/http"
	"strconv"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// large is a limit that exceeds every list here.
const large = 500

// listRequests returns every combination for a LIST. sendInitialEvents, with which a LIST is
// refused, is tried in one scope. The short form has each valid combination in the two scopes
// without selectors and in one of the three others, and a third of those with sendInitialEvents or
// an invalid value, so that every pair of parameters occurs.
func listRequests() (all []request) {
	for i, s := range scopes {
		initials := []string{unset}
		if s == scopes[namespace] {
			initials = []string{unset, "true", "false"}
		}
		for j, version := range []string{unset, zero, compacted, distant, old, present, future, far, garbage} {
			for k, match := range []string{unset, exact, notOlderThan, nonsense} {
				for l, from := range []string{unset, compacted, distant, old, present, inconsistent, garbage} {
					for m, limit := range []int{0, 1, large} {
						invalid := version == garbage || match == nonsense || from == garbage
						for _, initial := range initials {
							if !harness.Long() && (i >= labels || invalid || initial != unset) && (i+j+k+l+m)%3 != 0 {
								continue
							}
							all = append(all, request{verb: list, scope: s, version: version, match: match, from: from, limit: limit, initial: initial})
						}
					}
				}
			}
		}
	}
	return all
}

// listRow returns the row of KEP-2340's table for a LIST.
func listRow(r request) string {
	token := r.from != unset
	switch r.version {
	case unset:
		switch {
		case r.match == unset && !token:
			return "L1"
		case r.match == unset:
			return "L2"
		case r.match == exact:
			return "L3"
		case !token:
			return "L4"
		}
		return "L5"
	case zero:
		switch {
		case r.match == unset && !token:
			return "L6"
		case r.match == unset:
			return "L7"
		case r.match == exact:
			return "L8"
		case !token:
			return "L9"
		}
		return "L10"
	}
	switch {
	case r.match == unset && !token && r.limit == 0:
		return "L11"
	case r.match == unset && !token:
		return "L12"
	case r.match == unset:
		return "L13"
	case r.match == exact && !token:
		return "L14"
	case r.match == exact:
		return "L15"
	case !token && r.limit == 0:
		return "L16"
	case !token:
		return "L17"
	}
	return "L18"
}

// list returns the expectation for a LIST. memory is whether the gates are on.
func (h *history) list(r request, memory bool) expectation {
	switch {
	case r.initial != unset:
		return refused("a list with sendInitialEvents", http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case r.match == nonsense:
		return refused("a match that is none", http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	}
	row := listRow(r)
	means := row
	if r.scope.one != "" && r.from == unset { // listOfOneName
		r.limit = 0
		means = listRow(r)
	}
	switch means {
	case "L3", "L4", "L5", "L8", "L10", "L15", "L18": // listAtZeroWithToken
		return refused(row, http.StatusUnprocessableEntity, metav1.StatusReasonInvalid)
	case "L13": // listWithTokenAndVersion
		return refused(row, http.StatusBadRequest, metav1.StatusReasonBadRequest)
	}
	if r.version == garbage || r.from == garbage {
		return refused(row, http.StatusBadRequest, metav1.StatusReasonBadRequest)
	}
	switch means {
	case "L1": // consistent
		return h.listNow(row, r, "", r.limit, consistent(memory))
	case "L2", "L7":
		from := h.tokens[r.scope.name][r.from]
		if r.from == inconsistent {
			return h.listNow(row, r, from.after, r.limit, consistent(memory))
		}
		return h.listAt(row, r, r.from, from.revision, from.after, memory)
	case "L6", "L9": // from memory at once, limit ignored
		return h.listNow(row, r, "", 0, nothing)
	case "L12", "L14": // exactly at the resource version
		return h.listAt(row, r, r.version, h.revisions[r.version], "", memory)
	}
	// L11, L16 and L17 wait for the resource version, then memory answers.
	if r.inVain() {
		return tooLarge(row, nothing)
	}
	return h.listNow(row, r, "", r.limit, nothing)
}

// consistent returns the reads of etcd for a consistent read.
func consistent(memory bool) reads {
	if memory {
		return revision
	}
	return values
}

// listNow expects the present objects after a key.
func (h *history) listNow(row string, r request, after string, limit int, asked reads) expectation {
	e := h.listed(row, r.scope, h.revisions[present], after, limit, asked)
	e.rule = rule{least: h.revisions[present]}
	return e
}

// listAt expects the objects after a key exactly at a revision. when is the name of the revision.
func (h *history) listAt(row string, r request, when string, at int64, after string, memory bool) expectation {
	asked := nothing
	if !memory || when == distant || when == compacted {
		asked = values
	}
	switch when {
	case future, far:
		// the read of etcd's revision shows that it is in the future
		return tooLarge(row, consistent(memory))
	case compacted:
		e := refused(row, http.StatusGone, metav1.StatusReasonExpired)
		e.reads = asked
		e.aspects[more] = "false"
		if r.from != unset {
			e.aspects[more] = "true" // a token to continue in the present
		}
		return e
	}
	e := h.listed(row, r.scope, at, after, r.limit, asked)
	e.rule = rule{exactly: at}
	return e
}

// listed expects a list.
func (h *history) listed(row string, s *scope, at int64, after string, limit int, asked reads) expectation {
	found, others, left := h.page(s, at, after, limit)
	return expectation{row: row, reads: asked, aspects: aspects{
		code: strconv.Itoa(http.StatusOK), items: strings.Join(found, " "), more: strconv.FormatBool(others), remaining: left,
	}}
}

// TestList_EveryCombination_MatchesTable sends every LIST.
func TestList_EveryCombination_MatchesTable(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	w := open(t, ctx)
	want := func(r request, s *server) expectation { return w.list(r, s.memory) }
	requests := listRequests()
	got, err := w.askAll(ctx, w.servers, requests, want)
	harness.Check(t, err)
	compare(t, w.servers, requests, want, got)
}
