package mirror

import (
	"time"

	"github.com/stratakube/strata/btree"
)

// measurement contains the versions of a resource, newest first.
type measurement struct {
	t        *table
	versions []*version
	trees    []tree
	bytes    []int64
}

// weigh measures the memory of past versions that the latest version does not share, for every
// resource whose versions have changed. It walks the trees, on another goroutine, every second or
// less often, so that it takes at most a hundredth of a core. Versions made since are not counted
// yet; this is the precision of the window's bound.
func (w *writer) weigh(now time.Time) {
	if w.measuring || now.Before(w.weighAgain) {
		return
	}
	var all []*measurement
	for _, t := range w.tables {
		if g := t.versionsToMeasure(); g != nil {
			all = append(all, g)
		}
	}
	if len(all) == 0 {
		return
	}
	w.measuring = true
	s := w.shared
	s.wg.Go(func() {
		began := time.Now()
		for _, g := range all {
			g.bytes = btree.Weigh(g.trees)
		}
		took := time.Since(began)
		s.registry.enqueue(func(w *writer) { w.applyMeasurement(all, took) })
	})
}

// versionsToMeasure returns the versions of the table to be weighed, nil if they have not changed
// since the last time or the latest version is the only one.
func (t *table) versionsToMeasure() *measurement {
	lin := t.lineage.Load()
	if lin == nil {
		return nil
	}
	is := measuredVersions{lin.head.Load(), lin.checkpoints.Load(), lin.cachedVersions.Load()}
	if is == t.lastMeasured {
		return nil
	}
	t.lastMeasured = is
	g := &measurement{t: t}
	for _, v := range append([]*version{is.head}, lin.pastVersions()...) {
		g.versions = append(g.versions, v)
		g.trees = append(g.trees, v.tree)
	}
	if len(g.versions) == 1 {
		t.countVersionBytes(lin)
		return nil
	}
	return g
}

// applyMeasurement applies the result of weigh.
func (w *writer) applyMeasurement(all []*measurement, took time.Duration) {
	w.measuring, w.weighAgain = false, time.Now().Add(99*took)
	for _, g := range all {
		for i, v := range g.versions[1:] {
			v.bytes = g.bytes[i+1]
		}
		g.t.countVersionBytes(g.t.lineage.Load())
	}
	w.bound()
}
