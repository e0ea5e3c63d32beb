package kubestorage

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"sync/atomic"
	"testing"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testrace"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror"
)

// selectorModel has the pods at every revision.
type selectorModel struct {
	rnd  *rand.Rand
	live map[string]*example.Pod // by etcd key
	revs []mirror.Revision
	past []map[string]*example.Pod
	// changed has the keys that changed at each revision, in the order of the transaction.
	changed [][]string
}

// step changes a random pod, or several at one revision: labels are few, frequent or rare, and
// missing from some pods.
func (m *selectorModel) step(t *testing.T, etcd *memory.Store) {
	t.Helper()
	rnd := m.rnd
	n := 1
	if rnd.IntN(8) == 0 {
		n += rnd.IntN(20)
	}
	next := maps.Clone(m.live)
	ops := map[string]memory.Op{} // each key changes once in a revision
	for range n {
		pod := newPod(fmt.Sprintf("pod-%03d", rnd.IntN(500)))
		pod.Namespace = fmt.Sprintf("ns-%d", rnd.IntN(3))
		key := etcdKey(pod)
		if _, ok := m.live[key]; ok && rnd.IntN(5) == 0 {
			delete(next, key)
			ops[key] = memory.Op{Key: key, Delete: true}
			continue
		}
		pod.Labels = map[string]string{"app": fmt.Sprintf("app-%d", rnd.IntN(6)), "one": fmt.Sprint(rnd.IntN(1000))}
		if rnd.IntN(3) > 0 {
			pod.Labels["rare"] = []string{"", "x", "y", "12"}[min(rnd.IntN(30), 3)]
		}
		pod.Spec.NodeName = fmt.Sprintf("node-%d", rnd.IntN(50))
		next[key] = pod
		ops[key] = memory.Op{Key: key, Value: storedPod(t, pod)}
	}
	var all []memory.Op
	keys := slices.Sorted(maps.Keys(ops))
	rnd.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	for _, key := range keys {
		all = append(all, ops[key])
	}
	m.revs = append(m.revs, etcd.Txn(all...))
	m.changed = append(m.changed, keys)
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

// selectedOf returns the paths of the pods of a past state below a prefix that a selector selects,
// in key order.
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

// TestSelectors_AnyRevisionLimitAndToken_EqualsModel lists with random selectors, of everything or
// of a namespace, at the latest and at old revisions, whole and in pages, and compares with a
// filter of the model's state at that revision.
func TestSelectors_AnyRevisionLimitAndToken_EqualsModel(t *testing.T) {
	if testing.Short() {
		t.Skip("short: takes seconds")
	}
	t.Parallel()
	for _, finds := range []bool{false, true} {
		t.Run(fmt.Sprintf("values found in stored bytes %t", finds), func(t *testing.T) {
			opts := []func(*options){onDemand}
			if finds {
				opts = append(opts, withFinder(new(atomic.Int64)))
			}
			testSelectors(t, opts...)
		})
	}
}

func testSelectors(t *testing.T, opts ...func(*options)) {
	t.Helper()
	seed := testseed.New(t)
	f, etcd := inMemory(t, opts...)
	s, ctx := f.engine(t), contextFor(t)
	m := &selectorModel{rnd: rand.New(rand.NewPCG(seed, 1)), live: map[string]*example.Pod{}}
	planned, rounds := 0, 40
	if testrace.Few() {
		rounds = 8
	}
	for range rounds {
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
			if r.Plan() != nil {
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
	if planned < 5*rounds {
		t.Errorf("only %d lists used an index", planned)
	}
}
