// Package kine runs the API server on kine with SQLite, the store of k3s, with both engines side by
// side.
package kine

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/test/harness"
)

const (
	testTimeout = 20 * time.Minute
	maps        = "/api/v1/namespaces/default/configmaps"
	stored      = "/registry/configmaps/default/"
)

type object = map[string]any

func configMap(name, value string) object {
	return object{"apiVersion": "v1", "kind": "ConfigMap", "metadata": object{"name": name}, "data": object{"v": value}}
}

// fixture is two servers on one kine: the engine's, behind a counting proxy, and upstream's.
type fixture struct {
	*testing.T
	ctx              context.Context
	kine             *harness.Etcd
	proxy            *harness.Proxy
	strata, upstream *harness.Server
	apis             [2]*harness.API // Strata's and upstream's
}

// TestKine_ReadsAndWatches_MatchUpstream is a single test, because starting a kine and two servers
// dominates its time.
func TestKine_ReadsAndWatches_MatchUpstream(t *testing.T) {
	env := harness.New(t)
	f := &fixture{T: t, kine: env.Kine(t)}
	f.proxy = env.Proxy(f.kine)
	f.strata = env.StartAPIServer(f.proxy.Etcd(), "--engine="+harness.Strata)
	f.upstream = env.StartAPIServer(f.kine, "--engine="+harness.Upstream)
	ctx := harness.Context(t, testTimeout)
	f.ctx = ctx
	for i, s := range []*harness.Server{f.strata, f.upstream} {
		harness.Check(t, s.Await(ctx, "/readyz"))
		f.apis[i] = s.API()
	}
	for _, step := range []struct {
		name string
		run  func(*fixture)
	}{
		{"the mode is recognised and shown", (*fixture).mode},
		{"reads of the latest state see every write", (*fixture).linearizable},
		{"reads of the latest state come from memory", (*fixture).fromMemory},
		{"both engines answer the same", (*fixture).sameAnswers},
		{"pages are of one revision", (*fixture).pages},
		{"watches deliver the same and resume", (*fixture).watches},
		{"bookmarks advance with writes to other prefixes", (*fixture).bookmarks},
		{"the server starts again", (*fixture).restart},
		{"kine starts again", (*fixture).kineRestarts},
		{"compaction and sealed tokens", (*fixture).compaction},
	} {
		t.Run(step.name, func(t *testing.T) {
			g := *f
			g.T = t
			defer func() { f.apis = g.apis }()
			step.run(&g)
		})
	}
}

func (f *fixture) put(api *harness.API, name, value string) int64 {
	f.Helper()
	o, err := api.Create(f.ctx, maps, configMap(name, value))
	harness.Check(f.T, err)
	return f.revision(o.Metadata.ResourceVersion)
}

func (f *fixture) revision(s string) int64 {
	f.Helper()
	rev, err := strconv.ParseInt(s, 10, 64)
	harness.Check(f.T, err)
	return rev
}

// elsewhere writes a key outside the prefix of all resources, and returns the revision.
func (f *fixture) elsewhere() int64 {
	f.Helper()
	resp, err := f.kine.Client().Put(f.ctx, "/elsewhere", time.Now().String())
	harness.Check(f.T, err)
	return resp.Header.Revision
}

func (f *fixture) list(api *harness.API, query string) *harness.List {
	f.Helper()
	l, err := api.List(f.ctx, maps, query)
	harness.Check(f.T, err)
	return l
}

// body returns the answer to a GET.
func (f *fixture) body(api *harness.API, path, query string) string {
	f.Helper()
	r, err := api.Read(f.ctx, path, query, "")
	harness.Check(f.T, err)
	if r.Code != http.StatusOK {
		f.Fatalf("%s?%s: %v", path, query, r.Err())
	}
	return string(r.Body)
}

// rangesOfMaps returns the number of Strata's reads of ConfigMaps since the proxy was reset.
func (f *fixture) rangesOfMaps() (n int) {
	for _, r := range f.proxy.Ranges() {
		if !r.KeysOnly && strings.HasPrefix(string(r.Key), stored) {
			// otherwise a consistency check
			n++
		}
	}
	return n
}

func (f *fixture) mode() {
	const line = "the feed watches all keys"
	harness.Check(f.T, harness.Poll(f.ctx, func(context.Context) (bool, error) {
		return strings.Contains(f.strata.Output(), line), fmt.Errorf("no log line contains %q", line)
	}))
	if n := strings.Count(f.strata.Output(), line); n != 1 {
		f.Errorf("%d log lines contain %q, want one", n, line)
	}
	n, err := f.apis[0].Sum(f.ctx, "strata_mirror_feed_info", `freshness="events"`, `arrival_check="off"`)
	if err != nil || n != 1 {
		f.Errorf("strata_mirror_feed_info: %v of them, %v; want 1 with freshness events and no arrival check", n, err)
	}
}

// linearizable: the next GET and LIST on one server see writes acknowledged by the other.
func (f *fixture) linearizable() {
	for i := range 40 {
		writer, reader := f.apis[i%2], f.apis[(i+1)%2]
		name := fmt.Sprintf("linear-%02d", i)
		rev := f.put(writer, name, "1")
		o, err := reader.Get(f.ctx, maps+"/"+name, "")
		harness.Check(f.T, err)
		l := f.list(reader, "")
		if f.revision(o.Metadata.ResourceVersion) != rev || !slices.Contains(l.Names(), name) || f.revision(l.Metadata.ResourceVersion) < rev {
			f.Fatalf("%s, written at %d, is read at %s; the list at %s has %v", name, rev, o.Metadata.ResourceVersion, l.Metadata.ResourceVersion, l.Names())
		}
		if i%4 == 0 {
			harness.Check(f.T, writer.Delete(f.ctx, maps+"/"+name))
			if l := f.list(reader, ""); slices.Contains(l.Names(), name) {
				f.Fatalf("%s was deleted and is in the list at %s", name, l.Metadata.ResourceVersion)
			}
		}
	}
}

// fromMemory: reads cost kine only a read of its revision, also when the last write is not to an
// object.
func (f *fixture) fromMemory() {
	f.put(f.apis[1], "from-memory", "1")
	// Kine answers a GET for which memory is not current within 250 ms, as on a busy machine.
	late := func() int {
		n, err := f.apis[0].Sum(f.ctx, "apiserver_watch_cache_consistent_read_total", `fallback="true"`, `resource="configmaps"`)
		harness.Check(f.T, err)
		return int(n)
	}
	const most = 50
	before, fromKine, fromMemory, rounds := late(), 0, 0, 0
	for ; rounds < 10 || fromMemory == 0 && rounds < most; rounds++ {
		rev := f.elsewhere()
		f.proxy.Reset()
		l := f.list(f.apis[0], "")
		if _, err := f.apis[0].Get(f.ctx, maps+"/from-memory", ""); err != nil {
			f.Error(err)
		}
		if f.rangesOfMaps() > 0 { // one, or more if kine answers late
			fromKine++
		} else {
			fromMemory++
		}
		if f.revision(l.Metadata.ResourceVersion) < rev {
			f.Errorf("list at %s; want %d", l.Metadata.ResourceVersion, rev)
		}
	}
	if n := late() - before; fromKine > n || fromMemory == 0 {
		f.Errorf("%d reads of objects from kine in %d rounds, for %d GETs that memory could not answer in time", fromKine, rounds, n)
	}
}

func (f *fixture) sameAnswers() {
	f.put(f.apis[0], "same", "1")
	at := f.list(f.apis[1], "").Metadata.ResourceVersion
	exact := "resourceVersionMatch=Exact&resourceVersion=" + at
	f.put(f.apis[0], "same-later", "1")
	f.proxy.Reset()
	for _, path := range []string{maps, "/api/v1/configmaps", "/api/v1/namespaces", "/apis/rbac.authorization.k8s.io/v1/clusterroles"} {
		if got, want := f.body(f.apis[0], path, exact), f.body(f.apis[1], path, exact); got != want {
			f.Errorf("%s at %s is\n%s, want\n%s", path, at, got, want)
		}
	}
	if n := f.rangesOfMaps(); n != 0 {
		f.Errorf("an exact revision was read from kine %d times", n)
	}
	for _, query := range []string{"", "resourceVersion=0", "resourceVersion=" + at} {
		if got, want := f.body(f.apis[0], maps+"/same", query), f.body(f.apis[1], maps+"/same", query); got != want {
			f.Errorf("get?%s is %s, want %s", query, got, want)
		}
	}
	// A server waits for a revision that is not reached; here the requests wait concurrently.
	for _, bad := range []string{"resourceVersion=99999999999", "resourceVersionMatch=Exact&resourceVersion=99999999999"} {
		f.Run(bad, func(t *testing.T) {
			t.Parallel()
			var codes [2]int
			var group sync.WaitGroup
			for i, api := range f.apis {
				group.Go(func() {
					r, err := api.Read(f.ctx, maps, bad, "")
					if err != nil {
						t.Error(err)
						return
					}
					codes[i] = r.Code
				})
			}
			group.Wait()
			if codes[0] != codes[1] {
				t.Errorf("%d, upstream's %d", codes[0], codes[1])
			}
		})
	}
}

// pages: a token of either engine continues on the other, at the revision of the first page.
func (f *fixture) pages() {
	for i := range f.apis {
		all := f.list(f.apis[i], "")
		first := f.list(f.apis[i], "limit=5")
		if first.Metadata.Continue == "" || len(first.Items) != 5 {
			f.Fatalf("the first page has %d items and token %q", len(first.Items), first.Metadata.Continue)
		}
		f.put(f.apis[0], fmt.Sprintf("a-page-%d", i), "1") // sorts before all other names
		rest := f.list(f.apis[1-i], "limit=500&continue="+first.Metadata.Continue)
		if got := append(first.Names(), rest.Names()...); !slices.Equal(got, all.Names()) || rest.Metadata.ResourceVersion != first.Metadata.ResourceVersion {
			f.Errorf("pages have %v, want %v; revisions %s and %s", got, all.Names(), first.Metadata.ResourceVersion, rest.Metadata.ResourceVersion)
		}
	}
}

// next returns a text for the next event other than bookmarks.
func (f *fixture) next(w *harness.Watch) string {
	f.Helper()
	for {
		e, err := w.Next(f.ctx)
		harness.Check(f.T, err)
		if e.Type != "BOOKMARK" {
			return fmt.Sprintf("%s %s %s", e.Type, e.Object.Metadata.Name, e.Object.Metadata.ResourceVersion)
		}
	}
}

func (f *fixture) watch(api *harness.API, query string) *harness.Watch {
	f.Helper()
	return harness.StartWatch(f.T, f.ctx, api, maps, query)
}

func (f *fixture) watches() {
	from := f.list(f.apis[0], "").Metadata.ResourceVersion
	var live [2]*harness.Watch
	for i, api := range f.apis {
		live[i] = f.watch(api, "resourceVersion="+from)
	}
	events := 0
	for i := range 10 {
		name := fmt.Sprintf("watched-%d", i)
		f.put(f.apis[i%2], name, "1")
		_, err := f.apis[1-i%2].Patch(f.ctx, maps+"/"+name, `{"data":{"v":"2"}}`)
		harness.Check(f.T, err)
		f.elsewhere()
		harness.Check(f.T, f.apis[i%2].Delete(f.ctx, maps+"/"+name))
		events += 3
	}
	late := f.watch(f.apis[0], "resourceVersion="+from)
	for n := range events {
		want := f.next(live[1])
		for _, w := range []*harness.Watch{live[0], late} {
			if got := f.next(w); got != want {
				f.Fatalf("event %d is %s, want %s", n, got, want)
			}
		}
	}
}

// bookmarks: a watch of an unchanged resource follows the store's revision: with its initial
// events, and shortly before its end.
func (f *fixture) bookmarks() {
	for seconds := 4; ; seconds *= 3 {
		err := f.twoBookmarks(seconds)
		if err == nil {
			return
		}
		if seconds > 30 {
			f.Fatal(err)
		}
		f.Logf("a watch of %d s: %v", seconds, err) // a busy machine may take longer for the writes
	}
}

// twoBookmarks expects both bookmarks of a watch that lasts for some seconds.
func (f *fixture) twoBookmarks(seconds int) error {
	f.Helper()
	rev := f.elsewhere()
	w := f.watch(f.apis[0], fmt.Sprintf("allowWatchBookmarks=true&sendInitialEvents=true&resourceVersionMatch=NotOlderThan&fieldSelector=metadata.name%%3Dnone&timeoutSeconds=%d", seconds))
	defer w.Close()
	for range 2 {
		e, err := w.Next(f.ctx)
		if err != nil {
			return err
		}
		if e.Type != "BOOKMARK" || f.revision(e.Object.Metadata.ResourceVersion) < rev {
			return fmt.Errorf("%s at %s, want a bookmark at %d or later", e.Type, e.Object.Metadata.ResourceVersion, rev)
		}
		rev = f.elsewhere()
	}
	return nil
}

// restart: history from before the start is in memory, and watches continue across the restart.
func (f *fixture) restart() {
	from := f.list(f.apis[0], "")
	f.put(f.apis[0], "before-stop", "1")
	harness.Check(f.T, f.strata.Stop())
	f.put(f.apis[1], "while-down", "1")
	f.elsewhere()
	f.strata.Restart()
	f.apis[0] = f.strata.API()
	if n := f.list(f.apis[0], "").Names(); !slices.Contains(n, "while-down") {
		f.Errorf("the list has %v", n)
	}
	harness.Check(f.T, f.apis[0].AwaitHistory(f.ctx))
	f.proxy.Reset()
	exact := f.list(f.apis[0], "resourceVersionMatch=Exact&resourceVersion="+from.Metadata.ResourceVersion)
	if !slices.Equal(exact.Names(), from.Names()) {
		f.Errorf("at %s there are %v, want %v", from.Metadata.ResourceVersion, exact.Names(), from.Names())
	}
	if n := f.rangesOfMaps(); n != 0 {
		f.Errorf("a revision of before the start was read from kine %d times", n)
	}
	w, u := f.watch(f.apis[0], "resourceVersion="+from.Metadata.ResourceVersion), f.watch(f.apis[1], "resourceVersion="+from.Metadata.ResourceVersion)
	for range 2 {
		if got, want := f.next(w), f.next(u); got != want {
			f.Errorf("event %s, want %s", got, want)
		}
	}
}

// kineRestarts: no watch ends, no event is lost, and there is no relist.
func (f *fixture) kineRestarts() {
	w := f.watch(f.apis[0], "resourceVersion="+f.list(f.apis[0], "").Metadata.ResourceVersion)
	f.kine.Stop()
	if l, err := f.apis[0].List(f.ctx, maps, "resourceVersion=0"); err != nil || len(l.Items) == 0 {
		f.Errorf("a list of any revision while kine is down: %v", err)
	}
	f.kine.Start()
	var o harness.Object
	harness.Check(f.T, harness.Poll(f.ctx, func(ctx context.Context) (bool, error) {
		created, err := f.apis[0].Create(ctx, maps, configMap("after-kine", "1"))
		if o = created; err == nil {
			return true, nil
		}
		// A failed request may still be applied.
		var read error
		o, read = f.apis[0].Get(ctx, maps+"/after-kine", "")
		return read == nil, err
	}))
	if got, want := f.next(w), "ADDED after-kine "+o.Metadata.ResourceVersion; got != want {
		f.Errorf("event %s, want %s", got, want)
	}
	harness.Check(f.T, harness.Poll(f.ctx, func(ctx context.Context) (bool, error) {
		l, err := f.apis[0].List(ctx, maps, "")
		return err == nil && slices.Contains(l.Names(), "after-kine"), err
	}))
	for metric, want := range map[string]float64{"strata_mirror_relists_total": 0, "strata_mirror_divergences_total": 0, "strata_mirror_etcd_restores_total": 0} {
		if n, err := f.apis[0].Sum(f.ctx, metric); err != nil || n != want {
			f.Errorf("%s is %v, %v; want %v", metric, n, err, want)
		}
	}
}

// compaction: compactions are coordinated by kube-apiserver's protocol, and the keys of sealed
// tokens are written by a transaction, in the forms that kine supports.
func (f *fixture) compaction() {
	harness.Check(f.T, f.strata.Stop())
	f.strata.Restart("--etcd-compaction-interval=1s", "--strata-feature-gates=SealedContinueTokens=true")
	f.apis[0] = f.strata.API()
	harness.Check(f.T, harness.Poll(f.ctx, func(ctx context.Context) (bool, error) {
		f.elsewhere()
		n, err := f.apis[0].Sum(ctx, "strata_compaction_compactions_total")
		return n >= 2, err
	}))
	if n, err := f.apis[0].Sum(f.ctx, "strata_compaction_failures_total"); err != nil || n != 0 {
		f.Errorf("%v compactions have failed, %v", n, err)
	}
	var items []harness.Object
	var pages []metav1.ListMeta
	harness.Check(f.T, harness.Poll(f.ctx, func(ctx context.Context) (bool, error) {
		var err error // a revision is compacted a second or two after its list: 410
		items, pages, err = f.apis[0].ListAll(ctx, maps, "", 7)
		if err != nil && !strings.Contains(err.Error(), ": 410 ") {
			f.Fatal(err)
		}
		return err == nil, err
	}))
	if want := f.list(f.apis[0], ""); len(items) != len(want.Items) || len(pages) < 2 {
		f.Errorf("%d items in %d pages, want %d", len(items), len(pages), len(want.Items))
	}
}
