package dropin

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"testing"

	pb "go.etcd.io/etcd/api/v3/etcdserverpb"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.etcd.io/etcd/server/v3/proxy/grpcproxy"
	"go.uber.org/zap"
	"google.golang.org/grpc"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/test/harness"
)

const (
	listGate = "ConsistentListFromCache"
	getGate  = "ConsistentGetFromCache"

	quietPath = "/api/v1/podtemplates" // the test writes none
)

// rangesBelow returns the number of a proxy's ranges that began below a key prefix, except
// consistency checks, which read keys only.
func rangesBelow(p *harness.Proxy, prefix string) int {
	n := 0
	for _, r := range p.Ranges() {
		if !r.KeysOnly && strings.HasPrefix(string(r.Key), prefix) {
			n++
		}
	}
	return n
}

// putMap writes a ConfigMap directly to etcd and returns the revision of the write.
func putMap(t *testing.T, ctx context.Context, client *clientv3.Client, name string) int64 {
	t.Helper()
	resp, err := client.Put(ctx, "/registry/configmaps/default/"+name, fmt.Sprintf(
		`{"apiVersion":"v1","kind":"ConfigMap","metadata":{"name":%q,"namespace":"default","uid":%q}}`, name, name))
	harness.Check(t, err)
	return resp.Header.Revision
}

// requireLogged checks that exactly one line of a server's log contains all the texts.
func requireLogged(t *testing.T, s *harness.Server, texts ...string) {
	t.Helper()
	n := 0
	for line := range strings.Lines(s.Output()) {
		if !slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(line, text) }) {
			n++
		}
	}
	if n != 1 {
		t.Errorf("%d log lines contain %q, want one:\n%s", n, texts, s.Tail())
	}
}

// requireRefused checks that a server exits, before it has served, with exit code 1 and a last line
// that contains all the texts.
func requireRefused(t *testing.T, ctx context.Context, s *harness.Server, texts ...string) {
	t.Helper()
	if err := s.Await(ctx, "/readyz"); err == nil {
		t.Fatalf("the server is ready, want an exit with a line that contains %q", texts)
	}
	code, err := s.Wait(ctx)
	harness.Check(t, err)
	lines := strings.Split(strings.TrimSpace(s.Output()), "\n")
	last := lines[len(lines)-1]
	if code != 1 || !strings.HasPrefix(last, "strata: ") || slices.ContainsFunc(texts, func(text string) bool { return !strings.Contains(last, text) }) {
		t.Errorf("exit code %d, last line %q; want 1 and %q", code, last, texts)
	}
}

// TestOldEtcd_ProgressDependentReads_UseEtcd uses an etcd whose progress notifications may overtake
// events. Requests that depend on the progress of the feed read that etcd; all others are served
// from memory, whose revision advances with events.
func TestOldEtcd_ProgressDependentReads_UseEtcd(t *testing.T) {
	t.Parallel() // it waits for bookmarks, and for reads that time out
	path, version := harness.OldEtcd(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	old := env.ProgramEtcd(path)
	proxy := env.Proxy(old)
	client := old.Client()
	writeOutside(t, ctx, client)
	s := env.APIServer(proxy.Etcd(), engine(harness.Strata), "--strata-unclaimed-bytes=1")
	s.AwaitProgress("")
	api := s.API()
	requireLogged(t, s, version, proxy.Etcd().URL, "etcd#15220", "etcd#17507", listGate, getGate)

	t.Run("reads of the latest state are etcd's", func(t *testing.T) {
		create(t, ctx, api, defaultMaps, configMap("present"))
		for path, prefix := range map[string]string{
			defaultMaps:              "/registry/configmaps/default/",
			defaultMaps + "/present": "/registry/configmaps/default/present",
		} {
			for range 3 {
				proxy.Reset()
				r, err := api.Do(ctx, http.MethodGet, path, "", nil)
				harness.Check(t, err)
				if n := rangesBelow(proxy, prefix); r.Code != http.StatusOK || n == 0 {
					t.Errorf("%s: %d with %d reads of etcd", path, r.Code, n)
				}
			}
		}
	})
	t.Run("reads of the latest state are linearizable", func(t *testing.T) {
		for i := range 50 {
			name := fmt.Sprintf("written-%d", i)
			put := putMap(t, ctx, client, name)
			o, err := api.Get(ctx, defaultMaps+"/"+name, "")
			harness.Check(t, err)
			list, err := api.List(ctx, defaultMaps, "")
			harness.Check(t, err)
			if !slices.Contains(list.Names(), name) || harness.Revision(t, list.Metadata.ResourceVersion) < put ||
				harness.Revision(t, o.Metadata.ResourceVersion) != put {
				t.Fatalf("%s, written at %d, is at %s; the list at %s has %v", name, put,
					o.Metadata.ResourceVersion, list.Metadata.ResourceVersion, list.Names())
			}
		}
	})
	t.Run("reads of any version are memory's", func(t *testing.T) {
		o := create(t, ctx, api, defaultMaps, configMap("any"))
		awaitPublished(t, ctx, api, proxy.Etcd(), harness.Revision(t, o.Metadata.ResourceVersion))
		proxy.Reset()
		for path, queries := range map[string][]string{
			defaultMaps + "/any": {"resourceVersion=0", "resourceVersion=" + o.Metadata.ResourceVersion},
			defaultMaps: {"resourceVersion=0", "resourceVersion=0&limit=2", "resourceVersion=" + o.Metadata.ResourceVersion,
				"resourceVersionMatch=Exact&resourceVersion=" + o.Metadata.ResourceVersion},
		} {
			for _, query := range queries {
				r, err := api.Do(ctx, http.MethodGet, path, query, nil)
				harness.Check(t, err)
				if r.Code != http.StatusOK || !strings.Contains(string(r.Body), `"any"`) {
					t.Errorf("%s?%s: %v", path, query, r.Err())
				}
			}
		}
		names, at := initialEvents(t, ctx, api, defaultMaps, "resourceVersion=0")
		if !slices.Contains(names, "any") || at < harness.Revision(t, o.Metadata.ResourceVersion) {
			t.Errorf("initial events at %d: %v", at, names)
		}
		if n := rangesBelow(proxy, "/registry/configmaps/default/"); n != 0 {
			t.Errorf("%d reads of etcd", n)
		}
	})
	t.Run("custom resources from the start", func(t *testing.T) {
		// An object stored before the first request is not in memory yet, and is read at the
		// revision of the last event.
		_, err := client.Put(ctx, "/registry/"+thingsGroup+"/things/default/stored", fmt.Sprintf(
			`{"apiVersion":"%s/v1","kind":"Thing","metadata":{"name":"stored","namespace":"default","uid":"stored"}}`, thingsGroup))
		harness.Check(t, err)
		createThings(t, ctx, api)
		advance(t, ctx, client, 100)
		var list *harness.List
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			list, err = api.List(ctx, thingsPath, "resourceVersion=0")
			return err == nil && slices.Contains(list.Names(), "stored"), err
		}))
		w := harness.StartWatch(t, ctx, api, thingsPath, "resourceVersion="+list.Metadata.ResourceVersion)
		exercise(t, ctx, api)
		expectEvent(t, ctx, w, "ADDED", "exercise")
	})
	t.Run("watches begin with the latest state", func(t *testing.T) {
		put := putMap(t, ctx, client, "begin")
		names, at := initialEvents(t, ctx, api, defaultMaps, "")
		if !slices.Contains(names, "begin") || at < put {
			t.Errorf("initial events at %d, after a write at %d: %v", at, put, names)
		}
		w := harness.StartWatch(t, ctx, api, defaultMaps, "fieldSelector=metadata.name%3Dbegin")
		expectEvent(t, ctx, w, "ADDED", "begin")
		harness.Check(t, api.Delete(ctx, defaultMaps+"/begin"))
		expectEvent(t, ctx, w, "DELETED", "begin")
	})
	t.Run("writes to other prefixes", func(t *testing.T) { requireNotHungBy(t, ctx, api, client, proxy.Etcd()) })
	t.Run("etcd stops and returns", func(t *testing.T) {
		w := harness.StartWatch(t, ctx, api, defaultMaps, fmt.Sprintf("resourceVersion=%d", listRevision(t, ctx, api, defaultMaps, "")))
		advance(t, ctx, client, 10) // the feed resumes before these writes
		old.Stop()
		if list, err := api.List(ctx, defaultMaps, "resourceVersion=0"); err != nil || len(list.Items) == 0 {
			t.Errorf("list at any resource version without etcd: %+v, %v", list, err)
		}
		old.Start()
		put := putMap(t, ctx, client, "returned")
		expectEvent(t, ctx, w, "ADDED", "returned")
		awaitPublished(t, ctx, api, proxy.Etcd(), put)
		list := harness.AwaitList(t, ctx, api, defaultMaps)
		if !slices.Contains(list.Names(), "returned") {
			t.Errorf("listed: %v", list.Names())
		}
	})

	if n := clusterMetric(t, ctx, api, "progress_requests_total", proxy.Etcd()); n != 0 {
		t.Errorf("%d progress requests, want 0", n)
	}
}

// requireNotHungBy writes to etcd outside the prefixes of resources, of which memory receives no
// event: its published revision and bookmarks stay at the last event, and reads at a later
// revision, returned by other reads, are answered.
func requireNotHungBy(t *testing.T, ctx context.Context, api *harness.API, client *clientv3.Client, etcd *harness.Etcd) {
	o := create(t, ctx, api, defaultMaps, configMap("last"))
	awaitPublished(t, ctx, api, etcd, harness.Revision(t, o.Metadata.ResourceVersion))
	advance(t, ctx, client, 100)
	// Later pages have the revision of the first, which memory has not reached.
	items, pages, err := api.ListAll(ctx, defaultMaps, "", 7)
	harness.Check(t, err)
	list, err := api.List(ctx, defaultMaps, "")
	harness.Check(t, err)
	if len(items) != len(list.Items) || len(pages) < 2 {
		t.Errorf("%d items in %d pages, want %d", len(items), len(pages), len(list.Items))
	}
	present := list.Metadata.ResourceVersion
	if got := publishedRevision(t, ctx, api, etcd); got > lastChange(t, ctx, client) {
		t.Errorf("published revision is %d, after the last event", got)
	}

	exact, err := api.List(ctx, defaultMaps, "resourceVersionMatch=Exact&resourceVersion="+present)
	harness.Check(t, err)
	if exact.Metadata.ResourceVersion != present || len(exact.Items) != len(list.Items) {
		t.Errorf("exactly at %s: %d items at %s, want %d", present, len(exact.Items), exact.Metadata.ResourceVersion, len(list.Items))
	}
	for _, query := range []string{"", "resourceVersion=0"} {
		if _, err := api.Get(ctx, defaultMaps+"/last", query); err != nil {
			t.Errorf("get?%s: %v", query, err)
		}
	}
	for _, path := range []string{defaultMaps, defaultMaps + "/last"} {
		// Memory cannot know that it has reached that revision. It may return an error, like
		// upstream on such an etcd, but must not hang.
		r, err := api.Do(ctx, http.MethodGet, path, "timeout=20s&resourceVersion="+present, nil)
		harness.Check(t, err)
		tooLarge := r.Code == http.StatusGatewayTimeout && storage.IsTooLargeResourceVersion(&apierrors.StatusError{ErrStatus: r.Status()})
		if r.Code != http.StatusOK && !tooLarge {
			t.Errorf("%s not older than an earlier read: %v", path, r.Err())
		}
	}
	w := harness.StartWatch(t, ctx, api, defaultMaps, "resourceVersion="+present)
	idle := harness.StartWatch(t, ctx, api, quietPath, bookmarks+fmt.Sprint(listRevision(t, ctx, api, quietPath, "resourceVersion=0")))
	if at := nextBookmark(t, ctx, idle); at > lastChange(t, ctx, client) {
		t.Errorf("a bookmark is at %d, after the last event", at)
	}
	o = create(t, ctx, api, defaultMaps, configMap("next"))
	if got := expectEvent(t, ctx, w, "ADDED", "next"); got.Metadata.ResourceVersion != o.Metadata.ResourceVersion {
		t.Errorf("event at %s, want %s", got.Metadata.ResourceVersion, o.Metadata.ResourceVersion)
	}
	// The event advances the revision of all resources.
	next := harness.Revision(t, o.Metadata.ResourceVersion)
	awaitPublished(t, ctx, api, etcd, next)
	if got := listRevision(t, ctx, api, quietPath, "resourceVersion=0"); got < next {
		t.Errorf("%s is in memory at %d after an event at %d", quietPath, got, next)
	}
	awaitBookmark(t, ctx, api, quietPath, harness.Revision(t, present), next)
}

// TestOldEtcd_GateEnabled_ServerRefusesToStart starts servers whose flags turn the gates that need
// a newer etcd on or off.
func TestOldEtcd_GateEnabled_ServerRefusesToStart(t *testing.T) {
	t.Parallel()
	path, version := harness.OldEtcd(t)
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	old := env.ProgramEtcd(path)
	gates := func(value string) *harness.Server {
		return env.StartAPIServer(old, engine(harness.Strata), "--strata-feature-gates="+value)
	}
	for _, gate := range []string{listGate, getGate} {
		t.Run(gate, func(t *testing.T) { requireRefused(t, ctx, gates(gate+"=true"), gate, version, old.URL) })
	}
	// The last value of a gate applies.
	off := gates(listGate + "=true," + getGate + "=true," + listGate + "=false," + getGate + "=false")
	harness.Check(t, off.Await(ctx, "/readyz"))
	exercise(t, ctx, off.API())
}

// TestEtcds_VersionAndProgress_DecideConsistentReads has one server with many etcds, which are one
// etcd behind proxies that report different versions, and behind etcd's own gRPC proxy, which does
// not answer progress requests. The reads that reach each proxy show whether the server trusts it.
func TestEtcds_VersionAndProgress_DecideConsistentReads(t *testing.T) {
	t.Parallel() // it waits for an answer that is never sent
	ctx := harness.Context(t, testTimeout)
	env := harness.New(t)
	etcd := env.Etcd()
	// it accepts no connections, and reserves the port
	unreachable, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	defer unreachable.Close()
	down := "http://" + unreachable.Addr().String()

	type backend struct {
		resource string
		stored   string   // the resource's name in etcd
		versions []string // of the proxies
		down     bool     // with another endpoint, which is unreachable
		trusted  bool     // consistent reads are answered from memory
		logged   []string // in one line of the log, with the endpoints
	}
	backends := []backend{
		{"events", "events", []string{"3.4.30"}, false, false, []string{"3.4.30"}},
		{"podtemplates", "podtemplates", []string{"3.5.12"}, false, false, []string{"3.5.12"}},
		{"limitranges", "limitranges", []string{"3.5.0"}, false, false, []string{"3.5.0"}},
		{"secrets", "secrets", []string{"3.4.31"}, false, true, nil},
		{"resourcequotas", "resourcequotas", []string{"3.5.13"}, false, true, nil},
		{"serviceaccounts", "serviceaccounts", []string{"3.6.0-rc.1"}, false, true, nil},
		{"endpoints", "services/endpoints", []string{"some other server"}, false, true, []string{"some other server"}},
		{"persistentvolumeclaims", "persistentvolumeclaims", []string{"3.6.8", "3.4.23"}, false, false, []string{"3.4.23"}},
		{"replicationcontrollers", "controllers", []string{"3.5.7"}, true, false, []string{"3.5.7"}},
		{"pods", "pods", []string{"3.5.21"}, true, true, []string{down}},
	}
	proxies := make([][]*harness.Proxy, len(backends))
	var overrides []string
	for i, b := range backends {
		var urls []string
		if b.down {
			urls = append(urls, down)
		}
		for _, version := range b.versions {
			p := env.Proxy(etcd)
			p.SetVersion(version)
			proxies[i] = append(proxies[i], p)
			urls = append(urls, p.Etcd().URL)
		}
		overrides = append(overrides, "/"+b.resource+"#"+strings.Join(urls, ";"))
	}
	without := env.Proxy(startGRPCProxy(t, env, etcd))
	s := env.APIServer(without.Etcd(), engine(harness.Strata), "--etcd-servers-overrides="+strings.Join(overrides, ","))
	s.AwaitProgress(without.Etcd().URL)
	api := s.API()
	for i, b := range backends {
		t.Run(fmt.Sprint(b.versions, b.down), func(t *testing.T) {
			path := "/api/v1/namespaces/default/" + b.resource
			requireVersionsLogged(t, s, proxies[i], b.logged)
			for query, direct := range map[string]bool{"": !b.trusted, "resourceVersion=0": false} {
				for _, p := range proxies[i] {
					p.Reset()
				}
				_, err := api.List(ctx, path, query)
				harness.Check(t, err)
				n := 0
				for _, p := range proxies[i] {
					n += rangesBelow(p, "/registry/"+b.stored+"/default/")
				}
				if direct != (n > 0) {
					t.Errorf("%s?%s: %d reads of etcd, want some: %v", path, query, n, direct)
				}
			}
		})
	}

	t.Run("no progress", func(t *testing.T) {
		requireWithoutProgress(t, ctx, s, etcd.Client(), without)
	})
	t.Run("one of several with the gate on", func(t *testing.T) {
		old := proxies[7][1].Etcd().URL
		refused := env.StartAPIServer(etcd, engine(harness.Strata), "--etcd-servers="+proxies[7][0].Etcd().URL+","+old,
			"--strata-feature-gates="+listGate+"=true")
		requireRefused(t, ctx, refused, listGate, "3.4.23", old)
	})
}

// requireVersionsLogged checks that a server's log has exactly one line with the expected texts on
// the version of an etcd, or none if no text is expected.
func requireVersionsLogged(t *testing.T, s *harness.Server, proxies []*harness.Proxy, logged []string) {
	t.Helper()
	if logged != nil {
		for _, p := range proxies {
			logged = append(logged, p.Etcd().URL)
		}
		requireLogged(t, s, append(logged, "reason=")...)
		return
	}
	for line := range strings.Lines(s.Output()) {
		if strings.Contains(line, "reason=") && strings.Contains(line, proxies[0].Etcd().URL) {
			t.Errorf("unexpected log line: %s", line)
		}
	}
}

// requireWithoutProgress checks reads of a server with a proxy in front of an etcd that does not
// answer progress requests: one log line reports it, and memory answers consistent reads, also
// after writes outside the resources.
func requireWithoutProgress(t *testing.T, ctx context.Context, s *harness.Server,
	client *clientv3.Client, proxy *harness.Proxy) {
	t.Helper()
	api := s.API()
	exercise(t, ctx, api)
	requireLogged(t, s, "does not answer progress requests", proxy.Etcd().URL)
	create(t, ctx, api, defaultMaps, configMap("present"))
	for i := range 10 {
		put := putMap(t, ctx, client, fmt.Sprint("written-", i))
		advance(t, ctx, client, 3)
		proxy.Reset()
		list, err := api.List(ctx, defaultMaps, "")
		harness.Check(t, err)
		if at := harness.Revision(t, list.Metadata.ResourceVersion); at < put+3 {
			t.Errorf("the list is at %d, want %d or later", at, put+3)
		}
		if n := rangesBelow(proxy, "/registry/configmaps/default/"); n != 0 {
			t.Errorf("%d reads of etcd", n)
		}
	}
}

// startGRPCProxy returns the etcd behind etcd's gRPC proxy, which stops together with the
// environment's processes.
func startGRPCProxy(t *testing.T, env *harness.Env, etcd *harness.Etcd) *harness.Etcd {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	harness.Check(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	client := etcd.Client()
	server := grpc.NewServer()
	kv, _ := grpcproxy.NewKvProxy(client)
	watch, watchDone := grpcproxy.NewWatchProxy(ctx, zap.NewNop(), client)
	lease, leaseDone := grpcproxy.NewLeaseProxy(ctx, client)
	pb.RegisterKVServer(server, kv)
	pb.RegisterWatchServer(server, watch)
	pb.RegisterLeaseServer(server, lease)
	pb.RegisterMaintenanceServer(server, grpcproxy.NewMaintenanceProxy(client))
	serving := make(chan struct{})
	go func() {
		defer close(serving)
		_ = server.Serve(listener) // until Stop
	}()
	env.AtEnd(func() {
		cancel()
		server.Stop()
		<-serving
		<-watchDone
		<-leaseDone
	})
	proxied := *etcd
	proxied.URL = "http://" + listener.Addr().String()
	return &proxied
}
