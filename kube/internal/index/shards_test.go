package index

import (
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apimachinery/pkg/sharding"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/internal/test/testseed"
	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror/memo"
)

const (
	uidField       = "object.metadata.uid"
	namespaceShard = "object.metadata.namespace"
	endOfHashes    = "0x10000000000000000"
)

// shardOf returns the selector of the i-th of n shards of equal size, and its set.
func shardOf(t testing.TB, key string, i, n int) (sharding.Selector, *objects.ShardSet) {
	t.Helper()
	bound := func(i int) string {
		if i == n {
			return endOfHashes
		}
		return fmt.Sprintf("0x%016x", uint64(i)*(1<<63/uint64(n)*2))
	}
	return shardFrom(t, key, bound(i), bound(i+1))
}

func shardFrom(t testing.TB, key, start, end string) (sharding.Selector, *objects.ShardSet) {
	t.Helper()
	sel := sharding.NewSelector(sharding.ShardRangeRequirement{Key: key, Start: start, End: end})
	pred := storage.Everything
	pred.ShardSelector = sel
	set := (&objects.Generation{}).Selector(pred).Shard
	if set == nil {
		t.Fatalf("%s is no set", sel)
	}
	return sel, set
}

// TestShard_AnyRevision_EqualsSelectedPods writes pods at random and compares shards, followed to
// the present and rolled back to old revisions, with the pods that upstream's selector selects
// there.
func TestShard_AnyRevision_EqualsSelectedPods(t *testing.T) {
	seed := testseed.New(t)
	f := newFixture(t)
	m := podtest.NewModel(seed, 2)
	for range 15 {
		for range 1 + m.Rand.IntN(60) {
			m.Step(t, f.Etcd)
		}
		f.CatchUp(t)
		for range 12 {
			n := []int{1, 2, 16}[m.Rand.IntN(3)]
			sel, set := shardOf(t, []string{uidField, namespaceShard}[m.Rand.IntN(2)], m.Rand.IntN(n), n)
			x, at := f.s.Shard(set), len(m.Revs)-1
			cur, err := x.At(podtest.Context(t), m.Revs[at])
			testcheck.NoError(t, err)
			if known := f.s.KnownShard(set); known != cur {
				t.Fatalf("%s: the shard of the last read is %p, want %p", sel, known, cur)
			}
			requireShard(t, m, at, cur, sel)
			at = m.Rand.IntN(len(m.Revs))
			snap, err := f.Resource.At(m.Revs[at])
			testcheck.NoError(t, err)
			var changed []string
			for _, ev := range f.EventsAfter(t, m.Revs[at]) {
				changed = append(changed, ev.Key())
			}
			slices.Sort(changed)
			past, err := x.RolledTo(podtest.Context(t), snap, cur, slices.Compact(changed))
			testcheck.NoError(t, err)
			requireShard(t, m, at, past, sel)
			if again, ok := x.OldVersion(f.View.CurrentGeneration(), m.Revs[at]); !ok || again != past {
				t.Errorf("%s: the old version is not found again", sel)
			}
		}
	}
}

// requireShard fails unless a version of a shard has the pods that its selector selects at
// m.Revs[at].
func requireShard(t *testing.T, m *podtest.Model, at int, v *ShardVersion, sel sharding.Selector) {
	t.Helper()
	var want, got []string
	for key, pod := range m.Past[at] {
		if ok, err := sel.Matches(pod); err != nil {
			t.Fatal(err)
		} else if ok {
			want = append(want, key)
		}
	}
	slices.Sort(want)
	for e := range v.All("", "") {
		got = append(got, e.Key())
	}
	if !slices.Equal(got, want) {
		t.Fatalf("%s at %d has\n%v, want\n%v", sel, v.Revision(), got, want)
	}
	n, inRuns := 0, 0
	for run := range v.Runs("", "") {
		if !run.Selected {
			t.Fatal("a leaf of a shard is taken for one of the resource's own")
		}
		inRuns += len(run.Items())
	}
	if n, _ = v.Count("", ""); n != len(want) || inRuns != n {
		t.Errorf("%s counts %d pods, %d in runs, want %d", sel, n, inRuns, len(want))
	}
	if last, ok := v.Last("", ""); ok != (n > 0) || ok && last.Key() != want[n-1] {
		t.Errorf("%s has another last pod than %s", sel, want)
	}
}

// supersededMemo is a memo of a leaf that records its end.
type supersededMemo struct{ ended bool }

func (s *supersededMemo) Superseded() { s.ended = true }

var _ memo.Superseder = (*supersededMemo)(nil)

// mark sets a memo on the leaves of the version.
func mark(v *ShardVersion) (memos []*supersededMemo) {
	for _, l := range v.leaves() {
		m := &supersededMemo{}
		l.Memos().Swap(&memo.Key{}, nil, m)
		memos = append(memos, m)
	}
	return memos
}

// TestShard_ReplacedLeaves_AreSuperseded: an update supersedes the memo of its leaf only, and a
// relist those of all leaves.
func TestShard_ReplacedLeaves_AreSuperseded(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 600)
	_, set := shardOf(t, uidField, 0, 1)
	x := f.s.Shard(set)
	at := func() *ShardVersion {
		t.Helper()
		v, err := x.At(podtest.Context(t), f.Latest(t).Rev)
		testcheck.NoError(t, err)
		return v
	}
	count := func(memos []*supersededMemo) (ended int) {
		for _, m := range memos {
			if m.ended {
				ended++
			}
		}
		return ended
	}
	first := at()
	memos := mark(first)
	pod := podtest.Pod("pod-0300")
	pod.Namespace = "ns-0"
	f.Put(t, pod)
	f.CatchUp(t)
	if at(); count(memos) != 1 || len(memos) < 5 {
		t.Errorf("%d of %d leaves are superseded by one update", count(memos), len(memos))
	}
	memos = mark(at())
	f.s.EndShards()
	if count(memos) != len(memos) || f.s.KnownShard(set) != nil {
		t.Errorf("%d of %d leaves are superseded by the end", count(memos), len(memos))
	}
	f.s.Shard(set)
	if f.s.KnownShard(set) != nil || len(f.s.shards.all()) > 0 {
		t.Error("a shard is cached after the end")
	}
}

// TestShards_KeysReplaced_AreMadeAgain: a version belongs to the keys with which it was made.
func TestShards_KeysReplaced_AreMadeAgain(t *testing.T) {
	swap := podtest.NewSwappable(podtest.Encryption(t, "1"))
	f := newFixture(t, swap.With)
	f.seal(t, podtest.Encryption(t, "1"), 0, 100, 1)
	_, set := shardOf(t, uidField, 0, 1)
	x := f.s.Shard(set)
	if _, err := x.At(podtest.Context(t), 0); err != nil || !x.Built() {
		t.Fatal(err)
	}
	swap.Set(podtest.Encryption(t, "2"))
	if _, err := x.At(podtest.Context(t), 0); err == nil {
		t.Error("the shard is read with a removed key")
	}
	if f.s.DropEnded(); x.Built() {
		t.Error("a version of removed keys is held")
	}
	swap.Set(podtest.Encryption(t, "2", "1"))
	if v, err := x.At(podtest.Context(t), 0); err != nil || v.tree.Len() != 100 {
		t.Errorf("after the key returned: %v", err)
	}
}

// kept returns the number of cached shards and of their entries.
func (f *fixture) kept() (shards, entries int) {
	all := f.s.shards.all()
	for _, x := range all {
		if cur := x.cur.Load(); cur != nil {
			entries += cur.tree.Len()
		}
	}
	return len(all), entries
}

// TestShards_OfManySelectors_AreBounded: the shards of many selectors are dropped, except the one
// just read.
func TestShards_OfManySelectors_AreBounded(t *testing.T) {
	f := newFixture(t)
	f.Fill(t, 300)
	for i := range 20 {
		_, set := shardFrom(t, uidField, fmt.Sprintf("0x%016x", i), endOfHashes)
		x := f.s.Shard(set)
		if _, err := x.At(podtest.Context(t), 0); err != nil {
			t.Fatal(err)
		}
		f.s.TrimShards(x, 300)
		if f.s.KnownShard(set) == nil {
			t.Fatal("the shard of the last read was evicted")
		}
		if _, kept := f.kept(); kept > maxShardCopies*300+maxEmptyShards {
			t.Fatalf("%d cached entries in shards of 300 pods", kept)
		}
	}
}

// TestShards_WithoutReaders_AreDropped with their timer, one after the other.
func TestShards_WithoutReaders_AreDropped(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		f.Fill(t, 1)
		read := func(i int) {
			t.Helper()
			_, set := shardOf(t, namespaceShard, i, 4)
			if _, err := f.s.Shard(set).At(podtest.Context(t), 0); err != nil {
				t.Fatal(err)
			}
		}
		requireKept := func(want int) {
			t.Helper()
			synctest.Wait()
			shards, _ := f.kept()
			f.s.shards.mu.Lock()
			timer := f.s.shards.timer != nil
			f.s.shards.mu.Unlock()
			if shards != want || timer != (want > 0) {
				t.Errorf("%d cached shards, want %d; a timer: %t", shards, want, timer)
			}
		}
		read(0)
		read(1)
		requireKept(2)
		time.Sleep(shardIdle / 2)
		read(1)
		time.Sleep(shardIdle/2 + time.Second)
		requireKept(1)
		time.Sleep(2 * shardIdle)
		requireKept(0)
	})
}
