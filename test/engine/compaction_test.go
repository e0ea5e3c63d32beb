package enginetest

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"testing"
	"time"

	"go.etcd.io/etcd/api/v3/v3rpc/rpctypes"
	clientv3 "go.etcd.io/etcd/client/v3"
	"k8s.io/apiserver/pkg/storage/etcd3"
	"k8s.io/utils/clock"

	"github.com/stratakube/strata/etcdsource"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/mirror"
)

// replica is a mirror and the compactor that compacts it.
type replica struct {
	*etcdsource.Compactor
	mirror   *mirror.Mirror
	resource *mirror.Resource
}

// replicate starts a replica; its resource is that of all keys of prefix/things/.
func replicate(t *testing.T, client *clientv3.Client, prefix string, interval, check time.Duration) *replica {
	t.Helper()
	r := &replica{}
	var err error
	r.mirror, err = mirror.New(mirror.Options{Prefix: prefix, Source: etcdsource.New(client, t.Name(), prefix+"probe"), Logger: quiet()})
	testcheck.NoError(t, err)
	t.Cleanup(r.mirror.Close)
	if r.resource, err = r.mirror.Claim(prefix + "things/"); err != nil {
		t.Fatal(err)
	}
	testcheck.NoError(t, r.resource.WaitReady(contextFor(t)))
	r.Compactor = etcdsource.NewCompactor(client, etcdsource.CompactorOptions{
		Interval:      interval,
		OnCompaction:  r.mirror.Compact,
		Oldest:        r.oldest,
		CheckInterval: check,
		Logger:        quiet(),
	})
	t.Cleanup(r.Stop)
	return r
}

// oldest returns the oldest revision that the replica can read, 0 if it can read none.
func (r *replica) oldest() mirror.Revision {
	oldest, _, err := r.resource.Oldest()
	if err != nil {
		return 0 // the resource is being relisted
	}
	return oldest
}

// until polls the condition until it is true, and fails the test if that takes too long.
func until(t *testing.T, what string, ok func() bool) {
	t.Helper()
	ctx := contextFor(t)
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for !ok() {
		select {
		case <-tick.C:
		case <-ctx.Done():
			t.Fatalf("not within %s: %s", patience, what)
		}
	}
}

// newRunning returns a separate etcd for the test, because a compaction affects all keys, and a
// client of it.
func newRunning(t *testing.T) (*etcd, *clientv3.Client) {
	t.Helper()
	e := newEtcd(t)
	e.run(t)
	return e, connect(t, e.socket())
}

// compactedTo reports whether rev is the oldest revision that etcd retains.
func compactedTo(t *testing.T, client *clientv3.Client, rev mirror.Revision) bool {
	t.Helper()
	_, below := client.Get(contextFor(t), "k", clientv3.WithRev(rev-1))
	_, at := client.Get(contextFor(t), "k", clientv3.WithRev(rev))
	if at != nil && !errors.Is(at, rpctypes.ErrCompacted) {
		t.Fatal(at)
	}
	return errors.Is(below, rpctypes.ErrCompacted) && at == nil
}

// TestCompactionKey_WrittenByOther_DropsVersions: when another process writes the compaction key,
// versions below the compacted revision are dropped, by a process that neither compacts nor checks
// the compact revision of etcd. The version at that revision and the log are retained.
func TestCompactionKey_WrittenByOther_DropsVersions(t *testing.T) {
	t.Parallel()
	_, client := newRunning(t)
	r := replicate(t, client, "/r/", 0, -1)
	first := put(t, client, "/r/things/a", "1")
	var took []time.Duration
	for i := range 50 {
		rev := put(t, client, "/r/things/a", fmt.Sprint(i))
		put(t, client, "/r/things/b", fmt.Sprint(i)) // so that rev is not the latest revision
		put(t, client, etcdsource.CompactionKey, fmt.Sprint(rev))
		wrote := time.Now() // the event may arrive before etcd's response
		until(t, "the mirror drops the versions below the compact revision", func() bool { return r.oldest() == rev })
		took = append(took, time.Since(wrote))
		if s, err := r.resource.At(rev); err != nil || s.Rev != rev {
			t.Fatalf("the compacted revision itself: %v", err)
		} else if e, ok := s.Get("/r/things/a"); !ok || string(e.Value()) != fmt.Sprint(i) {
			t.Fatalf("at %d: %v, %v", rev, e, ok)
		}
		if _, err := r.resource.At(rev - 1); !errors.Is(err, mirror.ErrCompacted) {
			t.Fatalf("below the compacted revision: %v", err)
		}
	}
	slices.Sort(took)
	t.Logf("from the answer to the write to the drop: median %s, longest %s", took[len(took)/2], took[len(took)-1])
	if _, err := r.resource.CursorAfter(first, "/r/things/", ""); err != nil {
		t.Errorf("the history of watches is shorter: %v", err)
	}
}

// TestCompactors_OnOneEtcd_CompactLikeOne: two compactors of etcdsource, or one of them and
// upstream's. Together they compact like a single one; each records the other's compactions; and
// etcd's compacted revision agrees.
func TestCompactors_OnOneEtcd_CompactLikeOne(t *testing.T) {
	t.Parallel()
	const interval = 300 * time.Millisecond
	for _, upstream := range []bool{false, true} {
		t.Run(fmt.Sprintf("upstream=%v", upstream), func(t *testing.T) {
			_, client := newRunning(t)
			r := replicate(t, client, "/r/", interval, -1)
			// The other compactor has its own client, as in another process.
			other := connect(t, client.Endpoints()[0][len("unix://"):])
			var rival interface{ CompactRevision() int64 }
			var stop func()
			if upstream {
				c := etcd3.NewCompactor(other, interval, clock.RealClock{}, nil)
				rival, stop = c, sync.OnceFunc(c.Stop)
			} else {
				c := replicate(t, other, "/other/", interval, -1)
				rival, stop = c, c.Stop
			}
			defer stop()
			rev := put(t, client, "/r/things/a", "1")
			until(t, "both compact, or learn the compact revision", func() bool {
				put(t, client, "/r/things/a", "2")
				return r.CompactRevision() > rev+10 && rival.CompactRevision() > rev+10
			})
			if f := r.Stats().Failures; f != 0 {
				t.Errorf("%d turns have failed", f)
			}

			// When either compactor stops, the other continues.
			stop()
			rev = put(t, client, "/r/things/a", "3")
			until(t, "the one that is left compacts", func() bool {
				put(t, client, "/r/things/a", "4")
				return r.CompactRevision() > rev
			})
			// The key is written first, then etcd is compacted.
			until(t, "the replica, its memory and etcd agree", func() bool {
				last := r.CompactRevision()
				return r.oldest() == last && compactedTo(t, client, last)
			})
		})
	}
}

// TestCompactor_UpstreamCompacts_IsFollowed: only upstream's compactor compacts etcd; the mirror
// drops the compacted versions.
func TestCompactor_UpstreamCompacts_IsFollowed(t *testing.T) {
	t.Parallel()
	_, client := newRunning(t)
	other := connect(t, client.Endpoints()[0][len("unix://"):])
	c := etcd3.NewCompactor(other, 100*time.Millisecond, clock.RealClock{}, nil)
	defer c.Stop()
	r := replicate(t, client, "/r/", 0, -1)
	rev := put(t, client, "/r/things/a", "1")
	until(t, "the mirror drops the history that upstream compacts", func() bool {
		put(t, client, "/r/things/a", "2")
		return r.oldest() > rev
	})
	// Upstream's compactor writes the key, then compacts.
	until(t, "memory and etcd agree", func() bool { return compactedTo(t, client, r.oldest()) })
}

// TestCompactor_KeyDeletedRepeatedly_Continues: compaction continues although the compaction key is
// deleted repeatedly.
func TestCompactor_KeyDeletedRepeatedly_Continues(t *testing.T) {
	t.Parallel()
	_, client := newRunning(t)
	a := replicate(t, client, "/r/", 100*time.Millisecond, -1)
	b := replicate(t, client, "/r/", 150*time.Millisecond, -1)
	for range 5 {
		known := a.CompactRevision()
		if _, err := client.Delete(contextFor(t), etcdsource.CompactionKey); err != nil {
			t.Fatal(err)
		}
		rev := put(t, client, "/r/things/a", "1")
		until(t, "compaction continues", func() bool {
			put(t, client, "/r/things/a", "2")
			if got := a.CompactRevision(); got < known {
				t.Fatalf("%d was known, now %d", known, got)
			}
			return a.CompactRevision() > rev && b.CompactRevision() > rev
		})
	}
	if f := a.Stats().Failures + b.Stats().Failures; f != 0 {
		t.Errorf("%d turns have failed", f)
	}
}

// TestCompactor_ManualCompaction_IsDetectedByCheck: a manual compaction does not write the key; the
// next check detects it.
func TestCompactor_ManualCompaction_IsDetectedByCheck(t *testing.T) {
	t.Parallel()
	_, client := newRunning(t)
	r := replicate(t, client, "/r/", 0, 100*time.Millisecond)
	for i := range 3 {
		put(t, client, "/r/things/a", "1")
		rev := put(t, client, "/r/things/a", "2")
		last := put(t, client, "/r/things/a", "3")
		// otherwise its feed gets ErrCompacted
		until(t, "memory has it all", func() bool { return r.mirror.PublishedRevision() >= last })
		if _, err := client.Compact(contextFor(t), rev); err != nil {
			t.Fatal(err)
		}
		until(t, "the mirror drops the history that a client compacts", func() bool { return r.oldest() == rev })
		if n := r.Stats().Unannounced; n != int64(i+1) {
			t.Errorf("%d compactions were found, want %d", n, i+1)
		}
	}
}

// TestCompactor_AfterOutage_CatchesUp: the compactor reconnects after an outage of etcd and catches
// up.
func TestCompactor_AfterOutage_CatchesUp(t *testing.T) {
	t.Parallel()
	e, client := newRunning(t)
	r := replicate(t, client, "/r/", 100*time.Millisecond, -1)
	rev := put(t, client, "/r/things/a", "1")
	until(t, "the first compaction", func() bool { return r.CompactRevision() > rev })
	e.stop()
	until(t, "the mirror detects the lost connection", func() bool { return !r.Stats().Following })
	e.run(t)
	rev = put(t, client, "/r/things/a", "2")
	until(t, "compaction continues", func() bool {
		put(t, client, "/r/things/a", "3")
		return r.CompactRevision() > rev && r.oldest() > rev && r.Stats().Following
	})
}

// TestCompactor_RestoredEtcd_WritesNoOldRevision: an earlier state is restored while the compactor
// remembers revisions that do not exist after the restore. None of these is written or compacted;
// the compactor then follows the restored etcd.
func TestCompactor_RestoredEtcd_WritesNoOldRevision(t *testing.T) {
	t.Parallel()
	e, client := newRunning(t)
	for range 10 {
		put(t, client, "/r/things/a", "before")
	}
	r := replicate(t, client, "/r/", 200*time.Millisecond, 200*time.Millisecond)
	backup := filepath.Join(e.Directory(), "backup")
	e.stop()
	testcheck.NoError(t, os.CopyFS(backup, os.DirFS(e.data())))
	e.run(t)
	for range 300 {
		put(t, client, "/r/things/a", "lost")
	}
	rev := put(t, client, "/r/things/a", "lost")
	until(t, "etcd is compacted", func() bool {
		put(t, client, "/r/things/a", "lost")
		return r.CompactRevision() > rev
	})
	lost := r.CompactRevision()
	e.stop()
	testcheck.NoError(t, os.RemoveAll(e.data()))
	testcheck.NoError(t, os.CopyFS(e.data(), os.DirFS(backup)))
	done := r.Stats().Compactions
	e.run(t)
	after := put(t, client, "/r/things/a", "after")
	if after >= lost {
		t.Fatalf("etcd is at %d, was compacted to %d: it is not restored", after, lost)
	}
	until(t, "compaction continues, and the mirror follows it", func() bool {
		known := r.CompactRevision()
		return known > after && known < lost && r.Stats().Compactions > done &&
			r.mirror.CompactRevision() == known && r.oldest() == known && compactedTo(t, client, known)
	})
	r.Stop()
	now := put(t, client, "/r/things/a", "after")
	resp, err := client.Get(contextFor(t), etcdsource.CompactionKey)
	if err != nil || len(resp.Kvs) != 1 {
		t.Fatalf("%v, %v", resp, err)
	}
	if got := string(resp.Kvs[0].Value); len(got) > len(fmt.Sprint(now)) {
		t.Errorf("announced is %s, etcd is at %d", got, now)
	}
}
