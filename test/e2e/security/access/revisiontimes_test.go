package access

import (
	"net/http"
	"testing"

	"github.com/stratakube/strata/kube/revisiontimes"
	"github.com/stratakube/strata/test/harness"
)

// TestRBAC_RevisionTimes_NeedsRightsOfList: the form RevisionTimes of a list is answered to users
// who may list, and shows no object. In other requests, and by a server without it, it is not
// acceptable.
func TestRBAC_RevisionTimes_NeedsRightsOfList(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	w := open(t)
	var requests []asked
	var verbs []string
	add := func(r read, target string) {
		for _, user := range []string{anonymous, stranger, nothing, inA, inB, oneName, getter, lister, watcher, all} {
			want := wantOf(user, r)
			want.sees = nil
			requests = append(requests, asked{request: request{user: user, target: target, header: accept(revisiontimes.MediaType)}, want: want})
			verbs = append(verbs, r.verb)
		}
	}
	for _, r := range []resource{secrets, configMaps, gizmos, nodes} {
		for _, namespace := range []string{"a", "b", ""} {
			if !r.namespaced && namespace != "" {
				continue
			}
			path := r.path(namespace)
			add(read{verb: "list", resource: r, namespace: namespace}, path)
			add(read{verb: "list", resource: r, namespace: namespace, name: "one"}, path+"?fieldSelector=metadata.name%3Done")
			add(read{verb: "watch", resource: r, namespace: namespace}, path+"?watch=true&timeoutSeconds=1")
			if !r.namespaced || namespace != "" {
				add(read{verb: "get", resource: r, namespace: namespace, name: "one"}, path+"/one")
			}
		}
	}
	for _, e := range []*engine{w.strata, w.upstream} {
		answers, _ := e.askAll(t, ctx, "revisiontimes", requests)
		for i, r := range requests {
			want := http.StatusNotAcceptable
			switch {
			case r.want.refused != 0:
				want = r.want.refused
			case e == w.strata && verbs[i] == "list":
				want = http.StatusOK
			}
			if answers[i].code != want {
				t.Errorf("%s: %s: code %d, want %d: %s", e.name, r.request, answers[i].code, want, answers[i].body)
			}
		}
	}
}
