package shards

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/server/test/internal/harness"
)

// move runs `strata etcd move`.
func move(t *testing.T, ctx context.Context, env *harness.Env, resource string, from, to *harness.Etcd, more ...string) harness.Result {
	t.Helper()
	r, err := env.Run(ctx, "", append([]string{"etcd", "move", resource, "--from=" + from.URL, "--to=" + to.URL}, more...)...)
	harness.Check(t, err)
	return r
}

// requireMove checks the exit code of a move, and that its output or error has a text.
func requireMove(t *testing.T, r harness.Result, code int, text string) {
	t.Helper()
	if r.Code != code || !strings.Contains(r.Stdout+r.Stderr, text) {
		t.Fatalf("exit code %d, want %d and %q:\n%s%s", r.Code, code, text, r.Stdout, r.Stderr)
	}
}

// stored returns the values below /registry/ and a path.
func stored(t *testing.T, ctx context.Context, etcd *clientv3.Client, path string) map[string]string {
	t.Helper()
	r, err := etcd.Get(ctx, "/registry/"+path, clientv3.WithPrefix())
	harness.Check(t, err)
	values := map[string]string{}
	for _, kv := range r.Kvs {
		values[string(kv.Key)] = string(kv.Value)
	}
	return values
}

// TestMove_RunningServer_LosesNothing moves widgets and events to another etcd while a server writes them, restarts the server with the
// override, and moves widgets back.
func TestMove_RunningServer_LosesNothing(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t) // upstream does not refuse writes during the move
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	first, second := env.Etcd(), env.Etcd()
	from, to := first.Client(), second.Client()
	server := env.APIServer(first)
	api := server.API()
	defineWidgets(t, ctx, api)
	_, err := api.Create(ctx, eventsPath, event("one"))
	harness.Check(t, err)
	accepted := make(chan map[string]string)
	writing, stop := context.WithCancel(ctx)
	go func() {
		created := map[string]string{}
		for i := 0; writing.Err() == nil; i++ {
			name := fmt.Sprintf("w-%d", i)
			if o, err := api.Create(writing, widgetsPath, widget(name)); err == nil {
				created[name] = o.Metadata.ResourceVersion
			}
		}
		accepted <- created
	}()
	watched, _, err := api.Watch(ctx, widgetsPath, "")
	harness.Check(t, err)
	old, err := watched.Next(ctx) // the writer has begun
	harness.Check(t, err)
	watched.Close()

	dry := move(t, ctx, env, "shards.example.com/widgets", first, second, "--dry-run")
	requireMove(t, dry, 0, "nothing was changed")
	if n := keys(t, ctx, to, ""); n != 0 {
		t.Fatalf("--dry-run wrote %d keys", n)
	}
	requireMove(t, move(t, ctx, env, "shards.example.com/widgets", first, second), 0, "--etcd-servers-overrides=shards.example.com/widgets#"+second.URL)
	r, err := api.Do(ctx, http.MethodPost, widgetsPath, "", widget("late"))
	harness.Check(t, err)
	if r.Code != http.StatusServiceUnavailable || !strings.Contains(r.Status().Message, second.URL) {
		t.Errorf("a write after the move: %v, want 503 and %s", r.Err(), second.URL)
	}
	requireMove(t, move(t, ctx, env, "events", first, second), 0, "moved 1 keys")
	stop()
	created := <-accepted
	if len(created) == 0 {
		t.Fatal("no widget was created")
	}
	for name := range created {
		if n := keys(t, ctx, to, "shards.example.com/widgets/default/"+name); n == 0 {
			t.Errorf("the server accepted widget %s, which is not in the other etcd", name)
		}
	}
	if one, two := stored(t, ctx, from, "shards.example.com/widgets/"), stored(t, ctx, to, "shards.example.com/widgets/"); fmt.Sprint(one) != fmt.Sprint(two) {
		t.Errorf("%d widgets in the old etcd differ from %d in the new one", len(one), len(two))
	}
	requireTTL(t, ctx, to, "/registry/events/default/one")

	harness.Check(t, server.Stop())
	server.Restart(overrides(map[string]*harness.Etcd{"shards.example.com/widgets": second, "/events": second}))
	awaitCode(t, ctx, api, widgetsPath+"/"+old.Object.Metadata.Name, http.StatusOK)
	requireCode(t, ctx, api, eventsPath+"/one", http.StatusOK)
	list, err := api.List(ctx, widgetsPath, "")
	harness.Check(t, err)
	for name, revision := range created { // every revision that a client can have is below those of the other etcd
		if harness.Revision(t, list.Metadata.ResourceVersion) <= harness.Revision(t, revision) {
			t.Fatalf("widget %s had revision %s, and the list has %s", name, revision, list.Metadata.ResourceVersion)
		}
	}
	requireRelist(t, ctx, api, widgetsPath, old.Object.Metadata.ResourceVersion)
	_, err = api.Create(ctx, widgetsPath, widget("new"))
	harness.Check(t, err)

	// Back again. The old copy in the first etcd is replaced.
	requireMove(t, move(t, ctx, env, "widgets.shards.example.com", second, first), 0, "keys of an earlier copy")
	harness.Check(t, server.Stop())
	api = env.APIServer(first, overrides(map[string]*harness.Etcd{"/events": second})).API() // a repeated flag would add to the overrides
	awaitCode(t, ctx, api, widgetsPath+"/new", http.StatusOK)
	_, err = api.Create(ctx, widgetsPath, widget("newer"))
	harness.Check(t, err)
	requireMove(t, move(t, ctx, env, "shards.example.com/widgets", second, first, "--delete-source", "--servers-restarted"), 0, "deleted ")
	if n := keys(t, ctx, to, "shards.example.com/"); n != 0 {
		t.Errorf("%d widgets remain in the second etcd", n)
	}
}

// TestMove_BackWithoutRestart_LosesNothing moves widgets to another etcd and back while a server, which is not restarted, writes them.
func TestMove_BackWithoutRestart_LosesNothing(t *testing.T) {
	t.Parallel()
	harness.OnlyStrata(t) // upstream does not refuse writes during the move
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	first, second := env.Etcd(), env.Etcd()
	api := env.APIServer(first).API()
	defineWidgets(t, ctx, api)
	_, err := api.Create(ctx, widgetsPath, widget("one"))
	harness.Check(t, err)
	requireMove(t, move(t, ctx, env, "shards.example.com/widgets", first, second), 0, "moved 1 keys")

	accepted := make(chan []string)
	writing, stop := context.WithCancel(ctx)
	go func() {
		var created []string
		for i := 0; writing.Err() == nil; i++ {
			name := fmt.Sprintf("w-%d", i)
			if _, err := api.Create(writing, widgetsPath, widget(name)); err == nil {
				created = append(created, name)
			}
		}
		accepted <- created
	}()
	back := move(t, ctx, env, "shards.example.com/widgets", second, first)
	stop()
	created := <-accepted
	requireMove(t, back, 0, "moved 1 keys")
	for _, name := range append(created, "one") {
		requireCode(t, ctx, api, widgetsPath+"/"+name, http.StatusOK)
		if keys(t, ctx, first.Client(), "shards.example.com/widgets/default/"+name) != 1 {
			t.Errorf("widget %s was accepted, and is not in the etcd of the server", name)
		}
	}
	harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) { // the mark is gone
		r, err := api.Do(ctx, http.MethodPost, widgetsPath, "", widget("after"))
		if err != nil {
			return false, err
		}
		return r.Code == http.StatusCreated, r.Err()
	}))
	// A deletion needs an object in the other etcd.
	_, err = first.Client().Delete(ctx, "/registry/shards.example.com/widgets/", clientv3.WithPrefix())
	harness.Check(t, err)
	requireMove(t, move(t, ctx, env, "shards.example.com/widgets", second, first, "--delete-source", "--servers-restarted"), 1, "has no keys of")
}

// requireTTL checks that a key has a lease with the time of events.
func requireTTL(t *testing.T, ctx context.Context, etcd *clientv3.Client, key string) {
	t.Helper()
	r, err := etcd.Get(ctx, key)
	harness.Check(t, err)
	if len(r.Kvs) != 1 || r.Kvs[0].Lease == 0 {
		t.Fatalf("%s has no lease", key)
	}
	ttl, err := etcd.TimeToLive(ctx, clientv3.LeaseID(r.Kvs[0].Lease))
	harness.Check(t, err)
	if ttl.TTL < 3000 || ttl.TTL > 3700 {
		t.Errorf("%s expires in %d s, want about 3600", key, ttl.TTL)
	}
}

// requireRelist checks that a watch from a revision of the other etcd is refused with 410.
func requireRelist(t *testing.T, ctx context.Context, api *harness.API, path, revision string) {
	t.Helper()
	w, r, err := api.Watch(ctx, path, "resourceVersion="+revision)
	harness.Check(t, err)
	if w == nil {
		if r.Code != http.StatusGone {
			t.Errorf("watch from %s: %v, want 410", revision, r.Err())
		}
		return
	}
	defer w.Close()
	e, err := w.Next(ctx)
	harness.Check(t, err)
	if e.Type != "ERROR" || e.Status.Code != http.StatusGone {
		t.Errorf("watch from %s: %+v, want 410", revision, e)
	}
}

// TestMove_UnsafeState_IsRefused tries moves that could lose data.
func TestMove_UnsafeState_IsRefused(t *testing.T) {
	t.Parallel()
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	first, second, third := env.Etcd(), env.Etcd(), env.Etcd()
	from, to := first.Client(), second.Client()
	put := func(client *clientv3.Client, key, value string) {
		t.Helper()
		_, err := client.Put(ctx, "/registry/"+key, value)
		harness.Check(t, err)
	}
	requireMove(t, move(t, ctx, env, "leases", first, second), 1, "has no keys of leases.coordination.k8s.io")
	put(from, "leases/default/a", "1")
	requireMove(t, move(t, ctx, env, "leases", first, first), 1, "are the same etcd")
	alias := *first
	alias.URL = strings.Replace(first.URL, "127.0.0.1", "localhost", 1)
	requireMove(t, move(t, ctx, env, "leases", first, &alias), 1, "already has 1 keys")
	requireMove(t, move(t, ctx, env, "nothings", first, second), 2, "is not a built-in resource")
	requireMove(t, move(t, ctx, env, "leases", first, second, "--delete-source"), 1, "was not moved away")
	put(to, "leases/default/b", "2")
	requireMove(t, move(t, ctx, env, "leases", first, second), 1, "already has 1 keys of leases.coordination.k8s.io")
	_, err := to.Delete(ctx, "/registry/leases/default/b")
	harness.Check(t, err)
	put(from, "strata/move-lock", "a test")
	requireMove(t, move(t, ctx, env, "leases", first, second), 1, "another move holds the lock (a test)")
	_, err = from.Delete(ctx, "/registry/strata/move-lock")
	harness.Check(t, err)

	requireMove(t, move(t, ctx, env, "leases", first, second), 0, "moved 1 keys")
	requireMove(t, move(t, ctx, env, "leases", first, second), 1, "was moved from "+first.URL)
	requireMove(t, move(t, ctx, env, "leases", first, second, "--delete-source"), 1, "add --servers-restarted")
	if n := keys(t, ctx, from, "leases/"); n != 1 {
		t.Errorf("%d leases remain after a refused deletion, want 1", n)
	}
	requireMove(t, move(t, ctx, env, "leases", first, third, "--delete-source", "--servers-restarted"), 1, "was moved from "+first.URL+" to "+second.URL)
	put(from, "leases/default/a", "late")
	requireMove(t, move(t, ctx, env, "leases", first, second, "--delete-source", "--servers-restarted"), 1, "written after the move, such as /registry/leases/default/a")
	requireMove(t, move(t, ctx, env, "leases", second, first), 1, "written after it was moved away, such as /registry/leases/default/a")
	if got := stored(t, ctx, from, "leases/"); len(got) != 1 || got["/registry/leases/default/a"] != "late" {
		t.Errorf("refused commands changed the first etcd: %v", got)
	}
	if got := stored(t, ctx, to, "leases/"); len(got) != 1 || got["/registry/leases/default/a"] != "1" {
		t.Errorf("refused commands changed the second etcd: %v", got)
	}
}
