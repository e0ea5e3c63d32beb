// Package mirror keeps a consistent, revision-aware copy of a key range of etcd in memory. It
// serves reads of the latest revision and of recent past revisions, and the events between two
// revisions.
//
// Data moves one way:
//
//	Source ──batches──▶ Mirror (one writer) ──▶ Resource: versions + log ──▶ Snapshot, Cursor
//
// A [Source] lists the range once and then delivers every change in revision order, on one feed for
// the whole range. One goroutine, the writer, applies each batch to the persistent tree and the
// event log of its [Resource], and then advances the published revision. The
// writer never decodes a value. Readers cache derived values on the [Entry], under a [memo.Key].
//
// Readers take no lock. A [Snapshot] is one revision of a resource, immutable and complete. A
// [Cursor] is a position in the resource's log. Starting and following use one path: a watcher is a
// snapshot at R plus a cursor after R.
//
// # Invariants
//
// Code that relies on an invariant cites its number, I1 to I9. The list is in docs/architecture.md,
// section 3, with the responsibility of this package for each.
package mirror
