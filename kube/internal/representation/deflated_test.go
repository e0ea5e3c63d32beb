package representation

import (
	"bytes"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"

	"github.com/stratakube/strata/internal/test/testcheck"
	"github.com/stratakube/strata/kube/internal/test/podtest"
)

// Readers of one list walk it in step; each leaf is compressed once for all of them.
func TestFrames_ConcurrentReaders_CompressLeafOnce(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 200)
	rep := newRep(t, c, Format{})
	leaf := runs(t, c)[0]

	const readers = 32
	first := make([]*byte, readers) // the address of each reader's result
	start := make(chan struct{})
	var group sync.WaitGroup
	for i := range readers {
		group.Go(func() {
			<-start
			run, err := rep.deflatedItems(t.Context(), leaf)
			if err != nil || len(run.Deflated) == 0 {
				t.Errorf("%d bytes, %v", len(run.Deflated), err)
				return
			}
			first[i] = &run.Deflated[0]
		})
	}
	close(start)
	group.Wait()
	for i := range first {
		if first[i] != first[0] {
			t.Fatalf("readers 0 and %d got runs that were compressed apart", i)
		}
	}
}

// Compressed data counts against the budget as long as its leaf is part of the newest version.
func TestFrames_OfNewestVersion_CountAgainstBudget(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 200)
	rep := newRep(t, c, Format{})
	leaf := runs(t, c)[0]
	var spans Spans
	if err := rep.appendRun(t.Context(), &spans, leaf); err != nil || len(spans.All) == 0 {
		t.Fatalf("%d spans, %v", len(spans.All), err)
	}

	before := c.Blocks.Stats().Used
	run, err := rep.deflatedItems(t.Context(), leaf)
	testcheck.NoError(t, err)
	kept := c.Blocks.Stats().Used - before
	if most := int64(len(run.Deflated) + 1024); kept < int64(len(run.Deflated)) || kept > most {
		t.Errorf("%d bytes are counted for a compressed leaf of %d, want a little more", kept, len(run.Deflated))
	}

	// A change of one object retires its leaf.
	pod := podtest.Labelled("pod-0000", "changed", "yes")
	pod.Namespace = "ns-0"
	c.Put(t, pod)
	c.CatchUp(t)
	podtest.Eventually(t, "the compressed leaf goes, because the leaf was replaced", func() bool {
		return !rep.keepsDeflated(leaf)
	})
	again, err := rep.deflatedItems(t.Context(), runs(t, c)[0])
	if err != nil || again.CRC == run.CRC {
		t.Errorf("after a change the leaf has the same checksum %08x (%v)", again.CRC, err)
	}
}

// A reader whose request ends while it compresses a leaf does not fail other readers.
func TestFrames_ReaderCanceled_OthersSucceed(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 200)
	failed := errors.New("this request has ended")
	var calls atomic.Int64
	entered, release := make(chan struct{}), make(chan struct{})
	rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
		if calls.Add(1) == 1 {
			close(entered)
			<-release
			return nil, failed
		}
		return podItem(dst, obj)
	}})
	leaf := runs(t, c)[0]

	var group sync.WaitGroup
	group.Go(func() {
		if _, err := rep.deflatedItems(t.Context(), leaf); !errors.Is(err, failed) {
			t.Errorf("the first reader got %v, want its own error", err)
		}
	})
	<-entered
	var started sync.WaitGroup
	for range 32 {
		started.Add(1)
		group.Go(func() {
			started.Done()
			run, err := rep.deflatedItems(t.Context(), leaf)
			if err != nil || len(run.Deflated) == 0 {
				t.Errorf("%d bytes, %v", len(run.Deflated), err)
			}
		})
	}
	started.Wait()
	close(release)
	group.Wait()
}

// TestFrames_OfLeaves_EqualTheirItems, with and without cached items, are counted, and are
// cached beside the items of the same leaf.
func TestFrames_OfLeaves_EqualTheirItems(t *testing.T) {
	for _, kept := range []bool{false, true} {
		c := podtest.New(t)
		c.Fill(t, 300)
		rep := newRep(t, c, Format{})
		all := runs(t, c)
		var want []byte
		var sizes []uint32
		items := newRep(t, c, Format{})
		if kept {
			items = rep
		}
		for _, run := range all {
			var spans Spans
			testcheck.NoError(t, items.appendRun(t.Context(), &spans, run))
			for _, e := range run.Items() {
				item, err := items.Item(t.Context(), e)
				testcheck.NoError(t, err)
				var size int
				want, size = podFrame(want, watch.Added, item)
				sizes = append(sizes, uint32(size))
			}
		}
		before := c.Blocks.Stats().Used
		for range 2 {
			frames, err := rep.DeflatedFrames(t.Context(), nil, all, podFrame)
			if err != nil || len(frames) != len(all) {
				t.Fatalf("%d frames of %d runs, %v", len(frames), len(all), err)
			}
			var got []byte
			var gotSizes []uint32
			for _, f := range frames {
				got, gotSizes = append(got, inflate(t, f.Segment)...), append(gotSizes, f.Sizes...)
			}
			if !bytes.Equal(got, want) || !slices.Equal(gotSizes, sizes) {
				t.Fatalf("items kept %v: the frames are %d bytes in %d events, want %d in %d", kept, len(got), len(gotSizes), len(want), len(sizes))
			}
			for _, run := range all {
				if rep.keepsDeflated(run) {
					t.Error("a list would be sent the frames of a watch")
				}
			}
		}
		if c.Blocks.Stats().Used <= before {
			t.Error("frames are not counted")
		}
		if run, err := rep.deflatedItems(t.Context(), all[0]); err != nil || bytes.Contains(inflate(t, run), []byte("ADDED")) {
			t.Errorf("a list gets the frames of a watch (%v)", err)
		}
	}
}

// TestFrames_OfUndecodableObject_AreLeftOut: the frames of other leaves are returned.
func TestFrames_OfUndecodableObject_AreLeftOut(t *testing.T) {
	c := podtest.New(t)
	c.Fill(t, 300)
	all := runs(t, c)
	bad := all[1].Items()[0].Key()
	rep := newRep(t, c, Format{Encode: func(dst []byte, obj runtime.Object) ([]byte, error) {
		if strings.HasSuffix(bad, "/"+obj.(*example.Pod).Name) {
			return nil, errors.New("cannot be encoded")
		}
		return podItem(dst, obj)
	}})
	frames, err := rep.DeflatedFrames(t.Context(), nil, all, podFrame)
	testcheck.NoError(t, err)
	for i, f := range frames {
		if (f.Len == 0) != (i == 1) {
			t.Errorf("the frames of run %d have %d bytes", i, f.Len)
		}
	}
}

// TestFrames_OfEvents_AreShared: an event is compressed once for all watches that send it as the
// same type.
func TestFrames_OfEvents_AreShared(t *testing.T) {
	c := podtest.New(t)
	rep := newRep(t, c, Format{})
	rev := c.Put(t, podtest.Pod("a"))
	c.Put(t, podtest.Pod("b"))
	c.Etcd.Delete(podtest.Key(podtest.Pod("b")))
	c.CatchUp(t)
	events := c.EventsAfter(t, rev)
	if len(events) != 2 {
		t.Fatalf("%d events", len(events))
	}
	seen := map[*Frame]bool{}
	for _, use := range []struct {
		event int
		t     watch.EventType
	}{{0, watch.Added}, {0, watch.Modified}, {1, watch.Deleted}} {
		first, err := rep.DeflatedEvent(t.Context(), events[use.event], use.t, podFrame)
		testcheck.NoError(t, err)
		again, err := rep.DeflatedEvent(t.Context(), events[use.event], use.t, podFrame)
		if err != nil || again != first || seen[first] {
			t.Errorf("%s: %v, shared %v, of another type %v", use.t, err, again == first, seen[first])
		}
		seen[first] = true
		item := rep.ItemAfter
		if use.t == watch.Deleted {
			item = rep.ItemBefore
		}
		data, err := item(t.Context(), events[use.event])
		testcheck.NoError(t, err)
		if rv := fmt.Appendf(nil, `"resourceVersion":"%d"`, events[use.event].Rev); !bytes.Contains(data, rv) {
			t.Errorf("%s: the item %s is not of the event's revision", use.t, data)
		}
		if want, size := podFrame(nil, use.t, data); !bytes.Equal(inflate(t, first.Segment), want) || first.Size != size {
			t.Errorf("%s: the frame is not that of the item", use.t)
		}
	}
}
