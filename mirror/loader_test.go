package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"

	"github.com/stratakube/strata/mirror/driver"
)

// scriptedSource answers lists and history as its fields say.
type scriptedSource struct {
	driver.Source
	now     Revision
	listed  [][]driver.KV
	history []driver.Batch
	before  []driver.KV // the history
}

func (s *scriptedSource) ReadRevision(context.Context) (driver.Header, error) {
	return driver.Header{ClusterID: 1, Revision: s.now}, nil
}

func (s *scriptedSource) List(_ context.Context, _ string, _ Revision, page func([]driver.KV) error) (driver.Header, error) {
	for _, kvs := range s.listed {
		if err := page(kvs); err != nil {
			return driver.Header{}, err
		}
	}
	return driver.Header{ClusterID: 1, Revision: s.now}, nil
}

func (s *scriptedSource) Replay(_ context.Context, _ string, _ driver.Header, _ Revision, deliver func(driver.Batch) error) error {
	for _, b := range s.history {
		if err := deliver(b); err != nil {
			return err
		}
	}
	return nil
}

func (s *scriptedSource) GetAll(_ context.Context, keys []string, _ Revision, found func(driver.KV) error) error {
	for _, kv := range s.before {
		if slices.Contains(keys, string(kv.Key)) {
			if err := found(kv); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s *scriptedSource) loader(excluded ...string) *loader {
	return &loader{
		opts:          &Options{Source: s},
		count:         &counters{},
		mirroredState: func() driver.Header { return driver.Header{} },
		excluded:      func() []string { return excluded },
		oldestTrusted: func() Revision { return 0 },
		wait:          func(context.Context, Revision) error { return nil },
		restoring:     make(chan struct{}, 1),
	}
}

func unlisted(string) (*Entry, bool) { return nil, false }

func kvAt(key string, rev Revision) driver.KV {
	return driver.KV{Key: []byte(key), Value: []byte("v"), CreateRevision: rev, ModRevision: rev, Version: 1}
}

func TestLoader_ListsWithoutExcludedPrefixes(t *testing.T) {
	s := &scriptedSource{now: 9, listed: [][]driver.KV{{kvAt("/a/1", 2), kvAt("/b/1", 3)}, {kvAt("/c/1", 4)}}}
	o := s.loader("/b/")
	l := o.list(t.Context(), "/", nil, 0)
	var keys []string
	for _, e := range l.entries {
		keys = append(keys, e.Key())
	}
	if l.err != nil || !slices.Equal(keys, []string{"/a/1", "/c/1"}) || l.header.Revision != 9 {
		t.Errorf("got %q at %d, %v; want /a/1 and /c/1 at 9", keys, l.header.Revision, l.err)
	}
	if !l.omits("/b/") || l.omits("/a/") {
		t.Errorf("prefixes left out: %q, want /b/ alone", l.omitted)
	}
	if n := o.count.ListedKeys.Load(); n != 3 {
		t.Errorf("%d keys are counted, want 3", n)
	}
}

func TestLoader_ListThatIsNotOneRevision_IsRefused(t *testing.T) {
	for name, pages := range map[string][][]driver.KV{
		"keys out of order":         {{kvAt("/b", 2)}, {kvAt("/a", 2)}},
		"a key after the list":      {{kvAt("/a", 10)}},
		"a key twice, on two pages": {{kvAt("/a", 2)}, {kvAt("/a", 2)}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scriptedSource{now: 9, listed: pages}
			if l := s.loader().list(t.Context(), "/", nil, 0); !errors.Is(l.err, errDiverged) {
				t.Errorf("got %v, want errDiverged", l.err)
			}
		})
	}
}

func TestLoader_HistoryOutOfOrder_IsRefused(t *testing.T) {
	n := 0
	change := func(rev Revision) driver.Change { n++; return driver.Change{KV: kvAt(fmt.Sprint("/a", n), rev)} }
	for name, batches := range map[string][]driver.Batch{
		"a revision twice":               {{Changes: []driver.Change{change(5)}, Through: 5}, {Changes: []driver.Change{change(5)}, Through: 6}},
		"at or before its start":         {{Changes: []driver.Change{change(4)}, Through: 5}},
		"after the revision of its end":  {{Changes: []driver.Change{change(8)}, Through: 8}},
		"after the progress of a batch":  {{Changes: []driver.Change{change(6)}, Through: 5}},
		"descending, within one batch":   {{Changes: []driver.Change{change(6), change(5)}, Through: 7}},
		"before the batch ahead of it":   {{Changes: []driver.Change{change(6)}, Through: 6}, {Changes: []driver.Change{change(5)}, Through: 7}},
		"before progress without events": {{Through: 6}, {Changes: []driver.Change{change(5)}, Through: 7}},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scriptedSource{now: 9, history: batches}
			if _, err := s.loader().replay(t.Context(), "/", driver.Header{ClusterID: 1, Revision: 4}, 7, unlisted); !errors.Is(err, errDiverged) {
				t.Errorf("got %v, want errDiverged", err)
			}
		})
	}
	b := kvAt("/b", 3)
	s := &scriptedSource{now: 9, history: []driver.Batch{{Changes: []driver.Change{change(5), {KV: driver.KV{Key: b.Key, ModRevision: 5}, Deleted: true}}, Through: 5}, {Through: 7}}, before: []driver.KV{b}}
	if p, err := s.loader().replay(t.Context(), "/", driver.Header{ClusterID: 1, Revision: 4}, 7, unlisted); err != nil || len(p.events) != 2 {
		t.Errorf("history in order: %+v, %v; want 2 events", p, err)
	}
}

func TestLoader_HistoryWithGap_NamesKey(t *testing.T) {
	first, second := kvAt("/a", 5), kvAt("/a", 5)
	second.ModRevision, second.Version = 6, 2
	third := second
	third.ModRevision, third.Version = 7, 3
	other := kvAt("/a", 7)
	before := map[string][]driver.KV{"a lost write at the start": {first}}
	gone := driver.Change{KV: driver.KV{Key: first.Key, ModRevision: 7}, Deleted: true}
	for name, changes := range map[string][]driver.Change{
		"a lost write":                     {{KV: first}, {KV: third}},
		"a lost write at the start":        {{KV: third}},
		"a lost deletion":                  {{KV: first}, {KV: other}},
		"a lost creation":                  {{KV: second}},
		"a deletion of a key that is gone": {gone},
	} {
		t.Run(name, func(t *testing.T) {
			s := &scriptedSource{now: 9, history: []driver.Batch{{Changes: changes, Through: 7}}, before: before[name]}
			p, err := s.loader().replay(t.Context(), "/", driver.Header{ClusterID: 1, Revision: 4}, 7, unlisted)
			if err != nil || !errors.Is(p.gaps["/a"], errDiverged) {
				t.Errorf("got %v, %v, want errDiverged for key /a", p.gaps, err)
			}
		})
	}
}
