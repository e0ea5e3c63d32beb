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
	for invariant, breaks := range map[string]func(w *writer, tb *table, lin *lineage){
		"I1": func(w *writer, tb *table, lin *lineage) { w.checked.rev = 9 },
		"I2": func(w *writer, tb *table, lin *lineage) {
			lin.checkpoints.Store(&[]*version{{rev: 3, seq: lin.log.End()}})
		},
		"I3": func(w *writer, tb *table, lin *lineage) {
			lin.log.Append(&Event{Rev: 2, Entry: newEntry(&driver.KV{}, true)})
		},
		"I4": func(w *writer, tb *table, lin *lineage) {
			tb.changed.subscribe(tb.prefix, lin, "/registry/a/", "/registry/a0").from = 1
		},
		"I5": func(w *writer, tb *table, lin *lineage) {
			lin.head.Store(&version{rev: 9, tree: lin.head.Load().tree, seq: lin.log.End()})
		},
		"I7": func(w *writer, tb *table, lin *lineage) { w.stats.HistoryBytes.Add(1) },
		"I8": func(w *writer, tb *table, lin *lineage) {
			w.tables["/registry/a/"] = newTable(w, &Resource{m: w.shared, prefix: "/registry/a/"})
		},
	} {
		t.Run(invariant, func(t *testing.T) {
			w, tb := newCheckedWriter(t)
			breaks(w, tb, tb.lineage.Load())
			if err := w.check(); err == nil || !strings.Contains(err.Error(), invariant+" is broken: ") {
				t.Errorf("found %v, want that %s is broken", err, invariant)
			}
		})
	}
}
