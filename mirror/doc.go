// Package mirror keeps a consistent, revision-aware copy of a key range of etcd in memory. It
// serves reads of the latest revision and of recent past revisions, and the events between two
// revisions.
//
// Data moves one way:
//
//	Source ──batches──▶ Mirror (one writer) ──▶ Resource: versions + log ──▶ Snapshot, Cursor
//
// A [driver.Source] lists the range once and then delivers every change in revision order, on one
// feed for the whole range. One goroutine, the writer, applies each batch to the copy-on-write
// B-tree (package btree) and the event log of its [Resource], and then advances the published
// revision. The writer never decodes a value. Readers cache derived values on the [Entry], under a
// [memo.Key].
//
// Readers take no lock. A [Snapshot] is one revision of a resource, immutable and complete. A
// [Cursor] is a position in the resource's log. To list and watch, take a Snapshot at R and its
// Cursor (Snapshot.Cursor): both are of one lineage, so no event is missed or repeated. A lineage
// is the history of a resource since its last list; a relist ends it, and its cursors get
// ErrCompacted, except where a compaction of etcd was the reason and the cursor is not behind (D5).
//
// # Recipes
//
// The examples of the package run each of them. [New] returns a [Mirror] of a source, such as
// package etcdsource's; [Mirror.Claim] and [Resource.WaitReady] return when a resource can be read.
//
//   - Read now: [Resource.Latest], then [Snapshot.Get], All, Count or Last. For a linearizable
//     read, pass the result of [Mirror.ReadRevision] to [Mirror.Wait] first.
//   - Read at a revision: [Resource.At]. ErrCompacted means that the revision is below
//     [Resource.Oldest], and ErrFutureRevision that [Mirror.Wait] has to come first.
//   - Follow: [Snapshot.Cursor] after a list, or [Resource.CursorAfter] to resume at a revision. In
//     a loop, take [Cursor.Changed], call [Cursor.Next], and wait for the channel if there are no
//     events. ErrCompacted means: list again.
//
// # For caches built on a mirror
//
// A cache of decoded or encoded objects, such as kube/kubestorage, also uses the names below. Other
// users do not need them.
//
//   - Derived values: [Entry.Memos], [Event.Memos], [Snapshot.Memos], [Resource.Memos],
//     [Entry.PeekIn], [Entry.Detached], [Run], [Snapshot.Runs], [Snapshot.DetachedRun],
//     [Snapshot.Sift] with [Sieve], [Snapshot.Measure], [Snapshot.IsLatest].
//   - Watches by a derived value: [WatchIndex], [NewWatchIndex], [Cursor.FollowIndex],
//     [Cursor.Await], [Cursor.Since], [Cursor.SameLineage], [Cursor.Err].
//   - Comparison with etcd: [Resource.Check] with [CheckResult] and [Difference],
//     [Resource.Inconsistent], [Resource.ListFromEtcd].
//   - Load and memory: [Resource.TrackReader], [Resource.NearestRetained].
//
// # Invariants
//
// Code that relies on an invariant cites its number, I1 to I9. The list is in
// docs/architecture.md, section 3. D1 to D15 are the decisions of docs/design.
package mirror
