package samebytes

import (
	"cmp"
	"context"
	"encoding/base64"
	"encoding/json"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/runtime/schema"

	"github.com/stratakube/strata/test/harness"
)

// subject is a resource for which all options are tested.
type subject struct {
	resource
	namespace string   // "" for all objects
	name      string   // of an object
	fields    []string // field selectors for this resource
}

// subjects are resources that are served in different ways: by the API server's own registries,
// with and without changes on read, by the handler of custom resources in the stored and in a
// converted version, by the aggregator.
var subjects = []subject{
	{core("configmaps"), oddNamespace, "plain-1", nil},
	{core("secrets"), oddNamespace, "opaque", []string{"type=Opaque", "type!=Opaque"}},
	{core("pods"), oddNamespace, "web-1", []string{
		"spec.nodeName=node-a", "spec.nodeName!=node-a", "spec.nodeName=", "status.phase=Running", "status.phase!=Running,spec.nodeName=node-a",
		"spec.restartPolicy=Never", "spec.schedulerName=default-scheduler", "spec.serviceAccountName=web", "spec.hostNetwork=true", "status.podIP=10.1.2.3",
		"status.nominatedNodeName=",
	}},
	{core("services"), oddNamespace, "ordinary", []string{"spec.clusterIP=None", "spec.type=ExternalName"}},
	{core("persistentvolumeclaims"), oddNamespace, "from-snapshot", nil},
	{custom("v1", "widgets", true), oddNamespace, "full", []string{"spec.color=green", "spec.color!=green", "spec.color=red", "spec.replicas=0", "spec.replicas=x", "spec.ratio=1"}},
	{custom("v1beta1", "widgets", true), oddNamespace, "full", []string{"spec.color=green"}},
	{custom("v1", "planets", false), "", "earth", []string{"spec.moons=1"}},
	{custom("v1", "unicorns", true), oddNamespace, "none", nil},
	{resource{gvr: schema.GroupVersionResource{Group: "apiregistration.k8s.io", Version: "v1", Resource: "apiservices"}}, "", "v1.remote.example.com", nil},
}

func core(name string) resource {
	return resource{gvr: schema.GroupVersionResource{Version: "v1", Resource: name}, namespaced: true}
}

func custom(version, name string, namespaced bool) resource {
	return resource{gvr: schema.GroupVersionResource{Group: customGroup, Version: version, Resource: name}, namespaced: namespaced, custom: true}
}

// String is the name of a subtest.
func (s subject) String() string { return s.resource.String() }

// paths returns the list paths of a subject.
func (s subject) paths() map[string]string {
	if !s.namespaced {
		return map[string]string{"all": s.path()}
	}
	return map[string]string{"all": s.path(), "namespace": s.in(s.namespace), "no-such-namespace": s.in("missing")}
}

// object is the path of the subject's object.
func (s subject) object() string { return s.in(s.namespace) + "/" + s.name }

// part returns the cases for the subject.
func (s subject) part(all cases) cases {
	return partOf(all, slices.IndexFunc(subjects, func(o subject) bool { return o.gvr == s.gvr }))
}

// partOf returns the cases for the resource of a number: all in the long form. Otherwise, of the
// cases whose names differ only in the first part (mostly the path), it chooses a third, or a ninth
// if they are many, but at least one: each resource has every combination of the other parts, and
// any three (or nine) consecutive resources together have every case.
func partOf(all cases, number int) cases {
	if harness.Long() {
		return all
	}
	alike := map[string][]string{}
	for _, name := range slices.Sorted(maps.Keys(all)) {
		_, rest, ok := strings.Cut(name, "/")
		if !ok {
			rest = name
		}
		alike[rest] = append(alike[rest], name)
	}
	part := cases{}
	for i, rest := range slices.Sorted(maps.Keys(alike)) {
		few := min(len(alike[rest]), 3)
		if len(alike[rest]) > 12 {
			few = 9
		}
		for j, name := range alike[rest] {
			if (i+j+number)%few == 0 {
				part[name] = all[name]
			}
		}
	}
	return part
}

// listOptions are queries with the same meaning for every resource, by name, that do not concern
// revisions.
var listOptions = map[string]string{
	"none":                        "",
	"limit-1":                     "limit=1",
	"limit-2":                     "limit=2",
	"limit-500":                   "limit=500",
	"limit-0":                     "limit=0",
	"limit-negative":              "limit=-1",
	"limit-garbage":               "limit=x",
	"limit-fraction":              "limit=1.5",
	"limit-largest":               "limit=9223372036854775807",
	"limit-too-large":             "limit=9223372036854775808",
	"limit-empty":                 "limit=",
	"limit-twice":                 "limit=1&limit=2",
	"continue-empty":              "limit=1&continue=",
	"continue-garbage":            "limit=1&continue=garbage",
	"continue-garbage-base64":     "limit=1&continue=" + base64.RawURLEncoding.EncodeToString([]byte("garbage")),
	"continue-empty-object":       "limit=1&continue=" + base64.RawURLEncoding.EncodeToString([]byte("{}")),
	"continue-traversal":          "limit=1&continue=" + continueToken(5, "../../secrets/odd"),
	"continue-no-start":           "limit=1&continue=" + continueToken(5, ""),
	"continue-negative":           "limit=1&continue=" + continueToken(-1, "a\x00"),
	"continue-zero":               "limit=1&continue=" + continueToken(0, "a\x00"),
	"continue-and-version":        "limit=1&resourceVersion=5&continue=" + continueToken(5, "a\x00"),
	"continue-and-version-0":      "limit=1&resourceVersion=0&continue=" + continueToken(5, "a\x00"),
	"continue-and-match":          "limit=1&resourceVersionMatch=Exact&continue=" + continueToken(5, "a\x00"),
	"continue-without-limit":      "continue=" + continueToken(5, "a\x00"),
	"labels-equal":                "labelSelector=" + url.QueryEscape("app=web"),
	"labels-double-equal":         "labelSelector=" + url.QueryEscape("app==web"),
	"labels-not-equal":            "labelSelector=" + url.QueryEscape("app!=web"),
	"labels-in":                   "labelSelector=" + url.QueryEscape("app in (web, db)"),
	"labels-notin":                "labelSelector=" + url.QueryEscape("app notin (web)"),
	"labels-exists":               "labelSelector=app",
	"labels-not-exists":           "labelSelector=" + url.QueryEscape("!app"),
	"labels-and":                  "labelSelector=" + url.QueryEscape("app=web,tier in (front),!other"),
	"labels-empty-value":          "labelSelector=" + url.QueryEscape("empty="),
	"labels-nothing":              "labelSelector=" + url.QueryEscape("app=nothing-has-this"),
	"labels-empty":                "labelSelector=",
	"labels-greater":              "labelSelector=" + url.QueryEscape("tenth>5"),
	"labels-prefixed":             "labelSelector=" + url.QueryEscape("example.com/prefixed_Name.1=a-b_c.d"),
	"labels-twice":                "labelSelector=app%3Dweb&labelSelector=app%3Ddb",
	"labels-limited":              "limit=1&labelSelector=" + url.QueryEscape("app=web"),
	"labels-from-memory":          "resourceVersion=0&limit=1&labelSelector=" + url.QueryEscape("app=web"),
	"labels-invalid-in":           "labelSelector=" + url.QueryEscape("app in"),
	"labels-invalid-unclosed":     "labelSelector=" + url.QueryEscape("app in (a"),
	"labels-invalid-key":          "labelSelector=" + url.QueryEscape("a b"),
	"labels-invalid-no-key":       "labelSelector=" + url.QueryEscape("=x"),
	"labels-invalid-value":        "labelSelector=" + url.QueryEscape("app=ü"),
	"labels-invalid-greater":      "labelSelector=" + url.QueryEscape("app>web"),
	"fields-name":                 "fieldSelector=metadata.name%3Dplain-1",
	"fields-name-missing":         "fieldSelector=metadata.name%3Dmissing",
	"fields-not-name":             "fieldSelector=metadata.name!%3Dplain-1",
	"fields-name-unusual":         "fieldSelector=" + url.QueryEscape("metadata.name=a b"),
	"fields-name-slash":           "fieldSelector=" + url.QueryEscape("metadata.name=a/b"),
	"fields-name-empty":           "fieldSelector=" + url.QueryEscape("metadata.name="),
	"fields-two-names":            "fieldSelector=" + url.QueryEscape("metadata.name=a,metadata.name=b"),
	"fields-namespace":            "fieldSelector=metadata.namespace%3D" + oddNamespace,
	"fields-other-namespace":      "fieldSelector=metadata.namespace%3D" + bulkNamespace,
	"fields-not-namespace":        "fieldSelector=metadata.namespace!%3D" + oddNamespace,
	"fields-unsupported":          "fieldSelector=spec.unknown%3D1",
	"fields-unsupported-metadata": "fieldSelector=metadata.uid%3D1",
	"fields-invalid":              "fieldSelector=nothing",
	"fields-invalid-escape":       "fieldSelector=" + url.QueryEscape(`metadata.name=\x`),
	"fields-empty":                "fieldSelector=",
	"fields-and-labels":           "fieldSelector=metadata.name%3Dplain-1&labelSelector=app%3Dweb",
	"fields-invalid-both":         "fieldSelector=x&labelSelector=" + url.QueryEscape("a b"),
	"fields-name-limited":         "limit=1&fieldSelector=metadata.name%3Dplain-1",
	"fields-name-from-memory":     "resourceVersion=0&fieldSelector=metadata.name%3Dplain-1",
	"timeout":                     "timeoutSeconds=10",
	"timeout-0":                   "timeoutSeconds=0",
	"timeout-negative":            "timeoutSeconds=-1",
	"timeout-garbage":             "timeoutSeconds=x",
	"request-timeout":             "timeout=5s",
	"request-timeout-garbage":     "timeout=x",
	"initial-events":              "sendInitialEvents=true",
	"no-initial-events":           "sendInitialEvents=false",
	"initial-events-garbage":      "sendInitialEvents=x",
	"initial-events-match":        "sendInitialEvents=true&resourceVersionMatch=NotOlderThan",
	"bookmarks":                   "allowWatchBookmarks=true",
	"bookmarks-garbage":           "allowWatchBookmarks=x",
	"watch-false":                 "watch=false",
	"watch-0":                     "watch=0",
	"watch-twice":                 "watch=false&watch=true",
	"watch-FALSE":                 "watch=FALSE",
	"pretty":                      "pretty=true",
	"pretty-1":                    "pretty=1",
	"pretty-0":                    "pretty=0",
	"pretty-false":                "pretty=false",
	"pretty-garbage":              "pretty=garbage",
	"pretty-empty":                "pretty=",
	"unknown":                     "unknown=1",
	"export":                      "export=true",
	"include-object":              "includeObject=Object",
	"uninitialized":               "includeUninitialized=true",
	"kind-and-version":            "kind=List&apiVersion=v2",
	"upper-case":                  "LIMIT=1&Limit=1",
	"invalid-escape":              "limit=%zz",
	"semicolon":                   "limit=1;labelSelector=app",
	"ampersands":                  "&&limit=1&&",
	"shard":                       "shardSelector=x",
}

// continueToken returns a token in upstream's format.
func continueToken(revision int64, start string) string {
	token, err := json.Marshal(map[string]any{"v": "meta.k8s.io/v1", "rv": revision, "start": start})
	if err != nil {
		panic(err) // a map of strings and numbers
	}
	return base64.RawURLEncoding.EncodeToString(token)
}

// TestList_EveryOption_MatchesUpstream tries every option of a LIST, with valid and invalid values.
func TestList_EveryOption_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.eachSubject(t, ctx, func(t *testing.T, s subject, present int64) {
		all := cases{}
		for where, path := range s.paths() {
			for name, query := range listOptions {
				all[named(where, name)] = request{path: path, query: query, accept: jsonType}
			}
			all[named(where, "name", "json")] = request{path: path, query: "fieldSelector=metadata.name%3D" + s.name, accept: jsonType}
			all[named(where, "name", "protobuf")] = request{path: path, query: "fieldSelector=metadata.name%3D" + s.name, accept: protobufType}
			for _, m := range media {
				all[named(where, "nothing-selected", m.name)] = request{path: path, query: "labelSelector=nobody-has-this", accept: m.list}
				all[named(where, "limited", m.name)] = request{path: path, query: "limit=2", accept: m.list, gzip: true}
			}
			for _, m := range moreMedia {
				for _, v := range wires {
					all[named(where, "media", m.name, v.name)] = v.on(request{path: path, accept: m.list})
				}
			}
			for _, agent := range agents {
				for _, accept := range []string{"", jsonType, yamlType, protobufType, transformedList} {
					all[named(where, "agent", agent, accept)] = request{path: path, agent: agent, accept: accept, query: "limit=3"}
				}
			}
		}
		all = s.part(all)
		for where, path := range s.paths() {
			for _, fields := range s.fields {
				for _, more := range []string{"", "&limit=1", "&resourceVersion=0"} {
					all[named(where, "fields", fields, "with"+more)] = request{path: path, query: "fieldSelector=" + url.QueryEscape(fields) + more, accept: jsonType}
				}
			}
		}
		w.run(t, ctx, all)
	})
}

// agents are user agents that get indented responses, and similar ones that do not.
var agents = []string{"curl/8.5.0", "Wget/1.21", "Mozilla/5.0 (X11; Linux x86_64)", "mozilla/5.0", "curl", "kubectl/v1.37.2 (linux/amd64)", "Mozilla/4.0"}

// TestList_ResourceVersionAndLimit_MatchUpstream combines resourceVersion, resourceVersionMatch and
// limit, valid or not.
func TestList_ResourceVersionAndLimit_MatchUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	w.eachSubject(t, ctx, func(t *testing.T, s subject, present int64) {
		versions := map[string]string{
			"unset": "", "0": "0", "present": fmt.Sprint(present), "past": fmt.Sprint(w.past), "compacted": fmt.Sprint(w.compacted), "1": "1",
			"garbage": "x", "negative": "-1", "zeros": "00", "fraction": "1.5", "too-large": "18446744073709551616",
		}
		if s.name == "plain-1" || s.name == "full" {
			// a future version makes a server wait for some seconds
			versions["future"] = fmt.Sprint(present + 1_000_000)
		}
		all := cases{}
		for versionName, version := range versions {
			for _, match := range []string{"", "Exact", "NotOlderThan", "exact", "garbage"} {
				for _, limit := range []string{"", "2"} {
					query := url.Values{}
					set(query, "resourceVersion", version)
					set(query, "resourceVersionMatch", match)
					set(query, "limit", limit)
					if versionName == "future" && limit != "" && match == "" {
						continue
					}
					all[named(versionName, cmp.Or(match, "unset"), cmp.Or(limit, "all"))] = request{path: s.in(s.namespace), query: query.Encode(), accept: jsonType}
				}
			}
		}
		for _, m := range media {
			all[named("past", "media", m.name)] = request{path: s.in(s.namespace), query: fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", w.past), accept: m.list}
			all[named("compacted", "media", m.name)] = request{path: s.in(s.namespace), query: fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", w.compacted), accept: m.list}
			all[named("garbage", "media", m.name)] = request{path: s.in(s.namespace), query: "resourceVersion=x", accept: m.list}
		}
		w.run(t, ctx, s.part(all))
	})
}

func set(values url.Values, name, value string) {
	if value != "" {
		values.Set(name, value)
	}
}

// TestPagedList_MatchesUpstream reads lists in pages; both servers get a request for each page,
// with upstream's token and with Strata's token.
func TestPagedList_MatchesUpstream(t *testing.T) {
	w := open(t)
	ctx := harness.Context(t, testTimeout)
	for _, s := range subjects {
		all := cases{}
		for where, path := range s.paths() {
			for _, start := range []string{"", "labelSelector=app", "resourceVersion=0", fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", w.past)} {
				for _, m := range media {
					if (start == "" || m.name == "json") && m.name != "cbor" && m.name != "yaml" {
						all[named(where, cmp.Or(start, "plain"), m.name)] = request{path: path, query: start, accept: m.list}
					}
				}
			}
		}
		w.runPages(t, ctx, s, all)
	}
}

// runPages reads the subject's part of lists in pages, in parallel subtests.
func (w *world) runPages(t *testing.T, ctx context.Context, s subject, all cases) {
	w.settle(t, ctx, s.path())
	for name, r := range s.part(all) {
		t.Run(named(s.String(), name), func(t *testing.T) {
			t.Parallel()
			w.pages(t, r.path, r.query, r.accept)
		})
	}
}

// pages reads a list in pages to its end, or some pages of it.
func (w *world) pages(t *testing.T, path, query, accept string) {
	t.Helper()
	ctx := harness.Context(t, testTimeout)
	const most = 12
	limit, token := 1, ""
	for page := range most {
		values, err := url.ParseQuery(query)
		harness.Check(t, err)
		values.Set("limit", strconv.Itoa(limit))
		if token != "" {
			values.Set("continue", token)
			values.Del("resourceVersion")
			values.Del("resourceVersionMatch")
		}
		r := request{path: path, query: values.Encode(), accept: accept}
		answer := w.same(t, ctx, r)
		// The tokens of the two servers are equal, or same would have failed. They are easy to read
		// in JSON.
		if accept != jsonType {
			r.accept = jsonType
			answer = w.same(t, ctx, r)
		}
		var list struct {
			Metadata struct{ Continue string }
		}
		harness.Check(t, json.Unmarshal(answer.body, &list))
		if token = list.Metadata.Continue; token == "" || t.Failed() {
			return
		}
		limit += page
	}
}
