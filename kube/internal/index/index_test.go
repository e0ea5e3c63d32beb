package index

import (
	"fmt"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	"k8s.io/apiserver/pkg/apis/example"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// TestIndex_List_DecodesOnlyChanges shows the purpose of an index.
func TestIndex_List_DecodesOnlyChanges(t *testing.T) {
	f := newFixture(t)
	for i := range 200 {
		f.Put(t, podOn(fmt.Sprintf("pod-%03d", i), fmt.Sprintf("node-%d", i%50)))
	}
	f.CatchUp(t)
	decoded := func(node string) int {
		return f.Decoded(func() { f.require(t, onNode(t, node), byIndex, 4) })
	}
	if n := decoded("node-7"); n != 200 {
		t.Errorf("the first list decoded %d objects, want all once", n)
	}
	if n := decoded("node-9"); n != 0 {
		t.Errorf("the second list decoded %d objects, want none", n)
	}
	f.Put(t, podOn("pod-009", "node-9"))
	f.CatchUp(t)
	if n := decoded("node-9"); n != 1 {
		t.Errorf("after one update the list decoded %d objects, want the changed one", n)
	}
}

// TestIndex_RestoredEtcd_IsDropped: after a restore the revision of the index occurs a second time,
// with other objects.
func TestIndex_RestoredEtcd_IsDropped(t *testing.T) {
	f := newFixture(t)
	for i := range 100 {
		f.Put(t, podOn(fmt.Sprintf("old-%03d", i), "node"))
	}
	f.CatchUp(t)
	f.require(t, onNode(t, "node"), byIndex, 100)
	was := f.Etcd.Revision()

	restored := map[string]string{}
	for i := range 70 {
		pod := podOn(fmt.Sprintf("new-%03d", i), "node")
		restored[podtest.Key(pod)] = podtest.Stored(t, pod)
	}
	f.Etcd.Restore(was-5, restored)
	podtest.Eventually(t, "the mirror detects the restore", func() bool {
		_, _ = f.Mirror.ReadRevision(podtest.Context(t))
		return f.Mirror.PublishedRevision() < was && f.Resource.Ready()
	})
	for f.Etcd.Revision() <= was {
		f.require(t, onNode(t, "node"), byIndex, 70)
		f.Etcd.Put(podtest.Prefix+"something", fmt.Sprint(f.Etcd.Revision()))
		f.CatchUp(t)
	}
}

// TestIndex_NotRead_IsDropped: an unread index releases its entries, including replaced ones
// and those of a relisted resource, and its bytes are not counted any more (I7).
func TestIndex_NotRead_IsDropped(t *testing.T) {
	for _, how := range []string{"idle", "relisted"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				f := newFixture(t, func(o *podtest.Options) { o.Window = mirror.Window{MaxAge: time.Second} })
				fill := func() {
					for i := range 100 {
						f.Put(t, podOn(fmt.Sprint("p", i), fmt.Sprint("node-", i)))
					}
					f.CatchUp(t)
				}
				fill()
				rest := f.Blocks.Stats().Used
				f.list(t, onNode(t, ""))
				counted := f.Blocks.Stats().Used - rest
				if len(f.digests(t)) == 0 || counted < 100*8 {
					t.Errorf("an index of 100 entries has the digests %v and counts %d bytes", f.digests(t), counted)
				}
				var entries []weak.Pointer[mirror.Entry]
				for e := range f.Latest(t).All("", "") {
					entries = append(entries, weak.Make(e))
				}
				if how == "idle" {
					fill()
				} else {
					restored := map[string]string{}
					for i := range 70 {
						pod := podtest.Pod(fmt.Sprint("q", i))
						restored[podtest.Key(pod)] = podtest.Stored(t, pod)
					}
					f.Etcd.Restore(1000, restored)
					time.Sleep(5 * time.Second)
					if err := f.Resource.WaitReady(podtest.Context(t)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(2 * indexIdle)
				synctest.Wait()
				if held := held(entries); held > 0 {
					t.Errorf("%d entries that were replaced are held", held)
				}
				if left := f.Blocks.Stats().Used; how == "idle" && left != rest || left >= rest+counted || len(f.digests(t)) != 0 {
					t.Errorf("%d bytes are counted, %d before and %d with the index; digests %v", left, rest, rest+counted, f.digests(t))
				}
				f.list(t, onNode(t, "")) // builds it again
				if f.Blocks.Stats().Used == 0 {
					t.Error("the rebuilt index is not counted")
				}
			})
		})
	}
}

// TestIndex_KeysReplacedDuringDecryption_CachesNoDigest: later lists do not use a value that was
// being decrypted while its key was removed.
func TestIndex_KeysReplacedDuringDecryption_CachesNoDigest(t *testing.T) {
	slow := podtest.NewPausing(podtest.Encryption(t, "1"))
	codec := podtest.NewSwappable(slow)
	f := newFixture(t, codec.With)
	f.Seal(t, slow, podOn("pod", "a"))
	f.CatchUp(t)
	list := func() error {
		sel := f.View.CurrentGeneration().Selector(onNode(t, "a"))
		_, err := (&read{f, sel, f.s.planDigests(podtest.Context(t), &sel, f.Latest(t), 1000, 0), f.Latest(t)}).selected(podtest.Context(t))
		return err
	}
	slow.Pause()
	result := make(chan error, 1)
	go func() { result <- list() }()
	<-slow.Entered
	codec.Set(podtest.Encryption(t, "2"))
	if err := list(); err == nil {
		t.Error("the index is read with a removed key")
	}
	slow.Release <- struct{}{}
	<-result // it may meet the end of its generation
	if err := list(); err == nil || f.Blocks.Stats().Used != 0 {
		t.Errorf("%d bytes are cached of a removed key; a list: %v", f.Blocks.Stats().Used, err)
	}
}

// TestIndexes_MoreLabelsThanBound_AreDropped selects by more labels than a resource has indexes:
// the least recently used ones, and their digests, are dropped, and lists by every label stay
// right.
func TestIndexes_MoreLabelsThanBound_AreDropped(t *testing.T) {
	const names, pods = maxIndexes + 16, 300
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t)
		for i := range pods {
			pod := podtest.Pod(fmt.Sprintf("pod-%03d", i))
			pod.Labels = map[string]string{}
			for n := range names {
				pod.Labels[fmt.Sprint("label-", n)] = fmt.Sprint(i % (n + 1))
			}
			f.Put(t, pod)
		}
		f.CatchUp(t)
		for n := range names {
			for i := range 3 {
				plan := []string{byScan, byIndex, byIndex}[i]
				// those with i % (n+1) == 0
				f.require(t, podtest.Selecting(t, fmt.Sprintf("label-%d=0", n), ""), plan, (pods+n)/(n+1))
			}
			if got, want := int(f.indexes.Load()), min(n+1, maxIndexes); got != want {
				t.Fatalf("%v indexes after %d labels, want %d", got, n+1, want)
			}
		}
		time.Sleep(5 * time.Second) // drops the digests of those that were removed
		synctest.Wait()
		if n := len(f.digests(t)); n == 0 || n > maxIndexes {
			t.Errorf("%d indexes have digests, want 1 to %d", n, maxIndexes)
		}
	})
}

// TestIndexes_LargerThanBudget_IsRefused: a label whose digests take more than their part of the
// budget is scanned until it is tried again, and the reports show it.
func TestIndexes_LargerThanBudget_IsRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFixture(t, func(o *podtest.Options) { o.Bytes = 4 * 4096 })
		var all []*example.Pod
		// more than fit into a quarter of the budget, less than into half
		for i := range 500 {
			all = append(all, podtest.Labelled(fmt.Sprintf("pod-%04d", i), "unique", fmt.Sprint(i)))
			f.Put(t, all[i])
		}
		f.CatchUp(t)
		scans := func() (n int) {
			t.Helper()
			for i := range 3 {
				plan, selected := f.list(t, podtest.Selecting(t, fmt.Sprint("unique=", 7*i), ""))
				if selected != 1 {
					t.Fatalf("unique=%d selects %d pods, want 1", 7*i, selected)
				}
				if plan == byScan {
					n++
				}
			}
			return n
		}
		if n := scans(); n != 2 {
			t.Errorf("%d of 3 lists were scans, want the first, and the third, which finds the index full", n)
		}
		time.Sleep(indexIdle / 5) // the bytes are counted meanwhile
		synctest.Wait()
		if n := f.refused.Load(); n != 1 {
			t.Errorf("%d refusals, want 1", n)
		}
		if n := scans(); n != 3 {
			t.Errorf("%d of 3 lists by a refused label were scans", n)
		}
		time.Sleep(indexIdle * 3 / 2)
		synctest.Wait()
		for _, pod := range all[200:] {
			f.Etcd.Delete(podtest.Key(pod))
		}
		f.CatchUp(t)
		if n := scans(); n > 1 {
			t.Errorf("%d of 3 lists were scans after the time of the refusal, want at most the first", n)
		}
		if n := len(f.digests(t)); n != 1 {
			t.Errorf("%d indexes have digests, want the one that was tried again", n)
		}
	})
}

// TestIndexes_AllResourcesAtBound_RefuseAnother: indexes of other resources have taken the bytes of
// all. A declared index still has room.
func TestIndexes_AllResourcesAtBound_RefuseAnother(t *testing.T) {
	const pods = 500
	synctest.Test(t, func(t *testing.T) {
		const limit = 1 << 20
		f := newFixture(t, func(o *podtest.Options) { o.Bytes = limit })
		for i := range pods {
			pod := podOn(fmt.Sprintf("pod-%04d", i), fmt.Sprint("node-", i%50))
			pod.Labels = map[string]string{"app": fmt.Sprint(i % 50)}
			f.Put(t, pod)
		}
		f.CatchUp(t)
		f.Blocks.Charge(limit / 2)
		for range 5 {
			if _, n := f.list(t, podtest.Selecting(t, "app=7", "")); n != pods/50 {
				t.Fatalf("%d pods with the label, want %d", n, pods/50)
			}
			f.require(t, onNode(t, "node-7"), byIndex, pods/50)
			time.Sleep(indexIdle / 8)
			synctest.Wait()
		}
		if n := len(f.digests(t)); n != 1 {
			t.Errorf("%d indexes have digests, want the declared one", n)
		}
		if charged := f.Blocks.Charged(); charged > limit/4*3 {
			t.Errorf("%d bytes of indexes in all, want at most %d", charged, limit/4*3)
		}
	})
}
