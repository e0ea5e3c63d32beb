// Package informer implements client-go's SharedIndexInformer on a resource of a mirror, for API
// servers that need informers of their own objects. kubestorage.Engine.Objects returns the Opener
// of a resource, for New.
//
// An informer of client-go requests a list and a watch, and holds a second copy of every object. An
// informer of this package reads the mirror in the same process:
//
//   - Its store is a view of the newest version. Get, List and ByIndex decode what they return, and
//     share objects with later callers while the block cache has room. So a read is as new as the
//     published revision, never older than an event that a handler has seen.
//   - An index is brought up to date by its readers, which decode objects that have changed since
//     the last read. It has a lock of its own, and keeps keys and values, but no entry or object.
//   - A handler has a snapshot for its initial objects, then a cursor in the log. It has no queue:
//     a slow handler delays no other one, and retains at most the version that it has seen last.
//   - It makes no request, starts when the mirror is loaded, and is no client of the API: it does
//     not appear in audit logs, metrics of requests, or priority levels.
//
// Order, resync, transforms, indexers, registrations and their removal are those of client-go. The
// differences:
//
//   - The store cannot be written. Two reads of one key may return different pointers to equal
//     objects.
//   - While a resource is relisted (D5), the store shows the last version before. Handlers then get
//     the differences, deletions as cache.DeletedFinalStateUnknown.
//   - An object that cannot be decoded is reported to the WatchErrorHandler. Source.Keep decides
//     whether the store shows it as it was last decoded, as client-go's does, or List omits it. A
//     handler waits until it can be decoded or is replaced, because later events must not overtake
//     it.
//   - The WatchErrorHandler is called by readers and handlers, concurrently, and not while the
//     storage waits for etcd. Transforms are called for each decoding.
//   - A resync decodes every object again, unless the source keeps them.
package informer
