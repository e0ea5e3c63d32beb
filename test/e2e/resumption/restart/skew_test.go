package restart

import (
	"testing"
	"time"

	"github.com/stratakube/strata/test/harness"
	"github.com/stratakube/strata/test/harness/informer"
	"github.com/stratakube/strata/test/harness/recorded"
)

// A bookmark of one server is valid on another one that is behind: the watch starts there, and
// delivers no event that the client has received.
func TestBookmark_FromNewerServer_ResumesOnOlderServer(t *testing.T) {
	harness.OnlyStrata(t) // upstream answers "Too large resource version"
	shared.use.Own(t)
	ctx := harness.Context(t, 8*time.Minute)
	newer, older, proxy := shared.servers[0], shared.servers[1], shared.proxy
	api := newer.API()
	in := informer.Follow{Namespace: harness.Namespace(t, ctx, api, harness.NewName("newer"))}
	maps, secrets := "/api/v1/namespaces/"+in.Namespace+"/configmaps", "/api/v1/namespaces/"+in.Namespace+"/secrets"
	history := recorded.Follow(t, ctx, shared.etcd.Client(), "/registry/")
	before, err := older.API().List(ctx, maps, "") // both servers serve the resources
	harness.Check(t, err)
	_, err = older.API().List(ctx, secrets, "")
	harness.Check(t, err)

	t.Cleanup(func() { proxy.Stall(false) })
	proxy.Stall(true)
	var written int64
	for i := range 20 {
		o, err := api.Create(ctx, maps, configMap(string(rune('a'+i)), i))
		harness.Check(t, err)
		written = harness.Revision(t, o.Metadata.ResourceVersion)
	}
	busy, quiet := &watcher{path: maps}, &watcher{path: secrets}
	all := []*watcher{busy, quiet}
	for _, w := range all {
		// the server sends a bookmark before it ends a watch
		w.query = "allowWatchBookmarks=true&timeoutSeconds=3"
		harness.Check(t, w.begin(ctx, api, harness.Revision(t, before.Metadata.ResourceVersion)))
	}
	for _, w := range all {
		harness.Check(t, w.catchUp(ctx, api, written)) // the quiet one by a bookmark
		if err := w.drain(ctx); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.end)
		w.query = "allowWatchBookmarks=true"
		held, err := older.API().List(ctx, w.path, "resourceVersion=0")
		harness.Check(t, err)
		if at := harness.Revision(t, held.Metadata.ResourceVersion); at >= w.position {
			t.Fatalf("the server that is behind is at %d, and the bookmark at %d", at, w.position)
		}
		if err := w.begin(ctx, older.API(), w.position); err != nil {
			t.Fatalf("a watch of %s after a bookmark of a newer server is refused: %v", w.path, err)
		}
	}
	o, err := api.Create(ctx, maps, configMap("last", 0))
	harness.Check(t, err)
	proxy.Stall(false)
	last := harness.Revision(t, o.Metadata.ResourceVersion)
	harness.Check(t, busy.until(ctx, last))
	o, err = api.Create(ctx, secrets, object{"metadata": object{"name": "last"}})
	harness.Check(t, err)
	harness.Check(t, quiet.until(ctx, harness.Revision(t, o.Metadata.ResourceVersion)))
	judge(t, ctx, history, "/registry/configmaps/", in, busy, last)
	judge(t, ctx, history, "/registry/secrets/", in, quiet, quiet.position)
}
