// Package watchcheck validates recorded watches: it compares the events sent to a client with the
// history of the store, with one validator for each guarantee of a watch.
//
//	Ordered       revisions never decrease, and those of one key increase
//	Unique        no event is repeated
//	Reliable      no event is missing, invented, or of the wrong kind, up to the revision that the watch has vouched for
//	Atomic        all events of one revision come together: before any later one, and not split over a reconnect
//	Resumable     a watch that begins after a revision delivers exactly the rest, from its first event on
//	Bookmarkable  a bookmark at R comes after every event up to R and before all others, and carries only R
//
// A test records the history of the store itself (History), derives the view of each watch's
// selector (History.View), and passes the recorded events of the client, connection by connection
// (Session). The package does not depend on Kubernetes or etcd: only the selector interprets
// objects.
package watchcheck
