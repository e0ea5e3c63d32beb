package tables

import (
	"context"
	"fmt"
	"net/http"
	"net/url"

	"github.com/stratakube/strata/test/harness"
)

// request is one combination of parameters.
type request struct {
	verb    string // list, watch or get
	scope   *scope
	version string
	match   string
	from    string // origin of the continue token
	limit   int
	initial string // sendInitialEvents
	marks   bool   // allowWatchBookmarks
}

// Verbs.
const (
	list  = "list"
	watch = "watch"
	get   = "get"
)

// Values of resourceVersionMatch.
const (
	exact        = "Exact"
	notOlderThan = "NotOlderThan"
	nonsense     = "Nonsense"
)

// String is the name of a subtest: the parameters and their values.
func (r request) String() string {
	text := r.scope.name
	add := func(name, value string) {
		if value != "" {
			text += "," + name + "=" + value
		}
	}
	add("resourceVersion", r.version)
	add("match", r.match)
	add("continue", r.from)
	if r.limit != 0 {
		add("limit", fmt.Sprint(r.limit))
	}
	add("sendInitialEvents", r.initial)
	if r.marks {
		add("bookmarks", "true")
	}
	return text
}

// query returns the query of the request. A GET names its object in the path.
func (r request) query(h *history) string {
	values := url.Values{}
	set := func(name, value string) {
		if value != "" {
			values.Set(name, value)
		}
	}
	if r.verb != get {
		set("labelSelector", r.scope.labels)
		set("fieldSelector", r.scope.fields)
	}
	switch r.version {
	case unset, zero:
		set("resourceVersion", r.version)
	case garbage:
		set("resourceVersion", "garbage")
	default:
		set("resourceVersion", fmt.Sprint(h.revisions[r.version]))
	}
	set("resourceVersionMatch", r.match)
	if r.from == garbage {
		set("continue", "garbage")
	} else {
		set("continue", h.tokens[r.scope.name][r.from].value)
	}
	if r.limit != 0 {
		set("limit", fmt.Sprint(r.limit))
	}
	set("sendInitialEvents", r.initial)
	if r.marks {
		set("allowWatchBookmarks", "true")
	}
	return values.Encode()
}

// exact reports whether a valid LIST asks for exactly a resource version, as L12 and L14 do.
func (r request) exact() bool {
	return r.verb == list && (r.match == exact || r.match == unset && r.version != zero && r.limit != 0)
}

// inVain reports whether the request asks for a resource version that is not reached.
func (r request) inVain() bool { return r.version == future || r.version == far }

// ask sends a LIST or a GET.
func (r request) ask(ctx context.Context, h *history, api *harness.API) (answer, error) {
	path := r.scope.path
	if r.verb == get {
		path += "/" + r.scope.one
	}
	// No row expects a refusal, as of a server that cannot catch up with etcd in time.
	resp, err := api.Read(ctx, path, r.query(h), "")
	if err != nil {
		return answer{}, err
	}
	if resp.Code != http.StatusOK {
		return refusal(resp), nil
	}
	if r.verb == get {
		return objectAnswer(resp)
	}
	return listAnswer(resp)
}
