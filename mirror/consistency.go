package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"
)

// Check is what a comparison of a resource with etcd has come to.
type Check struct {
	// Snapshot is what was compared, at its revision.
	Snapshot Snapshot
	// Differences are keys that etcd has otherwise, ascending; none if memory is right. At most
	// maxDifferences are told, Count is the number of all.
	Differences []Difference
	Count       int
	// Mended: the keys of Differences were read again, and memory is right now. If it is
	// false though there are differences, the resource is being listed anew.
	Mended bool
}

// Difference is a key that memory and etcd disagree about.
type Difference struct {
	Key string
	// Held and Etcd are the revisions that wrote the key last, 0 if it is not there.
	Held, Etcd Revision
}

const (
	// maxDifferences bounds the keys that are read again one by one. More say that it was
	// no single event that was lost, and the resource is listed anew. A guess.
	maxDifferences = 1000
	// Bounds of a page of keys. etcd reads the values of a page too, although it does not
	// send them, so their sizes count: memory knows them. Where it does not, a page is small.
	checkPageBytes = 8 << 20
	checkPageKeys  = 10_000
	checkPageBlind = 500
	// Bounds of reading them. Beyond, the resource is listed anew, which is as right.
	repairTimeout = 10 * time.Second
	repairBytes   = 64 << 20
)

// Check compares the resource as it is now with what etcd has at the same revision, which is
// that of the clock: keys and mod revisions, never a value (D11, KEP-4988). each, if it is
// not nil, is told of every key of etcd, in order. Cost is O(n) here and at etcd, in
// pages of at most 10,000 keys; readers and the writer are not held up.
//
// If they differ, what memory has told of the past cannot be relied on: the versions and the log
// of the resource are dropped, so that cursors end with ErrCompacted, the keys in question
// are read again, and Suspect reports true until the next check finds no difference. It is
// never a compaction, a restart or a list that makes them differ: those end the check with
// an error. Errors: ErrNotReady, ErrCompacted if etcd was compacted past the revision meanwhile,
// ErrRestored, ErrSuperseded, those of Source.Keys.
func (r *Resource) Check(ctx context.Context, each func(key []byte, mod Revision)) (*Check, error) {
	snap, err := r.Latest()
	if err != nil {
		return nil, err
	}
	c := &comparison{r: r, snap: snap, inner: r.m.registry.below(r.prefix), next: r.prefix, end: prefixEnd(r.prefix), each: each}
	header, err := r.m.opts.Source.Keys(ctx, r.prefix, snap.Rev, c.page, c.compare)
	switch {
	case err != nil:
		return nil, fmt.Errorf("check %s at %d: %w", r.prefix, snap.Rev, err)
	case header.ClusterID != r.m.cluster.Load():
		return nil, fmt.Errorf("check %s at %d: %w: cluster %x", r.prefix, snap.Rev, ErrRestored, header.ClusterID)
	}
	c.rest()
	if r.cur.Load() != snap.lin {
		return nil, fmt.Errorf("check %s at %d: %w", r.prefix, snap.Rev, ErrSuperseded)
	}
	check := &Check{Snapshot: snap, Differences: c.found, Count: c.count}
	if c.count == 0 {
		snap.lin.suspect.Store(false)
		return check, nil
	}
	check.Mended, err = c.repair(check)
	return check, err
}

// ErrSuperseded: the resource was listed anew while it was compared.
var ErrSuperseded = errors.New("the resource was listed anew meanwhile")

// Suspect reports whether the last check has found the resource to differ from etcd: what it
// tells of the past may be as wrong, so whoever can read that elsewhere should.
func (r *Resource) Suspect() bool {
	lin := r.cur.readable()
	return lin != nil && lin.suspect.Load()
}

// comparison walks over a snapshot and what etcd tells, both in key order.
type comparison struct {
	r     *Resource
	snap  Snapshot
	inner []string
	next  string // what memory has from here on was not compared yet
	end   string
	each  func(key []byte, mod Revision)

	found []Difference
	count int
}

// page returns how many keys from start on etcd may be asked for at once.
func (c *comparison) page(start string) int {
	keys, bytes := 0, int64(0)
	for e := range c.snap.All(start, c.end) {
		if bytes += int64(len(e.Key())) + e.Size(); keys > 0 && bytes > checkPageBytes || keys == checkPageKeys {
			return keys
		}
		keys++
	}
	return max(keys, checkPageBlind)
}

// compare takes the next keys that etcd has.
func (c *comparison) compare(page []KV) error {
	if len(page) == 0 {
		return nil
	}
	next := string(page[len(page)-1].Key) + "\x00"
	if len(c.inner) > 0 {
		page = slices.DeleteFunc(page, func(kv KV) bool { return c.foreign(string(kv.Key)) })
	}
	if c.each != nil {
		for i := range page {
			c.each(page[i].Key, page[i].ModRevision)
		}
	}
	lacks := func(kv *KV) { c.differ(Difference{Key: string(kv.Key), Etcd: kv.ModRevision}) }
	for e := range c.snap.All(c.next, next) {
		key := e.Key()
		for ; len(page) > 0 && string(page[0].Key) < key; page = page[1:] {
			lacks(&page[0])
		}
		switch {
		case len(page) > 0 && string(page[0].Key) == key:
			if etcd := page[0].ModRevision; e.mod != etcd {
				c.differ(Difference{Key: key, Held: e.mod, Etcd: etcd})
			}
			page = page[1:]
		case !c.foreign(key):
			c.differ(Difference{Key: key, Held: e.mod})
		}
	}
	for i := range page {
		lacks(&page[i])
	}
	c.next = next
	return nil
}

// rest takes what memory has after the last key that etcd has.
func (c *comparison) rest() {
	for e := range c.snap.All(c.next, c.end) {
		if !c.foreign(e.Key()) {
			c.differ(Difference{Key: e.Key(), Held: e.mod})
		}
	}
}

// foreign reports whether the key is of a resource that lies in this one.
func (c *comparison) foreign(key string) bool {
	return slices.ContainsFunc(c.inner, func(p string) bool { return strings.HasPrefix(key, p) })
}

func (c *comparison) differ(d Difference) {
	if c.count++; c.count <= maxDifferences {
		c.found = append(c.found, d)
	}
}

// mended is a key as etcd has it.
type mended struct {
	key   string
	entry *Entry // nil if it is not there
}

// repair gives the resource the keys that a check has found to be different, as a new lineage
// that begins at the clock, and reports whether it has; else the resource is relisted. It does not
// end with the context of the check: known differences are repaired in any case.
// Errors: ErrSuperseded, ErrClosed.
func (c *comparison) repair(check *Check) (bool, error) {
	m := c.r.m
	ctx, cancel := context.WithTimeout(m.ctx, repairTimeout)
	defer cancel()
	var keys []mended
	var err error
	if check.Count > len(check.Differences) {
		err = fmt.Errorf("%d keys", check.Count)
	}
	bytes := int64(0)
	for _, d := range check.Differences {
		if err != nil {
			break
		}
		var fix mended
		if fix, err = c.fetch(ctx, d, check.Snapshot.Rev); fix.entry != nil {
			bytes += fix.entry.footprint()
		}
		if err == nil && bytes > repairBytes {
			err = fmt.Errorf("more than %d MiB", repairBytes>>20)
		}
		keys = append(keys, fix)
	}
	done := make(chan error, 1)
	m.registry.enqueue(func(w *writer) { done <- w.mend(c.r, check.Snapshot, keys, err) })
	select {
	case err := <-done:
		if errors.Is(err, ErrDiverged) {
			return false, nil
		}
		return err == nil, err
	case <-m.ctx.Done():
		return false, ErrClosed
	}
}

// fetch reads a key as it was at the revision of the check.
func (c *comparison) fetch(ctx context.Context, d Difference, at Revision) (mended, error) {
	if d.Etcd == 0 {
		return mended{key: d.Key}, nil
	}
	kv, ok, err := c.r.m.opts.Source.Get(ctx, d.Key, at)
	if err == nil && (!ok || kv.ModRevision != d.Etcd) {
		err = fmt.Errorf("%w: etcd has %q of %d at %d, told of %d", ErrDiverged, d.Key, kv.ModRevision, at, d.Etcd)
	}
	if err != nil {
		return mended{}, err
	}
	return mended{d.Key, newEntry(&kv, true)}, nil
}

// mend is the writer's half of comparison.repair: a new lineage that begins at the clock, with the
// keys as etcd has them. With an error, or where a key has changed since it was
// compared, it has the resource relisted instead: ErrDiverged. Error: ErrSuperseded.
func (w *writer) mend(r *Resource, snap Snapshot, keys []mended, err error) error {
	t := w.tables[r.prefix]
	if t == nil || t.Resource != r || r.cur.Load() != snap.lin || !t.owned {
		return ErrSuperseded
	}
	head := snap.lin.head.Load()
	edit := head.tree.Edit()
	x := &txn{t: t} // only to retire
	for _, k := range keys {
		if err != nil {
			break
		}
		was, held := snap.Get(k.key)
		now, _ := head.tree.Get(k.key)
		if was != now {
			err = fmt.Errorf("%q has changed since", k.key)
			break
		}
		if held {
			x.events = append(x.events, &Event{Prev: was})
		}
		replace(edit, was, k.entry)
	}
	if err != nil {
		err = fmt.Errorf("%w: a check has found it different from etcd: %w", ErrDiverged, err)
		w.diverged(t, err)
		t.suspect = true // when it is loaded
		return err
	}
	for _, k := range keys {
		if was, held := snap.Get(k.key); held {
			t.count(was, -1)
		}
		if k.entry != nil {
			t.count(k.entry, 1)
		}
	}
	rev := w.clock.Revision()
	lin := newLineage(&version{rev: rev, tree: edit.Tree()}, nil, nil, false)
	lin.suspect.Store(true)
	t.begin(lin, history{})
	// A restored history must not reach back to events that clients have seen differently.
	w.since.Store(max(rev, w.since.Load()))
	w.stats.repairs.Add(1)
	x.old = edit.Replaced()
	x.retire()
	w.doubt(t)
	return nil
}
