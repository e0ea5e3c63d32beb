// Package etcdmoves has the keys by which a move of a resource between two etcd clusters and API servers communicate: the mark of a
// resource that is moved, or was, to another etcd. A server of the engine refuses writes of such a resource. kube-apiserver does not
// know the mark.
package etcdmoves

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// State is the state of a mark.
type State string

const (
	// Incoming: a copy to this etcd has begun and has not ended. The keys in this etcd are incomplete.
	Incoming State = "incoming"
	// Moving: the last changes are being copied to another etcd.
	Moving State = "moving"
	// Moved: the resource is in another etcd; the keys in this one are an old copy.
	Moved State = "moved"
)

// Mark is the value of a mark, as JSON.
type Mark struct {
	State    State     `json:"state"`
	Resource string    `json:"resource"` // such as leases.coordination.k8s.io
	Servers  []string  `json:"servers"`  // of the other etcd
	Time     time.Time `json:"time"`
	By       string    `json:"by"` // the process that wrote the mark
	// Revision is the revision of the marked etcd at which the copy was complete. The keys of the resource have no later change.
	Revision int64 `json:"revision,omitempty"`
	// OtherRevision is the revision of the other etcd then. A key with a later change was written by a server that uses the other etcd.
	OtherRevision int64 `json:"otherRevision,omitempty"`
}

// Prefix returns the prefix of all marks in an etcd, for the prefix of all keys of its API servers, with a slash at its end.
func Prefix(prefix string) string { return prefix + "strata/moves/" }

// Lock returns the key of the lock that a move holds in both etcds.
func Lock(prefix string) string { return prefix + "strata/move-lock" }

// Key returns the key of the mark of the resource whose keys begin with prefix, a path and a slash.
func Key(prefix, resourcePath string) string { return Prefix(prefix) + strings.Trim(resourcePath, "/") }

// Parse returns the mark in a value.
func Parse(value []byte) (m Mark, err error) {
	if err := json.Unmarshal(value, &m); err != nil {
		return m, fmt.Errorf("mark of a moved resource: %w", err)
	}
	return m, nil
}

// Refuses reports whether servers have to refuse writes of the marked resource. Every state refuses them: a write to an incoming copy
// would be overwritten by the copy.
func (m Mark) Refuses() bool { return m.State == Incoming || m.State == Moving || m.State == Moved }
