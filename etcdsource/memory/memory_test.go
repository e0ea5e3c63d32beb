package memory

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"

	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

const prefix = "/registry/"

// watch collects the batches of a watch until the test ends; err returns the error of the watch.
func watch(t *testing.T, s *Store, after driver.Header) (got func() []string, err func() error) {
	var all []string
	ended := make(chan error, 1)
	ctx, cancel := context.WithCancel(context.Background())
	t.Cleanup(cancel)
	go func() {
		ended <- s.Watch(ctx, prefix, after, func(b driver.Batch) error {
			line := fmt.Sprintf("through %d:", b.Through)
			for _, c := range b.Changes {
				line += fmt.Sprintf(" %s=%s@%d", c.Key[len(prefix):], c.Value, c.ModRevision)
			}
			all = append(all, line)
			return nil
		})
	}()
	got = func() []string {
		synctest.Wait()
		defer func() { all = nil }()
		return all
	}
	return got, func() error {
		synctest.Wait()
		select {
		case err := <-ended:
			return err
		default:
			return nil
		}
	}
}

func want(t *testing.T, got []string, want ...string) {
	t.Helper()
	if !slices.Equal(got, want) {
		t.Errorf("got  %q\nwant %q", got, want)
	}
}

// The tests below are transcripts of the behaviour that a mirror relies on, on one of two
// histories.

// threeRevisions returns a store with a=1 at revision 2, and a=2 and b=1 at revision 3.
func threeRevisions(t *testing.T) *Store {
	t.Helper()
	s := New()
	if rev := s.Delete(prefix + "none"); rev != 1 {
		t.Errorf("a transaction that does nothing has revision %d", rev)
	}
	s.Put(prefix+"a", "1") // 2
	s.Txn(Op{Key: prefix + "a", Value: "2"}, Op{Key: prefix + "b", Value: "1"}, Op{Key: "/other", Value: "1"})
	return s
}

// compactedAtSeven returns a store that is compacted at its revision 7. The last changes below the
// prefix are a=3 at 6 and a=4 at 7. A watch from the beginning has been stalled since 5; err
// returns its error.
func compactedAtSeven(t *testing.T) (s *Store, err func() error) {
	t.Helper()
	s = threeRevisions(t)
	got, err := watch(t, s, driver.Header{ClusterID: 1, Revision: 1})
	want(t, got(), "through 3: a=1@2 a=2@3 b=1@3")
	s.Put("/other", "2") // 4
	s.Put("/other", "3") // 5
	s.Stall(true)
	s.Put(prefix+"a", "3") // 6
	s.Put(prefix+"a", "4") // 7
	s.Compact(7)
	return s, err
}

func TestWatch_OfOtherKeys_ReportsProgressOnRequestOnly(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		s := threeRevisions(t)
		got, _ := watch(t, s, driver.Header{ClusterID: 1, Revision: 1})
		want(t, got(), "through 3: a=1@2 a=2@3 b=1@3")

		// Changes outside the prefix are reported only if progress is requested.
		s.Put("/other", "2") // 4
		want(t, got())
		_ = s.RequestProgress(ctx)
		want(t, got(), "through 4:")

		// A request is dropped while the watch is behind.
		s.Stall(true)
		s.Put("/other", "3") // 5
		_ = s.RequestProgress(ctx)
		want(t, got())
		s.Stall(false)
		want(t, got())
		_ = s.RequestProgress(ctx)
		want(t, got(), "through 5:")
	})
}

func TestWatch_FromLatest_ReportsNoProgressBeforeNextRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		s, _ := compactedAtSeven(t)
		s.Stall(false)
		got, _ := watch(t, s, driver.Header{ClusterID: 1, Revision: 7})
		_ = s.RequestProgress(ctx)
		want(t, got())
		s.Put("/other", "4") // 8
		want(t, got())
		_ = s.RequestProgress(ctx)
		want(t, got(), "through 8:")
	})
}

func TestStore_CompactedDuringStalledWatch_ServesThatRevision(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx := context.Background()
		s, err := compactedAtSeven(t)
		if err := err(); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("overtaken by compaction: %v", err)
		}
		s.Stall(false)
		if _, err := s.List(ctx, prefix, 6, func([]driver.KV) error { return nil }); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("list below the compacted revision: %v", err)
		}
		var kvs []driver.KV
		header, lerr := s.List(ctx, prefix, 7, func(p []driver.KV) error { kvs = append(kvs, p...); return nil })
		if lerr != nil || header != (driver.Header{ClusterID: 1, Revision: 7}) || len(kvs) != 2 ||
			string(kvs[0].Value) != "4" || kvs[0].Version != 4 || kvs[0].CreateRevision != 2 || kvs[0].ModRevision != 7 {
			t.Errorf("list at the compacted revision: %v %v %v", header, kvs, lerr)
		}
		var changes []string
		for _, c := range s.Changes(prefix, 3) {
			changes = append(changes, fmt.Sprintf("%s=%s@%d", c.Key[len(prefix):], c.Value, c.ModRevision))
		}
		want(t, changes, "a=3@6", "a=4@7")

		got, err := watch(t, s, driver.Header{ClusterID: 1, Revision: 6})
		want(t, got(), "through 7: a=4@7")
		s.Break()
		if err := err(); !errors.Is(err, ErrBroken) {
			t.Errorf("broken: %v", err)
		}
	})
}

func TestWatch_OfRestoredStore_ReturnsErrRestored(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s, err := compactedAtSeven(t)
		s.Stall(false)
		s.Put("/other", "4") // 8
		s.Break()
		if err := err(); !errors.Is(err, mirror.ErrCompacted) && !errors.Is(err, ErrBroken) {
			t.Errorf("watch that was stalled below the compacted revision: %v", err)
		}
		s.Restore(5, map[string]string{prefix + "a": "restored"})
		for _, after := range []driver.Header{{ClusterID: 1, Revision: 5}, {ClusterID: 2, Revision: 6}} {
			_, err := watch(t, s, after)
			if err := err(); !errors.Is(err, mirror.ErrRestored) {
				t.Errorf("watch after %v of a restored etcd: %v", after, err)
			}
		}
		var kvs []driver.KV
		if _, err := s.List(context.Background(), prefix, 5, func(p []driver.KV) error { kvs = append(kvs, p...); return nil }); err != nil || len(kvs) != 1 {
			t.Errorf("list of the restored: %v %v", kvs, err)
		}
	})
}
