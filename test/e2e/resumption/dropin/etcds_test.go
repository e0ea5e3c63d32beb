package dropin

import (
	"context"
	"fmt"
	"net/http"
	"strings"
	"testing"

	clientv3 "go.etcd.io/etcd/client/v3"

	"github.com/stratakube/strata/test/harness"
)

// exercise creates, lists, watches, updates and deletes a ConfigMap and a custom resource.
func exercise(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	createThings(t, ctx, api)
	for _, tc := range []struct {
		path string
		body object
	}{
		{defaultMaps, configMap("exercise")},
		{thingsPath, thing("exercise", "data")},
	} {
		list, err := api.List(ctx, tc.path, "")
		harness.Check(t, err)
		w := harness.StartWatch(t, ctx, api, tc.path, "resourceVersion="+list.Metadata.ResourceVersion)
		create(t, ctx, api, tc.path, tc.body)
		expectEvent(t, ctx, w, "ADDED", "exercise")
		patched, err := api.Patch(ctx, tc.path+"/exercise", `{"metadata":{"labels":{"a":"b"}}}`)
		harness.Check(t, err)
		if o := expectEvent(t, ctx, w, "MODIFIED", "exercise"); o.Metadata.ResourceVersion != patched.Metadata.ResourceVersion {
			t.Errorf("event at %s, want %s", o.Metadata.ResourceVersion, patched.Metadata.ResourceVersion)
		}
		again, err := api.List(ctx, tc.path, "labelSelector=a%3Db")
		harness.Check(t, err)
		if len(again.Items) != 1 {
			t.Errorf("%d objects after one was created", len(again.Items))
		}
		harness.Check(t, api.Delete(ctx, tc.path+"/exercise"))
		expectEvent(t, ctx, w, "DELETED", "exercise")
		w.Close()
	}
}

const (
	thingsGroup = "test.example.com"
	thingsPath  = "/apis/" + thingsGroup + "/v1/namespaces/default/things"
)

func thing(name, text string) object {
	return object{"apiVersion": thingsGroup + "/v1", "kind": "Thing", "metadata": object{"name": name}, "spec": object{"text": text}}
}

// createThings creates the definition, if it does not exist, and returns when it is served.
func createThings(t *testing.T, ctx context.Context, api *harness.API) {
	t.Helper()
	harness.Check(t, harness.Define(ctx, thingsGroup, "things", "Thing", nil, api))
}

// count returns the number of keys under a prefix of an etcd.
func count(t *testing.T, ctx context.Context, client *clientv3.Client, prefix string) int64 {
	t.Helper()
	resp, err := client.Get(ctx, prefix, clientv3.WithPrefix(), clientv3.WithCountOnly())
	harness.Check(t, err)
	return resp.Count
}

// TestEtcdPrefix_TwoClustersOverTLS_AreSeparate runs two clusters with different prefixes on one
// etcd, which requires client certificates, and checks for a clear error without one. One of the
// clusters does not request progress by itself.
func TestEtcdPrefix_TwoClustersOverTLS_AreSeparate(t *testing.T) {
	t.Parallel() // it waits for an etcd that refuses its connections
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.EtcdTLS(env.Authority())
	client := etcd.Client()
	without := env.StartAPIServer(etcd, "--etcd-certfile=", "--etcd-keyfile=")
	one := env.StartAPIServer(etcd, "--etcd-prefix=/one/registry", "--strata-progress-interval=0")
	// the other prefix is a prefix of this one
	two := env.StartAPIServer(etcd, "--etcd-prefix=/one/registry2", progressOften)
	for _, s := range []*harness.Server{one, two} {
		harness.Check(t, s.Await(ctx, "/readyz"))
		if harness.Engine() == harness.Strata {
			s.AwaitProgress("")
		}
	}
	exercise(t, ctx, one.API())
	exercise(t, ctx, two.API())
	list, err := two.API().List(ctx, defaultMaps, "")
	harness.Check(t, err)
	w := harness.StartWatch(t, ctx, two.API(), defaultMaps, "resourceVersion="+list.Metadata.ResourceVersion)
	create(t, ctx, one.API(), defaultMaps, configMap("of-one"))
	create(t, ctx, two.API(), defaultMaps, configMap("of-two"))
	expectEvent(t, ctx, w, "ADDED", "of-two")
	for prefix, want := range map[string]string{"/one/registry/": "of-one", "/one/registry2/": "of-two"} {
		if n := count(t, ctx, client, prefix+"configmaps/default/"+want); n != 1 {
			t.Errorf("%d keys for %s below %s", n, want, prefix)
		}
		if n := count(t, ctx, client, prefix+"configmaps/default/"); n != 1 {
			t.Errorf("%d ConfigMaps below %s, want 1", n, prefix)
		}
	}
	if n := count(t, ctx, client, "/registry/"); n != 0 {
		t.Errorf("%d keys below the default prefix", n)
	}
	if harness.Engine() == harness.Strata {
		requireNoProgressAsked(t, ctx, etcd, one.API(), two.API())
	}

	code, err := without.Wait(ctx)
	harness.Check(t, err)
	output := without.Output()
	if code != 1 || !strings.Contains(output[strings.LastIndex(strings.TrimSpace(output), "\n")+1:], etcd.URL) {
		t.Errorf("without a certificate: exit code %d, want 1 and a last line that names %s:\n%s", code, etcd.URL, without.Tail())
	}
}

// advance advances an etcd's revision with writes outside the prefix of API servers.
func advance(t *testing.T, ctx context.Context, client *clientv3.Client, revisions int) {
	t.Helper()
	for i := range revisions {
		_, err := client.Put(ctx, "outside", fmt.Sprint(i))
		harness.Check(t, err)
	}
}

// TestTransaction_BecomesVisibleAtomically repeatedly writes several objects in one etcd
// transaction: no list, paged list or watch may show some of them without the others (I5).
func TestTransaction_BecomesVisibleAtomically(t *testing.T) {
	// upstream's cacher, which applies events one by one, shows partial transactions
	harness.OnlyStrata(t)
	shared.use.Share(t)
	ctx := harness.Context(t, testTimeout)
	client, api := shared.etcd.Client(), shared.servers[0].API()
	namespace := harness.Namespace(t, ctx, api, harness.NewName("transactions"))
	maps := "/api/v1/namespaces/" + namespace + "/configmaps"
	const keys, rounds = 20, 60
	names := make([]string, keys)
	for i := range names {
		names[i] = fmt.Sprintf("map-%02d", i)
		create(t, ctx, api, maps, configMap(names[i]))
	}
	list, err := api.List(ctx, maps, "")
	harness.Check(t, err)
	watch := harness.StartWatch(t, ctx, api, maps, "resourceVersion="+list.Metadata.ResourceVersion)
	writing := make(chan error, 1)
	go func() {
		writing <- func() error {
			for round := range rounds {
				var puts []clientv3.Op
				for _, name := range names {
					// An API server decodes JSON like its own protobuf.
					value := fmt.Sprintf(`{"apiVersion":"v1","kind":"ConfigMap","data":{"round":"%d"},
						"metadata":{"name":%q,"namespace":%q,"uid":%q}}`, round, name, namespace, name)
					puts = append(puts, clientv3.OpPut("/registry/configmaps/"+namespace+"/"+name, value))
				}
				if _, err := client.Txn(ctx).Then(puts...).Commit(); err != nil {
					return err
				}
			}
			return nil
		}()
	}()
	for done := false; !done; {
		select {
		case err := <-writing:
			harness.Check(t, err)
			done = true // and one more round
		default:
		}
		for _, query := range []string{"", "resourceVersion=0"} {
			list, err := api.List(ctx, maps, query)
			harness.Check(t, err)
			requireOneRound(t, list.Items)
		}
		items, _, err := api.ListAll(ctx, maps, "", 6)
		harness.Check(t, err)
		requireOneRound(t, items)
	}
	for round := range rounds {
		version := ""
		for i, name := range names {
			o := expectEvent(t, ctx, watch, "MODIFIED", name)
			if o.Data["round"] != fmt.Sprint(round) || i > 0 && o.Metadata.ResourceVersion != version {
				t.Fatalf("event %d of round %d is of round %s at %s, want %s", i, round, o.Data["round"], o.Metadata.ResourceVersion, version)
			}
			version = o.Metadata.ResourceVersion
		}
	}
}

func requireOneRound(t *testing.T, items []harness.Object) {
	t.Helper()
	for _, o := range items {
		if o.Data["round"] != items[0].Data["round"] || o.Data["round"] != "" && o.Metadata.ResourceVersion != items[0].Metadata.ResourceVersion {
			t.Fatalf("%s is of round %s, %s of round %s", items[0].Key(), items[0].Data["round"], o.Key(), o.Data["round"])
		}
	}
}

// TestEtcd_StoppedAndStarted_WatchesContinue stops etcd during watches. Memory still answers
// requests for any resource version; when etcd is back, the same watches continue.
func TestEtcd_StoppedAndStarted_WatchesContinue(t *testing.T) {
	shared.use.Own(t)
	ctx := harness.Context(t, testTimeout)
	etcd, api := shared.etcd, shared.servers[0].API()
	createThings(t, ctx, api)
	namespace := "/namespaces/" + harness.Namespace(t, ctx, api, harness.NewName("stopped"))
	paths := map[string]func(name string) object{
		"/api/v1" + namespace + "/configmaps":                  configMap,
		"/apis/" + thingsGroup + "/v1" + namespace + "/things": func(name string) object { return thing(name, "") },
	}
	watches := map[string]*harness.Watch{}
	for path, body := range paths {
		create(t, ctx, api, path, body("before"))
		list, err := api.List(ctx, path, "")
		harness.Check(t, err)
		watches[path] = harness.StartWatch(t, ctx, api, path, "resourceVersion="+list.Metadata.ResourceVersion)
	}

	for round := range harness.Pick(1, 2) {
		etcd.Stop()
		for path := range paths {
			list, err := api.List(ctx, path, "resourceVersion=0")
			if err != nil || len(list.Items) == 0 {
				t.Errorf("round %d: list of %s at any resource version without etcd: %+v, %v", round, path, list, err)
			}
			if _, err := api.Get(ctx, path+"/before", "resourceVersion=0"); err != nil {
				t.Errorf("round %d: get at any resource version without etcd: %v", round, err)
			}
			// A consistent read cannot be answered: it fails, at its timeout at the latest.
			if r, err := api.Do(ctx, http.MethodGet, path, "timeout=2s", nil); ctx.Err() != nil || err == nil && r.Code == http.StatusOK {
				t.Errorf("round %d: consistent list of %s without etcd: %+v, %v, want an error", round, path, r, err)
			}
		}
		etcd.Start()
		for path, body := range paths {
			name := fmt.Sprintf("after-%d", round)
			harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
				_, err := api.Create(ctx, path, body(name))
				return err == nil || strings.Contains(err.Error(), "AlreadyExists"), err
			}))
			expectEvent(t, ctx, watches[path], "ADDED", name)
			list, err := api.List(ctx, path, "")
			harness.Check(t, err)
			if names := fmt.Sprint(list.Names()); !strings.Contains(names, name) || !strings.Contains(names, "before") {
				t.Errorf("round %d: %s lists %s", round, path, names)
			}
		}
	}
}
