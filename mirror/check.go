package mirror

import (
	"fmt"
	"slices"
)

// check returns an error if an invariant is broken. It runs between two batches,
// on the writer. Cost is O(everything); for tests.
func (m *Mirror) check() error {
	now := m.clock.rev.Load()
	unclaimed, history := int64(0), int64(0)
	for prefix, r := range m.byPrefix {
		if err := r.check(now); err != nil {
			return fmt.Errorf("%s: %w", prefix, err)
		}
		if !r.owned {
			unclaimed += r.bytes
		}
		history += r.history.bytes
	}
	// I7: what is counted as history is what the logs hold, and is bounded.
	if counted := m.stats.historyBytes.Load(); counted != history || history > m.opts.Window.MaxBytes {
		return fmt.Errorf("counts %d bytes of history, holds %d, limit %d", counted, history, m.opts.Window.MaxBytes)
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
	// The log leads from the oldest version, through every checkpoint, to the head.
	cps := *lin.checkpoints.Load()
	if cps[0].rev < lin.log.Floor() {
		return fmt.Errorf("oldest version %d is below the floor %d", cps[0].rev, lin.log.Floor())
	}
	for _, to := range append(slices.Clone(cps[1:]), head) {
		if to.rev < cps[0].rev {
			continue // the oldest was made of the head
		}
		v, ok := lin.roll(cps[0], to.rev)
		if !ok {
			return fmt.Errorf("cannot roll %d to %d", cps[0].rev, to.rev)
		}
		if got, want := slices.Collect(v.tree.All("", "")), slices.Collect(to.tree.All("", "")); !slices.Equal(got, want) {
			return fmt.Errorf("rolled from %d, version %d differs", cps[0].rev, to.rev)
		}
		if to.seq != v.seq {
			return fmt.Errorf("version %d continues at %d, want %d", to.rev, to.seq, v.seq)
		}
	}
	return nil
}
