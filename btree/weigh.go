package btree

import (
	"sync/atomic"
	"unsafe"
)

// weighings numbers the calls of Weigh; each number is used once.
var weighings atomic.Uint64

// Weigh returns for each tree the bytes of memory of its nodes that no earlier tree in the slice
// contains: the memory that is freed if this tree and the later ones are released. Items do not
// count, nor memos but those that are a memo.Sizer. Cost is O(nodes of the trees, shared ones
// once), about 20 ns each.
//
// It marks the nodes. Readers and edits do not read the mark, so they may run concurrently, but two
// calls with trees that share nodes must not.
func Weigh[T Item](trees []Tree[T]) []int64 {
	id := weighings.Add(1)
	bytes := make([]int64, len(trees))
	for i, t := range trees {
		if t.root != nil {
			bytes[i] = t.root.weigh(id)
		}
	}
	return bytes
}

func (n *node[T]) weigh(id uint64) int64 {
	if n.weighed == id {
		return 0 // nor do the nodes below it count
	}
	n.weighed = id
	bytes := n.memory()
	for _, kid := range n.kids {
		bytes += kid.weigh(id)
	}
	return bytes
}

// memory returns the bytes of the node itself.
func (n *node[T]) memory() int64 {
	bytes := block(1, unsafe.Sizeof(*n)) + n.memoList().Size()
	if n.kids == nil {
		var item T
		return bytes + int64(unsafe.Sizeof(*n.leaf)) + block(cap(n.leaf.items), unsafe.Sizeof(item))
	}
	return bytes + block(cap(n.kids), unsafe.Sizeof(n)) + block(cap(n.seps), unsafe.Sizeof(""))
}

// block returns the bytes of an array as the allocator rounds them up: by 4% on average.
func block(n int, size uintptr) int64 {
	bytes := int64(n) * int64(size)
	switch {
	case bytes <= 128:
		return (bytes + 15) &^ 15
	case bytes <= 512:
		return (bytes + 31) &^ 31
	case bytes <= 1024:
		return (bytes + 127) &^ 127
	}
	return (bytes + 255) &^ 255
}
