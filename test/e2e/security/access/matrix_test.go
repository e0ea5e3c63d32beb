package access

import (
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// Forms of an answer, beside JSON.
const (
	protobuf        = "application/vnd.kubernetes.protobuf"
	table           = "application/json;as=Table;v=v1;g=meta.k8s.io"
	partial         = "application/json;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
	partialList     = "application/json;as=PartialObjectMetadataList;v=v1;g=meta.k8s.io"
	partialProto    = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadata;v=v1;g=meta.k8s.io"
	partialListBeta = "application/vnd.kubernetes.protobuf;as=PartialObjectMetadataList;v=v1beta1;g=meta.k8s.io"
	yaml            = "application/yaml"
)

// read is the request of a user, as authorization sees it.
type read struct {
	verb      string // get, list or watch
	resource  resource
	namespace string // empty: all namespaces
	name      string // of a get, or of a field selector that names one object
}

// may reports whether the user is authorized for r. It restates the roles.
func may(user string, r read) bool {
	switch user {
	case admin, all:
		return true
	case inA:
		return r.namespace == "a"
	case inB:
		return r.namespace == "b"
	case oneName:
		return r.name == "one" && (r.namespace == "a" || r.resource == nodes)
	case getter:
		return r.namespace == "a" && r.verb == "get"
	case lister:
		return r.namespace == "a" && r.verb == "list"
	case watcher:
		return r.namespace == "a" && r.verb == "watch"
	}
	return false
}

// sees reports whether the user may see the object with the mark by any read.
func sees(user string) func(mark string) bool {
	return func(mark string) bool {
		parts := strings.Split(mark, ".")
		namespace, name := parts[2], parts[3]
		cluster := namespace == ""
		switch user {
		case admin, all:
			return true
		case inA, getter, lister, watcher:
			return namespace == "a"
		case inB:
			return namespace == "b"
		case oneName:
			return name == "one" && (namespace == "a" || cluster)
		}
		return false
	}
}

// wantOf returns the expectation for a read.
func wantOf(user string, r read) expectation {
	switch {
	case user == stranger:
		return expectation{refused: http.StatusUnauthorized}
	case !may(user, r):
		return expectation{refused: http.StatusForbidden}
	}
	return expectation{sees: func(mark string) bool {
		parts := strings.Split(mark, ".")
		inScope := parts[1] == r.resource.name && (r.namespace == "" || parts[2] == r.namespace) && (r.name == "" || parts[3] == r.name)
		return inScope && sees(user)(mark)
	}}
}

// variant is one way to express a read: a query and an Accept header.
type variant struct {
	query  string
	header http.Header
	name   string // as given by a field selector
	token  bool   // the query has a continue token
}

func accept(media string) http.Header { return http.Header{"Accept": {media}} }

// variants are the ways to express a read. The first result is requested in every scope.
func (w *world) variants(verb string) (few, many []variant) {
	named := func(name string) string { return "fieldSelector=" + url.QueryEscape("metadata.name="+name) }
	selected := func(selector string) string { return "fieldSelector=" + url.QueryEscape(selector) }
	switch verb {
	case "get":
		few = []variant{{}, {header: accept(protobuf)}, {header: accept(table)}, {header: accept(partial)}}
		many = []variant{
			{header: accept(partialProto)}, {header: accept(yaml)}, {header: accept("text/html")},
			{query: "resourceVersion=0"}, {query: "resourceVersion=" + w.revision}, {query: "resourceVersion=x"},
			{query: "pretty=true"}, {query: "export=true"}, {query: "watch=true"}, {query: "watch=1&resourceVersion=0&timeoutSeconds=1"},
			{query: named("two")}, {query: named("one") + "&watch=true&timeoutSeconds=1"}, {query: "limit=1&continue=x"},
			{header: http.Header{"User-Agent": {"curl/8"}}}, {header: http.Header{"X-Http-Method-Override": {"DELETE"}}},
		}
	case "list":
		few = []variant{
			{}, {query: "resourceVersion=0"}, {query: "limit=1"}, {query: "limit=1&continue=TOKEN", token: true},
			{query: named("one"), name: "one"}, {query: named("two"), name: "two"}, {header: accept(protobuf)}, {header: accept(table)},
		}
		many = []variant{
			{header: accept(partialList)}, {header: accept(partialListBeta)}, {header: accept(yaml)},
			{header: http.Header{"Accept-Encoding": {"gzip"}}}, {query: "limit=2", header: http.Header{"Accept-Encoding": {"gzip"}}},
			{query: "labelSelector=called%3Dtwo"}, {query: "labelSelector=all%3Dtrue&limit=1"}, {query: "labelSelector=%21%21"},
			{query: "resourceVersion=" + w.revision + "&resourceVersionMatch=Exact"},
			{query: "resourceVersion=" + w.revision + "&resourceVersionMatch=NotOlderThan"},
			{query: "resourceVersion=x"}, {query: "limit=x"}, {query: "continue=x"}, {query: "sendInitialEvents=true"},
			{query: "pretty=true"}, {query: "watch=false"},
			{query: named("one"), name: "one", header: accept(protobuf)}, {query: named("one"), name: "one", header: accept(table)},
			{query: named("two"), name: "two", header: accept(partialList)},
			{query: named("one") + "&limit=1&resourceVersion=0", name: "one"},
			{query: named("one") + "&labelSelector=called%3Dtwo", name: "one"},
			{query: selected("metadata.name!=one")}, {query: selected("metadata.namespace=b")}, {query: selected("data.key=value")},
			{query: selected("metadata.name=one,metadata.name!=two"), name: "one"},
			{query: selected("metadata.namespace=a,metadata.name=one"), name: "one"},
			{query: "limit=1&continue=TOKEN", token: true, header: accept(table)},
			{query: "limit=1&continue=TOKEN&" + named("one"), token: true, name: "one"},
		}
	case "watch":
		const short = "watch=true&timeoutSeconds=1&"
		initial := "resourceVersionMatch=NotOlderThan&sendInitialEvents=true&allowWatchBookmarks=true"
		few = []variant{
			{query: short + "resourceVersion=0"}, {query: short + named("one") + "&resourceVersion=0", name: "one"},
			{query: short + named("two") + "&resourceVersion=0", name: "two"}, {query: short + initial},
		}
		many = []variant{
			{query: short}, {query: short + "resourceVersion=" + w.revision}, {query: short + "resourceVersion=x"},
			{query: "watch=1&timeoutSeconds=1&resourceVersion=0"}, {query: "watch&timeoutSeconds=1&resourceVersion=0"},
			{query: short + initial + "&resourceVersion=0"},
			{query: short + initial + "&" + named("one"), name: "one"}, {query: short + initial + "&" + named("two"), name: "two"},
			{query: short + "sendInitialEvents=true"}, {query: short + "resourceVersion=0&labelSelector=called%3Dtwo"},
			{query: short + "resourceVersion=0&" + selected("metadata.namespace=b")},
			{query: short + "resourceVersion=0", header: accept(protobuf)}, {query: short + "resourceVersion=0", header: accept(table)},
			{query: short + initial, header: accept(partial)}, {query: short + initial, header: accept(partialProto)},
			{query: short + "continue=TOKEN", token: true},
		}
	}
	return few, many
}

// TestRBAC_EveryUserVerbAndOption_MatchesRoles: users, times verbs, resources and scopes, times all
// options of a read and the forms of its answer. Unauthorized users are refused with 401 or 403;
// authorized users see exactly the objects that the roles allow; and both engines answer and audit
// the same.
func TestRBAC_EveryUserVerbAndOption_MatchesRoles(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	w.same(t, ctx, "matrix", w.matrix(harness.Long()))
}

// matrix returns the requests of the matrix; with every, all forms of every resource.
func (w *world) matrix(every bool) []asked {
	users := []string{anonymous, stranger, nothing, inA, inB, oneName, getter, lister, watcher, all}
	var requests []asked
	add := func(r read, v variant, path string) {
		target := path
		if v.query != "" {
			target += "?" + v.query
		}
		for _, user := range users {
			r := r
			if r.verb != "get" {
				r.name = v.name
			}
			a := asked{request: request{user: user, target: target, header: v.header}, want: wantOf(user, r)}
			if v.token {
				a.list = r.resource.path(r.namespace) + "?limit=1"
			}
			requests = append(requests, a)
		}
	}
	for _, r := range []resource{secrets, configMaps, gizmos, services, nodes} {
		scopes := []string{"a", "b", ""}
		if !r.namespaced {
			scopes = []string{""}
		}
		for _, verb := range []string{"get", "list", "watch"} {
			few, many := w.variants(verb)
			for _, namespace := range scopes {
				if verb == "get" && r.namespaced && namespace == "" {
					continue
				}
				variants := few
				if every || (r == secrets || r == gizmos) && namespace == "a" {
					variants = append(few[:len(few):len(few)], many...)
				}
				for _, v := range variants {
					if verb != "get" {
						add(read{verb: verb, resource: r, namespace: namespace}, v, r.path(namespace))
						continue
					}
					for _, name := range []string{"one", "two", "missing"} {
						add(read{verb: verb, resource: r, namespace: namespace, name: name}, v, r.path(namespace)+"/"+name)
					}
				}
			}
		}
	}
	return requests
}

// TestRBAC_Subresource_IsAuthorizedSeparately: a subresource is authorized separately from its
// object.
func TestRBAC_Subresource_IsAuthorizedSeparately(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	w.same(t, ctx, "subresources", subresources())
}

// subresources returns requests of users for subresources.
func subresources() []asked {
	var requests []asked
	for _, user := range []string{anonymous, stranger, nothing, inA, inB, oneName, getter, lister, all} {
		for _, path := range []string{
			gizmos.path("a") + "/one/status", gizmos.path("a") + "/two/status", gizmos.path("b") + "/one/status",
			nodes.path("") + "/one/status", nodes.path("") + "/two/status",
			secrets.path("a") + "/one/status", services.path("a") + "/one/status", services.path("b") + "/one/status",
			pods.path("nodes") + "/node-a-x/status", pods.path("nodes") + "/node-a-x/log", pods.path("nodes") + "/node-a-x/ephemeralcontainers",
			"/api/v1/namespaces/a/status", "/api/v1/namespaces/b/status", "/api/v1/namespaces/a/finalize",
		} {
			want := expectation{refused: -1, sees: sees(user)}
			if user == stranger {
				want.refused = http.StatusUnauthorized
			}
			requests = append(requests, asked{request: request{user: user, target: path}, want: want})
		}
	}
	return requests
}
