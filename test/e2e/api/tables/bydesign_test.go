package tables

import (
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// fromTheKEP lists the differences between the API and KEP-2340's tables, which both engines share.
var fromTheKEP = []string{listAtZeroWithToken, listWithTokenAndVersion, listOfOneName, watchWithToken, watchListed}

// Their IDs in docs/keps.md, for use in the expectations.
const (
	listAtZeroWithToken     = "D-L10"
	listWithTokenAndVersion = "D-L13"
	listOfOneName           = "D-NAME"
	watchWithToken          = "D-WTOKEN"
	watchListed             = "D-WLIST"
)

// difference is an intended difference between the engines, in some requests to some forms of
// Strata.
type difference struct {
	id      string // of the explanation in docs/keps.md
	what    string
	verb    string
	aspects []aspect
	applies func(request, *server) bool
}

// byDesign lists all permitted differences between the engines. An unused entry is a failure, too.
var byDesign = []*difference{
	{
		id: "D-GET", what: "a consistent GET asks etcd for its revision, upstream's for the object",
		verb: get, aspects: []aspect{etcd},
		applies: func(r request, _ *server) bool { return r.version == unset },
	},
	{
		id: "D-GETRV", what: "a GET at a resource version that is none: 400, not 500",
		verb: get, aspects: []aspect{code, reason, message},
		applies: func(r request, _ *server) bool { return r.version == garbage },
	},
	{
		id: "D-GETRV", what: "a WATCH from a resource version that is none: 400, not 500",
		verb: watch, aspects: []aspect{code, reason, message},
		applies: func(r request, _ *server) bool { return r.version == garbage },
	},
	{
		id: "D-W1", what: "a watch with nothing set begins with a consistent read, unless the API has already made that of it",
		verb: watch, aspects: []aspect{etcd},
		applies: func(r request, s *server) bool { return watchRow(r) == "W1" && !s.watchList },
	},
	{
		id: "D-L7", what: "resource version 0 with a token: the limit holds, upstream's cache ignores it",
		verb: list, aspects: []aspect{items, more, remaining},
		applies: func(r request, _ *server) bool { return listRow(r) == "L7" && r.limit != 0 },
	},
	{
		id: "D-FUTURE", what: "whether an exact revision is in the future: etcd's revision says it at once, upstream waits",
		verb: list, aspects: []aspect{etcd},
		applies: func(r request, _ *server) bool { return r.scope.one == "" && r.exact() && r.inVain() },
	},
	{
		id: "D-NAME", what: "a list of one name at a revision is answered from memory, upstream's from etcd",
		verb: list, aspects: []aspect{etcd},
		applies: func(r request, _ *server) bool { return r.scope.one != "" && r.exact() },
	},
	{
		id: "D-HINT", what: "of a revision in the future memory says when to try again, etcd does not",
		verb: list, aspects: []aspect{message},
		applies: func(r request, s *server) bool { return r.exact() && r.inVain() && (r.scope.one != "" || !s.memory) },
	},
}

// designed returns the entry that allows the aspect of an answer of s to differ, nil if none does.
func designed(r request, s *server, about aspect) *difference {
	for _, d := range byDesign {
		if d.verb == r.verb && slices.Contains(d.aspects, about) && d.applies(r, s) {
			return d
		}
	}
	return nil
}

// TestDifferences_AreDocumented requires an entry for each difference in docs/keps.md.
func TestDifferences_AreDocumented(t *testing.T) {
	document, err := os.ReadFile("../../../../docs/keps.md")
	harness.Check(t, err)
	ids := slices.Clone(fromTheKEP)
	for _, d := range byDesign {
		ids = append(ids, d.id)
	}
	for _, id := range ids {
		if !strings.Contains(string(document), "\n| "+id+" |") {
			t.Errorf("docs/keps.md does not explain %s", id)
		}
	}
}
