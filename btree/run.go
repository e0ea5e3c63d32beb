package btree

// NewRun returns a run of items that no tree holds, in ascending key order, for readers
// of runs. The slice belongs to the run from then on.
func NewRun[T Item](items []T) Run[T] {
	return Run[T]{Leaf: &Leaf[T]{items: items}, To: len(items)}
}
