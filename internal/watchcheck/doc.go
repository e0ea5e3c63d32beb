// Package watchcheck judges recorded watches: what a client was sent is compared with the history of the store, one
// validator for each guarantee that a watch gives.
//
//	Ordered       revisions never decrease, and those of one key increase
//	Unique        no event comes twice
//	Reliable      no event is missing, invented, or of the wrong kind, as far as the watch has vouched
//	Atomic        all events of one revision come together: before any later one, and not split over a reconnect
//	Resumable     a watch that begins after a revision delivers exactly the rest, from its first event on
//	Bookmarkable  a bookmark at R comes after every event up to R and before all others, and carries nothing but R
//
// A test records the history of the store itself (History), takes the view of each watch's selector (History.View), and
// hands over what the client got, connection by connection (Session). The package knows no Kubernetes and no etcd: what an
// object is, is the business of the selector.
package watchcheck
