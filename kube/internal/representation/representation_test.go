package representation

import (
	"bytes"
	"errors"
	"fmt"
	"sync/atomic"
	"testing"
	"testing/synctest"

	"k8s.io/apimachinery/pkg/runtime"

	"github.com/stratakube/strata/btree"
	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
	"github.com/stratakube/strata/mirror/driver"
)

// TestRepresentation_SecondList_DecodesOnlyChanges shows the purpose of cached items.
func TestRepresentation_SecondList_DecodesOnlyChanges(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 300)
	rep := newRep(t, c, Format{})
	for i, want := range []int{300, 0, 1} {
		if i == 2 {
			pod := podtest.Labelled("pod-0000", "changed", "yes")
			pod.Namespace = "ns-0"
			c.Put(t, pod)
			c.CatchUp(t)
		}
		var got []byte
		if n := c.Decoded(func() { got = list(t, c, rep) }); n != want {
			t.Errorf("list %d decoded %d objects, want %d", i, n, want)
		}
		if want := encodedOneByOne(t, c); !bytes.Equal(got, want) {
			t.Errorf("list %d has %d bytes, want %d", i, len(got), len(want))
		}
		if changed := bytes.Contains(got, []byte(`"changed":"yes"`)); changed != (i == 2) {
			t.Errorf("list %d has the changed object: %t", i, changed)
		}
	}
}

// TestRepresentation_PartOfLeaf_HasItsItems: with and without cached items, one by one and as a
// run, a page has the items of its range.
func TestRepresentation_PartOfLeaf_HasItsItems(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 300)
	whole := encodedOneByOne(t, c)
	for _, cached := range []bool{false, true} {
		rep := newRep(t, c, Format{})
		if cached {
			list(t, c, rep)
		}
		var got []byte
		snap := c.Latest(t)
		middle := podtest.Root + "ns-1/pod-0100"
		for _, bounds := range [][2]string{{"", middle}, {middle, ""}} {
			var spans Spans
			for run := range snap.Runs(bounds[0], bounds[1]) {
				if rep.keeps(run) != cached {
					t.Errorf("a run of %d items is cached: %t", len(run.Items()), !cached)
				}
				testcheck.NoError(t, rep.appendRun(podtest.Context(t), &spans, run))
				if !rep.keeps(run) {
					t.Error("the items of a run that was read are not cached")
				}
				if n, known := rep.size(run); !known || n == 0 {
					t.Errorf("the size of a run that was read is %d, %t", n, known)
				}
			}
			got = append(got, bytes.Join(spans.All, nil)...)
		}
		if !bytes.Equal(got, whole) {
			t.Errorf("cached %t: two pages have %d bytes, want %d", cached, len(got), len(whole))
		}
	}
}

// TestRepresentation_Budget_BoundsCachedBytes, and bytes of deleted entries are released.
func TestRepresentation_Budget_BoundsCachedBytes(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 300)
	first := newRep(t, c, Format{})
	list(t, c, first)
	all := c.Blocks.Stats().Used
	if all == 0 {
		t.Fatal("the cache is empty")
	}
	limit := c.Blocks.Stats().Limit
	c.Blocks.Charge(limit - all - all/2) // half of the next representation has room
	rep, want := newRep(t, c, Format{}), encodedOneByOne(t, c)
	for range 3 {
		if got := list(t, c, rep); !bytes.Equal(got, want) {
			t.Fatalf("listed %d bytes, want %d", len(got), len(want))
		}
	}
	if used := c.Blocks.Stats().Used; used > limit {
		t.Fatalf("%d cached bytes, want at most %d", used, limit)
	}
	c.Blocks.Charge(-c.Blocks.Charged())
	for e := range c.Latest(t).All("", "") {
		c.Etcd.Delete(e.Key())
	}
	c.CatchUp(t)
	podtest.Eventually(t, "the cache holds no deleted objects", func() bool { return c.Blocks.Stats().Used == 0 })
}

// TestRepresentation_SmallParts_AreJoined: a leaf whose items were cached one by one, in blocks of
// their own, is copied into few blocks.
func TestRepresentation_SmallParts_AreJoined(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 60) // one leaf
	rep := newRep(t, c, Format{})
	for e := range c.Latest(t).All("", "") {
		if _, err := rep.Item(podtest.Context(t), e); err != nil {
			t.Fatal(err)
		}
	}
	run := runs(t, c)[0]
	var spans Spans
	if n := c.Decoded(func() {
		testcheck.NoError(t, rep.appendRun(podtest.Context(t), &spans, run))
	}); n != 0 || len(spans.All) != 1 {
		t.Errorf("%d items were decoded again, and the leaf has %d parts, want 1", n, len(spans.All))
	}
	if got := bytes.Join(spans.All, nil); !bytes.Equal(got, encodedOneByOne(t, c)) {
		t.Errorf("the leaf has %d bytes", len(got))
	}
}

// TestRepresentation_SpliceableItems_NeedNoCache: an item that is known to splice is neither
// decoded nor cached when the cache is full. One whose splice differs is encoded.
func TestRepresentation_SpliceableItems_NeedNoCache(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 200)
	var wrong atomic.Bool
	rep := newRep(t, c, Format{Splice: func(dst, stored []byte, rev mirror.Revision) ([]byte, bool) {
		item := bytes.Replace(stored, []byte(`"metadata":{`), fmt.Appendf(nil, `"metadata":{"resourceVersion":"%d",`, rev), 1)
		if wrong.Load() {
			item = item[1:]
		}
		return append(dst, item...), true
	}, Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
		// As podItem, with the resource version at the start of the metadata.
		item, err := podItem(nil, obj)
		rv := fmt.Appendf(nil, `"resourceVersion":"%s",`, obj.(interface{ GetResourceVersion() string }).GetResourceVersion())
		item = bytes.Replace(item, rv, nil, 1)
		return append(dst, bytes.Replace(item, []byte(`"metadata":{`), append([]byte(`"metadata":{`), rv...), 1)...), err
	}})
	c.Blocks.Charge(c.Blocks.Stats().Limit)
	first := list(t, c, rep)
	if n := c.Decoded(func() {
		if again := list(t, c, rep); !bytes.Equal(again, first) {
			t.Errorf("%d bytes and then %d", len(first), len(again))
		}
		var buf []byte
		for e := range c.Latest(t).All("", "") {
			item, err := rep.ItemIn(podtest.Context(t), e, &buf)
			testcheck.NoError(t, err)
			if size, err := rep.ItemSize(podtest.Context(t), e, nil); err != nil || size != len(item) {
				t.Fatalf("the size of an item is %d (%v), want %d", size, err, len(item))
			}
		}
	}); n != 0 {
		t.Errorf("%d objects were decoded again", n)
	}
	if used := c.Blocks.Stats().Used - c.Blocks.Charged(); used != 0 {
		t.Errorf("%d bytes are cached, where none are allowed", used)
	}
	wrong.Store(true)
	rep = newRep(t, c, rep.format)
	list(t, c, rep)
	if n := c.Decoded(func() {
		if again := list(t, c, rep); !bytes.Equal(again, first) {
			t.Error("an item that splicing makes in another way was spliced")
		}
	}); n != 200 {
		t.Errorf("%d objects were decoded, want all", n)
	}
}

// TestRepresentation_Transcode_DecodesWhatItDeclines: the transcoder's item is used without
// decoding; other values are decoded.
func TestRepresentation_Transcode_DecodesWhatItDeclines(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 100)
	rep := newRep(t, c, Format{Transcode: func(dst, stored []byte, _ mirror.Revision) ([]byte, bool) {
		return append(dst, "transcoded\n"...), !bytes.Contains(stored, []byte(`"i":"3"`))
	}})
	var got []byte
	if n := c.Decoded(func() { got = list(t, c, rep) }); n != 10 || bytes.Count(got, []byte("transcoded\n")) != 90 {
		t.Errorf("%d objects were decoded, want the 10 that the transcoder declines; %d items are its own", n, bytes.Count(got, []byte("transcoded\n")))
	}
}

// TestRepresentation_CutFromWhole_DecodesNothing: an item is cut from the item of another
// representation that has it cached.
func TestRepresentation_CutFromWhole_DecodesNothing(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 100)
	whole := newRep(t, c, Format{})
	rep := newRep(t, c, Format{Whole: whole, Cut: func(dst, item []byte) ([]byte, bool) { return append(dst, item[:10]...), true }})
	list(t, c, whole)
	if n := c.Decoded(func() {
		if got := list(t, c, rep); len(got) != 100*10 {
			t.Errorf("%d bytes, want 10 of each item", len(got))
		}
	}); n != 0 {
		t.Errorf("%d objects were decoded", n)
	}
}

// TestRepresentation_ItemSizeChanges_NextListMeasuresAgain: a webhook may convert an object
// differently each time. From the next list on, the announced size equals the sent size.
func TestRepresentation_ItemSizeChanges_NextListMeasuresAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		c.Fill(t, 300)
		var more atomic.Int32
		rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
			dst, err := podItem(dst, obj)
			return append(dst, bytes.Repeat([]byte(" "), int(more.Load()))...), err
		}})
		// announced and sent are the sizes of one list.
		sizes := func() (announced, sent int64) {
			t.Helper()
			announced, known := rep.Measure(c.Latest(t), "", "")
			if !known {
				var err error
				if announced, err = (&List{Rep: rep}).Prepare(podtest.Context(t), c.Latest(t).Runs("", "")); err != nil {
					t.Fatal(err)
				}
			}
			return announced, int64(len(list(t, c, rep)))
		}
		for range 2 {
			if announced, sent := sizes(); announced != sent {
				t.Fatalf("%d bytes are announced, and %d sent", announced, sent)
			}
		}
		more.Store(7)
		c.Evict()
		sizes() // detects the change, too late
		for range 2 {
			if announced, sent := sizes(); announced != sent {
				t.Fatalf("after a change %d bytes are announced, and %d sent", announced, sent)
			}
		}
		more.Store(9)
		c.Evict()
		if announced, sent := sizes(); announced != sent {
			t.Fatalf("after a second change %d bytes are announced, and %d sent", announced, sent)
		}
	})
}

// TestRepresentation_ItemSizeChanges_CompressedListMeasuresAgain: a compressed run whose items were
// not cached is not sent with the size of items that were made later.
func TestRepresentation_ItemSizeChanges_CompressedListMeasuresAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		c.Fill(t, 600)
		var more atomic.Int32
		more.Store(2000)
		rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
			dst, err := podItem(dst, obj)
			return append(dst, bytes.Repeat([]byte(" "), int(more.Load()))...), err
		}})
		// check compares the sizes of one compressed list.
		check := func() {
			t.Helper()
			l := &List{Rep: rep, Compressed: true}
			announced, err := l.Prepare(podtest.Context(t), c.Latest(t).Runs("", ""))
			if err != nil {
				t.Fatal(err)
			}
			sent, whole := int64(0), 0
			for p, err := range l.Parts(podtest.Context(t), c.Latest(t).Runs("", "")) {
				if err != nil {
					t.Fatal(err)
				}
				if p.Deflated.Len > 0 {
					whole++
				}
				sent += p.Deflated.Len
				for _, span := range p.Spans {
					sent += int64(len(span))
				}
			}
			if announced != sent || whole == 0 {
				t.Fatalf("%d bytes are announced, and %d sent, %d leaves compressed", announced, sent, whole)
			}
		}
		list(t, c, rep) // the size of the items is known
		c.Evict()
		check() // keeps the compressed runs
		more.Store(2007)
		for _, run := range runs(t, c) {
			// what an eviction of all items, but not of the compressed runs, leaves
			kept := rep.itemsOf(run.Leaf)
			kept.parts = nil
			for _, e := range run.Items() {
				for key := e.Memos().Get(rep.memoKey); key != nil; key = e.Memos().Get(rep.memoKey) {
					e.Memos().Swap(rep.memoKey, key, nil)
				}
			}
		}
		list(t, c, rep) // makes the items again, with another size
		check()
		check()
	})
}

// TestRepresentation_LargeLeaf_BuildsItemsOneByOne: the items of a leaf of large objects are not
// held together, but their total size is known.
func TestRepresentation_LargeLeaf_BuildsItemsOneByOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := podtest.New(t)
		c.Fill(t, 100)
		padding := bytes.Repeat([]byte(" "), (1<<20)/20)
		rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
			dst, err := podItem(dst, obj)
			return append(dst, padding...), err
		}})
		for _, run := range runs(t, c) {
			if isLarge(rep, run) {
				t.Error("the stored object is too small for the test")
			}
		}
		all, err := (&List{Rep: rep}).Prepare(podtest.Context(t), c.Latest(t).Runs("", ""))
		if err != nil {
			t.Fatal(err)
		}
		c.Evict()
		c.Blocks.Charge(c.Blocks.Stats().Limit)
		for _, run := range runs(t, c) {
			if !isLarge(rep, run) {
				t.Errorf("%d objects are not large", len(run.Items()))
			}
			var n int64
			var buf []byte
			for _, e := range run.Items() {
				item, err := rep.ItemIn(podtest.Context(t), e, &buf)
				if err != nil {
					t.Fatal(err)
				}
				n += int64(len(item))
			}
			if size, known := rep.size(run); !known || n != size {
				t.Errorf("%d bytes; the size is %d, %v", n, size, known)
			}
		}
		if again, err := (&List{Rep: rep}).Prepare(podtest.Context(t), c.Latest(t).Runs("", "")); err != nil || again != all {
			t.Errorf("%d bytes and then %d, %v", all, again, err)
		}
		if n, known := rep.Measure(c.Latest(t), "", ""); !known || n != all {
			t.Errorf("measured %d bytes, %v; want %d", n, known, all)
		}
	})
}

// TestPrepare_Deflated_KeepsCompressedRuns: a list that is sent compressed is prepared compressed,
// and its size is that of the runs.
func TestPrepare_Deflated_KeepsCompressedRuns(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 600)
	rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
		dst, err := podItem(dst, obj)
		return append(dst, bytes.Repeat([]byte(" "), 2000)...), err
	}})
	list(t, c, rep) // a leaf is compressed if its items, whose size is known now, are worth it
	n, err := (&List{Rep: rep, Compressed: true}).Prepare(podtest.Context(t), c.Latest(t).Runs("", ""))
	testcheck.NoError(t, err)
	var want int64
	for _, run := range runs(t, c) {
		if !rep.keepsDeflated(run) {
			t.Errorf("a leaf of %d items is not cached compressed", len(run.Items()))
		}
		segment, err := rep.deflatedItems(podtest.Context(t), run)
		testcheck.NoError(t, err)
		want += segment.Len
	}
	if n != want {
		t.Errorf("prepared %d bytes, want %d", n, want)
	}
}

// TestPrepare_Error_EndsPreparation: the error of an item is that of the list.
func TestPrepare_Error_EndsPreparation(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 600)
	failed := errors.New("cannot be encoded")
	rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
		if obj.(interface{ GetName() string }).GetName() == "pod-0300" {
			return nil, failed
		}
		return podItem(dst, obj)
	}})
	if n, err := (&List{Rep: rep}).Prepare(podtest.Context(t), c.Latest(t).Runs("", "")); n != 0 || !errors.Is(err, failed) {
		t.Errorf("%d bytes, %v", n, err)
	}
}

// TestRepresentation_DetachedEntries_AreNotCached: later reads cannot find items of entries that
// are in no version of the resource.
func TestRepresentation_DetachedEntries_AreNotCached(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 64)
	var kvs []driver.KV
	for e := range c.Latest(t).All("", "") {
		kv := driver.KV{Key: []byte(e.Key()), Value: e.Value(), CreateRevision: e.CreateRevision(), ModRevision: e.ModRevision()}
		if len(kvs)%5 < 2 {
			kv.ModRevision-- // an older state
		}
		kvs = append(kvs, kv)
	}
	rep := newRep(t, c, Format{})
	var first []byte
	for round := range 3 {
		run, own := c.Latest(t).DetachedRun(kvs)
		if own == 0 || run.Items()[0].Detached() == run.Items()[2].Detached() {
			t.Fatal("the run must have entries of memory and others")
		}
		n, err := (&List{Rep: rep, Once: true}).Prepare(podtest.Context(t), func(yield func(mirror.Run) bool) { yield(run) })
		var spans Spans
		if err == nil {
			err = (&List{Rep: rep, Once: true}).append(podtest.Context(t), &spans, run)
		}
		testcheck.NoError(t, err)
		all := bytes.Join(spans.All, nil)
		if round == 0 {
			first = all
		}
		if !bytes.Equal(all, first) || n != int64(len(all)) {
			t.Errorf("round %d has %d bytes, measured as %d, want %d", round, len(all), n, len(first))
		}
		if used := c.Blocks.Stats().Used; used != 0 {
			t.Errorf("round %d: %d bytes are cached", round, used)
		}
	}
}

// TestMemos_Leaves_LoseItemsOfClosedRepresentations and keep those of others.
func TestMemos_Leaves_LoseItemsOfClosedRepresentations(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 100)
	a, b := newRep(t, c, Format{}), newRep(t, c, Format{})
	list(t, c, a)
	list(t, c, b)
	check := func(wantA, wantB bool) {
		t.Helper()
		for _, run := range runs(t, c) {
			run.Leaf.Memos().DropClosed()
			if hasA, hasB := a.itemsOf(run.Leaf) != nil, b.itemsOf(run.Leaf) != nil; hasA != wantA || hasB != wantB || run.Leaf.Memos().Empty() != (!wantA && !wantB) {
				t.Errorf("items of a: %t, want %t; of b: %t, want %t", hasA, wantA, hasB, wantB)
			}
		}
	}
	check(true, true)
	a.Close()
	check(false, true)
	b.Close()
	check(false, false)
}

// TestOf_OneName_IsOneRepresentation that is closed with its generation.
func TestOf_OneName_IsOneRepresentation(t *testing.T) {
	swap := podtest.NewSwappable(podtest.Encryption(t, "1"))
	c := podtest.New(t, swap.With)
	pod := podtest.Pod("a")
	c.Seal(t, podtest.Encryption(t, "1"), pod)
	c.CatchUp(t)
	gen := c.View.CurrentGeneration()
	rep := Of(gen, "name", Format{Encode: podItem})
	if Of(gen, "name", Format{}) != rep || Of(gen, "other", Format{Encode: podItem}) == rep || !rep.Fresh() {
		t.Error("a name must have one representation, which is fresh")
	}
	if _, err := rep.Item(podtest.Context(t), c.Entry(t, pod)); err != nil || c.Blocks.Stats().Used == 0 {
		t.Fatalf("no item is cached: %v", err)
	}
	swap.Set(podtest.Encryption(t, "2"))
	next := c.View.CurrentGeneration()
	if rep.Fresh() || Of(next, "name", Format{Encode: podItem}) == rep || c.Blocks.Stats().Used != 0 {
		t.Errorf("after a change of keys the representation is in use, or %d bytes are cached", c.Blocks.Stats().Used)
	}
}

// TestRepresentation_LeafOfShard_UsesItemsOfResource: the leaves of a shard, which is a tree of
// some entries, have the items that a list of the resource has made, and do not move them.
func TestRepresentation_LeafOfShard_UsesItemsOfResource(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 300)
	rep := newRep(t, c, Format{})
	list(t, c, rep)
	used := c.Blocks.Stats().Used
	var entries []*mirror.Entry
	for e := range c.Latest(t).All("", "") {
		if e.ModRevision()%2 == 0 { // no two neighbours
			entries = append(entries, e)
		}
	}
	shard := btree.Build(entries)
	for run := range shard.Runs("", "") {
		run.Selected = true
		var spans Spans
		if n := c.Decoded(func() {
			testcheck.NoError(t, rep.appendRun(podtest.Context(t), &spans, run))
		}); n != 0 || !rep.keeps(run) {
			t.Errorf("%d objects were decoded, and the items are cached: %t", n, rep.keeps(run))
		}
	}
	if n, known := rep.Measure(&shard, "", ""); !known || n == 0 || c.Blocks.Stats().Used != used {
		t.Errorf("the shard has %d bytes, known %t; %d bytes are cached, %d before", n, known, c.Blocks.Stats().Used, used)
	}
	list(t, c, rep)
	for _, run := range runs(t, c) {
		if !rep.keeps(run) {
			t.Error("the items of the resource have moved")
		}
	}
}

// TestParts_SlowReader_MakesFewLeaves: while the reader writes a part, the bytes of others that are
// made are bounded, independent of the number of processors.
func TestParts_SlowReader_MakesFewLeaves(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		was := readying
		readying = make(chan struct{}, 16) // of 8 processors
		defer func() { readying = was }()
		c := podtest.New(t)
		c.Fill(t, 4000)
		padding := bytes.Repeat([]byte(" "), 8<<10)
		var made atomic.Int64
		rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
			n := len(dst)
			dst, err := podItem(dst, obj)
			dst = append(dst, padding...)
			made.Add(int64(len(dst) - n))
			return dst, err
		}})
		c.Blocks.Charge(c.Blocks.Stats().Limit)
		l, all := &List{Rep: rep}, c.Latest(t).Runs("", "")
		total, err := l.Prepare(podtest.Context(t), all)
		if err != nil || total < 8*readyBytes {
			t.Fatalf("%d bytes, %v", total, err)
		}
		made.Store(0)
		var written int64
		for p, err := range l.Parts(podtest.Context(t), all) {
			testcheck.NoError(t, err)
			synctest.Wait() // the reader is slow
			for _, span := range p.Spans {
				written += int64(len(span))
			}
			if ahead := made.Load() - written; ahead > readyBytes {
				t.Fatalf("%d bytes are made ahead of the reader", ahead)
			}
		}
		if written != total {
			t.Errorf("%d bytes are written, want %d", written, total)
		}
	})
}
