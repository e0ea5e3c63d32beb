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
// Code that relies on one of these cites its number.
//
//	I1  the published revision (the clock) never decreases, but for a restored
//	    etcd, which starts everything anew
//	I2  a published version is never written again
//	I3  every event with floor < revision <= clock is in its log exactly once,
//	    in revision order
//	I4  a cursor's position reaches R only when every event <= R that it selects
//	    was returned
//	I5  all keys that changed in one etcd transaction become visible together
//	I6  a read answered at R saw every write acknowledged before the read began
//	    (Current, then Wait), or R is at least what it asked for (Wait), or
//	    exactly that (At)
//	I7  memory held by history is bounded by Options.Window, whatever readers do
//	I8  nothing acknowledged by etcd is absent at or after its revision
//	I9  the writer calls nothing that decodes, waits for a reader, or blocks on
//	    anything but its source
package mirror
