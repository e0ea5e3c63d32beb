package btree

import (
	"fmt"

	"github.com/stratakube/strata/mirror/memo"
)

// Check returns an error if the tree breaks one of its invariants: keys ascend, separators
// separate, counts and bytes add up, all leaves have the same depth, no node except the root is too
// small or too large, and no node has two memos of one key (see Measure, Sift). Cost is
// O(n); for tests.
func (t Tree[T]) Check() error {
	if t.root == nil {
		return nil
	}
	_, err := t.root.check("", "", true)
	return err
}

func (n *node[T]) check(low, high string, root bool) (depth int, err error) {
	if w := n.width(); w > maxItems || w == 0 || (!root && w < minItems) {
		return 0, fmt.Errorf("node of width %d (root: %v)", w, root)
	}
	var want node[T]
	want.leaf, want.kids = n.leaf, n.kids
	want.recount()
	if want.count != n.count || want.bytes != n.bytes {
		return 0, fmt.Errorf("node counts %d items, %d bytes; holds %d, %d", n.count, n.bytes, want.count, want.bytes)
	}
	keys := map[*memo.Key]bool{}
	for k, value := range n.memoList().All() {
		if _, isSum := value.(sum); keys[k] || n.kids == nil && isSum {
			return 0, fmt.Errorf("a second memo of a key, or a sum of a leaf: %v", value)
		}
		keys[k] = true
	}
	if n.kids == nil {
		prev := ""
		for i, it := range n.leaf.items {
			k := it.Key()
			if i > 0 && k <= prev || k < low || high != "" && k >= high {
				return 0, fmt.Errorf("key %q after %q outside [%q, %q)", k, prev, low, high)
			}
			prev = k
		}
		return 1, nil
	}
	if len(n.seps) != len(n.kids)-1 {
		return 0, fmt.Errorf("%d separators for %d children", len(n.seps), len(n.kids))
	}
	for i, k := range n.kids {
		lo, hi := low, high
		if i > 0 {
			lo = n.seps[i-1]
		}
		if i < len(n.seps) {
			hi = n.seps[i]
		}
		d, err := k.check(lo, hi, false)
		if err != nil {
			return 0, err
		}
		if i > 0 && d != depth {
			return 0, fmt.Errorf("leaves at depths %d and %d", depth, d)
		}
		depth = d
	}
	return depth + 1, nil
}
