package objects_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/objects"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/transcode"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestObject_SecondRead_IsShared: a decoded object is shared by readers until its entry is
// replaced; one of an entry that is in no version is not cached.
func TestObject_SecondRead_IsShared(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		c.Put(t, podtest.Pod("a"))
		c.CatchUp(t)
		gen, ctx, e := c.View.CurrentGeneration(), podtest.Context(t), c.Entry(t, podtest.Pod("a"))
		first, err := gen.Object(ctx, e, c.Blocks.Now())
		if err != nil || c.Blocks.Stats().Used == 0 {
			t.Fatalf("nothing is cached: %v", err)
		}
		if again, err := gen.Object(ctx, e, c.Blocks.Now()); err != nil || again != first || first.(*example.Pod).ResourceVersion != fmt.Sprint(e.ModRevision()) {
			t.Errorf("the second read has another object (%v)", err)
		}
		c.Evict()
		if again, err := gen.Object(ctx, e, c.Blocks.Now()); err != nil || again == first {
			t.Errorf("an evicted object is read again (%v)", err)
		}
		c.Put(t, podtest.Labelled("a", "b", "c"))
		c.CatchUp(t)
		podtest.Eventually(t, "the replaced object is released", func() bool { return c.Blocks.Stats().Used == 0 })

		run, _ := c.Latest(t).DetachedRun([]driver.KV{{Key: []byte(e.Key()), Value: e.Value(), CreateRevision: e.CreateRevision(), ModRevision: e.ModRevision()}})
		if _, err := gen.Object(ctx, run.Items()[0], c.Blocks.Now()); err != nil || c.Blocks.Stats().Used != 0 {
			t.Errorf("%d bytes are cached of an entry that is in no version (%v)", c.Blocks.Stats().Used, err)
		}
	})
}

// TestEvent_Objects_AreSharedByWatches: both states are decoded once for all watches, with the
// revision of the event. Only the newest 256 events keep them.
func TestEvent_Objects_AreSharedByWatches(t *testing.T) {
	c := podtest.New(t)
	first := c.Put(t, podtest.Pod("a"))
	for i := range 300 {
		c.Put(t, podtest.Labelled("a", "n", fmt.Sprint(i)))
	}
	gone := c.Etcd.Delete(podtest.Key(podtest.Pod("a")))
	c.CatchUp(t)
	gen, events := c.View.CurrentGeneration(), c.EventsAfter(t, first)
	if obj, err := gen.ObjectAfterIfWanted(t.Context(), events[0]); obj != nil || err != nil {
		t.Errorf("without a watch with a selector: %v, %v", obj, err)
	}
	c.View.WantAttributes()
	read := func(ev *mirror.Event) (n int) {
		return c.Decoded(func() {
			var watches sync.WaitGroup
			var all [8]runtime.Object
			for i := range all {
				watches.Go(func() {
					var err error
					if ev.Entry == nil {
						all[i], err = gen.ObjectBefore(t.Context(), ev)
					} else {
						all[i], err = gen.ObjectAfter(t.Context(), ev)
					}
					if err != nil || all[i].(*objects.CachingObject).GetResourceVersion() != fmt.Sprint(ev.Rev) {
						t.Errorf("object %v of the event at %d: %v", all[i], ev.Rev, err)
					}
				})
			}
			watches.Wait()
			for _, obj := range all {
				if obj != all[0] {
					t.Error("two watches have different objects")
				}
			}
		})
	}
	for _, ev := range events {
		if n := read(ev); n != 1 {
			t.Errorf("8 watches decoded the event at %d %d times", ev.Rev, n)
		}
	}
	if last := events[len(events)-1]; last.Rev != gone || read(last) != 0 || read(events[0]) != 1 {
		t.Error("the newest event must have its object, and the oldest must not")
	}
	if obj, err := gen.ObjectAfterIfWanted(t.Context(), events[299]); err != nil || obj.(*example.Pod).Labels["n"] != "299" {
		t.Errorf("with a watch with a selector: %v, %v", obj, err)
	}
}

// TestDecode_Failure_NamesKeyOnce: the error of a value that cannot be decrypted has the key, and
// its cause has not.
func TestDecode_Failure_NamesKeyOnce(t *testing.T) {
	c := podtest.New(t, func(o *podtest.Options) { o.Config.Transformer = podtest.Encryption(t, "1") })
	c.Seal(t, podtest.Encryption(t, "2"), podtest.Pod("a"))
	c.CatchUp(t)
	gen, e := c.View.CurrentGeneration(), c.Entry(t, podtest.Pod("a"))
	_, err := gen.Decode(podtest.Context(t), e, 1)
	if !storage.IsInternalError(err) || strings.Count(err.Error(), e.Key()) != 1 {
		t.Errorf("%v", err)
	}
	if strings.Contains(objects.Cause(err).Error(), e.Key()) {
		t.Errorf("the cause %v has the key", objects.Cause(err))
	}
	if _, err := gen.Attributes(podtest.Context(t), e); err == nil || gen.KnownAttributes(e) != nil {
		t.Errorf("attributes of a value that cannot be decrypted: %v", err)
	}
}

// derived is derived data of another package.
type derived struct{ closed bool }

func (d *derived) Close() { d.closed = true }

// TestGeneration_KeysReplaced_Ends: a change of keys ends the generation, its derived data and its
// blocks, and is reported once. A reader that still uses it caches nothing.
func TestGeneration_KeysReplaced_Ends(t *testing.T) {
	swap, rotated := podtest.NewSwappable(podtest.Encryption(t, "1")), 0
	c := podtest.New(t, swap.With, func(o *podtest.Options) { o.OnRotate = func() { rotated++ } })
	c.Seal(t, podtest.Encryption(t, "1"), podtest.Pod("a"))
	c.Seal(t, podtest.Encryption(t, "1"), podtest.Pod("unread"))
	c.CatchUp(t)
	gen, ctx, e := c.View.CurrentGeneration(), podtest.Context(t), c.Entry(t, podtest.Pod("a"))
	data := &derived{}
	if gen.Derived("data", func() objects.Derived { return data }) != objects.Derived(data) || gen.Derived("data", func() objects.Derived { return &derived{} }) != objects.Derived(data) {
		t.Error("a name must have one value")
	}
	if !c.View.Rekeyed() {
		t.Error("the keys of the view must be replaceable")
	}
	if _, err := gen.Object(ctx, e, c.Blocks.Now()); err != nil {
		t.Fatal(err)
	}
	if _, err := gen.Attributes(ctx, e); err != nil || gen.KnownAttributes(e) == nil {
		t.Fatal(err)
	}
	if c.View.CurrentGeneration() != gen || rotated != 0 {
		t.Error("the generation ends without a change of keys")
	}
	swap.Set(podtest.Encryption(t, "2", "1"))
	next := c.View.CurrentGeneration()
	if next == gen || c.View.CurrentGeneration() != next || rotated != 1 || !gen.Ended() || gen.InUse() || next.Ended() || !next.InUse() {
		t.Errorf("after a change of keys: the same generation %t, %d changes reported", next == gen, rotated)
	}
	if !data.closed || c.Blocks.Stats().Used != 0 || next.KnownAttributes(e) != nil {
		t.Errorf("derived data is closed: %t; %d bytes are cached; attributes %v", data.closed, c.Blocks.Stats().Used, next.KnownAttributes(e))
	}
	unread := c.Entry(t, podtest.Pod("unread"))
	if _, err := gen.Attributes(ctx, unread); err != nil || gen.KnownAttributes(unread) != nil {
		t.Errorf("an ended generation has cached attributes (%v)", err)
	}
	if _, err := gen.Object(ctx, unread, c.Blocks.Now()); err != nil || c.Blocks.Stats().Used != 0 {
		t.Errorf("an ended generation has cached %d bytes (%v)", c.Blocks.Stats().Used, err)
	}
	late := &derived{}
	if gen.Derived("late", func() objects.Derived { return late }); !late.closed {
		t.Error("derived data of an ended generation is open")
	}
	c.View.Close()
	swap.Set(podtest.Encryption(t, "1"))
	if c.View.CurrentGeneration() != next || rotated != 1 {
		t.Error("a closed view changes its generation")
	}
}

// converting decodes custom resources to example.com/v1, as a webhook would convert them.
type converting struct{ runtime.Codec }

func (c converting) Decode(data []byte, kind *schema.GroupVersionKind, into runtime.Object) (runtime.Object, *schema.GroupVersionKind, error) {
	obj, was, err := c.Codec.Decode(data, kind, into)
	if u, ok := obj.(*unstructured.Unstructured); ok && err == nil {
		u.SetAPIVersion("example.com/v1")
	}
	return obj, was, err
}

// TestConverted_EntryDropped_IsReleased: a custom resource converted by a webhook is cached while
// the object is unchanged, and for its deletion event while the history has that.
func TestConverted_EntryDropped_IsReleased(t *testing.T) {
	newWidget := func() runtime.Object {
		u := &unstructured.Unstructured{}
		u.SetGroupVersionKind(schema.GroupVersionKind{Group: "example.com", Version: "v1", Kind: "Widget"})
		return u
	}
	c := podtest.New(t, func(o *podtest.Options) {
		o.Window, o.Codec = mirror.Window{MaxBytes: 20_000}, converting{unstructured.UnstructuredJSONScheme}
		o.Config.NewFunc, o.Config.GetAttrs = newWidget, storage.DefaultNamespaceScopedAttr
	})
	const key = podtest.Root + "ns/a"
	gen := c.View.CurrentGeneration()
	var one int64
	for i := range 50 {
		c.Etcd.Put(key, fmt.Sprintf(`{"apiVersion":"example.com/v2","kind":"Widget","metadata":{"name":"a","namespace":"ns","labels":{"n":"%02d"}}}`, i))
		c.CatchUp(t)
		e, _ := c.Latest(t).Get(key)
		for read := range 2 {
			u := newWidget().(*unstructured.Unstructured)
			n := c.Decoded(func() {
				if err := gen.DecodeInto(podtest.Context(t), e, u); err != nil {
					t.Fatal(err)
				}
			})
			if u.GetAPIVersion() != "example.com/v1" || u.GetResourceVersion() != fmt.Sprint(e.ModRevision()) || n != 1-read {
				t.Fatalf("read %d converted %d times: %v", read, n, u.Object)
			}
		}
		switch used := c.Blocks.Stats().Used; {
		case used == 0:
			t.Fatal("the cache is empty")
		case i == 0:
			one = used
		}
		// The writer moves the published revision before it removes the memo of the previous entry.
		podtest.Eventually(t, fmt.Sprintf("after %d updates the cache holds one object", i), func() bool { return c.Blocks.Stats().Used == one })
	}
	rev := c.Etcd.Revision()
	c.Etcd.Delete(key)
	c.CatchUp(t)
	if used := c.Blocks.Stats().Used; used != one {
		t.Errorf("after the deletion %d cached bytes, want %d for its event", used, one)
	}
	ev := c.EventsAfter(t, rev)[0]
	if n := c.Decoded(func() {
		if obj, err := gen.ObjectBefore(t.Context(), ev); err != nil || obj.(*objects.CachingObject).GetResourceVersion() != fmt.Sprint(ev.Rev) {
			t.Errorf("the deleted object: %v, %v", obj, err)
		}
	}); n != 0 {
		t.Error("the event needs another conversion")
	}
	for i := range 100 { // more history than the window holds
		c.Etcd.Put(podtest.Root+"ns/b", fmt.Sprintf(`{"apiVersion":"example.com/v1","kind":"Widget","metadata":{"name":"b","namespace":"ns","annotations":{"n":"%0500d"}}}`, i))
	}
	c.CatchUp(t)
	podtest.Eventually(t, "the cache is empty when history has dropped the deletion", func() bool { return c.Blocks.Stats().Used == 0 })
}

// TestFinder_MostSearchesFail_Ends: a finder ends after 1,000 misses, unless more values were
// found; labels and fields are counted apart.
func TestFinder_MostSearchesFail_Ends(t *testing.T) {
	for _, hits := range []int{0, 1, 3} { // of four values
		n := 0
		c := podtest.New(t, func(o *podtest.Options) {
			o.Config.Find = func(_ bool, name string) transcode.Find {
				if name == "none" {
					return nil
				}
				return func([]byte) ([]byte, bool, bool) {
					n++
					return []byte("value"), true, n%4 < hits
				}
			}
		})
		c.Put(t, podtest.Pod("a"))
		c.CatchUp(t)
		gen, e := c.View.CurrentGeneration(), c.Entry(t, podtest.Pod("a"))
		if gen.Finder(true, "none") != nil {
			t.Error("a label without a finder has one")
		}
		for range 6000 {
			finder := gen.Finder(true, "label")
			if finder == nil {
				break
			}
			pass := finder.Begin(podtest.Context(t))
			value, present, ok := pass.Find(e)
			if ok != (n%4 < hits) || ok && (!present || string(value) != "value") {
				t.Fatalf("search %d: %q, %t, %t", n, value, present, ok)
			}
			pass.End()
		}
		if ends := hits < 2; (gen.Finder(true, "label") == nil) != ends || ends && n > 1400 || gen.Finder(false, "field") == nil {
			t.Errorf("%d of 4 values are found: the finder ends after %d searches: %t", hits, n, gen.Finder(true, "label") == nil)
		}
	}
}
