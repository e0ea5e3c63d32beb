package skew

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

// TestSideBySide_PeerAcceptsWritesAndTokens runs Strata and a peer on one etcd: each returns the
// writes of the other, and resource versions, continue tokens, definitions of resources, encrypted
// objects and leases of one are valid on the other.
func TestSideBySide_PeerAcceptsWritesAndTokens(t *testing.T) {
	t.Parallel()
	forEach(t, append([]combination{{upstream, "3.6"}}, stockCombinations...), func(t *testing.T, ctx context.Context, c combination) {
		keys := harness.NewEncryption(t, []string{"secrets"}, harness.Keys("secretbox", "one", "two")...)
		p := c.start(t, ctx, keys.Flag())
		type test struct {
			name string
			run  func(*testing.T, context.Context, *pair)
		}
		tests := []test{
			{"Writes", requireWritesShown},
			{"ResourceVersions", requireSameResourceVersions},
			{"ContinueTokens", requireTokensContinue},
			{"Definitions", requireDefinitionsShared},
			{"LeaderElection", requireOneLeader},
			{"Encryption", func(t *testing.T, ctx context.Context, p *pair) { requireEncryptionShared(t, ctx, p, keys) }},
		}
		if c.peer != upstream { // its identity equals Strata's: it is the same command
			tests = append(tests, test{"Identity", requireIdentities})
		}
		for _, test := range tests {
			t.Run(test.name, func(t *testing.T) { test.run(t, ctx, p) })
		}
	})
}

// requireWritesShown writes through one server. The other returns each write at once in consistent
// reads, and both watches deliver the same events.
func requireWritesShown(t *testing.T, ctx context.Context, p *pair) {
	d := definition{"writes.example.com"}
	d.create(t, ctx, p.peer.API())
	for _, api := range []*harness.API{p.strata.API(), p.peer.API()} {
		d.await(t, ctx, api, "v1", http.StatusOK)
	}
	p.eachDirection(t, func(t *testing.T, dir direction) {
		for path, body := range map[string]object{
			defaultMaps:    configMap("written"),
			defaultLeases:  {"metadata": object{"name": "written"}, "spec": object{"holderIdentity": "a", "leaseDurationSeconds": 10}},
			d.things("v1"): d.thing("v1", "written"),
			"/api/v1/namespaces/default/events": {"metadata": object{"name": "written"}, "reason": "Test", "type": "Normal",
				"involvedObject": object{"kind": "Pod", "name": "p", "namespace": "default"}},
		} {
			from := list(t, ctx, dir.from, path, "").Metadata.ResourceVersion
			watches := []*harness.Watch{watchFrom(t, ctx, dir.from, path, from), watchFrom(t, ctx, dir.to, path, from)}
			created := create(t, ctx, dir.from, path, body)
			requireShown(t, ctx, dir, path, created)
			patched, err := dir.from.Patch(ctx, path+"/written", `{"metadata":{"labels":{"patched":"yes"}}}`)
			harness.Check(t, err)
			requireShown(t, ctx, dir, path, patched)
			// The other server updates the same object at its resource version; a stale version is
			// a conflict.
			again, err := dir.to.Patch(ctx, path+"/written",
				fmt.Sprintf(`{"metadata":{"resourceVersion":%q,"labels":{"patched":"again"}}}`, patched.Metadata.ResourceVersion))
			harness.Check(t, err)
			stale, err := dir.from.DoAs(ctx, http.MethodPatch, path+"/written", "", "application/merge-patch+json", "",
				fmt.Sprintf(`{"metadata":{"resourceVersion":%q,"labels":{"patched":"stale"}}}`, patched.Metadata.ResourceVersion))
			harness.Check(t, err)
			if stale.Code != http.StatusConflict {
				t.Errorf("patch of %s at a stale resource version: %v, want 409", path, stale.Err())
			}
			harness.Check(t, dir.from.Delete(ctx, path+"/written"))
			if r, err := dir.to.Do(ctx, http.MethodGet, path+"/written", "", nil); err != nil || r.Code != http.StatusNotFound {
				t.Errorf("get of the deleted %s: %+v, %v, want 404", path, r, err)
			}
			if l := list(t, ctx, dir.to, path, ""); slices.Contains(l.Names(), "written") {
				t.Errorf("%s lists the deleted object", path)
			}
			var deleted string
			for i, w := range watches {
				expectEvent(t, ctx, w, "ADDED", created)
				expectEvent(t, ctx, w, "MODIFIED", patched)
				expectEvent(t, ctx, w, "MODIFIED", again)
				e := nextEvent(t, ctx, w)
				if e.Type != "DELETED" || e.Object.Metadata.Name != "written" || i > 0 && e.Object.Metadata.ResourceVersion != deleted {
					t.Errorf("%s: got %s of %s at %s, want DELETED at %s", path, e.Type, e.Object.Key(), e.Object.Metadata.ResourceVersion, deleted)
				}
				deleted = e.Object.Metadata.ResourceVersion
				w.Close()
			}
		}
	})
}

// requireShown checks that every kind of read on the other server returns the object as on the
// first.
func requireShown(t *testing.T, ctx context.Context, dir direction, path string, o harness.Object) {
	t.Helper()
	name, version := o.Metadata.Name, o.Metadata.ResourceVersion
	want, err := dir.from.Do(ctx, http.MethodGet, path+"/"+name, "", nil)
	harness.Check(t, err)
	for _, query := range []string{"", "resourceVersion=" + version} {
		var got *harness.Response
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (_ bool, err error) {
			got, err = dir.to.Do(ctx, http.MethodGet, path+"/"+name, query, nil)
			return err == nil && got.Header.Get("Retry-After") == "", err // memory is late
		}))
		if string(got.Body) != string(want.Body) {
			t.Errorf("get %s/%s?%s: got\n%s\nwant\n%s", path, name, query, got.Body, want.Body)
		}
	}
	for _, query := range []string{"", notOlder(version), exact(version), "limit=500", "labelSelector=patched%3Dyes"} {
		l := list(t, ctx, dir.to, path, query)
		i := slices.IndexFunc(l.Items, func(item harness.Object) bool { return item.Metadata.Name == name })
		if expected := !strings.HasPrefix(query, "labelSelector") || o.Metadata.Labels["patched"] == "yes"; expected != (i >= 0) {
			t.Errorf("list %s?%s has %v, want %s in it: %v", path, query, l.Names(), name, expected)
		} else if i >= 0 && l.Items[i].Metadata.ResourceVersion != version {
			t.Errorf("list %s?%s has %s at %s, want %s", path, query, name, l.Items[i].Metadata.ResourceVersion, version)
		}
	}
}

// requireSameResourceVersions uses resource versions of lists, objects, events and bookmarks of one
// server on the other.
func requireSameResourceVersions(t *testing.T, ctx context.Context, p *pair) {
	p.eachDirection(t, func(t *testing.T, dir direction) {
		const path = defaultMaps
		first := create(t, ctx, dir.from, path, object{"metadata": object{"generateName": "versions-"}})
		event := watchFrom(t, ctx, dir.from, path, fmt.Sprint(harness.Revision(t, first.Metadata.ResourceVersion)-1))
		expectEvent(t, ctx, event, "ADDED", first)
		issued := map[string]string{
			"object":            first.Metadata.ResourceVersion,
			"consistent list":   list(t, ctx, dir.from, path, "").Metadata.ResourceVersion,
			"page":              list(t, ctx, dir.from, path, "limit=1").Metadata.ResourceVersion,
			"list of any age":   list(t, ctx, dir.from, path, "resourceVersion=0").Metadata.ResourceVersion,
			"initial bookmark":  endOfInitialEvents(t, ctx, dir.from, path, ""),
			"bookmark of quiet": endOfInitialEvents(t, ctx, dir.from, "/api/v1/limitranges", ""),
		}
		// Versions of one resource are valid for others too: they are revisions of the same etcd.
		second := create(t, ctx, dir.from, path, object{"metadata": object{"generateName": "versions-"}})
		for what, version := range issued {
			w := watchFrom(t, ctx, dir.to, path, version)
			if harness.Revision(t, version) < harness.Revision(t, first.Metadata.ResourceVersion) {
				expectEvent(t, ctx, w, "ADDED", first)
			}
			expectEvent(t, ctx, w, "ADDED", second)
			w.Close()
			if l := list(t, ctx, dir.to, path, notOlder(version)); harness.Revision(t, l.Metadata.ResourceVersion) < harness.Revision(t, version) {
				t.Errorf("%s: a list not older than %s is at %s", what, version, l.Metadata.ResourceVersion)
			}
			ours, theirs := list(t, ctx, dir.from, path, exact(version)), list(t, ctx, dir.to, path, exact(version))
			if fmt.Sprint(ours.Names()) != fmt.Sprint(theirs.Names()) || ours.Metadata.ResourceVersion != version || theirs.Metadata.ResourceVersion != version {
				t.Errorf("%s: lists exactly at %s: %v at %s and %v at %s", what, version,
					ours.Names(), ours.Metadata.ResourceVersion, theirs.Names(), theirs.Metadata.ResourceVersion)
			}
			if at := endOfInitialEvents(t, ctx, dir.to, path, version); harness.Revision(t, at) < harness.Revision(t, version) {
				t.Errorf("%s: initial events not older than %s end at %s", what, version, at)
			}
		}
	})
}

// endOfInitialEvents starts a watch with initial events, not older than a resource version, and
// returns the version of the bookmark after them.
func endOfInitialEvents(t *testing.T, ctx context.Context, api *harness.API, path, notOlderThan string) string {
	t.Helper()
	w := harness.StartWatch(t, ctx, api, path,
		"sendInitialEvents=true&allowWatchBookmarks=true&resourceVersionMatch=NotOlderThan&resourceVersion="+notOlderThan)
	defer w.Close()
	for {
		e, err := w.Next(ctx)
		harness.Check(t, err)
		if e.Type == "BOOKMARK" && e.Object.Metadata.Annotations[metav1.InitialEventsAnnotationKey] == "true" {
			return e.Object.Metadata.ResourceVersion
		}
	}
}

// requireTokensContinue reads lists in pages, alternating between the servers, while objects are
// created and deleted. All pages are at one revision.
func requireTokensContinue(t *testing.T, ctx context.Context, p *pair) {
	d := definition{"tokens.example.com"}
	d.create(t, ctx, p.strata.API())
	const objects, limit = 23, 4
	for _, api := range []*harness.API{p.strata.API(), p.peer.API()} {
		d.await(t, ctx, api, "v2", http.StatusOK)
	}
	for i := range objects {
		create(t, ctx, p.strata.API(), defaultMaps, configMap(fmt.Sprintf("token-%02d", i)))
		create(t, ctx, p.peer.API(), d.things("v2"), d.thing("v2", fmt.Sprintf("token-%02d", i)))
	}
	p.eachDirection(t, func(t *testing.T, dir direction) {
		for _, path := range []string{defaultMaps, "/api/v1/configmaps", "/apis/rbac.authorization.k8s.io/v1/clusterroles",
			d.things("v1"), "/apis/" + d.group + "/v2/things"} {
			servers := []*harness.API{dir.from, dir.to}
			page := list(t, ctx, dir.from, path, fmt.Sprintf("limit=%d", limit))
			version := page.Metadata.ResourceVersion
			names := page.Names()
			whole := list(t, ctx, dir.to, path, exact(version)).Names()
			for pages := 1; page.Metadata.Continue != ""; pages++ {
				if page.Metadata.RemainingItemCount == nil || int(*page.Metadata.RemainingItemCount) != len(whole)-len(names) {
					t.Errorf("%s: %v items remain after %d of %d", path, page.Metadata.RemainingItemCount, len(names), len(whole))
				}
				// No page contains the concurrent writes.
				o := create(t, ctx, servers[pages%2], defaultMaps, object{"metadata": object{"generateName": "token-0-"}})
				page = list(t, ctx, servers[pages%2], path, continued(page.Metadata.Continue, limit))
				harness.Check(t, servers[(pages+1)%2].Delete(ctx, defaultMaps+"/"+o.Metadata.Name))
				names = append(names, page.Names()...)
				if page.Metadata.ResourceVersion != version {
					t.Errorf("%s: page %d is at %s, the first at %s", path, pages, page.Metadata.ResourceVersion, version)
				}
			}
			if len(whole) < objects || fmt.Sprint(names) != fmt.Sprint(whole) {
				t.Errorf("%s: pages have %v, want %v", path, names, whole)
			}
		}
	})
}

// requireIdentities stops one server after the other. While both run, both are endpoints of the
// service "kubernetes" and renew the lease of this host's API server; a stopped server is no longer
// an endpoint.
func requireIdentities(t *testing.T, ctx context.Context, p *pair) {
	requireEndpoints(t, ctx, p, strataAddress, peerAddress)
	for _, s := range []struct {
		stopped, left *harness.Server
		address       string // of the remaining server
	}{{p.strata, p.peer, peerAddress}, {p.peer, p.strata, strataAddress}} {
		harness.Check(t, s.stopped.Stop())
		requireEndpoints(t, ctx, &pair{strata: s.left, peer: s.left}, s.address)
		requireLeaseRenewed(t, ctx, s.left.API())
		s.stopped.Restart()
		requireEndpoints(t, ctx, p, strataAddress, peerAddress)
	}
}

// requireEndpoints waits until both servers return exactly the addresses as the endpoints of the
// service.
func requireEndpoints(t *testing.T, ctx context.Context, p *pair, addresses ...string) {
	t.Helper()
	for _, api := range []*harness.API{p.strata.API(), p.peer.API()} {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			r, err := api.Do(ctx, http.MethodGet, "/apis/discovery.k8s.io/v1/namespaces/default/endpointslices/kubernetes", "", nil)
			if err != nil {
				return false, err
			}
			o, err := r.Object()
			if err != nil {
				return false, err
			}
			var got []string
			endpoints, _ := o.Object["endpoints"].([]any)
			for _, e := range endpoints {
				for _, a := range e.(object)["addresses"].([]any) {
					got = append(got, a.(string))
				}
			}
			slices.Sort(got)
			return slices.Equal(got, addresses), fmt.Errorf("the endpoints are %v, want %v", got, addresses)
		}))
	}
}

// requireLeaseRenewed waits until a running server renews the lease of the host's API server. Both
// servers run on one host and share the lease, whose name is a hash of the host's name. A stopping
// server deletes it; the other one creates it again.
func requireLeaseRenewed(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	const path, query = "/apis/coordination.k8s.io/v1/namespaces/kube-system/leases", "labelSelector=apiserver.kubernetes.io%2Fidentity%3Dkube-apiserver"
	w := harness.StartWatch(t, ctx, api, path, query+"&resourceVersion="+list(t, ctx, api, path, query).Metadata.ResourceVersion)
	defer w.Close()
	if e := nextEvent(t, ctx, w); e.Type != "ADDED" && e.Type != "MODIFIED" {
		t.Errorf("got %s of %s, want ADDED or MODIFIED", e.Type, e.Object.Key())
	}
	if l := list(t, ctx, api, path, query); len(l.Items) != 1 {
		t.Errorf("the API servers of one host have the leases %v, want one", l.Names())
	}
}
