package mirror

import (
	"cmp"
	"slices"
)

// check returns an error if an invariant of the resource is broken; now is the published revision.
func (t *table) check(now Revision) error {
	lin := t.lineage.Load()
	if err := t.changed.check(t.prefix, lin); err != nil {
		return err
	}
	if err := t.history.check(now); err != nil {
		return err
	}
	if lin == nil {
		if t.history.bytes != 0 {
			return broken("I7", "recorded %d bytes of history, actual none", t.history.bytes)
		}
		return nil
	}
	if head := lin.head.Load(); head.rev > now {
		return broken("I5", "version %d is newer than the published revision %d", head.rev, now)
	}
	if err := lin.head.Load().tree.Check(); err != nil {
		return broken("I2", "%w", err)
	}
	if err := lin.checkEvents(now); err != nil {
		return err
	}
	if err := t.checkCounts(lin); err != nil {
		return err
	}
	if lin.oldest() < t.w.stats.Compacted.Load() {
		return broken("I7", "oldest version %d, etcd is compacted to %d", lin.oldest(), t.w.stats.Compacted.Load())
	}
	return lin.checkVersions()
}

// check checks that the marks ascend up to the published revision, so that the window drops history
// in order (I7).
func (h *history) check(now Revision) error {
	for i, m := range h.marks {
		if m.rev > now || i > 0 && m.rev < h.marks[i-1].rev {
			return broken("I7", "history mark %d is at revision %d, published revision %d, marks %v", i, m.rev, now, h.marks)
		}
	}
	return nil
}

// checkEvents checks I3: the log is in revision order, above the floor, up to the published
// revision, and reaches back to the oldest version.
func (l *lineage) checkEvents(now Revision) error {
	last := l.log.Floor()
	for seq := l.log.First(); seq < l.log.End(); seq++ {
		e := l.log.At(seq)
		if e == nil {
			return broken("I3", "event %d is missing, the log has events %d to %d", seq, l.log.First(), l.log.End())
		}
		if e.Rev < last || e.Rev == l.log.Floor() || e.Rev > now {
			return broken("I3", "event at revision %d after revision %d, floor %d, published revision %d", e.Rev, last, l.log.Floor(), now)
		}
		last = e.Rev
	}
	if l.oldest() < l.log.Floor() {
		return broken("I3", "oldest version %d is below the floor %d", l.oldest(), l.log.Floor())
	}
	return nil
}

// checkCounts checks that the entries belong to the table, and that its counts of entries and
// history are correct.
func (t *table) checkCounts(lin *lineage) error {
	var bytes, history int64
	missing, head := 0, lin.head.Load()
	for e := range head.tree.All("", "") {
		if t.w.route(e.Key()) != t {
			return broken("I8", "contains key %q of another resource", e.Key())
		}
		if e.mod > head.rev {
			return broken("I5", "version %d contains key %q with mod revision %d", head.rev, e.Key(), e.mod)
		}
		if e.hasValue() {
			bytes += e.Size()
		} else {
			missing++
		}
	}
	for seq := lin.log.First(); seq < lin.log.End(); seq++ {
		e := lin.log.At(seq)
		history += e.historyBytes()
		if e.Prev != nil && !e.Prev.hasValue() {
			missing++
		}
	}
	if bytes != t.bytes || missing != t.missing || history != t.history.bytes {
		return broken("I7", "recorded %d bytes, %d entries without value, %d bytes of history; actual %d, %d, %d", t.bytes, t.missing, t.history.bytes, bytes, missing, history)
	}
	return nil
}

// checkVersions checks that the log connects the head, every version and the oldest version, in
// both directions.
func (l *lineage) checkVersions() error {
	made, checkpoints := *l.cachedVersions.Load(), *l.checkpoints.Load()
	if len(made) > maxCachedVersions {
		return broken("I7", "%d versions are cached for readers", len(made))
	}
	if !slices.IsSortedFunc(checkpoints, func(a, b *version) int { return cmp.Compare(a.seq, b.seq) }) {
		return broken("I3", "checkpoints do not ascend")
	}
	head, seq := l.head.Load(), l.log.After(l.oldest())
	// A reader that adds a version while the oldest revision rises drops the version afterwards
	// (lineage.at).
	made = slices.DeleteFunc(slices.Clone(made), func(v *version) bool { return v.seq < seq })
	t, ok := l.rebuild(head, seq)
	if !ok {
		return broken("I3", "cannot roll back from revision %d to %d", head.rev, l.oldest())
	}
	first := &version{tree: t, seq: seq}
	for _, v := range append(slices.Concat(checkpoints, made), head) {
		if v.seq < seq || v.seq > head.seq {
			return broken("I3", "version %d continues at %d, outside %d to %d", v.rev, v.seq, seq, head.seq)
		}
		if err := v.tree.Check(); err != nil {
			return broken("I2", "version %d: %w", v.rev, err)
		}
		want := slices.Collect(v.tree.All("", ""))
		for _, from := range []*version{first, head} {
			got, ok := l.rebuild(from, v.seq)
			if !ok {
				return broken("I3", "cannot roll from event %d to %d", from.seq, v.seq)
			}
			if !slices.Equal(slices.Collect(got.All("", "")), want) {
				return broken("I2", "rolled from event %d, version %d differs", from.seq, v.rev)
			}
		}
	}
	return nil
}
