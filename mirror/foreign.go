package mirror

import "github.com/stratakube/strata/internal/btree"

// Foreign returns a run of keys that were read from the source at another revision, in
// ascending order, for readers of runs. An entry that the snapshot holds at the same mod
// revision is the snapshot's own, with all that readers have kept on it; bytes is what the
// others hold. Cost is O(k log n) for k keys.
func (s Snapshot) Foreign(kvs []KV) (run Run, bytes int64) {
	entries := make([]*Entry, len(kvs))
	for i := range kvs {
		kv := &kvs[i]
		e, ok := s.Get(string(kv.Key))
		if !ok || e.mod != kv.ModRevision || !e.hasValue() {
			e = newEntry(kv, true)
			e.keyLen |= isForeign
			bytes += e.footprint()
		}
		entries[i] = e
	}
	return btree.NewRun(entries), bytes
}
