package index

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestEagerField_FirstList_UsesIndex: the first list by the involved object of events makes the
// index, that by another field does not.
func TestEagerField_FirstList_UsesIndex(t *testing.T) {
	f := newFixture(t)
	f.events(t, 500)
	for _, c := range []struct {
		selector, plan string
		want           int
	}{
		{"spec.nodeName=object-7", byScan, 5},
		{"involvedObject.name=object-7", byIndex, 5},
		{"involvedObject.kind=Pod,involvedObject.name=object-8", byIndex, 5},
		{"involvedObject.name!=object-7", byIndex, 495},
	} {
		pred := podtest.Selecting(t, "", c.selector)
		f.require(t, pred, c.plan, c.want)
		if DeclaredIndex(&pred) != nil {
			t.Errorf("%s: page tokens depend on an index that upstream does not declare", c.selector)
		}
	}
}

// TestDeclaredIndex_Any_FindsEntriesOfIndex: with the index of a plan, with another plan, and
// without one.
func TestDeclaredIndex_Any_FindsEntriesOfIndex(t *testing.T) {
	f := newFixture(t)
	f.events(t, 500)
	pred := onNode(t, "object-7")
	d := DeclaredIndex(&pred)
	if d == nil {
		t.Fatal("no declared index")
	}
	for name, plan := range map[string]*Plan{"its own": f.of(t, pred).plan, "another": f.of(t, podtest.Selecting(t, "", "involvedObject.kind=Pod")).plan, "none": nil} {
		for start, want := range map[string]bool{"": true, "event-00407\x00": false, "event-00407": true} {
			if start != "" {
				start = podtest.Root + "ns/" + start
			}
			if got := d.Any(podtest.Context(t), plan, f.View.CurrentGeneration(), f.Latest(t), start, ""); got != want {
				t.Errorf("plan %s: entries from %q: %t, want %t", name, start, got, want)
			}
		}
	}
}

// TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves: a term that every object meets makes no
// digests where another term excludes the leaf, though it is the first one of the selector.
func TestPlan_UnselectiveTermFirst_IsTestedInFewLeaves(t *testing.T) {
	f := newFixture(t)
	f.events(t, 6400) // at least 100 leaves
	f.require(t, podtest.Selecting(t, "", "involvedObject.kind=Pod,metadata.name=event-06399,involvedObject.name=object-99"), byIndex, 1)
	counts := f.digests(t)
	if len(counts) != 2 || counts[1] < 100 {
		t.Fatalf("digests by index: %v, want two indexes, one with a digest on each of 100 leaves or more", counts)
	}
	if counts[0] == 0 {
		t.Error("the first term was never tested")
	}
}

// model has the pods at every revision.
type model struct {
	rnd  *rand.Rand
	live map[string]*example.Pod // by etcd key
	revs []mirror.Revision
	past []map[string]*example.Pod
}

// step changes a random pod, or several at one revision: labels are few, frequent or rare, and
// missing from some pods.
func (m *model) step(t *testing.T, etcd *memory.Store) {
	t.Helper()
	rnd, n := m.rnd, 1
	if rnd.IntN(8) == 0 {
		n += rnd.IntN(20)
	}
	next, ops := maps.Clone(m.live), map[string]memory.Op{} // each key changes once in a revision
	for range n {
		pod := podOn(fmt.Sprintf("pod-%03d", rnd.IntN(250)), fmt.Sprintf("node-%d", rnd.IntN(50)))
		pod.Namespace = fmt.Sprintf("ns-%d", rnd.IntN(3))
		key := podtest.Key(pod)
		if _, ok := m.live[key]; ok && rnd.IntN(5) == 0 {
			delete(next, key)
			ops[key] = memory.Op{Key: key, Delete: true}
			continue
		}
		pod.Labels = map[string]string{"app": fmt.Sprintf("app-%d", rnd.IntN(6)), "one": fmt.Sprint(rnd.IntN(1000))}
		if rnd.IntN(3) > 0 {
			pod.Labels["rare"] = []string{"", "x", "y", "12"}[min(rnd.IntN(30), 3)]
		}
		pod.UID = types.UID(fmt.Sprint(rnd.Uint64()))
		next[key] = pod
		ops[key] = memory.Op{Key: key, Value: podtest.Stored(t, pod)}
	}
	m.revs = append(m.revs, etcd.Txn(slices.Collect(maps.Values(ops))...))
	m.live, m.past = next, append(m.past, next)
}

// selector returns a random selector.
func (m *model) selector(t *testing.T) storage.SelectionPredicate {
	t.Helper()
	pick := func(of ...string) string { return of[m.rnd.IntN(len(of))] }
	app, one := fmt.Sprintf("app-%d", m.rnd.IntN(8)), fmt.Sprint(m.rnd.IntN(1000))
	var terms []string
	for range m.rnd.IntN(4) {
		terms = append(terms, pick("app="+app, "app!="+app, "app in (app-1,"+app+")", "app notin (app-2,"+app+")", "rare", "!rare", "rare=x", "rare=", "rare!=y",
			"rare in (x,y)", "rare notin (x,)", "one="+one, "one>500", "one<20", "other", "!other", "other=z"))
	}
	field := ""
	if m.rnd.IntN(3) == 0 {
		node := fmt.Sprintf("node-%d", m.rnd.IntN(60))
		field = pick("spec.nodeName="+node, "spec.nodeName!="+node, "metadata.namespace=ns-1", "metadata.name=pod-007", "metadata.namespace!=ns-2,spec.nodeName="+node, "spec.none=")
	}
	pred := podtest.Selecting(t, strings.Join(terms, ","), field)
	if m.rnd.IntN(2) == 0 {
		pred.IndexFields, pred.IndexLabels = []string{"spec.nodeName"}, []string{"app"}
	}
	return pred
}

// selected returns the names of the pods of a past state that a selector selects, in key order.
func (m *model) selected(t *testing.T, at int, pred storage.SelectionPredicate) (names []string) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(m.past[at])) {
		l, f, err := podtest.Attrs(m.past[at][key])
		if err != nil {
			t.Fatal(err)
		}
		if pred.Label.Matches(labels.Set(l)) && pred.Field.Matches(f) {
			names = append(names, strings.TrimPrefix(key, podtest.Root))
		}
	}
	return names
}

// TestPlan_AnySelectorAndRevision_EqualsModel plans lists with random selectors at the latest and
// at old revisions, and compares the selected candidates with a filter of the model's state at that
// revision. Short hashes let values collide.
func TestPlan_AnySelectorAndRevision_EqualsModel(t *testing.T) {
	for _, bits := range []int{32, 3} {
		for _, finds := range []bool{false, true} {
			t.Run(fmt.Sprintf("hashes of %d bits, values found in stored bytes %t", bits, finds), func(t *testing.T) {
				if bits < 32 {
					hashMask = 1<<bits - 1
					defer func() { hashMask = ^uint32(0) }()
				}
				f := newFixture(t)
				if finds {
					f = finding(t)
				}
				testPlans(t, f)
			})
		}
	}
}

func testPlans(t *testing.T, f *fixture) {
	t.Helper()
	seed := testseed.New(t)
	m := &model{rnd: rand.New(rand.NewPCG(seed, 1)), live: map[string]*example.Pod{}}
	planned := 0
	for range 20 {
		for range 1 + m.rnd.IntN(100) {
			m.step(t, f.Etcd)
		}
		f.CatchUp(t)
		for range 30 {
			pred, at, snap := m.selector(t), len(m.revs)-1, f.Latest(t)
			if m.rnd.IntN(2) == 0 {
				at = m.rnd.IntN(len(m.revs))
				var err error
				if snap, err = f.Resource.At(m.revs[at]); err != nil {
					t.Fatal(err)
				}
			}
			r := f.read(podtest.Context(t), snap, pred)
			if r.plan != nil {
				planned++
			}
			got, err := r.selected(podtest.Context(t))
			if want := m.selected(t, at, pred); err != nil || !slices.Equal(got, want) {
				t.Fatalf("%q %q at %d: %d pods (%v), want %d: %v, want %v", pred.Label, pred.Field, m.revs[at], len(got), err, len(want), got, want)
			}
		}
	}
	if planned < 100 {
		t.Errorf("only %d lists used a plan", planned)
	}
}

// TestIndex_OldRevision_ExaminesSelectedOnly: the candidates of a declared field at an old revision
// are the selected objects.
func TestIndex_OldRevision_ExaminesSelectedOnly(t *testing.T) {
	f := newFixture(t)
	m := &model{rnd: rand.New(rand.NewPCG(testseed.New(t), 0)), live: map[string]*example.Pod{}}
	for range 400 {
		m.step(t, f.Etcd)
	}
	f.CatchUp(t)
	for _, at := range []int{399, 380, 300, 200} {
		snap, err := f.Resource.At(m.revs[at])
		if err != nil {
			t.Fatal(err)
		}
		for node := range 50 {
			pred := onNode(t, fmt.Sprint("node-", node))
			if got, want := f.read(podtest.Context(t), snap, pred).candidates(""), m.selected(t, at, pred); !slices.Equal(got, want) {
				t.Fatalf("node-%d at %d has the candidates %v, want %v", node, m.revs[at], got, want)
			}
		}
	}
}
