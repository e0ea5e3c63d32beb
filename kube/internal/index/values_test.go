package index

import (
	"bytes"
	"context"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"k8s.io/apiserver/pkg/storage"
	storagetesting "k8s.io/apiserver/pkg/storage/testing"
	"k8s.io/apiserver/pkg/storage/value"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/transcode"
)

// TestFinder_FirstLists_DecodeSelectedObjects: lists by a label or field decode the selected
// objects, and cache their attributes, from the first one on: without an index, while its digests
// are made, and for a negation after that.
func TestFinder_FirstLists_DecodeSelectedObjects(t *testing.T) {
	const n = 1000
	f := finding(t)
	f.events(t, n)
	for i, c := range []struct {
		pred     storage.SelectionPredicate
		plan     string
		selected int
		decoded  int // selected objects that no list has decoded for their attributes
		found    int64
	}{
		// the first use of a label makes no index
		{podtest.Selecting(t, "none", ""), byStored, 0, 0, n},
		{podtest.Selecting(t, "n=7", ""), byStored, 20, 20, n},
		// digests of cached attributes, and of stored values
		{podtest.Selecting(t, "n=7", ""), byIndex, 20, 0, n - 20},
		{podtest.Selecting(t, "n=7", ""), byIndex, 20, 0, 0},
		{onNode(t, "object-8"), byIndex, 10, 10, n - 20},
		{onNode(t, "object-8"), byIndex, 10, 0, 0},
	} {
		found, stored, attributes := f.found.Load(), f.stored.Load(), f.attributes(t)
		f.require(t, c.pred, c.plan, c.selected)
		if got, counted := f.found.Load()-found, f.stored.Load()-stored; got != c.found || counted != c.found {
			t.Errorf("list %d found %d stored values and counted %d, want %d", i, got, counted, c.found)
		}
		if got := f.attributes(t) - attributes; got != c.decoded {
			t.Errorf("list %d cached the attributes of %d objects, want %d", i, got, c.decoded)
		}
	}
	if n := f.decoded.Load(); n != 0 {
		t.Errorf("%d objects were decoded for their values", n)
	}
}

// TestFinder_ValuesThatAreNotFound_AreDecoded: an object without the field may have a default, so
// it is decoded, and lists are the same.
func TestFinder_ValuesThatAreNotFound_AreDecoded(t *testing.T) {
	f := finding(t)
	f.events(t, 200)
	for i := range 50 {
		f.Put(t, podtest.Labelled(fmt.Sprintf("event-9%04d", i), "n", []string{"é", `"`, `\`}[i%3]))
	}
	f.CatchUp(t)
	for range 3 {
		for selector, want := range map[string]int{"spec.nodeName=": 50, "spec.nodeName!=object-7": 248, "spec.nodeName!=": 200} {
			pred := podtest.Selecting(t, "", selector)
			pred.IndexFields = []string{"spec.nodeName"}
			f.require(t, pred, byIndex, want)
		}
	}
	if n := f.decoded.Load(); f.found.Load() == 0 || n != 50 {
		t.Errorf("%d values were found, and %d objects decoded, want 50", f.found.Load(), n)
	}
}

// TestFinder_MostValuesAreNotFound_EndsSearches: values stored in another form are searched up to a
// bound, then lists decode all objects as without a finder. A resource of which most values are
// found continues.
func TestFinder_MostValuesAreNotFound_EndsSearches(t *testing.T) {
	const pods, bound = 2000, 1000
	for _, known := range []int{0, pods / 4, pods * 3 / 4} { // pods whose value is found
		var searched atomic.Int64
		f := newFixture(t, func(o *podtest.Options) {
			o.Config.Find = func(bool, string) transcode.Find {
				return func(stored []byte) ([]byte, bool, bool) {
					searched.Add(1)
					return []byte("b"), true, bytes.Contains(stored, []byte(`"known":"yes"`))
				}
			}
		})
		for i := range pods {
			pod := podtest.Labelled(fmt.Sprintf("pod-%04d", i), "a", "b")
			pod.Labels["known"] = "no"
			if i%4 < known*4/pods {
				pod.Labels["known"] = "yes"
			}
			f.Put(t, pod)
		}
		f.CatchUp(t)
		pred := podtest.Selecting(t, "a=c", "")
		if r := f.of(t, pred); r.name() != byStored || len(r.candidates("")) < pods-known {
			t.Errorf("of %d known values, the first list has the plan %s", known, r.name())
		}
		first := searched.Load()
		finder := f.View.CurrentGeneration().Finder(true, "other")
		if ends := known < pods/2; ends != (finder == nil) {
			t.Errorf("of %d known values, %d were searched, and there is a finder: %t", known, first, finder != nil)
		} else if missed := first * int64(pods-known) / pods; ends && missed > bound+64 || !ends && first != pods {
			t.Errorf("of %d known values, %d were searched", known, first)
		}
		if known == 0 {
			f.require(t, podtest.Selecting(t, "other=c", ""), byScan, 0)
		}
		f.require(t, pred, byIndex, 0) // which has the finder
		if n := searched.Load() - first; finder == nil && n != 0 {
			t.Errorf("of %d known values, %d were searched later", known, n)
		}
	}
}

// TestFinder_Uses_MakeIndex: the second use of a label within ten minutes makes its index, and the
// first one where values are large. A list in the next minutes then reads no stored value.
func TestFinder_Uses_MakeIndex(t *testing.T) {
	const pods = 100
	for _, c := range []struct {
		size, found int64 // bytes of an annotation; values that are found in all lists
		pause       time.Duration
		plans       []string
	}{
		{100, 2 * pods, 2 * time.Minute, []string{byStored, byIndex, byIndex}},
		{100, 3 * pods, 11 * time.Minute, []string{byStored, byStored, byStored}},
		{5000, pods, 2 * time.Minute, []string{byIndex, byIndex, byIndex}},
	} {
		synctest.Test(t, func(t *testing.T) {
			f := finding(t)
			for i := range pods {
				pod := podtest.Labelled(fmt.Sprintf("pod-%04d", i), "n", "1")
				pod.Annotations = map[string]string{"text": strings.Repeat("t", int(c.size))}
				f.Put(t, pod)
			}
			f.CatchUp(t)
			var plans []string
			for range c.plans {
				r := f.of(t, podtest.Selecting(t, "n=2", ""))
				plans = append(plans, r.name())
				if got := r.candidates(""); len(got) > 0 {
					t.Fatalf("%s are candidates", got)
				}
				time.Sleep(c.pause)
			}
			if !slices.Equal(plans, c.plans) || f.found.Load() != c.found {
				t.Errorf("with %d bytes and a list each %s: plans %s, want %s; %d values were found, want %d", c.size, c.pause, plans, c.plans, f.found.Load(), c.found)
			}
		})
	}
}

// TestFinder_StoredPlan_CountsDecodedObjects: a list without an index finds the values of most
// objects, and decodes the others to compare them.
func TestFinder_StoredPlan_CountsDecodedObjects(t *testing.T) {
	f := finding(t)
	f.events(t, 200)
	for i := range 50 {
		f.Put(t, podtest.Labelled(fmt.Sprintf("event-9%04d", i), "n", `\`))
	}
	f.CatchUp(t)
	f.require(t, podtest.Selecting(t, "n=7", ""), byStored, 4)
	if stored, decoded := f.stored.Load(), f.decoded.Load(); stored != 200 || decoded != 50 || f.attributes(t) != 54 {
		t.Errorf("%d values were found, want 200; %d objects decoded, want 50; %d have attributes, want 54", stored, decoded, f.attributes(t))
	}
}

// TestFinder_Negation_ComparesStoredValues: the digest has values by their hashes, and a negation
// compares one value of each hash, which no cached attributes have.
func TestFinder_Negation_ComparesStoredValues(t *testing.T) {
	f := finding(t)
	f.events(t, 1000)
	pred := podtest.Selecting(t, "", "spec.nodeName!=object-8")
	pred.IndexFields = []string{"spec.nodeName"}
	if got := f.of(t, pred).candidates(""); len(got) != 990 || f.attributes(t) != 0 {
		t.Errorf("%d candidates, want 990; %d objects have cached attributes, want none", len(got), f.attributes(t))
	}
}

// TestFinder_ConcurrentWalksOfEndedList_DoNotWrite: the walks of a list share its plan, also after
// its context has ended. The race detector checks it.
func TestFinder_ConcurrentWalksOfEndedList_DoNotWrite(t *testing.T) {
	f := finding(t)
	f.events(t, 200)
	ctx, cancel := context.WithCancel(podtest.Context(t))
	r := f.read(ctx, f.Latest(t), podtest.Selecting(t, "n=7", ""))
	if r.name() != byStored {
		t.Fatalf("plan %s", r.name())
	}
	cancel()
	var walks sync.WaitGroup
	for range 4 {
		walks.Go(func() { r.candidates("") })
	}
	walks.Wait()
}

// seal stores pods of numbers from start to end, in steps, as the transformer writes them: of 100
// nodes, with 50 values of a label.
func (f *fixture) seal(t *testing.T, transformer value.Transformer, start, end, step int) {
	t.Helper()
	for i := start; i < end; i += step {
		pod := podOn(fmt.Sprintf("event-%04d", i), fmt.Sprint("object-", i%100))
		pod.Labels = map[string]string{"n": fmt.Sprint(i % 50)}
		pod.Annotations = map[string]string{"text": strings.Repeat("a text that is like others, ", 30)}
		f.Seal(t, transformer, pod)
	}
	f.CatchUp(t)
}

// TestFinder_KeysReplaced_ReadsValuesAgain: values of indexes belong to the keys that decrypted
// them. After a change of keys lists find them again, and fail while an object is encrypted with a
// removed key.
func TestFinder_KeysReplaced_ReadsValuesAgain(t *testing.T) {
	const n = 400
	first, both, second := podtest.Encryption(t, "1"), podtest.Encryption(t, "2", "1"), podtest.Encryption(t, "2")
	swap := podtest.NewSwappable(first)
	f := finding(t, swap.With)
	f.seal(t, first, 0, n, 1)
	// lists have the plans of keys that were just replaced.
	lists := func(when string, fails bool) {
		t.Helper()
		for i, c := range []struct {
			pred storage.SelectionPredicate
			plan string
			want int
		}{
			{podtest.Selecting(t, "n=7", ""), byStored, n / 50},
			{podtest.Selecting(t, "n=7", ""), byIndex, n / 50},
			{onNode(t, "object-8"), byIndex, n / 100},
			{podtest.Selecting(t, "", "spec.nodeName!=object-9"), byIndex, n / 100 * 99},
		} {
			before, r := f.found.Load(), f.of(t, c.pred)
			got, err := r.selected(podtest.Context(t))
			switch {
			case (err != nil) != fails:
				t.Errorf("%s, list %d: %v", when, i, err)
			case !fails && len(got) != c.want:
				t.Errorf("%s, list %d has %d objects, want %d", when, i, len(got), c.want)
			case r.name() != c.plan:
				t.Errorf("%s, list %d has the plan %s, want %s", when, i, r.name(), c.plan)
			case !fails && f.found.Load() == before:
				t.Errorf("%s, list %d has found no stored value", when, i)
			}
		}
	}
	lists("with the first key", false)
	swap.Set(both)
	lists("with a further key", false)
	f.seal(t, both, 0, n, 2)
	swap.Set(second)
	lists("without the first key", true)
	f.seal(t, second, 1, n, 2)
	swap.Set(podtest.Encryption(t, "2"))
	lists("after all were written again", false)
}

// TestFinder_CompressedAndTransformedValues_AreFound: values that have no readers are compressed in
// memory; they are decompressed and transformed in buffers that a pass shares, beside values that
// are not compressed.
func TestFinder_CompressedAndTransformedValues_AreFound(t *testing.T) {
	const n = 1500
	synctest.Test(t, func(t *testing.T) {
		transformer := storagetesting.NewPrefixTransformer([]byte("a prefix:"), false)
		f := finding(t, func(o *podtest.Options) { o.Config.Transformer = transformer })
		f.seal(t, transformer, 0, n, 1)
		time.Sleep(20 * time.Minute) // of the bubble
		if got := f.Resource.Stats().Compressed; got != n {
			t.Fatalf("%d values are compressed, want %d", got, n)
		}
		f.seal(t, transformer, 0, n, 3) // not compressed now
		for _, plan := range []string{byStored, byIndex} {
			f.require(t, podtest.Selecting(t, "n=7", ""), plan, n/50)
		}
		if got := f.found.Load(); got != 2*n-n/50 {
			// the selected objects have attributes after the first list
			t.Errorf("%d values were found, want %d", got, 2*n-n/50)
		}
	})
}
