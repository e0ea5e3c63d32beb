package chunks

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/server/test/internal/harness"
)

var plainJSON = forms[0]

// createTemplates creates pod templates through the API, like Kubernetes' conformance test, and returns their names.
func createTemplates(t *testing.T, ctx context.Context, namespace string, n int) (names []string) {
	t.Helper()
	var creating sync.WaitGroup
	slots := make(chan struct{}, 8)
	errs := make(chan error, n)
	for i := range n {
		names = append(names, fmt.Sprintf("template-%04d", i))
		creating.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			_, err := shared.replicas[i%3].api.Create(ctx, templates.path(namespace), object{
				"metadata": object{"name": names[i]},
				"template": object{"spec": object{"containers": []any{object{"name": "test", "image": "test2"}}}},
			})
			errs <- err
		})
	}
	creating.Wait()
	for range n {
		harness.Check(t, <-errs)
	}
	return names
}

// TestPagedList_AnyLimit_ReturnsEveryItem repeats Kubernetes' conformance test of chunking: 400 pod templates, three times in pages of a
// random limit and of 17, then as a whole.
func TestPagedList_AnyLimit_ReturnsEveryItem(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const total = 400
	namespace := harness.NewName("ns")
	_, err := shared.replicas[0].api.Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": namespace}})
	harness.Check(t, err)
	names := createTemplates(t, ctx, namespace, total)
	path := templates.path(namespace)
	for _, limit := range []int{17, 1 + rand.IntN(total/10), 17, 1 + rand.IntN(total/10), 17, total, total + 1} {
		shared.reset()
		token, revision := "", ""
		var got []string
		for i := 0; ; i++ {
			list, err := shared.inTurn(i).api.List(ctx, path, fmt.Sprintf("limit=%d&continue=%s", limit, url.QueryEscape(token)))
			harness.Check(t, err)
			if len(list.Items) > limit {
				t.Fatalf("%d items, the limit is %d", len(list.Items), limit)
			}
			if revision == "" {
				revision = list.Metadata.ResourceVersion
			} else if list.Metadata.ResourceVersion != revision {
				t.Fatalf("page %d is of %s, the first was of %s", i+1, list.Metadata.ResourceVersion, revision)
			}
			got = append(got, list.Names()...)
			if token = list.Metadata.Continue; token == "" {
				if list.Metadata.RemainingItemCount != nil {
					t.Errorf("remainingItemCount of the last page is %d", *list.Metadata.RemainingItemCount)
				}
				break
			}
			if len(list.Items) != limit || list.Metadata.RemainingItemCount == nil || int(*list.Metadata.RemainingItemCount)+len(got) != total {
				t.Fatalf("page %d: %d items, after %d in all %v remain", i+1, len(list.Items), len(got), list.Metadata.RemainingItemCount)
			}
		}
		requireEqual(t, fmt.Sprintf("pages of %d", limit), got, names)
		if harness.Engine() == harness.Strata {
			shared.requireNoObjectReads(t, templates)
		}
	}
	list, err := shared.replicas[1].api.List(ctx, path, "")
	harness.Check(t, err)
	requireEqual(t, "all at once", list.Names(), names)
}

// TestPagedList_ServersKilled_ContinuesAtRevision kills all servers in the middle of paged lists. Those continue at their revision, from memory.
func TestPagedList_ServersKilled_ContinuesAtRevision(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	kinds := []kind{maps, things}
	type begun struct {
		kind  kind
		form  form
		path  string
		first *page
		want  []string
		limit int
	}
	var walks []begun
	for _, k := range kinds {
		namespace := harness.NewName("ns")
		_, names := s.fill(t, ctx, k, namespace, "first", 300)
		for i, f := range forms {
			if f.builtIn && k == things {
				continue
			}
			path := k.path(namespace)
			if i%2 == 1 {
				path = k.path("")
			}
			limit := 40 + 3*i
			first, err := s.inTurn(i).fetch(ctx, f, path, fmt.Sprintf("limit=%d", limit))
			harness.Check(t, err)
			whole, err := s.inTurn(i+1).fetch(ctx, f, path, "resourceVersionMatch=Exact&resourceVersion="+first.ResourceVersion)
			harness.Check(t, err)
			walks = append(walks, begun{k, f, path, first, whole.items, limit})
			s.commit(t, ctx, k.put(namespace, names[i*20], f.name), k.delete(namespace, names[299-i]), k.put(namespace, fmt.Sprintf("object-%06d-%d", i*30, i), f.name))
		}
	}
	for n := range 2 {
		s.killAll(t, ctx)
		s.defineThings(t, ctx) // they are served again
		s.reset()
		for i, w := range walks {
			got := w.first.items
			token := w.first.Continue
			for j := 0; token != ""; j++ {
				p, err := s.inTurn(i+j).fetch(ctx, w.form, w.path, fmt.Sprintf("limit=%d&continue=%s", w.limit, url.QueryEscape(token)))
				if err != nil {
					t.Fatalf("restart %d, %s of %s: %v", n+1, w.form.name, w.path, err)
				}
				if p.ResourceVersion != w.first.ResourceVersion {
					t.Errorf("restart %d, %s of %s: a page of %s, the first was of %s", n+1, w.form.name, w.path, p.ResourceVersion, w.first.ResourceVersion)
				}
				got, token = append(got[:len(got):len(got)], p.items...), p.Continue
			}
			requireEqual(t, fmt.Sprintf("restart %d, %s of %s", n+1, w.form.name, w.path), got, w.want)
		}
		for _, k := range kinds {
			s.requireNoObjectReads(t, k)
		}
	}
}

// TestExactList_ServersKilled_ReturnsSameItems lists at revisions from before all servers were killed: with resourceVersionMatch=Exact, and in
// the older form of a limit and a resource version.
func TestExactList_ServersKilled_ReturnsSameItems(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	type moment struct {
		kind           kind
		path, revision string
		items          []string
	}
	var moments []moment
	for _, k := range []kind{maps, things} {
		namespace := harness.NewName("ns")
		s.fill(t, ctx, k, namespace, "first", 120)
		for i := range 10 {
			s.commit(t, ctx, k.put(namespace, fmt.Sprintf("object-%06d", i*7), fmt.Sprint(i)), k.delete(namespace, fmt.Sprintf("object-%06d", 119-i)))
			list, err := s.inTurn(i).fetch(ctx, plainJSON, k.path(namespace), "")
			harness.Check(t, err)
			moments = append(moments, moment{k, k.path(namespace), list.ResourceVersion, list.items})
		}
	}
	s.killAll(t, ctx)
	s.defineThings(t, ctx)
	s.reset()
	for i, m := range moments {
		for j, query := range []string{"resourceVersionMatch=Exact&", "resourceVersionMatch=Exact&limit=1000&", "limit=1000&"} {
			p, err := s.inTurn(i+j).fetch(ctx, plainJSON, m.path, query+"resourceVersion="+m.revision)
			harness.Check(t, err)
			if p.ResourceVersion != m.revision || p.Continue != "" {
				t.Errorf("%s at %s: revision %s, token %q", query, m.revision, p.ResourceVersion, p.Continue)
			}
			requireEqual(t, query, p.items, m.items)
		}
		for _, query := range []string{"resourceVersionMatch=Exact&", ""} {
			items, revision, err := walk(ctx, plainJSON, m.path, query+"resourceVersion="+m.revision, 17, s.inTurn)
			harness.Check(t, err)
			if revision != m.revision {
				t.Errorf("pages at %s are of %s", m.revision, revision)
			}
			requireEqual(t, "pages "+query, items, m.items)
		}
	}
	s.requireNoObjectReads(t, maps)
	s.requireNoObjectReads(t, things)
}

// TestExactList_OlderThanMemory_ReadsEtcd lists at revisions that a server does not have in memory. It reads them from etcd: the same objects,
// in pages, with a few concurrent lists.
func TestExactList_OlderThanMemory_ReadsEtcd(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := shared
	namespace := harness.NewName("ns")
	s.fill(t, ctx, maps, namespace, strings.Repeat("v", 500), 1200)
	type moment struct {
		revision string
		items    map[string][]string // by form
	}
	var moments []moment
	for i := range 5 {
		s.commit(t, ctx, maps.put(namespace, fmt.Sprintf("object-%06d", i*100), fmt.Sprint(i)), maps.delete(namespace, fmt.Sprintf("object-%06d", 1100+i)))
		m := moment{items: map[string][]string{}}
		for _, f := range forms {
			query := ""
			if m.revision != "" {
				query = "resourceVersionMatch=Exact&resourceVersion=" + m.revision
			}
			list, err := s.inTurn(i).fetch(ctx, f, maps.path(namespace), query)
			harness.Check(t, err)
			m.revision, m.items[f.name] = list.ResourceVersion, list.items
		}
		moments = append(moments, m)
	}
	s.commit(t, ctx, maps.put(namespace, "object-000001", "last"))
	young := s.start("--strata-feature-gates=WatchHistoryRestore=false")
	defer func() { harness.Check(t, young.Stop()) }()
	path := maps.path(namespace)
	t.Run("in every form", func(t *testing.T) {
		for i, m := range moments {
			for _, f := range forms {
				young.proxy.Reset()
				list, err := young.fetch(ctx, f, path, "resourceVersionMatch=Exact&resourceVersion="+m.revision)
				harness.Check(t, err)
				requireEqual(t, f.name+" at "+m.revision, list.items, m.items[f.name])
				if list.ResourceVersion != m.revision {
					t.Errorf("a list at %s is of %s", m.revision, list.ResourceVersion)
				}
				if len(young.objectReads(maps)) == 0 {
					t.Fatal("memory has the revision: the test has no effect")
				}
				requirePaged(t, young)
			}
			items, revision, err := walk(ctx, plainJSON, path, "resourceVersion="+m.revision, 170+i, always(young))
			harness.Check(t, err)
			if revision != m.revision {
				t.Errorf("pages at %s are of %s", m.revision, revision)
			}
			requireEqual(t, "pages at "+m.revision, items, m.items[plainJSON.name])
		}
	})
	t.Run("started on another server", func(t *testing.T) {
		for _, m := range moments {
			items, _, err := walk(ctx, plainJSON, path, "resourceVersionMatch=Exact&resourceVersion="+m.revision, 170, func(i int) *replica {
				if i%2 == 0 {
					return s.replicas[0]
				}
				return young
			})
			harness.Check(t, err)
			requireEqual(t, "pages at "+m.revision, items, m.items[plainJSON.name])
		}
	})
	t.Run("a few at once", func(t *testing.T) {
		const lists, most = 12, 4
		young.proxy.Reset()
		young.proxy.Hold(true)
		defer young.proxy.Hold(false)
		type result struct {
			m    moment
			page *page
			err  error
		}
		results := make(chan result, lists)
		for i := range lists {
			go func() {
				m := moments[i%len(moments)]
				p, err := young.fetch(ctx, plainJSON, path, "resourceVersionMatch=Exact&resourceVersion="+m.revision)
				results <- result{m, p, err}
			}()
		}
		harness.Check(t, harness.Poll(ctx, func(context.Context) (bool, error) {
			n := len(young.objectReads(maps))
			return n >= most, fmt.Errorf("%d reads of objects", n)
		}))
		// Lists of the present continue meanwhile, and cause no further reads of the past.
		for range 20 {
			if _, err := young.fetch(ctx, plainJSON, path, "limit=10"); err != nil {
				t.Error(err)
			}
		}
		if n := len(young.objectReads(maps)); n > most {
			t.Errorf("%d lists read etcd at once, want %d at most", n, most)
		}
		young.proxy.Hold(false)
		for range lists {
			r := <-results
			harness.Check(t, r.err)
			requireEqual(t, "at "+r.m.revision, r.page.items, r.m.items[plainJSON.name])
		}
	})
	t.Run("the window is small", func(t *testing.T) {
		young.Kill()
		young.StartAgain("--strata-feature-gates=WatchHistoryRestore=true", "--strata-history-bytes=100Ki")
		harness.Check(t, young.Await(ctx, "/readyz"))
		list, err := young.fetch(ctx, plainJSON, path, "")
		harness.Check(t, err)
		for i := range 1000 {
			s.commit(t, ctx, maps.put(namespace, fmt.Sprintf("object-%06d", i), strings.Repeat("w", 500)))
		}
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			young.proxy.Reset()
			again, err := young.fetch(ctx, plainJSON, path, "resourceVersionMatch=Exact&resourceVersion="+list.ResourceVersion)
			if err != nil {
				return false, err
			}
			requireEqual(t, "at "+list.ResourceVersion, again.items, list.items)
			return len(young.objectReads(maps)) > 0, fmt.Errorf("%s is still in memory", list.ResourceVersion)
		}))
		requirePaged(t, young)
		// Memory is bounded.
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			held, err := young.api.Metric(ctx, "strata_mirror_history_bytes{")
			return err == nil && held <= 120<<10, fmt.Errorf("%.0f bytes of history are held: %w", held, err)
		}))
	})
}

// requirePaged fails the test if objects were read from etcd without a limit.
func requirePaged(t *testing.T, r *replica) {
	t.Helper()
	for _, request := range r.proxy.Ranges() {
		if strings.HasPrefix(string(request.Key), maps.prefix) && len(request.RangeEnd) > 0 && !request.CountOnly && request.Limit == 0 {
			t.Errorf("a range of etcd reads all objects from %s without a limit", request.Key)
			return
		}
	}
}

// TestPagedList_Compacted_Returns410WithNewToken compacts etcd during a paged list. All servers soon refuse the token, and return another one that continues
// from there: its pages share one revision again, on any server, and after a restart.
func TestPagedList_Compacted_Returns410WithNewToken(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	for _, k := range []kind{maps, things} {
		t.Run(k.plural, func(t *testing.T) {
			namespace := harness.NewName("ns")
			_, names := s.fill(t, ctx, k, namespace, "first", 100)
			path := k.path(namespace)
			first, err := s.replicas[0].api.List(ctx, path, "limit=17")
			harness.Check(t, err)
			s.commit(t, ctx, k.delete(namespace, names[0]), k.delete(namespace, names[17]), k.put(namespace, names[20], "changed"), k.put(namespace, "object-000030-new", "new"))
			last := s.commit(t, ctx, k.put(namespace, names[99], "last"))
			began := time.Now()
			s.compact(t, ctx, last)
			tokens := make([]string, len(s.replicas))
			for i, r := range s.replicas {
				harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
					resp := get(t, ctx, r.api, path, "limit=17&continue="+url.QueryEscape(first.Metadata.Continue))
					status := resp.Status()
					tokens[i] = status.Continue
					if resp.Code == http.StatusGone && (status.Reason != metav1.StatusReasonExpired || status.Continue == "") {
						t.Fatalf("reason %q, token %q: %s", status.Reason, status.Continue, resp.Body)
					}
					return resp.Code == http.StatusGone, fmt.Errorf("%d", resp.Code)
				}))
				t.Logf("server %d detected the compaction after at most %v", i, time.Since(began))
				if resp := get(t, ctx, r.api, path, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", last-1)); resp.Code != http.StatusGone || resp.Status().Reason != metav1.StatusReasonExpired || resp.Status().Continue != "" {
					t.Errorf("below the compacted revision: %v, want 410 without a token", resp.Err())
				}
				if list, err := r.api.List(ctx, path, fmt.Sprintf("resourceVersionMatch=Exact&resourceVersion=%d", last)); err != nil || len(list.Items) != 99 {
					t.Errorf("at the compacted revision: %v", err)
				}
			}
			want := append([]string{}, names[18:31]...)
			want = append(want, "object-000030-new")
			want = append(want, names[31:]...)
			for i, token := range tokens {
				// A concurrent change is visible to all remaining pages or to none.
				list, err := s.inTurn(i+1).api.List(ctx, path, "limit=17&continue="+url.QueryEscape(token))
				harness.Check(t, err)
				got, revision := list.Names(), list.Metadata.ResourceVersion
				if harness.Revision(t, revision) < last {
					t.Errorf("the page at the latest revision is of %s, the last write of %d", revision, last)
				}
				s.commit(t, ctx, k.put(namespace, names[98], fmt.Sprint(i)))
				if k.plural == maps.plural && i == len(tokens)-1 {
					s.killAll(t, ctx)
				}
				for j := 0; list.Metadata.Continue != ""; j++ {
					if list, err = s.inTurn(i+j).api.List(ctx, path, "limit=17&continue="+url.QueryEscape(list.Metadata.Continue)); err != nil {
						t.Fatal(err)
					}
					if list.Metadata.ResourceVersion != revision {
						t.Errorf("a page of %s after one of %s", list.Metadata.ResourceVersion, revision)
					}
					got = append(got, list.Names()...)
				}
				requireEqual(t, "the rest", got, want)
			}
		})
	}
}

// TestContinueToken_OtherSelector_MatchesUpstream continues paged lists with another selector, limit or namespace, on this engine and on upstream's, on
// the same etcd. Tokens of either engine give the same result.
func TestContinueToken_OtherSelector_MatchesUpstream(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := shared
	namespace := harness.NewName("ns")
	s.fill(t, ctx, maps, namespace, "first", 60)
	upstream := s.start("--engine=" + harness.Upstream)
	defer func() { harness.Check(t, upstream.Stop()) }()
	queries := []string{"", "labelSelector=shard%3D0", "labelSelector=shard%3D1", "labelSelector=shard+in+(0,1,2)", "labelSelector=none", "fieldSelector=metadata.name%3Dobject-000033",
		"fieldSelector=metadata.namespace%3D" + namespace}
	for i := range 60 {
		s.commit(t, ctx, maps.put(namespace, fmt.Sprintf("object-%06d", i), strings.Repeat("v", i%4))) // of several shards
	}
	show := func(r *harness.Response) string {
		if r.Code != http.StatusOK {
			status := r.Status()
			return fmt.Sprint(r.Code, status.Reason, status.Continue != "")
		}
		list, err := r.List()
		harness.Check(t, err)
		remaining := "unknown"
		if n := list.Metadata.RemainingItemCount; n != nil {
			remaining = fmt.Sprint(*n)
		}
		return fmt.Sprintf("%v at %s, more: %t, remaining: %s", list.Names(), list.Metadata.ResourceVersion, list.Metadata.Continue != "", remaining)
	}
	// Both servers have reached the current revision.
	list, err := upstream.api.List(ctx, maps.path(namespace), "")
	harness.Check(t, err)
	at := "&resourceVersionMatch=Exact&resourceVersion=" + list.Metadata.ResourceVersion
	for _, from := range []string{namespace, ""} {
		for _, begin := range queries {
			for _, mine := range []bool{true, false} {
				first := upstream
				if mine {
					first = s.replicas[0]
				}
				r := get(t, ctx, first.api, maps.path(from), "limit=5&"+begin+at)
				page, err := r.List()
				harness.Check(t, err)
				if page.Metadata.Continue == "" {
					continue
				}
				for _, then := range queries {
					for _, where := range []string{namespace, ""} {
						for _, limit := range []string{"", "limit=3&", "limit=500&"} {
							query := limit + then + "&continue=" + url.QueryEscape(page.Metadata.Continue)
							got, want := get(t, ctx, s.replicas[1].api, maps.path(where), query), get(t, ctx, upstream.api, maps.path(where), query)
							if g, w := show(got), show(want); g != w {
								t.Errorf("started in %q with %q (token of this engine: %t), then %q with %s%s:\n%.300s\nupstream:\n%.300s", from, begin, mine, where, limit, then, g, w)
							}
						}
					}
				}
			}
		}
	}
}
