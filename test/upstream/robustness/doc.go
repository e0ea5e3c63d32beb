// Package robustness judges the mirror with the validators of etcd's own robustness tests,
// go.etcd.io/etcd/tests/v3/robustness/validate: the linearizability model, the watch guarantees
// (filtered, ordered, unique, atomic, reliable, resumable, bookmarkable, with correct previous
// values) and the history at each revision.
//
// Clients of etcd's recorder write to an embedded etcd. Readers of a mirror of the same etcd record
// their reads as etcd's range operations and their cursors as etcd's watch operations, and the
// validators compare both with the requests in etcd's write-ahead log. The module is outside of the
// workspace, because the engine must not depend on etcd's tests.
package robustness
