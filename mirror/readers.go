package mirror

import "sync"

// readerCounts counts the registered reads of a resource's snapshots (Resource.TrackReader).
type readerCounts struct {
	mu        sync.Mutex // leaf
	byVersion map[readVersion]int
}

// readVersion identifies a snapshot: a revision of one lineage.
type readVersion struct {
	lin *lineage
	seq uint64
	rev Revision
}

// track counts a reader of the revision, until release.
func (h *readerCounts) track(key readVersion) (release func()) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.byVersion == nil {
		h.byVersion = map[readVersion]int{}
	}
	h.byVersion[key]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.byVersion[key]--; h.byVersion[key] == 0 {
			delete(h.byVersion, key)
		}
	}
}

// old returns the number of registered snapshots of past versions and their oldest revision, 0 if
// there is none; present is the readable lineage, which may be nil. Cost is O(revisions held).
func (h *readerCounts) old(readable *lineage) (n int, oldest Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, readers := range h.byVersion {
		if k.lin == nil || k.lin == readable && k.seq == readable.log.End() {
			continue
		}
		n += readers
		if oldest == 0 || k.rev < oldest {
			oldest = k.rev
		}
	}
	return n, oldest
}
