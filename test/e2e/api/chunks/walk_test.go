package chunks

import (
	"context"
	"fmt"
	"math/rand/v2"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/test/harness"
)

var plainJSON = forms[0]

// createTemplates creates pod templates through the API, like Kubernetes' conformance test, and
// returns their names.
func createTemplates(t *testing.T, ctx context.Context, namespace string, n int) (names []string) {
	t.Helper()
	for i := range n {
		names = append(names, fmt.Sprintf("template-%04d", i))
	}
	var creating sync.WaitGroup
	slots := make(chan struct{}, 8)
	errs := make(chan error, n)
	for i := range n {
		creating.Go(func() {
			slots <- struct{}{}
			defer func() { <-slots }()
			_, err := shared.inTurn(i).api.Create(ctx, templates.path(namespace), object{
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

// TestPagedList_AnyLimit_ReturnsEveryItem repeats Kubernetes' conformance test of chunking: 400 pod
// templates, three times in pages of a random limit and of 17, then as a whole.
func TestPagedList_AnyLimit_ReturnsEveryItem(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	const total = 400
	namespace := harness.NewName("ns")
	_, err := shared.replicas[0].api.Create(ctx, "/api/v1/namespaces", object{"metadata": object{"name": namespace}})
	harness.Check(t, err)
	names := createTemplates(t, ctx, namespace, total)
	path := templates.path(namespace)
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	for _, limit := range []int{17, 1 + rnd.IntN(total/10), 17, 1 + rnd.IntN(total/10), 17, total, total + 1} {
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
		harness.RequireEqual(t, fmt.Sprintf("pages of %d", limit), got, names)
		if harness.Engine() == harness.Strata {
			shared.requireNoObjectReads(t, templates)
		}
	}
	list, err := shared.replicas[1].api.List(ctx, path, "")
	harness.Check(t, err)
	harness.RequireEqual(t, "all at once", list.Names(), names)
}

// TestPagedList_ServersKilled_ContinuesAtRevision kills all servers in the middle of paged lists.
// Those continue at their revision, and exact lists return the same items, from memory.
func TestPagedList_ServersKilled_ContinuesAtRevision(t *testing.T) {
	harness.OnlyStrata(t)
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	kinds := []kind{maps, things}
	after := []func(*testing.T){s.beginAtLatest(t, ctx, maps)} // before the others: it compacts
	for _, k := range kinds {
		after = append(after, s.beginPages(t, ctx, k), s.beginExact(t, ctx, k))
	}
	for range harness.Pick(1, 2) {
		s.killAll(t, ctx)
		s.defineThings(t, ctx) // they are served again
		for _, r := range s.replicas {
			harness.Check(t, r.api.AwaitHistory(ctx))
		}
		s.reset()
		for _, f := range after {
			f(t)
		}
		for _, k := range kinds {
			s.requireNoObjectReads(t, k)
		}
	}
}

// beginPages begins a paged list in each form, and changes objects. The returned function continues
// the lists.
func (s *scene) beginPages(t *testing.T, ctx context.Context, k kind) (after func(*testing.T)) {
	type begun struct {
		form  form
		path  string
		first *page
		want  []string
		limit int
	}
	var walks []begun
	namespace := harness.NewName("ns")
	names := s.fill(t, ctx, k, namespace, "first", 300)
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
		walks = append(walks, begun{f, path, first, whole.items, limit})
		s.commit(t, ctx, k.put(namespace, names[i*20], f.name), k.delete(namespace, names[299-i]), k.put(namespace, fmt.Sprintf("object-%06d-%d", i*30, i), f.name))
	}
	return func(t *testing.T) {
		for i, w := range walks {
			got := w.first.items
			token := w.first.Continue
			for j := 0; token != ""; j++ {
				p, err := s.inTurn(i+j).fetch(ctx, w.form, w.path, fmt.Sprintf("limit=%d&continue=%s", w.limit, url.QueryEscape(token)))
				if err != nil {
					t.Fatalf("%s of %s: %v", w.form.name, w.path, err)
				}
				if p.ResourceVersion != w.first.ResourceVersion {
					t.Errorf("%s of %s: a page of %s, the first was of %s", w.form.name, w.path, p.ResourceVersion, w.first.ResourceVersion)
				}
				got, token = append(got[:len(got):len(got)], p.items...), p.Continue
			}
			harness.RequireEqual(t, fmt.Sprintf("%s of %s", w.form.name, w.path), got, w.want)
		}
	}
}

// beginExact lists at several revisions. The returned function lists at them again: with
// resourceVersionMatch=Exact, and in the older form of a limit and a resource version.
func (s *scene) beginExact(t *testing.T, ctx context.Context, k kind) (after func(*testing.T)) {
	type moment struct {
		revision string
		items    []string
	}
	var moments []moment
	namespace := harness.NewName("ns")
	path := k.path(namespace)
	s.fill(t, ctx, k, namespace, "first", 120)
	for i := range 10 {
		s.commit(t, ctx, k.put(namespace, fmt.Sprintf("object-%06d", i*7), fmt.Sprint(i)), k.delete(namespace, fmt.Sprintf("object-%06d", 119-i)))
		list, err := s.inTurn(i).fetch(ctx, plainJSON, path, "")
		harness.Check(t, err)
		moments = append(moments, moment{list.ResourceVersion, list.items})
	}
	return func(t *testing.T) {
		for i, m := range moments {
			for j, query := range []string{"resourceVersionMatch=Exact&", "resourceVersionMatch=Exact&limit=1000&", "limit=1000&"} {
				p, err := s.inTurn(i+j).fetch(ctx, plainJSON, path, query+"resourceVersion="+m.revision)
				harness.Check(t, err)
				if p.ResourceVersion != m.revision || p.Continue != "" {
					t.Errorf("%s at %s: revision %s, token %q", query, m.revision, p.ResourceVersion, p.Continue)
				}
				harness.RequireEqual(t, query, p.items, m.items)
			}
			for _, query := range []string{"resourceVersionMatch=Exact&", ""} {
				items, revision, err := walk(ctx, plainJSON, path, query+"resourceVersion="+m.revision, 17, s.inTurn)
				harness.Check(t, err)
				if revision != m.revision {
					t.Errorf("pages at %s are of %s", m.revision, revision)
				}
				harness.RequireEqual(t, "pages "+query, items, m.items)
			}
		}
	}
}

// beginAtLatest begins a paged list with the token of a 410. The returned function continues it.
func (s *scene) beginAtLatest(t *testing.T, ctx context.Context, k kind) (after func(*testing.T)) {
	e := s.expire(t, ctx, k)
	list := s.first(t, ctx, e, len(s.replicas)-1)
	return func(t *testing.T) { s.finish(t, ctx, e, len(s.replicas)-1, list) }
}

// TestExactList_OlderThanMemory_ReadsEtcd lists at revisions that a server does not have in memory.
// It reads them from etcd: the same objects, in pages, with a few concurrent lists.
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
	young := s.start("--strata-feature-gates=WatchHistoryRestore=false", "--strata-history-bytes=100Ki")
	defer func() { harness.Check(t, young.Stop()) }()
	path := maps.path(namespace)
	t.Run("in every form", func(t *testing.T) {
		for i, m := range moments {
			for _, f := range forms {
				young.proxy.Reset()
				list, err := young.fetch(ctx, f, path, "resourceVersionMatch=Exact&resourceVersion="+m.revision)
				harness.Check(t, err)
				harness.RequireEqual(t, f.name+" at "+m.revision, list.items, m.items[f.name])
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
			harness.RequireEqual(t, "pages at "+m.revision, items, m.items[plainJSON.name])
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
			harness.RequireEqual(t, "pages at "+m.revision, items, m.items[plainJSON.name])
		}
	})
	t.Run("a few at once", func(t *testing.T) {
		const lists, most = 12, 4
		young.proxy.Reset()
		held := time.Now()
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
		n := -1
		for range 20 {
			if _, err := young.fetch(ctx, plainJSON, path, "limit=10"); err != nil {
				t.Error(err)
			}
			if time.Since(held) < 4*time.Second { // a read that is held for 5 s is repeated
				n = len(young.objectReads(maps))
			}
		}
		switch {
		case n > most:
			t.Errorf("%d lists read etcd at once, want %d at most", n, most)
		case n < 0:
			t.Log("the machine was too busy to count the reads before their repetition")
		}
		young.proxy.Hold(false)
		for range lists {
			r := <-results
			harness.Check(t, r.err)
			harness.RequireEqual(t, "at "+r.m.revision, r.page.items, r.m.items[plainJSON.name])
		}
	})
	t.Run("the window is small", func(t *testing.T) {
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
			harness.RequireEqual(t, "at "+list.ResourceVersion, again.items, list.items)
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

// expired is a paged list whose revision etcd has compacted.
type expired struct {
	kind      kind
	namespace string
	last      int64    // the revision of the compaction
	tokens    []string // of the servers' 410
	rest      []string // the names that follow
}

// expire begins a paged list, changes objects, and compacts etcd. All servers soon refuse the
// token, and return another one.
func (s *scene) expire(t *testing.T, ctx context.Context, k kind) expired {
	t.Helper()
	namespace := harness.NewName("ns")
	names := s.fill(t, ctx, k, namespace, "first", 100)
	path := k.path(namespace)
	first, err := s.replicas[0].api.List(ctx, path, "limit=17")
	harness.Check(t, err)
	s.commit(t, ctx, k.delete(namespace, names[0]), k.delete(namespace, names[17]), k.put(namespace, names[20], "changed"), k.put(namespace, "object-000030-new", "new"))
	last := s.commit(t, ctx, k.put(namespace, names[99], "last"))
	e := expired{kind: k, namespace: namespace, last: last, tokens: make([]string, len(s.replicas)),
		rest: slices.Concat(names[18:31], []string{"object-000030-new"}, names[31:])}
	began := time.Now()
	s.compact(t, ctx, last)
	for i, r := range s.replicas {
		harness.Check(t, harness.Poll(ctx, func(ctx context.Context) (bool, error) {
			resp := get(t, ctx, r.api, path, "limit=17&continue="+url.QueryEscape(first.Metadata.Continue))
			status := resp.Status()
			e.tokens[i] = status.Continue
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
	return e
}

// first returns the page of the token of server i, from the next server, and then changes an
// object.
func (s *scene) first(t *testing.T, ctx context.Context, e expired, i int) *harness.List {
	t.Helper()
	list, err := s.inTurn(i+1).api.List(ctx, e.kind.path(e.namespace), "limit=17&continue="+url.QueryEscape(e.tokens[i]))
	harness.Check(t, err)
	if harness.Revision(t, list.Metadata.ResourceVersion) < e.last {
		t.Errorf("the page at the latest revision is of %s, the last write of %d", list.Metadata.ResourceVersion, e.last)
	}
	// The change is visible to all remaining pages or to none.
	s.commit(t, ctx, e.kind.put(e.namespace, e.rest[len(e.rest)-2], fmt.Sprint(i)))
	return list
}

// finish reads the pages after the first one, which share its revision.
func (s *scene) finish(t *testing.T, ctx context.Context, e expired, i int, list *harness.List) {
	t.Helper()
	got, revision := list.Names(), list.Metadata.ResourceVersion
	for j := 0; list.Metadata.Continue != ""; j++ {
		var err error
		list, err = s.inTurn(i+j).api.List(ctx, e.kind.path(e.namespace), "limit=17&continue="+url.QueryEscape(list.Metadata.Continue))
		harness.Check(t, err)
		if list.Metadata.ResourceVersion != revision {
			t.Errorf("a page of %s after one of %s", list.Metadata.ResourceVersion, revision)
		}
		got = append(got, list.Names()...)
	}
	harness.RequireEqual(t, "the rest", got, e.rest)
}

// TestPagedList_Compacted_Returns410WithNewToken compacts etcd during a paged list. All servers
// soon refuse the token, and return another one that continues from there: its pages share one
// revision again, on any server.
func TestPagedList_Compacted_Returns410WithNewToken(t *testing.T) {
	ctx := harness.Context(t, testTimeout)
	s := shared
	s.defineThings(t, ctx)
	for _, k := range []kind{maps, things} {
		t.Run(k.plural, func(t *testing.T) {
			e := s.expire(t, ctx, k)
			for i := range e.tokens {
				s.finish(t, ctx, e, i, s.first(t, ctx, e, i))
			}
		})
	}
}
