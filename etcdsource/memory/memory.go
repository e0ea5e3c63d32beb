// Package memory is an etcd-like key-value store in memory that implements driver.Source, for
// tests, in place of package etcdsource. It has one revision per transaction, compaction, and
// switches for faults between etcd and a client.
package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"sort"
	"strings"
	"sync"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// Op is one write of a transaction.
type Op struct {
	Key    string
	Value  string
	Delete bool
}

// Store is the key-value store. The zero value is not usable; see New. All methods
// may be called concurrently.
type Store struct {
	mu        sync.Mutex    // guards the fields below
	changed   chan struct{} // closed at every change that running watches must see
	cluster   uint64
	rev       mirror.Revision
	compacted mirror.Revision
	live      map[string]driver.KV
	history   []driver.Change
	progress  int // requests so far

	// Faults, guarded by mu; see the setters.
	stalled         bool
	drop            func(driver.Change) bool
	listErr         error
	readRevisionErr error
	broken          int // generation: watches of an earlier one end
	uncounted       bool
	pageSize        int
	group           int
}

// New returns an empty store at revision 1, like a new etcd.
func New() *Store {
	return &Store{cluster: 1, rev: 1, live: map[string]driver.KV{}, changed: make(chan struct{}), pageSize: 7, group: 3}
}

func (s *Store) changeLocked() {
	close(s.changed)
	s.changed = make(chan struct{})
}

// Txn applies the writes in one revision, which it returns. Deletions of absent
// keys do nothing; a transaction that does nothing has no revision of its own.
func (s *Store) Txn(ops ...Op) mirror.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	rev := s.rev + 1
	did := false
	for _, op := range ops {
		old, held := s.live[op.Key]
		if op.Delete {
			if held {
				delete(s.live, op.Key)
				s.history = append(s.history, driver.Change{KV: driver.KV{Key: []byte(op.Key), ModRevision: rev}, Deleted: true})
				did = true
			}
			continue
		}
		kv := driver.KV{Key: []byte(op.Key), Value: []byte(op.Value), CreateRevision: rev, ModRevision: rev, Version: 1}
		if held {
			kv.CreateRevision, kv.Version = old.CreateRevision, old.Version+1
		}
		if s.uncounted {
			kv.Version = 0
		}
		s.live[op.Key] = kv
		s.history = append(s.history, driver.Change{KV: kv})
		did = true
	}
	if did {
		s.rev = rev
		s.changeLocked()
	}
	return s.rev
}

// Put writes one key.
func (s *Store) Put(key, value string) mirror.Revision { return s.Txn(Op{Key: key, Value: value}) }

// Delete deletes one key.
func (s *Store) Delete(key string) mirror.Revision { return s.Txn(Op{Key: key, Delete: true}) }

// Revision returns the newest revision.
func (s *Store) Revision() mirror.Revision {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.rev
}

// Changes returns the changes of keys that start with prefix after the revision after, in
// order.
func (s *Store) Changes(prefix string, after mirror.Revision) []driver.Change {
	s.mu.Lock()
	defer s.mu.Unlock()
	var out []driver.Change
	for _, c := range s.history[s.afterLocked(after):] {
		if strings.HasPrefix(string(c.Key), prefix) {
			out = append(out, c)
		}
	}
	return out
}

// afterLocked returns the index of the first change after rev.
func (s *Store) afterLocked(rev mirror.Revision) int {
	return sort.Search(len(s.history), func(i int) bool { return s.history[i].ModRevision > rev })
}

// Compact drops history below rev; watches that still need it end.
func (s *Store) Compact(rev mirror.Revision) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.compacted = max(s.compacted, rev)
	s.changeLocked()
}

// Restore replaces the store by another cluster with the given keys, at revision rev, and ends all
// watches.
func (s *Store) Restore(rev mirror.Revision, keys map[string]string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.cluster++
	s.rev, s.compacted, s.history = rev, 0, nil
	s.live = map[string]driver.KV{}
	for k, v := range keys {
		kv := driver.KV{Key: []byte(k), Value: []byte(v), CreateRevision: rev, ModRevision: rev, Version: 1}
		s.live[k] = kv
		s.history = append(s.history, driver.Change{KV: kv})
	}
	s.broken++
	s.changeLocked()
}

// Rewrite replaces the history without a visible sign: the store has the given keys, at a higher
// revision of the same cluster, as if a backup was restored and written to. Running watches end.
func (s *Store) Rewrite(rev mirror.Revision, keys map[string]string) {
	cluster := s.cluster
	s.Restore(rev, keys)
	s.set(func() { s.cluster = cluster })
}

// Stall stops, or resumes, all deliveries of watches.
func (s *Store) Stall(on bool) { s.set(func() { s.stalled = on }) }

// Break ends all running watches with an error that may be retried.
func (s *Store) Break() { s.set(func() { s.broken++ }) }

// DropIf makes watches lose the changes for which f is true; nil loses none.
func (s *Store) DropIf(f func(driver.Change) bool) { s.set(func() { s.drop = f }) }

// CountNoWrites leaves the Version of all keys written from now on 0, as kine does.
func (s *Store) CountNoWrites() { s.set(func() { s.uncounted = true }) }

// FailLists makes List fail; nil ends it.
func (s *Store) FailLists(err error) { s.set(func() { s.listErr = err }) }

// FailReadRevision makes ReadRevision fail; nil ends it.
func (s *Store) FailReadRevision(err error) { s.set(func() { s.readRevisionErr = err }) }

func (s *Store) set(f func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	f()
	s.changeLocked()
}

// List implements driver.Source.
func (s *Store) List(ctx context.Context, prefix string, at mirror.Revision, page func([]driver.KV) error) (driver.Header, error) {
	s.mu.Lock()
	if s.listErr != nil {
		defer s.mu.Unlock()
		return driver.Header{}, s.listErr
	}
	header := driver.Header{ClusterID: s.cluster, Revision: s.rev}
	state := s.live
	if at != 0 {
		if at < s.compacted {
			defer s.mu.Unlock()
			return driver.Header{}, fmt.Errorf("%w: list at %d, compacted %d", mirror.ErrCompacted, at, s.compacted)
		}
		if at > s.rev {
			defer s.mu.Unlock()
			return driver.Header{}, fmt.Errorf("%w: list at %d, latest %d", mirror.ErrRestored, at, s.rev)
		}
		header.Revision = at
		state = map[string]driver.KV{}
		for _, c := range s.history {
			if c.ModRevision > at {
				break
			}
			if c.Deleted {
				delete(state, string(c.Key))
			} else {
				state[string(c.Key)] = c.KV
			}
		}
	}
	var all []driver.KV
	for k, kv := range state {
		if strings.HasPrefix(k, prefix) {
			all = append(all, kv)
		}
	}
	size := s.pageSize
	s.mu.Unlock()
	sort.Slice(all, func(i, j int) bool { return string(all[i].Key) < string(all[j].Key) })
	for p := range slices.Chunk(all, size) {
		if err := page(p); err != nil {
			return driver.Header{}, err
		}
	}
	return header, ctx.Err()
}

// Keys implements driver.Source.
func (s *Store) Keys(ctx context.Context, prefix string, at mirror.Revision, most func(string) int, page func([]driver.KV) error) (driver.Header, error) {
	var all []driver.KV
	header, err := s.List(ctx, prefix, at, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			kv.Value = nil
			all = append(all, kv)
		}
		return nil
	})
	for start := prefix; err == nil && len(all) > 0; {
		n := min(most(start), len(all))
		err = page(all[:n:n])
		start, all = string(all[n-1].Key)+"\x00", all[n:]
	}
	return header, err
}

// GetAll implements driver.Source.
func (s *Store) GetAll(ctx context.Context, keys []string, at mirror.Revision, found func(driver.KV) error) error {
	all := map[string]driver.KV{}
	if _, err := s.List(ctx, "", at, func(kvs []driver.KV) error {
		for _, kv := range kvs {
			all[string(kv.Key)] = kv
		}
		return nil
	}); err != nil {
		return err
	}
	for _, key := range keys {
		if kv, exists := all[key]; exists {
			if err := found(kv); err != nil {
				return err
			}
		}
	}
	return nil
}

// Oldest implements driver.Source.
func (s *Store) Oldest(_ context.Context, prefix string, now driver.Header, bounds driver.ReplayBounds) (mirror.Revision, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := s.sameLocked(now); err != nil {
		return 0, err
	}
	oldest := max(1, s.compacted, now.Revision-bounds.Revisions)
	bytes := int64(0)
	for i := s.afterLocked(now.Revision) - 1; i >= 0; i-- {
		c := &s.history[i]
		if strings.HasPrefix(string(c.Key), prefix) {
			bytes += int64(len(c.Key) + len(c.Value))
		}
		if bytes > bounds.Bytes {
			oldest = max(oldest, c.ModRevision)
			break
		}
	}
	return min(oldest, now.Revision), nil
}

// Replay implements driver.Source.
func (s *Store) Replay(ctx context.Context, prefix string, after driver.Header, through mirror.Revision, deliver func(driver.Batch) error) error {
	for at := after.Revision; at < through; {
		s.mu.Lock()
		err := s.sameLocked(after)
		if err == nil && at+1 < s.compacted {
			err = fmt.Errorf("%w: replay at %d, compacted %d", mirror.ErrCompacted, at+1, s.compacted)
		}
		var due *driver.Batch
		due, at = s.batchLocked(prefix, at, through)
		s.mu.Unlock()
		if err == nil && due != nil {
			err = deliver(*due)
		}
		if err = errors.Join(err, ctx.Err()); err != nil {
			return err
		}
	}
	return nil
}

// sameLocked returns ErrRestored if the store is another cluster than the header's, or an older
// state.
func (s *Store) sameLocked(h driver.Header) error {
	if h.ClusterID != s.cluster || h.Revision > s.rev {
		return fmt.Errorf("%w: cluster ID %x at revision %d, was %x at revision %d", mirror.ErrRestored, s.cluster, s.rev, h.ClusterID, h.Revision)
	}
	return nil
}

// ErrBroken is the error of a watch that Break or Restore has ended.
var ErrBroken = errors.New("connection broken")

// Watch implements driver.Source. A batch contains up to a few revisions. Like etcd it reports no
// revisions without changes in the prefix unless progress is requested.
func (s *Store) Watch(ctx context.Context, prefix string, after driver.Header, deliver func(driver.Batch) error) error {
	s.mu.Lock()
	if err := s.sameLocked(after); err != nil {
		s.mu.Unlock()
		return err
	}
	generation, progress, at := s.broken, s.progress, after.Revision
	for {
		if s.broken != generation {
			s.mu.Unlock()
			return ErrBroken
		}
		if compacted := s.compacted; at+1 < compacted {
			s.mu.Unlock()
			return fmt.Errorf("%w: watch at %d, compacted %d", mirror.ErrCompacted, at+1, compacted)
		}
		var due *driver.Batch
		if !s.stalled {
			for at < s.rev && due == nil {
				due, at = s.batchLocked(prefix, at, s.rev)
			}
			// A request is answered if the watch is synced, and dropped if not, or (etcd 3.6.2) if
			// there were no writes since the start revision of the watch.
			if due == nil && s.progress > progress && at > after.Revision {
				due = &driver.Batch{Through: at}
			}
		}
		progress = s.progress
		changed := s.changed
		s.mu.Unlock()
		if due != nil {
			if err := deliver(*due); err != nil {
				return err
			}
		} else {
			select {
			case <-changed:
			case <-ctx.Done():
				return ctx.Err()
			}
		}
		s.mu.Lock()
	}
}

// batchLocked returns the changes of the next few revisions after at and up to last, nil if there
// are none, and the last revision that it covers.
func (s *Store) batchLocked(prefix string, at, last mirror.Revision) (*driver.Batch, mirror.Revision) {
	through := min(at+mirror.Revision(s.group), last)
	b := &driver.Batch{}
	for i := s.afterLocked(at); i < len(s.history) && s.history[i].ModRevision <= through; i++ {
		c := s.history[i]
		if strings.HasPrefix(string(c.Key), prefix) && (s.drop == nil || !s.drop(c)) {
			b.Changes = append(b.Changes, c)
			b.Through = c.ModRevision
		}
	}
	if len(b.Changes) == 0 {
		return nil, through
	}
	return b, through
}

// RequestProgress implements driver.Source.
func (s *Store) RequestProgress(context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.progress++
	s.changeLocked()
	return nil
}

// ReadRevision implements driver.Source.
func (s *Store) ReadRevision(context.Context) (driver.Header, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return driver.Header{ClusterID: s.cluster, Revision: s.rev}, s.readRevisionErr
}
