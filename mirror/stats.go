package mirror

import (
	"math"
	"reflect"
	"sync/atomic"
	"time"
)

// Publication is a bucket of a histogram of the delay from the arrival of a batch until its events
// are readable: of the batches with a delay of at most AtMost and above that of the bucket before.
// The last bucket has no bound, and the highest value.
type Publication struct {
	AtMost time.Duration
	N      int64         // batches
	Time   time.Duration // their delays together
}

// Stats are a mirror's counters at one call.
type Stats struct {
	Ready             bool     // the first list is in place
	PublishedRevision Revision // the published revision
	// the newest revision reported by etcd, at least the published revision; see ReadRevision
	EtcdRevision Revision
	Compacted    Revision // versions below were dropped because etcd was compacted
	HistoryFloor Revision // every history reaches back to here
	HistoryBytes int64    // stored bytes that only history keeps alive
	Versions     int      // retained past versions, of all resources
	VersionBytes int64    // bytes of their trees that the latest version does not share
	// the bound of HistoryBytes and VersionBytes together, Window.MaxBytes
	HistoryLimit   int64
	UnclaimedBytes int64 // values stored for resources without a claim
	UnclaimedLimit int64 // their bound, Options.UnclaimedBytes
	Events         int64 // events applied
	Dropped        int64 // events of excluded resources
	ListedKeys     int64 // keys listed, all lists together
	// times the whole prefix had to be relisted, or could not be listed
	Relists    int64
	Reconnects int64 // times the feed was resumed
	// reconnects because the feed delivered nothing while etcd's revision advanced
	SilentFeeds int64
	Divergences int64 // relists because the feed contradicted the cached state
	// times keys were read again because a check found them to differ from etcd
	Repairs             int64
	RevisionReads       int64 // linearizable reads of etcd's revision
	RevisionReadWaiters int64 // calls of ReadRevision that shared those reads
	ProgressRequests    int64 // progress requests sent
	EtcdRestores        int64 // times etcd was another cluster, or an older state of the same
	CompressedValues    int64 // times a value was compressed
	// History read from etcd after the whole prefix or a resource was listed.
	Restoring      int64         // restores in progress or waiting
	Replays        int64         // times
	ReplayedEvents int64         // events, all times together
	ReplayFloor    Revision      // the revision after which the last one began
	ReplayTime     time.Duration // the duration of the last one, after its list
}

// Stats returns the counters. Cost is O(resources); the counters are not read at one instant.
func (m *Mirror) Stats() Stats {
	s := Stats{
		PublishedRevision: m.PublishedRevision(),
		HistoryLimit:      m.opts.Window.MaxBytes,
		UnclaimedLimit:    m.opts.UnclaimedBytes,
	}
	s.Versions, s.HistoryFloor = m.registry.histories()
	s.RevisionReads, s.RevisionReadWaiters = m.reads.Counts()
	m.stats.copyTo(&s)
	s.EtcdRevision = max(s.EtcdRevision, s.PublishedRevision)
	return s
}

// copyTo sets the fields of s that have a counter.
func (c *counters) copyTo(s *Stats) {
	counts, stats := reflect.ValueOf(c).Elem(), reflect.ValueOf(s).Elem()
	for i := range counts.NumField() {
		field := stats.FieldByName(counts.Type().Field(i).Name)
		if !field.IsValid() {
			continue // not part of Stats
		}
		switch n := counts.Field(i).Addr().Interface().(type) {
		case *atomic.Int64:
			field.SetInt(n.Load())
		case *atomic.Bool:
			field.SetBool(n.Load())
		}
	}
}

// ResourceStats are the counters of one resource at one call.
type ResourceStats struct {
	Ready        bool
	Inconsistent bool  // see Resource.Inconsistent
	Entries      int   // cached keys
	Bytes        int64 // stored size of their values
	Events       int   // events in the log

	Compressed       int   // of Entries, those with a compressed value, counted every few minutes
	CompressionSaves int64 // the bytes of memory that this saves

	Versions int // retained past versions, those made for readers included
	// bytes of their trees that the latest version does not share, measured about once a second
	VersionBytes   int64
	OldestRevision Revision // the oldest revision that At serves
	Readers        int      // registered reads of past versions, see Resource.TrackReader
	OldestRead     Revision // the oldest revision of those, 0 if there is none

	// Counters, which continue when the resource is claimed again.
	Received int64 // events that the feed has delivered
	// events published to cursors; events of a loading resource are part of the load
	Published    int64
	Publications []Publication // of the batches with these events
	Loads        int64         // times the resource became readable, or a list replaced its content
	LoadFailures int64         // failed lists for a load
	// of all Loads: from the claim, or the loss of the content, until the resource was readable
	LoadTime time.Duration
}

// Stats returns the counters of the resource. Cost is a few loads, and O(Readers).
func (r *Resource) Stats() ResourceStats {
	st := ResourceStats{
		Received:     r.counts.received.Load(),
		Published:    r.counts.published.Load(),
		Loads:        r.counts.loads.Load(),
		LoadFailures: r.counts.loadFailures.Load(),
		LoadTime:     time.Duration(r.counts.loadTime.Load()),

		Compressed:       int(r.counts.compressed.Load()),
		CompressionSaves: r.counts.compressionSaves.Load(),
	}
	for i := range r.counts.publications {
		p, bound := &r.counts.publications[i], time.Duration(math.MaxInt64)
		if i < len(publicationBounds) {
			bound = publicationBounds[i]
		}
		st.Publications = append(st.Publications, Publication{bound, p.n.Load(), time.Duration(p.time.Load())})
	}
	st.Readers, st.OldestRead = r.readers.old(r.lineage.readable())
	lin := r.lineage.readable()
	if lin == nil {
		return st
	}
	head := lin.head.Load()
	if head == nil { // the lineage has just ended
		return st
	}
	t := head.tree
	st.Ready, st.Entries, st.Bytes, st.Events = true, t.Len(), t.Bytes(), lin.log.Len()
	st.Inconsistent = lin.inconsistent.Load()
	st.Versions, st.OldestRevision = lin.versions(), lin.oldest()
	st.VersionBytes = r.versionBytes.Load()
	return st
}
