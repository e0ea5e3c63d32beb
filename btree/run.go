package btree

// NewRun returns a run of items that are in no tree, in ascending key order, for readers of runs.
// The run owns the slice from then on.
func NewRun[T Item](items []T) Run[T] {
	return Run[T]{Leaf: &Leaf[T]{items: items}, To: len(items)}
}
