package btree

import (
	"fmt"
	"maps"
	"math/rand/v2"
	"runtime"
	"slices"
	"sort"
	"testing"

	"pgregory.net/rapid"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/mirror/memo"
)

type item struct {
	key  string
	size int64
}

func (i *item) Key() string { return i.key }
func (i *item) Size() int64 { return i.size }

// frozen is a tree together with its expected items, which never change.
type frozen struct {
	tree Tree[*item]
	want map[string]*item
}

func requireSame(t *rapid.T, f frozen) {
	testcheck.NoError(t, f.tree.Check())
	keys := slices.Sorted(maps.Keys(f.want))
	var bytes int64
	i := 0
	for got := range f.tree.All("", "") {
		if i >= len(keys) || got != f.want[keys[i]] {
			t.Fatalf("item %d is %q, want one of %d keys", i, got.key, len(keys))
		}
		bytes += got.size
		i++
	}
	if i != len(keys) || f.tree.Len() != len(keys) || f.tree.Bytes() != bytes {
		t.Fatalf("tree of %d items, %d bytes; iterated %d; want %d, %d", f.tree.Len(), f.tree.Bytes(), i, len(keys), bytes)
	}
}

// machine applies the same edits to a tree and to a plain map.
type machine struct {
	tree  Tree[*item]
	model map[string]*item
	old   []frozen
}

// lengthKey is the key of the sums of machine.
var lengthKey = &memo.Key{}

var drawKey = rapid.Custom(func(t *rapid.T) string {
	return fmt.Sprintf("%03d", rapid.IntRange(0, 700).Draw(t, "key"))
})

// build begins with a tree of many items.
func (m *machine) build(t *rapid.T) {
	n := rapid.IntRange(0, 600).Draw(t, "n")
	var items []*item
	for i := range n {
		it := &item{fmt.Sprintf("%03d", i), int64(i)}
		items = append(items, it)
		m.model[it.key] = it
	}
	m.tree = Build(items)
}

func (m *machine) edit(t *rapid.T) {
	e := m.tree.Edit()
	n := rapid.IntRange(1, 200).Draw(t, "ops")
	deletes := rapid.IntRange(0, 10).Draw(t, "deletes of 10")
	rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
	for range n {
		k := fmt.Sprintf("%03d", rnd.IntN(700))
		want, had := m.model[k]
		if rnd.IntN(10) < deletes {
			prev, ok := e.Delete(k)
			if ok != had || prev != want {
				t.Fatalf("Delete(%q) = %v, %v; want %v, %v", k, prev, ok, want, had)
			}
			delete(m.model, k)
			continue
		}
		it := &item{k, int64(rnd.IntN(1000))}
		prev, ok := e.Set(it)
		if ok != had || prev != want {
			t.Fatalf("Set(%q) = %v, %v; want %v, %v", k, prev, ok, want, had)
		}
		m.model[k] = it
	}
	m.tree = e.Tree()
}

func (m *machine) freeze(*rapid.T) {
	m.old = append(m.old, frozen{m.tree, maps.Clone(m.model)})
}

// within reads a range with every method.
func (m *machine) within(t *rapid.T) {
	start, end := drawKey.Draw(t, "start"), drawKey.Draw(t, "end")
	if rapid.IntRange(0, 5).Draw(t, "open") == 0 {
		end = ""
	}
	var want []string
	var wantBytes int64
	for k, it := range m.model {
		if k >= start && (end == "" || k < end) {
			want = append(want, k)
			wantBytes += it.size
		}
	}
	sort.Strings(want)
	var got []string
	for run := range m.tree.Runs(start, end) {
		if len(run.Items()) == 0 {
			t.Fatal("empty run")
		}
		for _, it := range run.Items() {
			got = append(got, it.key)
		}
	}
	if !slices.Equal(got, want) {
		t.Fatalf("range [%q, %q) = %q, want %q", start, end, got, want)
	}
	if c, b := m.tree.Count(start, end); c != len(want) || b != wantBytes {
		t.Fatalf("Count = %d, %d; want %d, %d", c, b, len(want), wantBytes)
	}
	if last, ok := m.tree.Last(start, end); ok != (len(want) > 0) || ok && last != m.model[want[len(want)-1]] {
		t.Fatalf("Last(%q, %q) = %v, %v; want the last of %q", start, end, last, ok, want)
	}
}

func (m *machine) measure(t *rapid.T) {
	bound := rapid.OneOf(rapid.Just(""), drawKey)
	start, end := bound.Draw(t, "start"), bound.Draw(t, "end")
	length := func(r Run[*item]) (n int64, known bool) {
		for _, it := range r.Items() {
			n += it.size + 1
		}
		return n, true
	}
	c, b := m.tree.Count(start, end)
	for range 2 { // the second time from cached sums
		if n, ok := m.tree.Measure(start, end, lengthKey, length); !ok || n != b+int64(c) {
			t.Fatalf("Measure = %d, %v; want %d", n, ok, b+int64(c))
		}
	}
	unknown := func(Run[*item]) (int64, bool) { return 0, false }
	if n, ok := m.tree.Measure(start, end, &memo.Key{}, unknown); ok != (c == 0) {
		t.Fatalf("Measure with an unknown name = %d, %v", n, ok)
	}
}

// TestTree_RandomEdits_EqualsSortedMap compares edits with a plain map and reads every earlier
// tree again at the end.
func TestTree_RandomEdits_EqualsSortedMap(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		m := &machine{model: map[string]*item{}}
		if rapid.Bool().Draw(t, "bulk") {
			m.build(t)
		}
		t.Repeat(map[string]func(*rapid.T){
			"edit":    m.edit,
			"freeze":  m.freeze,
			"range":   m.within,
			"measure": m.measure,
			"":        func(t *rapid.T) { requireSame(t, frozen{m.tree, m.model}) },
		})
		for _, f := range m.old {
			requireSame(t, f)
		}
	})
}

// FuzzTree reads its input as a program of sets and deletes with arbitrary keys.
func FuzzTree(f *testing.F) {
	f.Add([]byte("\x01a\x02bb\x81a\x00\x03abc"))
	f.Fuzz(func(t *testing.T, program []byte) {
		model := map[string]*item{}
		e := Tree[*item]{}.Edit()
		for len(program) > 0 {
			op := program[0]
			n := min(int(op&0x7f), len(program)-1)
			key := string(program[1 : 1+n])
			program = program[1+n:]
			if op&0x80 != 0 {
				if _, ok := e.Delete(key); ok != (model[key] != nil) {
					t.Fatalf("Delete(%q) = %v", key, ok)
				}
				delete(model, key)
			} else {
				it := &item{key, int64(len(program))}
				if prev, _ := e.Set(it); prev != model[key] {
					t.Fatalf("Set(%q) returned %v", key, prev)
				}
				model[key] = it
			}
		}
		tree := e.Tree()
		testcheck.NoError(t, tree.Check())
		if tree.Len() != len(model) {
			t.Fatalf("%d items, want %d", tree.Len(), len(model))
		}
		for k, it := range model {
			if got, ok := tree.Get(k); !ok || got != it {
				t.Fatalf("Get(%q) = %v, %v", k, got, ok)
			}
		}
	})
}

// TestEdit_UntouchedLeaves_AreShared: memos on leaves remain useful because an edit keeps untouched
// leaves.
func TestEdit_UntouchedLeaves_AreShared(t *testing.T) {
	var items []*item
	for i := range 10_000 {
		items = append(items, &item{fmt.Sprintf("%05d", i), 1})
	}
	before := Build(items)
	seen := map[*Leaf[*item]]bool{}
	for r := range before.Runs("", "") {
		seen[r.Leaf] = true
	}
	for name, edit := range map[string]func(*Edit[*item]){
		"replaced": func(e *Edit[*item]) { e.Set(&item{"05000", 2}) },
		"removed":  func(e *Edit[*item]) { e.Delete("05000") },
	} {
		e := before.Edit()
		edit(e)
		fresh := 0
		for r := range e.Tree().Runs("", "") {
			if !seen[r.Leaf] {
				fresh++
			}
		}
		if fresh != 1 {
			t.Errorf("one %s item made %d new leaves, want 1", name, fresh)
		}
	}
}

// TestRun_Whole_NeedsBothEnds: part of a leaf is not its whole.
func TestRun_Whole_NeedsBothEnds(t *testing.T) {
	whole := NewRun(many(3))
	for _, r := range []Run[*item]{whole, {Leaf: whole.Leaf, To: 2}, {Leaf: whole.Leaf, From: 1, To: 3}} {
		if r.Whole() != (len(r.Items()) == 3) {
			t.Errorf("from %d to %d of 3: %v", r.From, r.To, r.Whole())
		}
	}
}

// TestEdit_Replaced_ReturnsRemovedLeavesWithMemo: Replaced returns the leaves with a memo that are
// not in the result, for every kind of removal.
func TestEdit_Replaced_ReturnsRemovedLeavesWithMemo(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		var items []*item
		for i := range rapid.IntRange(1, 1000).Draw(t, "n") {
			items = append(items, &item{fmt.Sprintf("%05d", i), 1})
		}
		before := Build(items)
		for r := range before.Runs("", "") {
			r.Leaf.Memos().Swap(&memo.Key{}, nil, "kept")
		}
		e := before.Edit()
		for range rapid.IntRange(0, 300).Draw(t, "edits") {
			k := fmt.Sprintf("%05d", rapid.IntRange(0, len(items)).Draw(t, "key"))
			if rapid.Bool().Draw(t, "delete") {
				e.Delete(k)
			} else {
				e.Set(&item{k, 2})
			}
		}
		replaced := e.Replaced()
		gone := map[*Leaf[*item]]bool{}
		for r := range before.Runs("", "") {
			gone[r.Leaf] = true
		}
		for r := range e.Tree().Runs("", "") {
			delete(gone, r.Leaf)
		}
		for _, l := range replaced {
			if !gone[l] {
				t.Fatal("a leaf is reported twice, or is still there")
			}
			delete(gone, l)
		}
		if len(gone) > 0 {
			t.Fatalf("%d leaves went unreported", len(gone))
		}
	})
}

func benchItems(n int) []*item {
	items := make([]*item, n)
	for i := range items {
		items[i] = &item{fmt.Sprintf("/registry/configmaps/ns-%03d/name-%07d", i%100, i), 1024}
	}
	slices.SortFunc(items, func(a, b *item) int {
		if a.key < b.key {
			return -1
		}
		return 1
	})
	return items
}

func BenchmarkSet(b *testing.B) {
	for _, n := range []int{1_000, 300_000} {
		for _, batch := range []int{1, 100} {
			b.Run(fmt.Sprintf("items=%d/batch=%d", n, batch), func(b *testing.B) {
				items := benchItems(n)
				tree := Build(items)
				rnd := rand.New(rand.NewPCG(1, 2))
				b.ReportAllocs()
				for i := 0; b.Loop(); i++ {
					e := tree.Edit()
					for range batch {
						e.Set(items[rnd.IntN(n)])
					}
					tree = e.Tree()
				}
			})
		}
	}
}

func BenchmarkGet(b *testing.B) {
	items := benchItems(300_000)
	tree := Build(items)
	i := 0
	for b.Loop() {
		i = (i + 7919) % len(items)
		if _, ok := tree.Get(items[i].key); !ok {
			b.Fatal("lost")
		}
	}
}

// TestMeasure_ManyKeys_DoesNotGrowTree: a tree without edits does not grow when it is measured
// under ever new keys.
func TestMeasure_ManyKeys_DoesNotGrowTree(t *testing.T) {
	var items []*item
	for i := range 1000 {
		items = append(items, &item{key: fmt.Sprintf("%04d", i), size: 1})
	}
	tree := Build(items)
	one := func(r Run[*item]) (int64, bool) { return int64(len(r.Items())), true }
	kept := &memo.Key{}
	for range 10 {
		n := &memo.Key{}
		for _, of := range []*memo.Key{n, kept} {
			if sum, ok := tree.Measure("", "", of, one); !ok || sum != 1000 {
				t.Fatalf("Measure = %d, %v", sum, ok)
			}
		}
		n.Close()
	}
	length := 0
	for range tree.root.inner.All() {
		length++
	}
	if length > 2 || tree.root.inner.Get(kept) == nil {
		t.Errorf("%d cached sums, want that of the open key, and at most one more", length)
	}
}

// nodes returns the nodes of a tree.
func nodes(n *node[*item], into map[*node[*item]]bool) {
	if n == nil {
		return
	}
	into[n] = true
	for _, kid := range n.kids {
		nodes(kid, into)
	}
}

// TestWeigh_SharedNodes_AreCountedOnce: a node counts for the first tree that contains it, in any
// order of trees.
func TestWeigh_SharedNodes_AreCountedOnce(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		rnd := rand.New(rand.NewPCG(rapid.Uint64().Draw(t, "seed"), 0))
		trees := []Tree[*item]{{}, Build(benchItems(rnd.IntN(3000)))}
		for range 8 { // each derived from an earlier one
			e := trees[rnd.IntN(len(trees))].Edit()
			for range rnd.IntN(200) {
				it := &item{key: fmt.Sprintf("%08d", rnd.IntN(4000)), size: 1}
				if rnd.IntN(3) == 0 {
					e.Delete(it.key)
				} else {
					e.Set(it)
				}
			}
			trees = append(trees, e.Tree())
		}
		rnd.Shuffle(len(trees), func(i, j int) { trees[i], trees[j] = trees[j], trees[i] })
		for range 2 { // marks of the first call have no effect on the second
			got := Weigh(trees)
			seen := map[*node[*item]]bool{}
			for i, tree := range trees {
				all := map[*node[*item]]bool{}
				nodes(tree.root, all)
				want := int64(0)
				for n := range all {
					if !seen[n] {
						seen[n] = true
						want += n.memory()
					}
				}
				if got[i] != want {
					t.Fatalf("tree %d of %d weighs %d, want %d", i, len(trees), got[i], want)
				}
			}
		}
	})
}

// TestBlock_AnySize_IsRoundedUp: sizes on both sides of each bound.
func TestBlock_AnySize_IsRoundedUp(t *testing.T) {
	for bytes, want := range map[int]int64{0: 0, 1: 16, 127: 128, 129: 160, 511: 512, 513: 640, 1023: 1024, 1025: 1280} {
		if got := block(bytes, 1); got != want {
			t.Errorf("%d bytes take %d, want %d", bytes, got, want)
		}
	}
}

// TestWeigh_EqualsHeapGrowth: the weights equal the heap's growth within a few percent.
func TestWeigh_EqualsHeapGrowth(t *testing.T) {
	heap := func() int64 {
		runtime.GC()
		runtime.GC()
		var ms runtime.MemStats
		runtime.ReadMemStats(&ms)
		return int64(ms.HeapAlloc)
	}
	items := benchItems(50_000)
	updates := benchItems(50_000)
	before := heap()
	trees := []Tree[*item]{Build(items)}
	rnd := rand.New(rand.NewPCG(testseed.New(t), 0))
	for i := range 20 {
		e := trees[i].Edit()
		for range 500 {
			e.Set(updates[rnd.IntN(len(updates))])
		}
		trees = append(trees, e.Tree())
	}
	held := heap() - before
	var weighed int64
	for _, bytes := range Weigh(trees) {
		weighed += bytes
	}
	if weighed < held*95/100 || weighed > held*105/100 {
		t.Errorf("trees weigh %d bytes, the heap has grown by %d", weighed, held)
	}
	runtime.KeepAlive(trees)
	runtime.KeepAlive(items)
	runtime.KeepAlive(updates)
}
