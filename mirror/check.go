package mirror

import (
	"cmp"
	"errors"
	"fmt"
	"slices"
)

// check returns an error if an invariant is broken. It runs between two batches,
// on the writer. Cost is O(everything); for tests.
func (m *Mirror) check() error {
	now := m.clock.rev.Load()
	unclaimed, history, versions := int64(0), int64(0), int64(0)
	for prefix, r := range m.byPrefix {
		if err := r.check(now); err != nil {
			return fmt.Errorf("%s: %w", prefix, err)
		}
		if !r.owned {
			unclaimed += r.bytes
		}
		history += r.history.bytes
		versions += r.versionBytes.Load()
	}
	// I7: what is counted as history is what is held, and is bounded.
	if st := m.Stats(); st.HistoryBytes != history || st.VersionBytes != versions || history+versions > m.opts.Window.MaxBytes {
		return fmt.Errorf("counts %d bytes of history and %d of versions, holds %d and %d, limit %d",
			st.HistoryBytes, st.VersionBytes, history, versions, m.opts.Window.MaxBytes)
	}
	if unclaimed > m.opts.UnclaimedBytes {
		return fmt.Errorf("%d bytes held for nobody, limit %d", unclaimed, m.opts.UnclaimedBytes) // I7
	}
	return nil
}

func (r *Resource) check(now Revision) error {
	lin := r.cur.Load()
	if lin == nil {
		if r.history.bytes != 0 {
			return fmt.Errorf("counts %d bytes of history, holds none", r.history.bytes)
		}
		return nil
	}
	head := lin.head.Load()
	if err := head.tree.Check(); err != nil {
		return err
	}
	// What is counted is what is held.
	var bytes int64
	missing := 0
	for e := range head.tree.All("", "") {
		if r.m.route(e.Key()) != r {
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
	// I3: in revision order, above the floor, up to the clock.
	last, history := lin.log.Floor(), int64(0)
	for seq := lin.log.First(); seq < lin.log.End(); seq++ {
		e := lin.log.At(seq)
		if e.Rev < last || e.Rev == lin.log.Floor() || e.Rev > now {
			return fmt.Errorf("event of %d after %d, floor %d, clock %d", e.Rev, last, lin.log.Floor(), now)
		}
		last = e.Rev
		history += e.historyBytes()
		if e.Prev != nil && !e.Prev.hasValue() {
			missing++
		}
	}
	if bytes != r.bytes || missing != r.missing || history != r.history.bytes {
		return fmt.Errorf("counts %d bytes, %d without value, %d of history; holds %d, %d, %d", r.bytes, r.missing, r.history.bytes, bytes, missing, history)
	}
	// The log leads from the head back to every version, and to the oldest; from there it
	// leads to every version again.
	if lin.oldest() < lin.log.Floor() {
		return fmt.Errorf("oldest version %d is below the floor %d", lin.oldest(), lin.log.Floor())
	}
	if lin.oldest() < r.m.stats.compacted.Load() {
		return fmt.Errorf("oldest version %d, etcd is compacted to %d", lin.oldest(), r.m.stats.compacted.Load())
	}
	if n := len(*lin.made.Load()); n > maxMade {
		return fmt.Errorf("%d versions are kept for readers", n)
	}
	if !slices.IsSortedFunc(*lin.checkpoints.Load(), func(a, b *version) int { return cmp.Compare(a.seq, b.seq) }) {
		return errors.New("checkpoints do not ascend")
	}
	seq := lin.log.After(lin.oldest())
	t, ok := lin.roll(head, seq)
	if !ok {
		return fmt.Errorf("cannot roll from %d back to %d", head.rev, lin.oldest())
	}
	first := &version{tree: t, seq: seq}
	for _, v := range append(lin.past(), head) {
		if v.seq < seq || v.seq > head.seq {
			return fmt.Errorf("version %d continues at %d, outside %d to %d", v.rev, v.seq, seq, head.seq)
		}
		if err := v.tree.Check(); err != nil {
			return fmt.Errorf("version %d: %w", v.rev, err)
		}
		want := slices.Collect(v.tree.All("", ""))
		for _, from := range []*version{first, head} {
			got, ok := lin.roll(from, v.seq)
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
