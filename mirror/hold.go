package mirror

import "sync"

// holds are the snapshots of a resource that are being read by those who say so.
type holds struct {
	mu   sync.Mutex // leaf
	held map[held]int
}

// held is a revision of a state of a resource.
type held struct {
	lin *lineage
	seq uint64
	rev Revision
}

// Hold tells that a snapshot is being read, until release, which is to be called once. When it
// is, or has become, one of the past, ResourceStats.Readers and OldestRead tell of it.
// It keeps nothing alive that the snapshot does not: what a version holds is free as soon as the
// last reader has let go of its snapshot. It takes a lock that only other calls for the
// same resource, and Stats, take: for reads that last.
func (r *Resource) Hold(s Snapshot) (release func()) {
	h, key := &r.holds, held{s.lin, s.seq, s.Rev}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == nil {
		h.held = map[held]int{}
	}
	h.held[key]++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.held[key]--; h.held[key] == 0 {
			delete(h.held, key)
		}
	}
}

// past returns how many snapshots of the past are held and the oldest of their revisions, 0
// if there is none; present is the lineage that is read, which may be nil. Cost is
// O(revisions held).
func (h *holds) past(present *lineage) (n int, oldest Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for k, readers := range h.held {
		if k.lin == nil || k.lin == present && k.seq == present.log.End() {
			continue
		}
		n += readers
		if oldest == 0 || k.rev < oldest {
			oldest = k.rev
		}
	}
	return n, oldest
}
