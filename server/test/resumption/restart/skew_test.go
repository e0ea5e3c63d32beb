package restart

import (
	"testing"
	"time"

	"github.com/stratakube/strata/server/test/internal/harness"
	"github.com/stratakube/strata/server/test/internal/recorded"
)

// A bookmark of one server is good on another one that is behind: the watch begins there, and delivers nothing that the
// client has had.
func TestBookmarkOfANewerServer(t *testing.T) {
	t.Parallel()
	onlyStrata(t) // upstream answers "Too large resource version"
	ctx := newContext(t, 2*time.Minute)
	e := harness.New(t)
	etcd := e.Etcd()
	proxy := e.Proxy(etcd)
	newer, older := e.StartAPIServer(etcd, serverFlags...), e.StartAPIServer(proxy.Etcd(), serverFlags...)
	for _, server := range []*harness.Server{newer, older} {
		check(t, server.Await(ctx, "/readyz"))
	}
	history := recorded.Follow(t, ctx, etcd.Client(), "/registry/")
	const maps, secrets = "/api/v1/namespaces/default/configmaps", "/api/v1/namespaces/default/secrets"
	api := newer.API()
	before, err := older.API().List(ctx, maps, "") // both servers know the resources
	check(t, err)
	_, err = older.API().List(ctx, secrets, "")
	check(t, err)

	proxy.Stall(true)
	for i := range 20 {
		_, err := api.Create(ctx, maps, configMap(string(rune('a'+i)), i))
		check(t, err)
	}
	busy, quiet := &watcher{path: maps}, &watcher{path: secrets}
	all := []*watcher{busy, quiet}
	for _, w := range all {
		w.query = "allowWatchBookmarks=true&timeoutSeconds=3" // the server vouches before it ends a watch
		check(t, w.begin(ctx, api, revisionOf(t, before.Metadata.ResourceVersion)))
	}
	for _, w := range all {
		if err := w.drain(ctx); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(w.end)
		w.query = "allowWatchBookmarks=true"
		held, err := older.API().List(ctx, w.path, "resourceVersion=0")
		check(t, err)
		if at := revisionOf(t, held.Metadata.ResourceVersion); at >= w.position {
			t.Fatalf("the server that is behind is at %d, and the bookmark at %d", at, w.position)
		}
		if err := w.begin(ctx, older.API(), w.position); err != nil {
			t.Fatalf("a watch of %s after a bookmark of a newer server is refused: %v", w.path, err)
		}
	}
	o, err := api.Create(ctx, maps, configMap("last", 0))
	check(t, err)
	proxy.Stall(false)
	last := revisionOf(t, o.Metadata.ResourceVersion)
	check(t, busy.until(ctx, last))
	o, err = api.Create(ctx, secrets, object{"metadata": object{"name": "last"}})
	check(t, err)
	check(t, quiet.until(ctx, revisionOf(t, o.Metadata.ResourceVersion)))
	judge(t, ctx, history, "/registry/configmaps/", follow{namespace: "default"}, busy, last)
	judge(t, ctx, history, "/registry/secrets/", follow{namespace: "default"}, quiet, quiet.position)
}
