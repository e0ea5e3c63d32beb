package kubestorage

import (
	"fmt"
	"math/rand/v2"
	goruntime "runtime"
	"slices"
	"testing"
	"testing/synctest"
	"time"
	"weak"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/selected"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// onNode selects the pods of a node; with the index that registries declare for it
// if indexed.
func onNode(node string, indexed bool) storage.SelectionPredicate {
	pred := storage.Everything
	pred.Field = fields.OneTermEqualSelector("spec.nodeName", node)
	pred.GetAttrs = podAttrs
	if indexed {
		pred.IndexFields = []string{"spec.nodeName"}
	}
	return pred
}

func podPaths(list *example.PodList) []string {
	var names []string
	for _, pod := range list.Items {
		names = append(names, pod.Namespace+"/"+pod.Name)
	}
	return names
}

// TestIndex_RandomMoves_EqualsWalk moves pods between nodes at random, across namespaces and trims of
// the log, and compares lists and initial events with and without index.
func TestIndex_RandomMoves_EqualsWalk(t *testing.T) {
	// The window is so small that the log does not always reach back to the last list.
	f := setup(t, withWindow(mirror.Window{MaxBytes: 20000}))
	ctx := contextFor(t)
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	rnd := rand.New(rand.NewPCG(seed, 0))
	nodes := []string{"", "a", "b", "ab", "c"}
	live := map[string]*example.Pod{}
	list := func(key string, pred storage.SelectionPredicate, rv string, match metav1.ResourceVersionMatch) *example.PodList {
		t.Helper()
		out := &example.PodList{}
		err := f.GetList(ctx, key, storage.ListOptions{Recursive: true, Predicate: pred, ResourceVersion: rv, ResourceVersionMatch: match}, out)
		if err != nil {
			t.Fatal(err)
		}
		return out
	}
	for range 60 {
		for range rnd.IntN(60) {
			pod := newPod(fmt.Sprintf("pod-%03d", rnd.IntN(400)))
			pod.Namespace = fmt.Sprintf("ns-%d", rnd.IntN(3))
			pod.Spec.NodeName = nodes[rnd.IntN(len(nodes))]
			key := podKey(pod)
			switch held := live[key]; {
			case held == nil:
				live[key] = f.create(t, pod)[0]
			case rnd.IntN(3) == 0:
				f.remove(t, held)
				delete(live, key)
			default:
				err := f.GuaranteedUpdate(ctx, key, &example.Pod{}, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
					obj.(*example.Pod).Spec.NodeName = pod.Spec.NodeName
					return obj, nil
				}), nil)
				if err != nil {
					t.Fatal(err)
				}
			}
		}
		node := nodes[rnd.IntN(len(nodes))]
		for _, key := range []string{"/pods", "/pods/ns-1"} {
			want := list(key, onNode(node, false), "", "")
			got := list(key, onNode(node, true), "", "")
			if !slices.Equal(podPaths(got), podPaths(want)) {
				t.Fatalf("pods of %q below %s at %s: %v, want %v", node, key, got.ResourceVersion, podPaths(got), podPaths(want))
			}
			exact := list(key, onNode(node, true), want.ResourceVersion, metav1.ResourceVersionMatchExact)
			if !slices.Equal(podPaths(exact), podPaths(want)) {
				t.Fatalf("pods of %q at exactly %s: %v, want %v", node, want.ResourceVersion, podPaths(exact), podPaths(want))
			}
			// Pages: the token is valid for the same list without the index.
			var paged []string
			pred := onNode(node, true)
			for pred.Limit = 2; ; {
				page := list(key, pred, "", "")
				paged = append(paged, podPaths(page)...)
				if pred.Continue = page.Continue; pred.Continue == "" {
					break
				}
			}
			if !slices.Equal(paged, podPaths(want)) {
				t.Fatalf("pods of %q in pages: %v, want %v", node, paged, podPaths(want))
			}
		}
		w, err := f.Watch(ctx, "/pods", storage.ListOptions{Recursive: true, Predicate: onNode(node, true)})
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range podPaths(list("/pods", onNode(node, false), "", "")) {
			ev := <-w.ResultChan()
			pod, ok := ev.Object.(*example.Pod)
			if ev.Type != watch.Added || !ok || pod.Namespace+"/"+pod.Name != name {
				t.Fatalf("initial event %v %v, want ADDED %s", ev.Type, ev.Object, name)
			}
		}
		w.Stop()
	}
}

// TestIndex_List_DecodesOnlyResult shows the purpose of an index.
func TestIndex_List_DecodesOnlyResult(t *testing.T) {
	f := setup(t)
	ctx := contextFor(t)
	var pods []*example.Pod
	for i := range 200 {
		pod := newPod(fmt.Sprintf("pod-%03d", i))
		pod.Spec.NodeName = fmt.Sprintf("node-%d", i%50)
		pods = append(pods, pod)
	}
	f.create(t, pods...)
	f.catchUp(t)
	decoded := func(node string, want int) int {
		return len(f.codec.during(func() {
			out := &example.PodList{}
			if err := f.GetList(ctx, "/pods", storage.ListOptions{Recursive: true, Predicate: onNode(node, true)}, out); err != nil {
				t.Fatal(err)
			}
			if len(out.Items) != want {
				t.Fatalf("%d pods on %s, want %d", len(out.Items), node, want)
			}
		}))
	}
	if n := decoded("node-7", 4); n != 204 {
		t.Errorf("the first list decoded %d objects, want all once and the 4 selected again", n)
	}
	if n := decoded("node-9", 4); n != 4 {
		t.Errorf("the second list decoded %d objects, want 4", n)
	}
	f.update(t, pods[9], "x")
	f.catchUp(t)
	if n := decoded("node-9", 4); n != 2 {
		t.Errorf("after one update the list decoded %d objects, want the changed one, for the index and for the list", n)
	}
}

// TestIndex_RestoredEtcd_IsDropped: after a restore the revision of the index occurs a second time, with
// other objects.
func TestIndex_RestoredEtcd_IsDropped(t *testing.T) {
	etcd := memory.New()
	f := setup(t, withSource(func(driver.Source) driver.Source { return etcd }))
	list := func() []string {
		t.Helper()
		return podPaths(f.list(t, storage.ListOptions{Recursive: true, Predicate: onNode("node", true)}))
	}
	for key, value := range podsOnNode(t, "old-a", "old-b") {
		etcd.Put(key, value)
	}
	for range 10 {
		etcd.Put(testPrefix+"something", "else")
	}
	if got := list(); !slices.Equal(got, []string{"ns/old-a", "ns/old-b"}) {
		t.Fatalf("before the restore: %v", got)
	}
	was := etcd.Revision()

	etcd.Restore(was-5, podsOnNode(t, "new"))
	s := f.engine(t)
	eventually(t, "the mirror detects the restore", func() bool {
		_ = s.consistent(contextFor(t), nil)
		return s.resource.Ready() && s.mirror.PublishedRevision() < was
	})
	for etcd.Revision() <= was {
		if got := list(); !slices.Equal(got, []string{"ns/new"}) {
			t.Errorf("at %d, restored from %d: %v, want the restored pod", etcd.Revision(), was, got)
		}
		etcd.Put(testPrefix+"something", fmt.Sprint(etcd.Revision()))
	}
}

// podsOnNode are the values of pods on the node "node", by etcd key.
func podsOnNode(t *testing.T, names ...string) map[string]string {
	t.Helper()
	kvs := map[string]string{}
	for _, name := range names {
		pod := newPod(name)
		pod.Spec.NodeName = "node"
		data, err := runtime.Encode(testCodec(), pod)
		if err != nil {
			t.Fatal(err)
		}
		kvs[etcdKey(pod)] = string(data)
	}
	return kvs
}

// TestIndex_NotRead_IsDropped: an unread index releases its entries, including replaced ones
// and those of a relisted resource, and its bytes are not counted any more (I7).
func TestIndex_NotRead_IsDropped(t *testing.T) {
	for _, how := range []string{"idle", "relisted"} {
		t.Run(how, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newTwin(t, mirror.Window{MaxAge: time.Second})
				for i := range 100 {
					w.put(t, newPod(fmt.Sprint("p", i)))
				}
				w.catchUp(t)
				list := func() {
					t.Helper()
					opts := storage.ListOptions{Recursive: true, ResourceVersion: "0", Predicate: onNode("", true)}
					if err := w.GetList(contextFor(t), "/pods/", opts, &example.PodList{}); err != nil {
						t.Fatal(err)
					}
				}
				digests := func() (n int) {
					for d := range mustLatest(t, w.Store).Digests() {
						d.Each(func(any, any) { n++ })
					}
					return n
				}
				rest := w.cluster.blocks.Stats().Used
				list()
				counted := w.cluster.blocks.Stats().Used - rest
				if digests() == 0 {
					t.Error("the list made no digest")
				}
				if counted < 100*8 {
					t.Errorf("an index of 100 entries counts %d bytes", counted)
				}
				var entries []weak.Pointer[mirror.Entry]
				snap, err := w.resource.Latest()
				if err != nil {
					t.Fatal(err)
				}
				for e := range snap.All("", "") {
					entries = append(entries, weak.Make(e))
				}
				snap = mirror.Snapshot{}
				if how == "idle" {
					for i := range 100 {
						w.put(t, newPod(fmt.Sprint("p", i)))
					}
					w.catchUp(t)
				} else {
					w.etcd.Restore(1000, map[string]string{etcdKey(newPod("p")): storedPod(t, newPod("p"))})
					time.Sleep(5 * time.Second)
					if err := w.resource.WaitReady(contextFor(t)); err != nil {
						t.Fatal(err)
					}
				}
				time.Sleep(2 * selected.IndexIdle)
				synctest.Wait()
				goruntime.GC()
				held := 0
				for _, e := range entries {
					if e.Value() != nil {
						held++
					}
				}
				if held > 0 {
					t.Errorf("%d entries that were replaced are held", held)
				}
				if left := w.cluster.blocks.Stats().Used; how == "idle" && left != rest || left >= rest+counted || digests() != 0 {
					t.Errorf("%d bytes are counted, %d before and %d with the index; %d digests", left, rest, rest+counted, digests())
				}
				list() // builds it again
				if w.cluster.blocks.Stats().Used == 0 {
					t.Error("the rebuilt index is not counted")
				}
			})
		})
	}
}
