package samebytes

import (
	"fmt"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// getOptions are queries of a GET, by name, that do not concern revisions.
var getOptions = map[string]string{
	"none":            "",
	"pretty":          "pretty=true",
	"pretty-1":        "pretty=1",
	"pretty-0":        "pretty=0",
	"pretty-false":    "pretty=false",
	"pretty-garbage":  "pretty=garbage",
	"pretty-empty":    "pretty=",
	"pretty-twice":    "pretty=0&pretty=1",
	"export":          "export=true",
	"exact":           "exact=true",
	"unknown":         "unknown=1",
	"limit":           "limit=1",
	"limit-garbage":   "limit=x",
	"selectors":       "labelSelector=a%20b&fieldSelector=x",
	"match":           "resourceVersionMatch=Exact",
	"watch":           "watch=false",
	"watch-garbage":   "watch=x",
	"timeout":         "timeoutSeconds=1",
	"request-timeout": "timeout=10s",
	"include-object":  "includeObject=Object",
	"include-nothing": "includeObject=None",
	"include-garbage": "includeObject=garbage",
	"dry-run":         "dryRun=All",
	"field-manager":   "fieldManager=x",
	"invalid-escape":  "pretty=%zz",
}

// TestGET_EveryOption_MatchesUpstream tries every option of a GET, with valid and invalid values.
func TestGET_EveryOption_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.eachSubject(t, ctx, func(t *testing.T, s subject, present int64) {
		all := cases{}
		names := map[string]string{"object": s.object(), "missing": s.in(s.namespace) + "/missing"}
		if s.namespaced {
			names["no-such-namespace"] = s.in("missing") + "/" + s.name
			names["without-namespace"] = s.in("") + "/" + s.name
		} else {
			names["with-namespace"] = s.in(oddNamespace) + "/" + s.name
		}
		for what, path := range names {
			for name, query := range getOptions {
				all[named(what, name)] = request{path: path, query: query, accept: jsonType}
				if strings.HasPrefix(name, "include") || strings.HasPrefix(name, "pretty") {
					all[named(what, "table", name)] = request{path: path, query: query, accept: tableObject}
					all[named(what, "yaml-table", name)] = request{path: path, query: query, accept: strings.Replace(tableObject, jsonType, yamlType, 1)}
				}
			}
			versions := map[string]string{
				"0": "0", "present": fmt.Sprint(present), "past": fmt.Sprint(w.past), "compacted": fmt.Sprint(w.compacted), "1": "1",
				"garbage": "x", "negative": "-1", "zeros": "00", "empty": "",
			}
			if what == "object" && (s.name == "plain-1" || s.name == "full") {
				versions["future"] = fmt.Sprint(present + 1_000_000)
			}
			for name, version := range versions {
				all[named(what, "version", name)] = request{path: path, query: "resourceVersion=" + version, accept: jsonType}
			}
			for _, m := range append(media, moreMedia...) {
				for _, v := range allWires {
					all[named(what+" over "+v.name, "media", m.name)] = v.on(request{path: path, accept: m.object})
				}
			}
			for _, agent := range agents {
				for _, accept := range []string{"", jsonType, yamlType, protobufType, transformedObject} {
					all[named(what, "agent", agent, accept)] = request{path: path, agent: agent, accept: accept}
					all[named(what, "agent-not-pretty", agent, accept)] = request{path: path, agent: agent, accept: accept, query: "pretty=0"}
				}
			}
		}
		w.run(t, ctx, s.part(all))
	})
}
