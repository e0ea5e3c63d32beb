package access

import (
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/url"
	"strings"
	"testing"

	"github.com/stratakube/strata/test/harness"
)

// tokenLists are the lists that supply the continue tokens.
var tokenLists = []string{
	secrets.path("a") + "?limit=1", secrets.path("b") + "?limit=1", secrets.path("") + "?limit=1", secrets.path("") + "?limit=4",
	secrets.path("a") + "?limit=1&labelSelector=all%3Dtrue", gizmos.path("a") + "?limit=1", gizmos.path("") + "?limit=4",
	configMaps.path("a") + "?limit=1", nodes.path("") + "?limit=1",
}

// narrowed is a list whose token differs in meaning between the engines. Upstream writes the token
// relative to the namespace, and then reads it relative to all namespaces; Strata writes it
// relative to the path by which it is read.
var narrowed = secrets.path("") + "?limit=1&fieldSelector=metadata.namespace%3Da"

// tokenRequests are lists and watches by users, each with the continue token of another user's list
// of other objects.
func tokenRequests(lists ...string) []asked {
	one := "fieldSelector=metadata.name%3Done"
	var requests []asked
	for _, user := range []string{anonymous, nothing, inA, inB, oneName, lister, all} {
		for _, list := range lists {
			for _, r := range []resource{secrets, gizmos} {
				for _, namespace := range []string{"a", "b", ""} {
					for query, name := range map[string]string{
						"limit=1&continue=TOKEN": "", "continue=TOKEN": "", one + "&continue=TOKEN": "one", "continue=TOKEN&limit=10&fieldSelector=metadata.namespace%3Db": "",
					} {
						want := wantOf(user, read{verb: "list", resource: r, namespace: namespace, name: name})
						requests = append(requests, asked{request{user: user, target: r.path(namespace) + "?" + query, list: list}, want})
					}
					want := wantOf(user, read{verb: "watch", resource: r, namespace: namespace})
					requests = append(requests, asked{request{user: user, target: r.path(namespace) + "?watch=true&timeoutSeconds=1&continue=TOKEN", list: list}, want})
				}
			}
		}
	}
	return requests
}

// forgedRequests are lists with plain tokens that the test made.
func (w *world) forgedRequests() []asked {
	revision := json.Number(w.revision)
	tokens := []string{"x", "e30", base64.RawURLEncoding.EncodeToString([]byte(`{"v":"meta.k8s.io/v1","rv":` + w.revision + `,"start":"../b/one"} {"start":"x"}`))}
	for _, start := range []string{
		"", "/", "//", "one", "/one", "one\u0000", "../b/one", "/../b/one", "..", "/..", "../", "../../secrets/b/one", "one/../../b/one", "./one", "/./one",
		"/registry/secrets/b/one", "b/one", "/b/one", "a/one", "\u0000", "%2e%2e/b/one", `..\\b\\one`, "\xff", "zzz",
	} {
		for _, token := range []object{
			{"v": "meta.k8s.io/v1", "rv": revision, "start": start}, {"v": "meta.k8s.io/v1", "rv": -1, "start": start}, {"v": "meta.k8s.io/v1", "rv": 0, "start": start},
			{"v": "meta.k8s.io/v2", "rv": revision, "start": start},
		} {
			data, err := json.Marshal(token)
			if err != nil {
				panic(err) // cannot fail: every field can be encoded
			}
			tokens = append(tokens, base64.RawURLEncoding.EncodeToString(data))
		}
	}
	var requests []asked
	for _, token := range tokens {
		for _, r := range []resource{secrets, gizmos, nodes} {
			query := "continue=" + url.QueryEscape(token)
			add := func(user, namespace, name, query string) {
				if !r.namespaced {
					namespace = ""
				}
				want := wantOf(user, read{verb: "list", resource: r, namespace: namespace, name: name})
				requests = append(requests, asked{request{user: user, target: r.path(namespace) + "?" + query}, want})
			}
			add(inA, "a", "", query)
			add(inA, "", "", query)
			add(inB, "b", "", query+"&limit=1")
			add(oneName, "a", "one", query+"&fieldSelector=metadata.name%3Done")
			if harness.Long() {
				add(all, "", "", query)
				add(all, "a", "", query+"&limit=2&labelSelector=all%3Dtrue")
			}
		}
	}
	return requests
}

// TestContinueToken_OfOtherUser_GrantsNoAccess: a continue token sets the start position, not the
// permissions. With another user's token a user lists only permitted objects. A forged token does
// not give access to other objects.
func TestContinueToken_OfOtherUser_GrantsNoAccess(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	w.same(t, ctx, "tokens", tokenRequests(tokenLists...))
	w.strata.askAll(t, ctx, "narrowed", tokenRequests(narrowed))
	w.same(t, ctx, "forged", w.forgedRequests())
}

// TestSealedToken_OfOtherUserOrServer_GrantsNoAccess: the same holds for sealed tokens and for
// plain tokens that are accepted beside them. A sealed token of another server is refused, and the
// refusal does not show its content.
func TestSealedToken_OfOtherUserOrServer_GrantsNoAccess(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	sealed := startEngine(w.etcd, harness.Strata, "--strata-feature-gates=SealedContinueTokens=true")
	harness.Check(t, sealed.settle(ctx, w.revision))
	requests := tokenRequests(append(tokenLists, narrowed)...)
	answers, _ := sealed.askAll(t, ctx, "sealed", requests)
	for i, r := range requests {
		list, _, _ := strings.Cut(r.list, "?")
		target, _, _ := strings.Cut(r.target, "?")
		a := answers[i]
		switch refused := a.code == http.StatusForbidden; {
		case refused || strings.Contains(r.target, "watch=true") || strings.Contains(r.target, "fieldSelector"):
		case list == target && !strings.Contains(r.list, "fieldSelector"):
			if a.code != http.StatusOK {
				t.Errorf("%s with the token of %s: %d %s", r.request, r.list, a.code, a.body)
			}
		case list != target:
			if a.code != http.StatusBadRequest || !strings.Contains(a.body, "continue key is not valid") {
				t.Errorf("%s with the token of %s: %d %s, want 400", r.request, r.list, a.code, a.body)
			}
		}
	}
	sealed.askAll(t, ctx, "plain", w.forgedRequests())
	for i := range requests {
		requests[i].from = w.strata // seals no tokens
	}
	sealed.askAll(t, ctx, "foreign", requests)
	token, err := sealed.token(ctx, secrets.path("a")+"?limit=1")
	harness.Check(t, err)
	_, body, ok := strings.Cut(token, ".")
	data, err := base64.RawURLEncoding.DecodeString(body)
	if !ok || err != nil {
		t.Errorf("%q is not a sealed token: %v", token, err)
	}
	if text := string(data); strings.Contains(text, "one") || strings.Contains(text, "two") || strings.Contains(text, "start") {
		t.Errorf("a sealed token contains %q", text)
	}
}
