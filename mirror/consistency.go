package mirror

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/stratakube/strata/mirror/driver"
)

// CheckResult is the result of comparing a resource with etcd.
type CheckResult struct {
	// Snapshot is the compared snapshot, at its revision.
	Snapshot Snapshot
	// Differences are the keys whose mod revision differs between the snapshot and etcd, ascending;
	// empty if the cache is correct. It has at most 1,000 elements; Count is the number of
	// all differences.
	Differences []Difference
	Count       int
	// Repaired: the keys of Differences were read again, and the cache is now correct. If it is
	// false although there are differences, the resource is being relisted.
	Repaired bool
}

// Difference is a key that differs between the cache and etcd.
type Difference struct {
	Key string
	// Cached and Etcd are the mod revisions in the cache and in etcd, 0 if the key does not exist
	// there.
	Cached, Etcd Revision
}

const (
	// maxDifferences bounds the keys that are repaired one by one. A larger number has another
	// cause than a single lost event, and the resource is relisted. A guess.
	maxDifferences = 1000
	// Bounds of a page of keys. etcd reads the values of a page too, although it does not send
	// them, so their sizes count. They are taken from the cached entries; a page of keys without
	// them is small.
	checkPageBytes = 8 << 20
	checkPageKeys  = 10_000
	checkPageBlind = 500
	// Bounds of a repair. Beyond them, the resource is relisted instead.
	repairTimeout = 10 * time.Second
	repairBytes   = 64 << 20
)

// Check compares the latest snapshot of the resource with etcd's state at the same revision: keys
// and mod revisions, without values (D11, KEP-4988). If each is not nil, Check calls it for every
// key of etcd, in order. Cost is O(n) here and at etcd, in pages of at most 10,000 keys; readers
// and the writer are not blocked.
//
// If there are differences, earlier versions and events may be wrong as well. Check then drops the
// versions and the log of the resource, so that cursors end with ErrCompacted, and reads the
// differing keys again. Inconsistent reports true until a later check finds no difference. A
// compaction, a restart or a relist never counts as a difference: each ends the check with an
// error. Errors: ErrNotReady, ErrCompacted if etcd was compacted past the revision meanwhile,
// ErrRestored, ErrSuperseded, those of Source.Keys.
func (r *Resource) Check(ctx context.Context, each func(key []byte, mod Revision)) (*CheckResult, error) {
	snap, err := r.Latest()
	if err != nil {
		return nil, err
	}
	c := &comparison{r: r, snap: snap, inner: r.m.registry.below(r.prefix), next: r.prefix, end: prefixEnd(r.prefix), each: each}
	header, err := r.m.opts.Source.Keys(ctx, r.prefix, snap.Rev, c.page, c.compare)
	switch {
	case err != nil:
		return nil, fmt.Errorf("check %s at revision %d: %w", r.prefix, snap.Rev, err)
	case header.ClusterID != r.m.cluster.Load():
		return nil, fmt.Errorf("check %s at revision %d: %w: cluster ID %x", r.prefix, snap.Rev, ErrRestored, header.ClusterID)
	}
	c.rest()
	if r.lineage.Load() != snap.lin {
		return nil, fmt.Errorf("check %s at revision %d: %w", r.prefix, snap.Rev, ErrSuperseded)
	}
	check := &CheckResult{Snapshot: snap, Differences: c.found, Count: c.count}
	if c.count == 0 {
		snap.lin.inconsistent.Store(false)
		return check, nil
	}
	check.Repaired, err = c.repair(check)
	return check, err
}

// Inconsistent reports whether the last check found the resource to differ from etcd. Its past
// revisions may be wrong too, so callers should read them from etcd if they can.
func (r *Resource) Inconsistent() bool {
	lin := r.lineage.readable()
	return lin != nil && lin.inconsistent.Load()
}

// comparison iterates over a snapshot and etcd's keys, both in key order.
type comparison struct {
	r     *Resource
	snap  Snapshot
	inner []string
	next  string // cached keys from here on were not compared yet
	end   string
	each  func(key []byte, mod Revision)

	found []Difference
	count int
}

// page returns the maximum number of keys for a request to etcd that begins at start.
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

// compare compares the next page of etcd's keys with the snapshot.
func (c *comparison) compare(page []driver.KV) error {
	if len(page) == 0 {
		return nil
	}
	next := string(page[len(page)-1].Key) + "\x00"
	if len(c.inner) > 0 {
		page = slices.DeleteFunc(page, func(kv driver.KV) bool { return c.isNested(string(kv.Key)) })
	}
	if c.each != nil {
		for i := range page {
			c.each(page[i].Key, page[i].ModRevision)
		}
	}
	lacks := func(kv *driver.KV) { c.differ(Difference{Key: string(kv.Key), Etcd: kv.ModRevision}) }
	for e := range c.snap.All(c.next, next) {
		key := e.Key()
		for ; len(page) > 0 && string(page[0].Key) < key; page = page[1:] {
			lacks(&page[0])
		}
		switch {
		case len(page) > 0 && string(page[0].Key) == key:
			if etcd := page[0].ModRevision; e.mod != etcd {
				c.differ(Difference{Key: key, Cached: e.mod, Etcd: etcd})
			}
			page = page[1:]
		case !c.isNested(key):
			c.differ(Difference{Key: key, Cached: e.mod})
		}
	}
	for i := range page {
		lacks(&page[i])
	}
	c.next = next
	return nil
}

// rest compares the cached keys after etcd's last key.
func (c *comparison) rest() {
	for e := range c.snap.All(c.next, c.end) {
		if !c.isNested(e.Key()) {
			c.differ(Difference{Key: e.Key(), Cached: e.mod})
		}
	}
}

// isNested reports whether the key belongs to another resource inside this one.
func (c *comparison) isNested(key string) bool {
	return slices.ContainsFunc(c.inner, func(p string) bool { return strings.HasPrefix(key, p) })
}

func (c *comparison) differ(d Difference) {
	if c.count++; c.count <= maxDifferences {
		c.found = append(c.found, d)
	}
}

// repairedKey is a key as read from etcd.
type repairedKey struct {
	key   string
	entry *Entry // nil if the key does not exist
}

// repair replaces the differing keys of the resource in a new lineage that begins at the published
// revision, and reports whether it did; otherwise the resource is relisted. The context of the
// check does not cancel it: known differences are always repaired. Errors: ErrSuperseded,
// ErrClosed.
func (c *comparison) repair(check *CheckResult) (bool, error) {
	m := c.r.m
	ctx, cancel := context.WithTimeout(m.ctx, repairTimeout)
	defer cancel()
	var keys []repairedKey
	var err error
	if check.Count > len(check.Differences) {
		err = fmt.Errorf("%d keys differ", check.Count)
	}
	bytes := int64(0)
	for _, d := range check.Differences {
		if err != nil {
			break
		}
		var fix repairedKey
		if fix, err = c.fetch(ctx, d, check.Snapshot.Rev); fix.entry != nil {
			bytes += fix.entry.footprint()
		}
		if err == nil && bytes > repairBytes {
			err = fmt.Errorf("differing objects exceed %d MiB", repairBytes>>20)
		}
		keys = append(keys, fix)
	}
	done := make(chan error, 1)
	m.registry.enqueue(func(w *writer) { done <- w.repair(c.r, check.Snapshot, keys, err) })
	select {
	case err := <-done:
		if errors.Is(err, errDiverged) {
			return false, nil
		}
		return err == nil, err
	case <-m.ctx.Done():
		return false, ErrClosed
	}
}

// fetch reads a key at the revision of the check.
func (c *comparison) fetch(ctx context.Context, d Difference, at Revision) (repairedKey, error) {
	if d.Etcd == 0 {
		return repairedKey{key: d.Key}, nil
	}
	var kv driver.KV
	err := c.r.m.opts.Source.GetAll(ctx, []string{d.Key}, at, func(found driver.KV) error {
		kv = found
		return nil
	})
	if err == nil && kv.ModRevision != d.Etcd {
		err = fmt.Errorf("%w: key %q has mod revision %d at revision %d, was listed with mod revision %d", errDiverged, d.Key, kv.ModRevision, at, d.Etcd)
	}
	if err != nil {
		return repairedKey{}, err
	}
	return repairedKey{d.Key, newEntry(&kv, true)}, nil
}

// repair is the writer's part of comparison.repair: it begins a lineage at the published revision
// with the keys as read from etcd. If err is set, or a key may have changed since it was compared,
// it relists the resource and returns errDiverged. Cost is O(events since the snapshot). Error:
// ErrSuperseded.
func (w *writer) repair(r *Resource, snap Snapshot, keys []repairedKey, err error) error {
	t := w.tables[r.prefix]
	if t == nil || t.Resource != r || r.lineage.Load() != snap.lin || !t.owned {
		return ErrSuperseded
	}
	if err == nil {
		err = snap.unchanged(keys)
	}
	if err != nil {
		err = fmt.Errorf("%w: consistency check found differences that cannot be repaired in place: %w", errDiverged, err)
		w.onDivergence(t, err)
		t.inconsistent = true // when it is loaded
		return err
	}
	edit := snap.lin.head.Load().tree.Edit()
	x := &tableUpdate{t: t} // only to supersede
	for _, k := range keys {
		was, exists := snap.Get(k.key)
		if exists {
			x.events = append(x.events, &Event{Prev: was})
			t.count(was, -1)
		}
		if k.entry != nil {
			t.count(k.entry, 1)
		}
		replace(edit, was, k.entry)
	}
	rev := w.published.Revision()
	lin := newLineage(&version{rev: rev, tree: edit.Tree()}, nil, nil, false)
	lin.inconsistent.Store(true)
	t.setLineage(lin, history{})
	// A restored history must not reach back to events that clients have received differently.
	w.trustedSince.Store(max(rev, w.trustedSince.Load()))
	w.stats.Repairs.Add(1)
	x.old = edit.Replaced()
	x.supersede()
	w.noteDivergence(t)
	return nil
}

// unchanged returns an error if an event since the snapshot concerns one of the keys, which are
// ascending, or if the log has dropped such an event. The entries of two versions do not show it: a
// key that is in neither may have been created and deleted.
func (s Snapshot) unchanged(keys []repairedKey) error {
	for seq := s.seq; seq < s.lin.log.End(); seq++ {
		e := s.lin.log.At(seq)
		if e == nil {
			return errors.New("the log does not reach back to the check")
		}
		compare := func(k repairedKey, key string) int { return strings.Compare(k.key, key) }
		if _, found := slices.BinarySearchFunc(keys, e.Key(), compare); found {
			return fmt.Errorf("key %q has changed since the check", e.Key())
		}
	}
	return nil
}
