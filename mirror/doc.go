// Package mirror keeps a consistent, revision-aware copy of a key range of etcd in memory. It
// serves reads of the latest revision and of recent past revisions, and the events between two
// revisions.
//
// Data moves one way:
//
//	Source ──batches──▶ Mirror (one writer) ──▶ Resource: versions + log ──▶ Snapshot, Cursor
//
// A [driver.Source] lists the range once and then delivers every change in revision order, on one feed for
// the whole range. One goroutine, the writer, applies each batch to the copy-on-write B-tree (package
// btree) and the event log of its [Resource], and then advances the published revision. The writer never
// decodes a value. Readers cache derived values on the [Entry], under a [memo.Key].
//
// Readers take no lock. A [Snapshot] is one revision of a resource, immutable and complete. A
// [Cursor] is a position in the resource's log. To list and watch, take a Snapshot at R and its
// Cursor (Snapshot.Cursor): both are of one lineage, so no event is missed or repeated. A lineage
// is the history of a resource since its last list; a relist ends it, and its cursors get
// ErrCompacted, except where a compaction of etcd was the reason and the cursor is not behind (D5).
//
// # Invariants
//
// Code that relies on an invariant cites its number, I1 to I9; D1 to D12 are the decisions in
// section 4. The list is in docs/architecture.md, section 3, with the responsibility of this
// package for each.
package mirror
