package mirror

import (
	"strings"
	"testing"

	"github.com/stratakube/strata/mirror/driver"
	"github.com/stratakube/strata/mirror/internal/freshness"
)

// newCheckedWriter returns a writer without a source whose only resource has one key and two
// events.
func newCheckedWriter(t *testing.T) (*writer, *table) {
	t.Helper()
	published, publisher := freshness.NewPublished(nil, nil)
	s := &shared{opts: Options{Prefix: "/registry/"}, published: published}
	s.opts.setDefaults()
	root := &Resource{m: s, prefix: s.opts.Prefix}
	s.registry = newRegistry(root)
	w := newWriter(s, publisher, root)
	tb := w.tables[root.prefix]
	tb.own(true)
	tb.setLineage(newLineage(tb.firstVersion(nil, 1), nil, nil, false), history{})
	for version := range int64(2) {
		rev := version + 2
		kv := &driver.KV{Key: []byte("/registry/a/key"), Value: []byte("value"), CreateRevision: 2, ModRevision: rev, Version: version + 1}
		if err := w.update(tb, 0).change(&driver.Change{KV: *kv}); err != nil {
			t.Fatal(err)
		}
		w.commit(rev, false)
	}
	if err := w.check(); err != nil {
		t.Fatal(err)
	}
	return w, tb
}

func TestWriterCheck_BrokenInvariant_IsNamed(t *testing.T) {
	joined := func(tb *table, lin *lineage) *topic {
		return tb.changed.subscribe(tb.prefix, lin, "/registry/a/", "/registry/a0")
	}
	for says, breaks := range map[string]func(w *writer, tb *table, lin *lineage){
		"I1 is broken: published revision decreased from 9": func(w *writer, tb *table, lin *lineage) { w.checked.rev = 9 },
		"I2 is broken: rolled from event": func(w *writer, tb *table, lin *lineage) {
			lin.checkpoints.Store(&[]*version{{rev: 3, seq: lin.log.End()}})
		},
		"I3 is broken: event at revision 2 after revision 3": func(w *writer, tb *table, lin *lineage) {
			lin.log.Append(&Event{Rev: 2, Entry: newEntry(&driver.KV{}, true)})
		},
		"I3 is broken: event at revision 4 after revision 3": func(w *writer, tb *table, lin *lineage) {
			lin.log.Append(&Event{Rev: 4, Entry: newEntry(&driver.KV{}, true)})
		},
		"I3 is broken: event at revision 2 after revision 2, floor 2": func(w *writer, tb *table, lin *lineage) {
			lin.log.Prepend(2, []*Event{{Rev: 2}})
		},
		"I3 is broken: event 1099511627776 is missing":        func(w *writer, tb *table, lin *lineage) { lin.log.Release() },
		"I3 is broken: oldest version 0 is below the floor 1": func(w *writer, tb *table, lin *lineage) { lin.oldestReadable.Store(0) },
		"I3 is broken: checkpoints do not ascend": func(w *writer, tb *table, lin *lineage) {
			lin.checkpoints.Store(&[]*version{{seq: lin.log.End()}, {seq: lin.log.First()}})
		},
		"I3 is broken: version 3 continues at": func(w *writer, tb *table, lin *lineage) {
			lin.checkpoints.Store(&[]*version{{rev: 3, seq: lin.log.End() + 1}})
		},
		"I4 is broken: topic \"/registry/a/\" has the events []": func(w *writer, tb *table, lin *lineage) { joined(tb, lin).from = 1 },
		"I4 is broken: topic \"/registry/a/\" has the name":      func(w *writer, tb *table, lin *lineage) { joined(tb, lin).name = "x" },
		"I4 is broken: topic \"/registry/a/\" has the name \"/registry/a/\"": func(w *writer, tb *table, lin *lineage) {
			joined(tb, lin).owner = &topics{}
		},
		"I4 is broken: topic \"/registry/a/\": posting 0": func(w *writer, tb *table, lin *lineage) {
			joined(tb, lin).postings.Append(lin.log.End(), lin.log.First())
		},
		"I4 is broken: topic \"/other/\" is outside of the resource": func(w *writer, tb *table, lin *lineage) {
			x := joined(tb, lin)
			x.name, x.owner.byName = "/other/", map[string]*topic{"/other/": x}
		},
		"I4 is broken: recorded 0 cursors on topics, actual 1": func(w *writer, tb *table, lin *lineage) {
			joined(tb, lin)
			tb.changed.subscribed.Store(0)
		},
		"I4 is broken: recorded 1 topics to wake, actual 0": func(w *writer, tb *table, lin *lineage) { joined(tb, lin).owner.waiting.Store(1) },
		"I4 is broken: 1 topics were not woken": func(w *writer, tb *table, lin *lineage) {
			x := joined(tb, lin)
			x.owner.due = []*topic{x}
		},
		"I5 is broken: version 9 is newer": func(w *writer, tb *table, lin *lineage) {
			lin.head.Store(&version{rev: 9, tree: lin.head.Load().tree, seq: lin.log.End()})
		},
		"I5 is broken: version 2 contains key": func(w *writer, tb *table, lin *lineage) {
			lin.head.Store(&version{rev: 2, tree: lin.head.Load().tree, seq: lin.log.End()})
		},
		"I7 is broken: topic \"/registry/a/\" has 0 cursors":       func(w *writer, tb *table, lin *lineage) { joined(tb, lin).cursors = 0 },
		"I7 is broken: topic \"/registry/a/\" has -1 cursors":      func(w *writer, tb *table, lin *lineage) { joined(tb, lin).cursors = -1 },
		"I7 is broken: recorded 0 cursors of topics, actual 1":     func(w *writer, tb *table, lin *lineage) { joined(tb, lin).owner.cursors = 0 },
		"I7 is broken: recorded 11 bytes of history and 0":         func(w *writer, tb *table, lin *lineage) { w.stats.HistoryBytes.Store(11) },
		"and 11 of versions, actual":                               func(w *writer, tb *table, lin *lineage) { w.stats.VersionBytes.Store(11) },
		"and 0, limit 1":                                           func(w *writer, tb *table, lin *lineage) { w.opts.Window.MaxBytes = 1 },
		"I7 is broken: recorded 11 unclaimed bytes, actual 0":      func(w *writer, tb *table, lin *lineage) { w.unclaimed = 11 },
		"I7 is broken: history mark 0 is at revision 4":            func(w *writer, tb *table, lin *lineage) { tb.history.marks = []mark{{rev: 4}} },
		"I7 is broken: history mark 1 is at revision 2":            func(w *writer, tb *table, lin *lineage) { tb.history.marks = []mark{{rev: 3}, {rev: 2}} },
		"bytes of history, actual none":                            func(w *writer, tb *table, lin *lineage) { tb.lineage.Store(nil) },
		"I7 is broken: recorded 11 bytes, 0 entries without value": func(w *writer, tb *table, lin *lineage) { tb.bytes = 11 },
		"bytes, 11 entries without value":                          func(w *writer, tb *table, lin *lineage) { tb.missing = 11 },
		"0 entries without value, 11 bytes of history":             func(w *writer, tb *table, lin *lineage) { tb.history.bytes = 11 },
		"I7 is broken: oldest version 1, etcd is compacted to 2":   func(w *writer, tb *table, lin *lineage) { w.stats.Compacted.Store(2) },
		"versions are cached for readers": func(w *writer, tb *table, lin *lineage) {
			versions := make([]*version, maxCachedVersions+1)
			lin.cachedVersions.Store(&versions)
		},
		"unclaimed bytes, actual 11, limit 10": func(w *writer, tb *table, lin *lineage) {
			w.tables["/registry/x/"] = newTable(w, &Resource{m: w.shared, prefix: "/registry/x/"})
			w.tables["/registry/x/"].bytes = 11
			w.unclaimed, w.opts.UnclaimedBytes = 11, 10
		},
		"I8 is broken: contains key": func(w *writer, tb *table, lin *lineage) {
			w.tables["/registry/a/"] = newTable(w, &Resource{m: w.shared, prefix: "/registry/a/"})
		},
	} {
		t.Run(says, func(t *testing.T) {
			w, tb := newCheckedWriter(t)
			breaks(w, tb, tb.lineage.Load())
			if err := w.check(); err == nil || !strings.Contains(err.Error(), says) {
				t.Errorf("found %v, want %q", err, says)
			}
		})
	}
}
