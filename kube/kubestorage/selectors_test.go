package kubestorage

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
)

// selectorModel has the pods at every revision.
type selectorModel struct {
	rnd  *rand.Rand
	live map[string]*example.Pod // by etcd key
	revs []mirror.Revision
	past []map[string]*example.Pod
	// changed has the key that changed at each revision.
	changed []string
}

// step changes a random pod: its labels are few, frequent or rare, and missing from some pods.
func (m *selectorModel) step(t *testing.T, etcd interface {
	Put(key, value string) mirror.Revision
	Delete(key string) mirror.Revision
}) {
	t.Helper()
	rnd := m.rnd
	pod := newPod(fmt.Sprintf("pod-%03d", rnd.IntN(500)))
	pod.Namespace = fmt.Sprintf("ns-%d", rnd.IntN(3))
	key := etcdKey(pod)
	next := maps.Clone(m.live)
	if _, ok := m.live[key]; ok && rnd.IntN(5) == 0 {
		delete(next, key)
		m.revs = append(m.revs, etcd.Delete(key))
	} else {
		pod.Labels = map[string]string{"app": fmt.Sprintf("app-%d", rnd.IntN(6)), "one": fmt.Sprint(rnd.IntN(1000))}
		if rnd.IntN(3) > 0 {
			pod.Labels["rare"] = []string{"", "x", "y", "12"}[min(rnd.IntN(30), 3)]
		}
		pod.Spec.NodeName = fmt.Sprintf("node-%d", rnd.IntN(50))
		next[key] = pod
		m.revs = append(m.revs, etcd.Put(key, storedPod(t, pod)))
	}
	m.changed = append(m.changed, key)
	m.live = next
	m.past = append(m.past, next)
}

// selector returns a random selector.
func (m *selectorModel) selector(t *testing.T) storage.SelectionPredicate {
	t.Helper()
	rnd := m.rnd
	pick := func(of ...string) string { return of[rnd.IntN(len(of))] }
	app, one := fmt.Sprintf("app-%d", rnd.IntN(8)), fmt.Sprint(rnd.IntN(1000))
	var terms []string
	for range rnd.IntN(4) {
		terms = append(terms, pick("app="+app, "app!="+app, "app in (app-1,"+app+")", "app notin (app-2,"+app+")", "rare", "!rare", "rare=x", "rare=", "rare!=y",
			"rare in (x,y)", "rare notin (x,)", "one="+one, "one>500", "one<20", "other", "!other", "other=z"))
	}
	pred := storage.SelectionPredicate{Label: parseLabels(t, strings.Join(terms, ",")), Field: fields.Everything(), GetAttrs: podAttrs}
	if rnd.IntN(2) == 0 {
		pred.IndexFields, pred.IndexLabels = []string{"spec.nodeName"}, []string{"app"}
	}
	if rnd.IntN(3) == 0 {
		node := fmt.Sprintf("node-%d", rnd.IntN(60))
		field, err := fields.ParseSelector(pick("spec.nodeName="+node, "spec.nodeName!="+node, "metadata.namespace=ns-1", "metadata.name=pod-007", "metadata.namespace!=ns-2,spec.nodeName="+node, "spec.none="))
		if err != nil {
			t.Fatal(err)
		}
		pred.Field = field
	}
	return pred
}

// selectedOf returns the paths of the pods of a past state below a prefix that a selector selects, in key order.
func selectedOf(t *testing.T, state map[string]*example.Pod, prefix string, pred storage.SelectionPredicate) (paths []string) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(state)) {
		pod := state[key]
		l, f, err := podAttrs(pod)
		if err != nil {
			t.Fatal(err)
		}
		if strings.HasPrefix(key, prefix) && pred.Label.Matches(labels.Set(l)) && pred.Field.Matches(f) {
			paths = append(paths, pod.Namespace+"/"+pod.Name)
		}
	}
	return paths
}

// TestSelectors_AnyRevisionLimitAndToken_EqualsModel lists with random selectors, of everything or of a namespace, at the latest and at old
// revisions, whole and in pages, and compares with a filter of the model's state at that revision.
func TestSelectors_AnyRevisionLimitAndToken_EqualsModel(t *testing.T) {
	for _, bits := range []int{32, 3} {
		t.Run(fmt.Sprintf("hashes of %d bits", bits), func(t *testing.T) {
			if bits < 32 {
				defer selected.ShortenHashes(bits)()
			}
			testSelectors(t)
		})
	}
}

func testSelectors(t *testing.T) {
	t.Helper()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	f, etcd := inMemory(t, onDemand)
	s, ctx := f.engine(t), contextFor(t)
	m := &selectorModel{rnd: rand.New(rand.NewPCG(seed, 1)), live: map[string]*example.Pod{}}
	planned := 0
	for range 40 {
		for range m.rnd.IntN(100) {
			m.step(t, etcd)
		}
		if len(m.revs) == 0 {
			continue
		}
		if err := s.mirror.Wait(ctx, etcd.Revision()); err != nil {
			t.Fatal(err)
		}
		for range 30 {
			pred, at := m.selector(t), len(m.revs)-1
			key, prefix := "/pods", testPrefix+"pods/"
			if m.rnd.IntN(4) == 0 {
				key, prefix = "/pods/ns-1", testPrefix+"pods/ns-1/"
			}
			opts := storage.ListOptions{Recursive: true, Predicate: pred}
			if m.rnd.IntN(2) == 0 {
				at = m.rnd.IntN(len(m.revs))
				opts.ResourceVersion, opts.ResourceVersionMatch = fmt.Sprint(m.revs[at]), metav1.ResourceVersionMatchExact
			}
			want := selectedOf(t, m.past[at], prefix, pred)
			describe := fmt.Sprintf("%q %q below %s at %d", pred.Label, pred.Field, key, m.revs[at])
			r, err := s.Read(ctx, key, opts)
			if err != nil {
				t.Fatal(describe, err)
			}
			if r.plan != nil {
				planned++
			}
			r.Close()
			opts.Predicate.Limit = int64(m.rnd.IntN(3) * m.rnd.IntN(40))
			var got []string
			for {
				page := &example.PodList{}
				if err := f.GetList(ctx, key, opts, page); err != nil {
					t.Fatal(describe, err)
				}
				got = append(got, podPaths(page)...)
				opts.ResourceVersion, opts.ResourceVersionMatch, opts.Predicate.Continue = "", "", page.Continue
				if page.Continue == "" {
					break
				}
			}
			if !slices.Equal(got, want) {
				t.Fatalf("%s, limit %d: %d pods, want %d: %v, want %v", describe, opts.Predicate.Limit, len(got), len(want), got, want)
			}
		}
	}
	if planned < 200 {
		t.Errorf("only %d lists used an index", planned)
	}
}

// events returns the events of a watch with the selector after the revision revs[at].
func (m *selectorModel) events(t *testing.T, at int, pred storage.SelectionPredicate) (events []string) {
	t.Helper()
	matches := func(pod *example.Pod) bool {
		if pod == nil {
			return false
		}
		l, f, err := podAttrs(pod)
		if err != nil {
			t.Fatal(err)
		}
		return pred.Label.Matches(labels.Set(l)) && pred.Field.Matches(f)
	}
	for i := at + 1; i < len(m.revs); i++ {
		key := m.changed[i]
		before, now := matches(m.past[i-1][key]), matches(m.past[i][key])
		typ := watch.Modified
		switch {
		case !before && !now:
			continue
		case !before:
			typ = watch.Added
		case !now:
			typ = watch.Deleted
		}
		events = append(events, fmt.Sprintf("%s %s@%d", typ, strings.TrimPrefix(key, testPrefix+"pods/"), m.revs[i]))
	}
	return events
}

// TestSelectors_Watches_EqualModel watches with random selectors while pods change: from old revisions, whose events are those of the model in
// order, and with initial events, which lead to the objects that the selector selects at the end.
func TestSelectors_Watches_EqualModel(t *testing.T) {
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	f, etcd := inMemory(t, onDemand)
	s, ctx := f.engine(t), contextFor(t)
	m := &selectorModel{rnd: rand.New(rand.NewPCG(seed, 2)), live: map[string]*example.Pod{}}
	for range 300 {
		m.step(t, etcd)
	}
	if err := s.mirror.Wait(ctx, etcd.Revision()); err != nil {
		t.Fatal(err)
	}
	type client struct {
		pred  storage.SelectionPredicate
		w     watch.Interface
		at    int // in revs; -1: with initial events
		state map[string]bool
	}
	var clients []*client
	for i := range 60 {
		c := &client{pred: m.selector(t), at: -1, state: map[string]bool{}}
		opts := storage.ListOptions{Recursive: true, Predicate: c.pred}
		if i%2 == 0 {
			c.at = m.rnd.IntN(len(m.revs))
			opts.ResourceVersion = fmt.Sprint(m.revs[c.at])
		}
		var err error
		if c.w, err = f.Watch(ctx, "/pods", opts); err != nil {
			t.Fatal(err)
		}
		defer c.w.Stop()
		clients = append(clients, c)
		for range m.rnd.IntN(20) {
			m.step(t, etcd)
		}
	}
	next := func(c *client) (watch.EventType, *example.Pod) {
		t.Helper()
		select {
		case ev, ok := <-c.w.ResultChan():
			if !ok || ev.Type == watch.Error {
				t.Fatalf("%q %q: watch ended: %+v", c.pred.Label, c.pred.Field, ev)
			}
			obj := ev.Object
			if shared, ok := obj.(runtime.CacheableObject); ok {
				obj = shared.GetObject()
			}
			return ev.Type, obj.(*example.Pod)
		case <-ctx.Done():
			t.Fatalf("%q %q: no further event", c.pred.Label, c.pred.Field)
		}
		return "", nil
	}
	for _, c := range clients {
		if c.at >= 0 {
			for _, want := range m.events(t, c.at, c.pred) {
				typ, pod := next(c)
				if got := fmt.Sprintf("%s %s/%s@%s", typ, pod.Namespace, pod.Name, pod.ResourceVersion); got != want {
					t.Fatalf("%q %q after %d: %s, want %s", c.pred.Label, c.pred.Field, m.revs[c.at], got, want)
				}
			}
			continue
		}
		want := selectedOf(t, m.live, "", c.pred)
		for !slices.Equal(slices.Sorted(maps.Keys(c.state)), slices.Sorted(slices.Values(want))) {
			typ, pod := next(c)
			path := podPaths(&example.PodList{Items: []example.Pod{*pod}})[0]
			if c.state[path] == (typ == watch.Added) {
				t.Fatalf("%q %q: %s of %s, selected before: %v", c.pred.Label, c.pred.Field, typ, path, c.state[path])
			}
			if c.state[path] = true; typ == watch.Deleted {
				delete(c.state, path)
			}
		}
	}
}
