package samebytes

import (
	"bytes"
	"encoding/base64"
	"encoding/json"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// byDesign lists all permitted differences between the two servers, with reasons. Each entry makes
// its part of both answers equal, and changes nothing else.
var byDesign = []struct {
	what, why string
	apply     func(r request, got, want *response)
}{
	{
		what: "headers Date and Audit-Id",
		why:  "are new for each request",
		apply: func(_ request, got, want *response) {
			for _, a := range []*response{got, want} {
				a.header.Del("Date")
				a.header.Del("Audit-Id")
			}
		},
	},
	{
		what: "header Content-Length",
		why: "Strata knows how long a list is before it sends it and says so, upstream only if it has buffered all of it; " +
			"the header must be correct, which the client library checks",
		apply: func(_ request, got, want *response) {
			for _, a := range []*response{got, want} {
				if a.header.Get("Content-Encoding") == "" && a.header.Get("Content-Length") == strconv.Itoa(len(a.body)) || a.header.Get("Content-Encoding") != "" {
					a.header.Del("Content-Length")
				}
			}
		},
	},
	{
		what: "the server's own address",
		why:  "is shown by /api, and is not the same",
		apply: func(r request, got, want *response) {
			if r.path == "/api" {
				got.body, want.body = addresses.ReplaceAll(got.body, nil), addresses.ReplaceAll(want.body, nil)
			}
		},
	},
	{
		what: "a GET with a resourceVersion that is none",
		why:  "is the client's mistake: 400 by Strata, in the words of upstream's etcd3 store. Upstream's cacher, in front of that, answers 500",
		apply: func(_ request, got, want *response) {
			if got.code == 400 && want.code == 500 && bytes.Contains(got.body, []byte("invalid resource version: ")) {
				*got = *want
			}
		},
	},
	{
		what: "the slash before the key in a continue token",
		why: "is written by upstream's cacher and not by its etcd3 store. Strata writes it always, upstream not when it has to read " +
			"a page at an old revision from etcd",
		apply: func(_ request, got, want *response) {
			if g, w := startKey(got.body), startKey(want.body); g == "/"+w && w != "" {
				got.body = tokens.ReplaceAllLiteral(got.body, tokens.Find(want.body))
			}
		},
	},
	{
		what: "a post-start hook of Strata's",
		why:  "has separate health paths, which / lists with all others",
		apply: func(r request, got, _ *response) {
			if r.path == "/" {
				got.body = drainHook.ReplaceAll(got.body, nil)
			}
		},
	},
	{
		what: "the order of ComponentStatuses",
		why:  "is that in which the components have answered",
		apply: func(r request, got, want *response) {
			if strings.HasSuffix(r.path, "/componentstatuses") {
				slices.Sort(got.body)
				slices.Sort(want.body)
			}
		},
	},
	{
		what: "-0 in a custom resource in another version than it is stored in",
		why: "is 0 once it has been converted to JSON and back, as Strata does to cache converted objects, and upstream to answer a list " +
			"in some cases",
		apply: func(r request, got, want *response) {
			if strings.Contains(r.path, customGroup+"/v1beta2/") {
				for _, a := range []*response{got, want} {
					a.body = negatives.ReplaceAll(a.body, []byte("${1}0"))
				}
			}
		},
	},
	{
		what:  "bookmarks, but for the one that ends the initial events",
		why:   "come when the server thinks fit; they are left out by sameStreams",
		apply: func(request, *response, *response) {},
	},
	{
		what: "which frames of a watch define the columns of a table",
		why: "is a race between watchers in upstream's handlers, which serve tables for both: the first frame does, and each one before " +
			"the first that no other watcher has had encoded already",
		apply: func(r request, got, want *response) {
			if strings.Contains(r.query, "watch=true") && columns.Match(got.body) && columns.Match(want.body) {
				got.body, want.body = columns.ReplaceAll(got.body, nil), columns.ReplaceAll(want.body, nil)
			}
		},
	},
	{
		what: "the oldest revision that a watch may begin at",
		why:  "is in the 410 of an older one. Upstream's is the revision at which its watch began, which varies; Strata restores the history in etcd",
		apply: func(r request, got, want *response) {
			if strings.Contains(r.query, "watch=true") && oldest.Match(got.body) && oldest.Match(want.body) {
				got.body, want.body = oldest.ReplaceAll(got.body, []byte("$1")), oldest.ReplaceAll(want.body, []byte("$1"))
			}
		},
	},
	{
		what: "ages in tables",
		why:  "depend on when the row was printed",
		apply: func(_ request, got, want *response) {
			for _, a := range []*response{got, want} {
				if tables.Match(a.body) {
					a.body = ages.ReplaceAll(a.body, []byte(`"<age>"`))
					a.body = agesInYAML.ReplaceAll(a.body, []byte(`$1<age>`))
				}
			}
		},
	},
}

var (
	oldest    = regexp.MustCompile(`(too old resource version: [0-9]+ )\([0-9]{4}\)`)
	columns   = regexp.MustCompile(`"columnDefinitions":.*?,"rows":`)
	tables    = regexp.MustCompile(`"?kind"?: ?"?Table`)
	tokens    = regexp.MustCompile(`\bcontinue"?: ?"?([A-Za-z0-9_-]+)`)
	negatives = regexp.MustCompile(`(\bneg"?: ?)-0\b`)
	drainHook = regexp.MustCompile(`\s*"/(healthz|livez|readyz)/poststarthook/strata-drain-on-shutdown",`)
	addresses = regexp.MustCompile(`127\.0\.0\.1:[0-9]+`)
	ages      = regexp.MustCompile(`"([0-9]+[smhdy])+"`)

	agesInYAML = regexp.MustCompile(`(?m)^(  - )([0-9]+[smhdy])+$`)
)

// startKey returns the key in the continue token of a list in JSON or YAML; "" if there is none.
func startKey(body []byte) string {
	found := tokens.FindSubmatch(body)
	if found == nil {
		return ""
	}
	var token struct{ Start string }
	data, err := base64.RawURLEncoding.DecodeString(string(found[1]))
	if err != nil || json.Unmarshal(data, &token) != nil {
		return ""
	}
	return token.Start
}

// applyDesign removes the permitted differences from both answers. The regular expressions would
// take most of the time of the tests, so equal bodies are not searched.
func applyDesign(r request, got, want *response) {
	for _, d := range byDesign {
		if strings.HasPrefix(d.what, "header") || !bytes.Equal(got.body, want.body) {
			d.apply(r, got, want)
		}
	}
}
