package podtest

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
	"github.com/stratakube/strata/mirror"
)

// Model has the pods of an etcd after each revision that changed some of them. Only Step changes
// them.
type Model struct {
	Rand *rand.Rand
	Revs []mirror.Revision         // ascending
	Past []map[string]*example.Pod // after each of Revs, by key
	// Changed has the keys that changed at each of Revs, in the order of the transaction.
	Changed [][]string
}

// NewModel returns the model of an etcd without pods.
func NewModel(seed, stream uint64) *Model {
	return &Model{Rand: rand.New(rand.NewPCG(seed, stream))}
}

// Live returns the newest pods, by key.
func (m *Model) Live() map[string]*example.Pod {
	if len(m.Past) == 0 {
		return nil
	}
	return m.Past[len(m.Past)-1]
}

// Step changes one of 900 pods in three namespaces, or several at one revision: labels are few,
// frequent or rare, and missing from some pods.
func (m *Model) Step(t testing.TB, etcd *memory.Store) {
	t.Helper()
	rnd, n := m.Rand, 1
	if rnd.IntN(8) == 0 {
		n += rnd.IntN(20)
	}
	// each key changes once in a revision
	next, ops := map[string]*example.Pod{}, map[string]memory.Op{}
	maps.Copy(next, m.Live())
	for range n {
		pod := Pod(fmt.Sprintf("pod-%03d", rnd.IntN(300)))
		pod.Namespace = fmt.Sprintf("ns-%d", rnd.IntN(3))
		key := Key(pod)
		if _, ok := next[key]; ok && rnd.IntN(5) == 0 && ops[key].Key == "" {
			delete(next, key)
			ops[key] = memory.Op{Key: key, Delete: true}
			continue
		}
		pod.Labels = map[string]string{"app": fmt.Sprintf("app-%d", rnd.IntN(6)), "one": fmt.Sprint(rnd.IntN(1000))}
		if rnd.IntN(3) > 0 {
			pod.Labels["rare"] = []string{"", "x", "y", "12"}[min(rnd.IntN(30), 3)]
		}
		pod.Spec.NodeName = fmt.Sprintf("node-%d", rnd.IntN(50))
		pod.UID = types.UID(fmt.Sprint(rnd.Uint64()))
		next[key] = pod
		ops[key] = memory.Op{Key: key, Value: Stored(t, pod)}
	}
	keys := slices.Sorted(maps.Keys(ops))
	rnd.Shuffle(len(keys), func(i, j int) { keys[i], keys[j] = keys[j], keys[i] })
	var all []memory.Op
	for _, key := range keys {
		all = append(all, ops[key])
	}
	m.Revs, m.Past, m.Changed = append(m.Revs, etcd.Txn(all...)), append(m.Past, next), append(m.Changed, keys)
}

// Selector returns a random selector of labels, of fields, or of both. Half of them name the
// indexes that a registry declares.
func (m *Model) Selector(t testing.TB) storage.SelectionPredicate {
	t.Helper()
	rnd := m.Rand
	pick := func(of ...string) string { return of[rnd.IntN(len(of))] }
	app, one := fmt.Sprintf("app-%d", rnd.IntN(8)), fmt.Sprint(rnd.IntN(1000))
	var terms []string
	for range rnd.IntN(4) {
		terms = append(terms, pick("app="+app, "app!="+app, "app in (app-1,"+app+")", "app notin (app-2,"+app+")", "rare", "!rare", "rare=x", "rare=", "rare!=y",
			"rare in (x,y)", "rare notin (x,)", "one="+one, "one>500", "one<20", "other", "!other", "other=z"))
	}
	field := ""
	if rnd.IntN(3) == 0 {
		node := fmt.Sprintf("node-%d", rnd.IntN(60))
		field = pick("spec.nodeName="+node, "spec.nodeName!="+node, "metadata.namespace=ns-1", "metadata.name=pod-007", "metadata.namespace!=ns-2,spec.nodeName="+node, "spec.none=")
	}
	pred := Selecting(t, strings.Join(terms, ","), field)
	if rnd.IntN(2) == 0 {
		pred.IndexFields, pred.IndexLabels = []string{"spec.nodeName"}, []string{"app"}
	}
	return pred
}

// Selected returns the pods after Revs[at], below a prefix of their keys, that a selector selects:
// their namespaces and names, in key order.
func (m *Model) Selected(t testing.TB, at int, prefix string, pred storage.SelectionPredicate) (names []string) {
	t.Helper()
	for _, key := range slices.Sorted(maps.Keys(m.Past[at])) {
		if strings.HasPrefix(key, prefix) && Matches(t, pred, m.Past[at][key]) {
			names = append(names, strings.TrimPrefix(key, Root))
		}
	}
	return names
}

// Matches reports whether a selector selects a pod; false for nil.
func Matches(t testing.TB, pred storage.SelectionPredicate, pod *example.Pod) bool {
	t.Helper()
	if pod == nil {
		return false
	}
	l, f, err := Attrs(pod)
	if err != nil {
		t.Fatal(err)
	}
	if shard := pred.ShardSelector; shard != nil {
		if ok, err := shard.Matches(pod); err != nil || !ok {
			return false
		}
	}
	return pred.Label.Matches(labels.Set(l)) && pred.Field.Matches(f)
}
