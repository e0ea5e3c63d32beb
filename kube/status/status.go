// Package status has the JSON form of the state of a server: its resources with objects, bytes,
// watches and lag, its reads, its memory and its slow watches. The console in the browser reads it;
// /metrics has the same values, and more, for monitoring.
package status

import "time"

// Status is one reading of a server. The values are not read at one instant.
type Status struct {
	Now     time.Time `json:"now"`
	Version string    `json:"version,omitempty"`
	// Clusters are the etcd clusters in memory, in the order of their endpoints. An etcd that has
	// not answered since the start is not ready, and has no revision.
	Clusters []Cluster `json:"clusters"`
	// Resources are in alphabetical order. Resources that are not cached are absent.
	Resources []Resource `json:"resources"`
	// Watches is the number of open watches, those of the server itself included.
	Watches int `json:"watches"`
	// SlowWatches are the watches whose oldest undelivered event arrived more than SlowAfter ago,
	// the slowest first, at most MaxSlowWatches of Slow.
	SlowWatches []Watch `json:"slowWatches"`
	Slow        int     `json:"slow"`
	Reads       Reads   `json:"reads"`
	Memory      Memory  `json:"memory"`
}

const (
	// SlowAfter is the age of an undelivered event that makes a watch a slow one: 99 % are
	// delivered within a tenth of it.
	SlowAfter = time.Second
	// MaxSlowWatches bounds an answer.
	MaxSlowWatches = 50
)

// Cluster is one etcd cluster.
type Cluster struct {
	Endpoints string `json:"endpoints"`
	Prefix    string `json:"prefix"`
	Ready     bool   `json:"ready"`
	Restoring bool   `json:"restoring"` // history is being read from etcd
	// Revision is the published revision, EtcdRevision the newest that etcd has reported.
	Revision     int64 `json:"revision"`
	EtcdRevision int64 `json:"etcdRevision"`
	Floor        int64 `json:"historyFloorRevision"`
	Compacted    int64 `json:"compactedRevision"`
	// HistoryBytes is the memory of history, at most HistoryLimitBytes.
	HistoryBytes      int64 `json:"historyBytes"`
	HistoryLimitBytes int64 `json:"historyLimitBytes"`
	// Counters since the start.
	Events      int64 `json:"events"`
	Relists     int64 `json:"relists"`
	Reconnects  int64 `json:"reconnects"`
	Divergences int64 `json:"divergences"`
	Repairs     int64 `json:"repairs"`
}

// Resource is a resource in memory.
type Resource struct {
	Group    string `json:"group"`
	Resource string `json:"resource"`
	Ready    bool   `json:"ready"`
	// Inconsistent is true from a difference found by a consistency check until a check finds none.
	Inconsistent bool  `json:"inconsistent"`
	Objects      int   `json:"objects"`
	Bytes        int64 `json:"bytes"` // of the objects, as stored
	Watches      int   `json:"watches"`
	// LagEvents is the number of events that the slowest watch has not examined.
	LagEvents int   `json:"lagEvents"`
	LogEvents int   `json:"logEvents"` // events over which a watch can resume
	Oldest    int64 `json:"oldestRevision"`
	// Events and Lists are counters since the start.
	Events int64 `json:"events"`
	Lists  Reads `json:"lists"`
}

// Reads are counters of reads by the source of the answer: the newest state in memory, an older one
// in memory, or etcd.
type Reads struct {
	Memory int64 `json:"memory"`
	Past   int64 `json:"past"`
	Etcd   int64 `json:"etcd"`
}

// Watch is an open watch.
type Watch struct {
	Group     string    `json:"group"`
	Resource  string    `json:"resource"`
	Namespace string    `json:"namespace,omitempty"`
	User      string    `json:"user,omitempty"`
	Since     time.Time `json:"since,omitzero"` // the start of the request
	// Revision is the position of the watch: all older events were examined.
	Revision int64 `json:"revision"`
	// BehindSeconds is the age of the oldest undelivered event, 0 if it is unknown because the
	// event is from before the server's start, and BehindRevisions the distance of the position
	// from the newest revision.
	BehindSeconds   float64 `json:"behindSeconds"`
	BehindRevisions int64   `json:"behindRevisions"`
	// Expired: history no longer has the event, so that the watch will end with 410.
	Expired bool `json:"expired,omitempty"`
}

// Memory is the memory of the process.
type Memory struct {
	// UsedBytes is the memory of the Go runtime, LimitBytes its soft limit, 0 if there is none.
	UsedBytes  int64 `json:"usedBytes"`
	LimitBytes int64 `json:"limitBytes"`
	// HeapBytes are live objects, and objects that the next collection frees.
	HeapBytes int64 `json:"heapBytes"`
	// RepresentationBytes are cached encodings, at most RepresentationLimitBytes.
	RepresentationBytes      int64 `json:"representationBytes"`
	RepresentationLimitBytes int64 `json:"representationLimitBytes"`
}
