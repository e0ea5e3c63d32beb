package btree

import (
	"fmt"
	"slices"
	"strings"
	"testing"
)

// TestCheck_BrokenTree_IsFound breaks each invariant of a tree of two levels.
func TestCheck_BrokenTree_IsFound(t *testing.T) {
	type root = *node[*item]
	for name, broken := range map[string]func(root){
		"none":              func(root) {},
		"a count":           func(n root) { n.count++ },
		"bytes":             func(n root) { n.bytes-- },
		"a count of a leaf": func(n root) { n.kids[1].count++ },
		"an empty leaf":     func(n root) { n.kids[1].leaf.items = nil; n.kids[1].recount(); n.recount() },
		"a small leaf": func(n root) {
			n.kids[0].leaf.items = n.kids[0].leaf.items[:minItems-1]
			n.kids[0].recount()
			n.recount()
		},
		"a large leaf": func(n root) {
			l := n.kids[len(n.kids)-1]
			l.leaf.items = slices.Concat(l.leaf.items, many(6 * maxItems)[4*maxItems:])
			l.recount()
			n.recount()
		},
		"the order of a leaf":         func(n root) { i := n.kids[0].leaf.items; i[0], i[1] = i[1], i[0] },
		"a key twice":                 func(n root) { i := n.kids[0].leaf.items; i[1] = i[0] },
		"a key at the next separator": func(n root) { i := n.kids[0].leaf.items; i[len(i)-1] = &item{key: n.seps[0], size: 1} },
		"a key below its separator":   func(n root) { n.kids[1].leaf.items[0] = &item{key: n.kids[0].leaf.items[0].key, size: 1} },
		"a missing separator":         func(n root) { n.seps = n.seps[1:] },
		"an inner node beside leaves": func(n root) { n.kids[1] = &node[*item]{kids: []root{n.kids[1]}}; n.kids[1].recount() },
		"a sum of a leaf":             func(n root) { n.kids[0].memoList().Swap(lengthKey, nil, sum(1)) },
		"none, with a sum at its top": func(n root) { n.memoList().Swap(lengthKey, nil, sum(1)) },
	} {
		var tree Tree[*item]
		e := tree.Edit()
		for _, it := range many(4 * maxItems) {
			e.Set(it)
		}
		tree = e.Tree()
		broken(tree.root)
		if err, valid := tree.Check(), strings.HasPrefix(name, "none"); (err == nil) != valid {
			t.Errorf("%s: %v", name, err)
		}
	}
	for name, broken := range map[string]func(root){
		"an empty leaf":       func(n root) { n.leaf.items = nil; n.recount() },
		"a large leaf":        func(n root) { n.leaf.items = many(maxItems + 1); n.recount() },
		"the order of a leaf": func(n root) { i := n.leaf.items; i[0], i[1] = i[1], i[0] },
		"a sum of a leaf":     func(n root) { n.memoList().Swap(lengthKey, nil, sum(1)) },
	} {
		tree := Build(many(2))
		broken(tree.root)
		if tree.Check() == nil {
			t.Errorf("%s alone is valid", name)
		}
	}
	tree := Build(many(maxItems * maxItems))
	tree.root.kids[1] = tree.root.kids[1].kids[0]
	tree.root.recount()
	if tree.Check() == nil {
		t.Error("a leaf beside inner nodes is valid")
	}
}

// TestBuild_KeysNotAscending_Panics: also for a key that comes twice.
func TestBuild_KeysNotAscending_Panics(t *testing.T) {
	items := many(2)
	for name, of := range map[string][]*item{"descending": {items[1], items[0]}, "twice": {items[0], items[0]}} {
		func() {
			defer func() {
				if recover() == nil {
					t.Errorf("%s: a tree was built", name)
				}
			}()
			Build(of)
		}()
	}
}

// TestSet_FullNodes_AreNotSplit: a node is split when it has one item or child more than maxItems.
func TestSet_FullNodes_AreNotSplit(t *testing.T) {
	e := Tree[*item]{}.Edit()
	height, width := 0, maxItems // of the root
	for _, it := range many(maxItems * maxItems) {
		e.Set(it)
		now := 1
		for n := e.root; n.kids != nil; n = n.kids[0] {
			now++
		}
		if now > height && width != maxItems {
			t.Fatalf("a root of width %d was split", width)
		}
		height, width = now, e.root.width()
	}
	if height != 3 {
		t.Errorf("height %d, want 3", height)
	}
}

func many(n int) []*item {
	all := make([]*item, n)
	for i := range all {
		all[i] = &item{key: fmt.Sprintf("k-%06d", i), size: 1}
	}
	return all
}

// TestLast_StartAtLastKey_IsIncluded: a range begins at its start.
func TestLast_StartAtLastKey_IsIncluded(t *testing.T) {
	e := Tree[*item]{}.Edit()
	for _, it := range many(2 * maxItems) {
		e.Set(it)
	}
	tree := e.Tree()
	last := fmt.Sprintf("k-%06d", 2*maxItems-1)
	if it, ok := tree.Last(last, ""); !ok || it.key != last {
		t.Errorf("from the last key: %v, %v", it, ok)
	}
	if it, ok := tree.Last(last+"\x00", ""); ok {
		t.Errorf("after the last key: %v", it)
	}
}

// TestDelete_AllKeys_NodesStayFilled: after each removal no node is too small.
func TestDelete_AllKeys_NodesStayFilled(t *testing.T) {
	items := many(8 * maxItems)
	for name, at := range map[string]func(left int) int{
		"from the first": func(int) int { return 0 },
		"from the last":  func(left int) int { return left - 1 },
		"from inside":    func(left int) int { return left / 3 },
	} {
		e := Tree[*item]{}.Edit()
		for _, it := range items {
			e.Set(it)
		}
		keys := slices.Clone(items)
		for len(keys) > 0 {
			i := at(len(keys))
			if _, ok := e.Delete(keys[i].key); !ok {
				t.Fatalf("%s: %s is not there", name, keys[i].key)
			}
			keys = slices.Delete(keys, i, i+1)
			tree := e.Tree()
			if err := tree.Check(); err != nil {
				t.Fatalf("%s, %d left: %v", name, len(keys), err)
			}
			e = tree.Edit()
		}
	}
}
