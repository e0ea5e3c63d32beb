package mirror

import "sync"

// holds counts the registered reads of a resource's snapshots (Resource.Hold).
type holds struct {
	mu   sync.Mutex // leaf
	held map[held]int
}

// held identifies a snapshot: a revision of one lineage.
type held struct {
	lin *lineage
	seq uint64
	rev Revision
}

// hold counts a reader of the revision, until release.
func (h *holds) hold(key held) (release func()) {
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

// past returns the number of registered snapshots of past versions and their oldest revision, 0 if
// there is none; present is the readable lineage, which may be nil. Cost is O(revisions held).
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
