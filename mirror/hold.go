package mirror

import "sync"

// holds are the snapshots of a resource's past that are being read.
type holds struct {
	mu   sync.Mutex // leaf; readers of the present do not take it
	held map[Revision]int
	n    int
}

// Hold counts the snapshot among those that are being read, until release, which is to be
// called once: ResourceStats.Readers and OldestRead tell of it. It keeps nothing alive
// that the snapshot does not: what a version holds is free as soon as the last reader has
// let go of its snapshot. A snapshot of the present is not counted, also when the present
// moves on while it is read; that costs two loads and no allocation. One of the past takes
// a lock that only other calls for the past of the same resource, and Stats, take.
func (r *Resource) Hold(s Snapshot) (release func()) {
	if s.lin == nil || s.seq == s.lin.log.End() && s.lin == r.cur.Load() {
		return nothingHeld
	}
	h := &r.holds
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held == nil {
		h.held = map[Revision]int{}
	}
	h.held[s.Rev]++
	h.n++
	return func() {
		h.mu.Lock()
		defer h.mu.Unlock()
		if h.n--; h.held[s.Rev] == 1 {
			delete(h.held, s.Rev)
		} else {
			h.held[s.Rev]--
		}
	}
}

func nothingHeld() {}

// read returns how many snapshots are held and the oldest of their revisions, 0 if there
// is none. Cost is O(revisions held).
func (h *holds) read() (n int, oldest Revision) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for rev := range h.held {
		if oldest == 0 || rev < oldest {
			oldest = rev
		}
	}
	return h.n, oldest
}
