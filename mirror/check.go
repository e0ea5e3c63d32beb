package mirror

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// check returns an error if an invariant is broken. It runs between two batches. Cost is
// O(everything); for tests.
func (w *writer) check() error {
	now := w.clock.Revision()
	unclaimed, history, versions := int64(0), int64(0), int64(0)
	for prefix, t := range w.tables {
		if err := t.check(now); err != nil {
			return fmt.Errorf("%s: %w", prefix, err)
		}
		if !t.owned {
			unclaimed += t.bytes
		}
		history += t.history.bytes
		versions += t.versionBytes.Load()
	}
	// I7: what is counted as history is what is held, and is bounded.
	if h, v := w.stats.historyBytes.Load(), w.stats.versionBytes.Load(); h != history || v != versions || history+versions > w.opts.Window.MaxBytes {
		return fmt.Errorf("counts %d bytes of history and %d of versions, holds %d and %d, limit %d",
			h, v, history, versions, w.opts.Window.MaxBytes)
	}
	if unclaimed != w.unclaimed || unclaimed > w.opts.UnclaimedBytes {
		return fmt.Errorf("counts %d bytes without a claim, holds %d, limit %d", w.unclaimed, unclaimed, w.opts.UnclaimedBytes) // I7
	}
	return nil
}

// check returns an error if an invariant of the resource is broken; now is the clock.
func (t *table) check(now Revision) error {
	lin := t.cur.Load()
	if lin == nil {
		if t.history.bytes != 0 {
			return fmt.Errorf("counts %d bytes of history, holds none", t.history.bytes)
		}
		return nil
	}
	if err := lin.head.Load().tree.Check(); err != nil {
		return err
	}
	if err := t.checkEvents(lin, now); err != nil {
		return err
	}
	if err := t.checkCounts(lin); err != nil {
		return err
	}
	if lin.oldest() < lin.log.Floor() {
		return fmt.Errorf("oldest version %d is below the floor %d", lin.oldest(), lin.log.Floor())
	}
	if lin.oldest() < t.w.stats.compacted.Load() {
		return fmt.Errorf("oldest version %d, etcd is compacted to %d", lin.oldest(), t.w.stats.compacted.Load())
	}
	return lin.checkVersions()
}

// checkEvents checks I3: the log is in revision order, above the floor, up to the clock.
func (t *table) checkEvents(lin *lineage, now Revision) error {
	last := lin.log.Floor()
	for seq := lin.log.First(); seq < lin.log.End(); seq++ {
		e := lin.log.At(seq)
		if e.Rev < last || e.Rev == lin.log.Floor() || e.Rev > now {
			return fmt.Errorf("event of %d after %d, floor %d, clock %d", e.Rev, last, lin.log.Floor(), now)
		}
		last = e.Rev
	}
	return nil
}

// checkCounts checks that the entries belong to the table, and that it counts them and the
// history as they are.
func (t *table) checkCounts(lin *lineage) error {
	var bytes, history int64
	missing, head := 0, lin.head.Load()
	for e := range head.tree.All("", "") {
		if t.w.route(e.Key()) != t {
			return fmt.Errorf("holds %q of another resource", e.Key())
		}
		if e.mod > head.rev {
			return fmt.Errorf("version %d holds %q of %d", head.rev, e.Key(), e.mod)
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
		return fmt.Errorf("counts %d bytes, %d without value, %d of history; holds %d, %d, %d", t.bytes, t.missing, t.history.bytes, bytes, missing, history)
	}
	return nil
}

// checkVersions checks that the log leads from the head back to every version, and to the
// oldest, and from there to every version again.
func (l *lineage) checkVersions() error {
	if n := len(*l.made.Load()); n > maxMade {
		return fmt.Errorf("%d versions are kept for readers", n)
	}
	if !slices.IsSortedFunc(*l.checkpoints.Load(), func(a, b *version) int { return cmp.Compare(a.seq, b.seq) }) {
		return errors.New("checkpoints do not ascend")
	}
	head, seq := l.head.Load(), l.log.After(l.oldest())
	t, ok := l.roll(head, seq)
	if !ok {
		return fmt.Errorf("cannot roll from %d back to %d", head.rev, l.oldest())
	}
	first := &version{tree: t, seq: seq}
	for _, v := range append(l.past(), head) {
		if v.seq < seq || v.seq > head.seq {
			return fmt.Errorf("version %d continues at %d, outside %d to %d", v.rev, v.seq, seq, head.seq)
		}
		if err := v.tree.Check(); err != nil {
			return fmt.Errorf("version %d: %w", v.rev, err)
		}
		want := slices.Collect(v.tree.All("", ""))
		for _, from := range []*version{first, head} {
			got, ok := l.roll(from, v.seq)
			if !ok {
				return fmt.Errorf("cannot roll from event %d to %d", from.seq, v.seq)
			}
			if !slices.Equal(slices.Collect(got.All("", "")), want) {
				return fmt.Errorf("rolled from event %d, version %d differs", from.seq, v.rev)
			}
		}
	}
	return nil
}
