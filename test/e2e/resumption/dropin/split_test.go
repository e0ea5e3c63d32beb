package dropin

import (
	"context"
	"fmt"
	"net/http"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// side is one of the two etcds of a server, with the resources stored in it.
type side struct {
	name   string
	etcd   *harness.Etcd
	client *clientv3.Client
	start  int64    // its revision before the server was started
	busy   string   // a resource that the test writes
	quiet  []string // resources without writes
}

// uncachedPath is a resource that is read from etcd.
const uncachedPath = "/api/v1/namespaces/default/events"

// TestSplitEtcd_RevisionsAreNotMixed is the test required by KEP-1904, on two etcds whose revisions
// are far apart: no resource of one etcd shows a revision of the other, and each resource follows
// all writes to its own etcd, including keys that are not of a resource.
func TestSplitEtcd_RevisionsAreNotMixed(t *testing.T) {
	t.Parallel() // it waits for bookmarks
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	far := side{name: "far", etcd: env.Etcd(), busy: defaultSecrets,
		// custom resources cannot be stored in the other etcd
		quiet: []string{"/api/v1/limitranges", thingsPath}}
	near := side{name: "near", etcd: env.Etcd(), busy: defaultMaps,
		quiet: []string{"/api/v1/podtemplates", uncachedPath}}
	far.client, near.client = far.etcd.Client(), near.etcd.Client()
	advance(t, ctx, far.client, 5000)
	for _, s := range []*side{&far, &near} {
		s.start = etcdRevision(t, ctx, s.client)
	}
	api := env.APIServer(far.etcd, fmt.Sprintf("--etcd-servers-overrides=/configmaps#%[1]s,/podtemplates#%[1]s,/events#%[1]s", near.etcd.URL),
		progressOften, "--watch-cache-sizes=events#0").API()
	createThings(t, ctx, api)

	for _, s := range []*side{&far, &near} {
		for _, path := range append([]string{s.busy}, s.quiet...) {
			s.requireOwnRevisions(t, ctx, api, path)
		}
	}
	for _, sides := range [][2]*side{{&far, &near}, {&near, &far}} {
		requireApart(t, ctx, api, sides[0], sides[1])
	}
	for _, s := range []*side{&far, &near} {
		for _, path := range s.quiet {
			s.requireFollowsOthers(t, ctx, api, path)
		}
	}
	requireStoredApart(t, ctx, api, &far, &near)
}

// requireWithin checks that a revision is between low, an earlier revision of its own etcd, and the
// current one.
func (s *side) requireWithin(t *testing.T, ctx context.Context, what string, got, low int64) {
	t.Helper()
	if high := etcdRevision(t, ctx, s.client); got < low || got > high {
		t.Errorf("%s: %d, want between %d and %d, where the %s etcd is", what, got, low, high, s.name)
	}
}

// requireOwnRevisions checks every kind of read that returns a revision.
func (s *side) requireOwnRevisions(t *testing.T, ctx context.Context, api *harness.API, path string) {
	t.Helper()
	before := etcdRevision(t, ctx, s.client)
	current := listRevision(t, ctx, api, path, "")
	s.requireWithin(t, ctx, path, current, before)
	s.requireWithin(t, ctx, path+" in pages", listRevision(t, ctx, api, path, "limit=1"), before)
	s.requireWithin(t, ctx, path+" at any version", listRevision(t, ctx, api, path, "resourceVersion=0"), s.start)
	s.requireWithin(t, ctx, path+" not older", listRevision(t, ctx, api, path, fmt.Sprintf("resourceVersionMatch=NotOlderThan&resourceVersion=%d", current)), current)
	if got := listRevision(t, ctx, api, path, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", current)); got != current {
		t.Errorf("%s exactly at %d is at %d", path, current, got)
	}
	_, at := initialEvents(t, ctx, api, path, "")
	s.requireWithin(t, ctx, "initial events of "+path, at, before)
	_, at = initialEvents(t, ctx, api, path, "resourceVersion=0")
	s.requireWithin(t, ctx, "initial events at any version of "+path, at, s.start)
}

// requireApart writes many revisions to one etcd and checks lists and bookmarks of the other, whose
// resources have no writes meanwhile.
func requireApart(t *testing.T, ctx context.Context, api *harness.API, written, other *side) {
	t.Helper()
	before := etcdRevision(t, ctx, other.client)
	paths := append([]string{other.busy}, other.quiet...)
	watches := map[string]*harness.Watch{}
	for _, path := range paths {
		from := listRevision(t, ctx, api, path, "")
		other.requireWithin(t, ctx, path, from, before)
		watches[path] = harness.StartWatch(t, ctx, api, path, bookmarks+fmt.Sprint(from))
	}
	last := etcdRevision(t, ctx, written.client)
	for i := range 50 {
		o := create(t, ctx, api, written.busy, object{"metadata": object{"name": fmt.Sprintf("apart-%d", i)}})
		written.requireWithin(t, ctx, "a new object", harness.Revision(t, o.Metadata.ResourceVersion), last)
		last = harness.Revision(t, o.Metadata.ResourceVersion)
		writeOutside(t, ctx, written.client)
	}
	if got := listRevision(t, ctx, api, written.busy, ""); got < last {
		t.Errorf("%s is listed at %d after a write at %d", written.busy, got, last)
	}
	for _, path := range paths {
		other.requireWithin(t, ctx, path, listRevision(t, ctx, api, path, ""), before)
		// There may be no bookmark: no write advances it beyond the start of the watch.
		if at := nextBookmark(t, ctx, watches[path]); at != 0 {
			other.requireWithin(t, ctx, "bookmark of "+path, at, before)
		}
	}
	if harness.Engine() == harness.Strata {
		for _, s := range []*side{written, other} {
			s.requireWithin(t, ctx, "metric of the published revision", publishedRevision(t, ctx, api, s.etcd), s.start)
		}
	}
}

// requireFollowsOthers writes other resources and other keys of the same etcd, and waits until
// lists and bookmarks of a resource without writes reach those revisions.
func (s *side) requireFollowsOthers(t *testing.T, ctx context.Context, api *harness.API, path string) {
	t.Helper()
	from := listRevision(t, ctx, api, path, "")
	// its watches are served by etcd, which sends no progress notification in this time
	uncached := path == uncachedPath

	o := create(t, ctx, api, s.busy, object{"metadata": object{"generateName": "followed-"}})
	written := harness.Revision(t, o.Metadata.ResourceVersion)
	if harness.Engine() == harness.Strata && !uncached {
		// By events alone, without consistent reads.
		awaitPublished(t, ctx, api, s.etcd, written)
		if got := listRevision(t, ctx, api, path, "resourceVersion=0"); got < written {
			t.Errorf("%s is in memory at %d, want the published revision %d", path, got, written)
		}
		awaitBookmark(t, ctx, api, path, from, written)
	}
	s.requireWithin(t, ctx, path+" after a write to "+s.busy, listRevision(t, ctx, api, path, ""), written)

	outside := writeOutside(t, ctx, s.client)
	if harness.Engine() == harness.Strata && !uncached {
		// By progress alone, which is requested because a watch has bookmarks.
		awaitBookmark(t, ctx, api, path, from, outside)
		awaitPublished(t, ctx, api, s.etcd, outside)
	}
	s.requireWithin(t, ctx, path+" after a write to another prefix", listRevision(t, ctx, api, path, ""), outside)
	_, at := initialEvents(t, ctx, api, path, "")
	s.requireWithin(t, ctx, "initial events of "+path+" after a write to another prefix", at, outside)
	if !uncached {
		awaitBookmark(t, ctx, api, path, from, outside)
	}
}

// requireStoredApart checks that ConfigMaps are stored in the second etcd, with its revisions and
// its history, and Secrets in the first.
func requireStoredApart(t *testing.T, ctx context.Context, api *harness.API, first, second *side) {
	t.Helper()
	exercise(t, ctx, api)
	if n := count(t, ctx, first.client, "/registry/configmaps/"); n != 0 {
		t.Errorf("%d ConfigMaps in the first etcd", n)
	}
	create(t, ctx, api, defaultMaps, configMap("second"))
	create(t, ctx, api, defaultSecrets, object{"metadata": object{"name": "first"}})
	if n := count(t, ctx, second.client, "/registry/configmaps/default/second"); n != 1 {
		t.Errorf("%d keys for the ConfigMap in the second etcd", n)
	}

	// A resource version of one etcd is meaningless in the other: here that of Secrets is in the
	// future of ConfigMaps.
	secrets, err := api.List(ctx, defaultSecrets, "")
	harness.Check(t, err)
	maps, err := api.List(ctx, defaultMaps, "")
	harness.Check(t, err)
	r, err := api.Do(ctx, http.MethodGet, defaultMaps, "resourceVersion="+secrets.Metadata.ResourceVersion, nil)
	harness.Check(t, err)
	if r.Code != http.StatusGatewayTimeout {
		t.Errorf("ConfigMaps at the resource version of Secrets: %v, want 504", r.Err())
	}

	// Compaction of one etcd does not affect the other.
	_, err = first.client.Compact(ctx, harness.Revision(t, secrets.Metadata.ResourceVersion))
	harness.Check(t, err)
	exact, err := api.List(ctx, defaultMaps, "resourceVersionMatch=Exact&resourceVersion="+maps.Metadata.ResourceVersion)
	harness.Check(t, err)
	if fmt.Sprint(exact.Names()) != fmt.Sprint(maps.Names()) {
		t.Errorf("got %v, want %v", exact.Names(), maps.Names())
	}
}
