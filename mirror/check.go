package mirror

import (
	"fmt"
	"slices"
)

// check returns an error if an invariant is broken. It runs between two batches,
// on the writer. Cost is O(everything); for tests.
func (m *Mirror) check() error {
	now := m.clock.rev.Load()
	unclaimed := int64(0)
	for prefix, r := range m.byPrefix {
		if err := r.check(now); err != nil {
			return fmt.Errorf("%s: %w", prefix, err)
		}
		if !r.owned {
			unclaimed += r.bytes
		}
	}
	if unclaimed > m.opts.UnclaimedBytes {
		return fmt.Errorf("%d bytes held for nobody, limit %d", unclaimed, m.opts.UnclaimedBytes) // I7
	}
	return nil
}

func (r *Resource) check(now Revision) error {
	lin := r.cur.Load()
	if lin == nil {
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
	last := lin.log.Floor()
	for seq := lin.log.First(); seq < lin.log.End(); seq++ {
		e := lin.log.At(seq)
		if e.Rev < last || e.Rev == lin.log.Floor() || e.Rev > now {
			return fmt.Errorf("event of %d after %d, floor %d, clock %d", e.Rev, last, lin.log.Floor(), now)
		}
		last = e.Rev
		if e.Prev != nil && !e.Prev.hasValue() {
			missing++
		}
	}
	if r.prefix != r.m.opts.Prefix { // carving leaves the root's past as it was
		if bytes != r.bytes || missing != r.missing {
			return fmt.Errorf("counts %d bytes, %d without value; holds %d, %d", r.bytes, r.missing, bytes, missing)
		}
		// The log leads from the oldest version, through every checkpoint, to the head.
		cps := *lin.checkpoints.Load()
		if cps[0].rev < lin.log.Floor() {
			return fmt.Errorf("oldest version %d is below the floor %d", cps[0].rev, lin.log.Floor())
		}
		for _, to := range append(slices.Clone(cps[1:]), head) {
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
	}
	return nil
}
