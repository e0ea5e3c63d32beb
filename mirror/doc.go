// Package mirror keeps a consistent, revision-aware copy of a key range of etcd
// in memory and serves reads of it: the present, any revision of the recent past,
// and the events between two revisions.
//
// Data moves one way:
//
//	Source ──batches──▶ Mirror (one writer) ──▶ Resource: versions + log ──▶ Snapshot, Cursor
//
// A [Source] lists the range once and then delivers every change in revision
// order, on one feed for the whole range. One goroutine, the writer, applies
// each batch to the persistent tree and the event log of the [Resource] it
// belongs to, and then moves the clock, the revision that readers may see. It
// never decodes a value: what a reader derives from an [Entry] is kept beside it
// in a [Slot], by the reader.
//
// Readers take no lock. A [Snapshot] is one revision of a resource, immutable
// and complete; a [Cursor] is a position in the resource's log. Starting and
// following are one path: a watcher is a snapshot at R plus a cursor after R.
//
// # Invariants
//
// Code that relies on an invariant cites its number, I1 to I9. docs/architecture.md, section 3,
// has the list, with the part that this package has in each.
package mirror
