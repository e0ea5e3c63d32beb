package mirror

import "sync"

// holds counts the readers of a resource that called Hold, by the revision that they read.
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
