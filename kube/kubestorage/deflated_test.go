package kubestorage

import (
	"bytes"
	"compress/gzip"
	"errors"
	"io"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/blockcache"
	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/kube/internal/gzipjoin"
	"github.com/stratakube/strata/mirror"
)

// firstLeaf returns the first whole leaf of all pods.
func firstLeaf(t testing.TB, s *Store) mirror.Run {
	t.Helper()
	r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: storage.Everything})
	if err != nil {
		t.Fatal(err)
	}
	for run := range r.Runs() {
		if run.Whole() {
			return run
		}
	}
	t.Fatal("no whole leaf")
	return mirror.Run{}
}

// Readers of one list walk it in step; each leaf is compressed once for all of them.
func TestFrames_ConcurrentReaders_CompressLeafOnce(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	rep := newRepresentation(s, podItem, nil)
	defer rep.Close()
	leaf := firstLeaf(t, s)

	const readers = 32
	first := make([]*byte, readers) // the address of each reader's result
	start := make(chan struct{})
	var group sync.WaitGroup
	for i := range readers {
		group.Go(func() {
			<-start
			run, err := rep.Deflated(t.Context(), leaf)
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
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	rep := newRepresentation(s, podItem, nil)
	defer rep.Close()
	leaf := firstLeaf(t, s)
	var spans encoded.Spans
	if err := rep.AppendRun(t.Context(), &spans, leaf); err != nil || len(spans.All) == 0 {
		t.Fatalf("%d spans, %v", len(spans.All), err)
	}

	before := s.cluster.blocks.Stats().Used
	run, err := rep.Deflated(t.Context(), leaf)
	if err != nil {
		t.Fatal(err)
	}
	kept := s.cluster.blocks.Stats().Used - before
	if want := int64(len(run.Deflated) + blockcache.Overhead); kept != want {
		t.Errorf("%d bytes are counted for a compressed leaf, want %d", kept, want)
	}

	// A change of one object retires its leaf.
	key := strings.TrimPrefix(leaf.Items()[0].Key(), strings.TrimSuffix(testPrefix, "/"))
	err = f.GuaranteedUpdate(t.Context(), key, &example.Pod{}, false, nil, storage.SimpleUpdate(func(obj runtime.Object) (runtime.Object, error) {
		obj.(*example.Pod).Labels["changed"] = "yes"
		return obj, nil
	}), nil)
	if err != nil {
		t.Fatal(err)
	}
	f.catchUp(t)
	eventually(t, "the compressed leaf goes, because the leaf was replaced", func() bool {
		return !rep.KeepsDeflated(leaf)
	})
	again, err := rep.Deflated(t.Context(), firstLeaf(t, s))
	if err != nil || again.CRC == run.CRC {
		t.Errorf("after a change the leaf has the same checksum %08x (%v)", again.CRC, err)
	}
}

// A reader whose request ends while it compresses a leaf does not fail other readers.
func TestFrames_ReaderCanceled_OthersSucceed(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	failed := errors.New("this request has ended")
	var calls atomic.Int64
	entered, release := make(chan struct{}), make(chan struct{})
	rep := newRepresentation(s, func(dst []byte, obj runtime.Object) ([]byte, error) {
		if calls.Add(1) == 1 {
			close(entered)
			<-release
			return nil, failed
		}
		return podItem(dst, obj)
	}, nil)
	defer rep.Close()
	leaf := firstLeaf(t, s)

	var group sync.WaitGroup
	group.Go(func() {
		if _, err := rep.Deflated(t.Context(), leaf); !errors.Is(err, failed) {
			t.Errorf("the first reader got %v, want its own error", err)
		}
	})
	<-entered
	var started sync.WaitGroup
	for range 32 {
		started.Add(1)
		group.Go(func() {
			started.Done()
			run, err := rep.Deflated(t.Context(), leaf)
			if err != nil || len(run.Deflated) == 0 {
				t.Errorf("%d bytes, %v", len(run.Deflated), err)
			}
		})
	}
	started.Wait()
	close(release)
	group.Wait()
}

// podFrame frames each item as a line that begins with the type.
func podFrame(dst []byte, t watch.EventType, item []byte) (framed []byte, size int) {
	n := len(dst)
	dst = append(append(append(append(dst, t...), ' '), item...), '\n')
	return dst, len(dst) - n
}

// inflate returns the uncompressed bytes of a run.
func inflate(t testing.TB, run gzipjoin.Segment) []byte {
	t.Helper()
	var body bytes.Buffer
	z := gzipjoin.NewWriter(&body)
	if err := errors.Join(z.WriteRun(run), z.Close()); err != nil {
		t.Fatal(err)
	}
	r, err := gzip.NewReader(&body)
	if err != nil {
		t.Fatal(err)
	}
	content, err := io.ReadAll(r)
	if err != nil {
		t.Fatal(err)
	}
	return content
}

// TestFrames_OfLeaves_EqualTheirItems, with and without cached items, are counted, and are
// cached beside the items of the same leaf.
func TestFrames_OfLeaves_EqualTheirItems(t *testing.T) {
	for _, kept := range []bool{false, true} {
		f := setup(t)
		s := f.engine(t)
		fillPods(t, f, 300)
		rep := newRepresentation(s, podItem, nil)
		defer rep.Close()
		r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: storage.Everything})
		if err != nil {
			t.Fatal(err)
		}
		var runs []mirror.Run
		for run := range r.Runs() {
			runs = append(runs, run)
		}
		var want []byte
		var sizes []uint32
		items := newRepresentation(s, podItem, nil)
		defer items.Close()
		if kept {
			items = rep
		}
		for _, run := range runs {
			var spans encoded.Spans
			if err := items.AppendRun(t.Context(), &spans, run); err != nil {
				t.Fatal(err)
			}
			for _, e := range run.Items() {
				item, err := items.Item(t.Context(), e)
				if err != nil {
					t.Fatal(err)
				}
				var size int
				want, size = podFrame(want, watch.Added, item)
				sizes = append(sizes, uint32(size))
			}
		}
		before := s.cluster.blocks.Stats().Used
		for range 2 {
			frames, err := rep.DeflatedFrames(t.Context(), nil, runs, podFrame)
			if err != nil || len(frames) != len(runs) {
				t.Fatalf("%d frames of %d runs, %v", len(frames), len(runs), err)
			}
			var got []byte
			var gotSizes []uint32
			for _, f := range frames {
				got, gotSizes = append(got, inflate(t, f.Segment)...), append(gotSizes, f.Sizes...)
			}
			if !bytes.Equal(got, want) || !slices.Equal(gotSizes, sizes) {
				t.Fatalf("items kept %v: the frames are %d bytes in %d events, want %d in %d", kept, len(got), len(gotSizes), len(want), len(sizes))
			}
			for _, run := range runs {
				if rep.KeepsDeflated(run) {
					t.Error("a list would be sent the frames of a watch")
				}
			}
		}
		if s.cluster.blocks.Stats().Used <= before {
			t.Error("frames are not counted")
		}
		if run, err := rep.Deflated(t.Context(), runs[0]); err != nil || bytes.Contains(inflate(t, run), []byte("ADDED")) {
			t.Errorf("a list gets the frames of a watch (%v)", err)
		}
	}
}

// TestFrames_OfUndecodableObject_AreLeftOut: the frames of other leaves are returned.
func TestFrames_OfUndecodableObject_AreLeftOut(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: storage.Everything})
	if err != nil {
		t.Fatal(err)
	}
	var runs []mirror.Run
	for run := range r.Runs() {
		runs = append(runs, run)
	}
	bad := runs[1].Items()[0].Key()
	rep := newRepresentation(s, func(dst []byte, obj runtime.Object) ([]byte, error) {
		if strings.HasSuffix(bad, "/"+obj.(*example.Pod).Name) {
			return nil, errors.New("cannot be encoded")
		}
		return podItem(dst, obj)
	}, nil)
	defer rep.Close()
	frames, err := rep.DeflatedFrames(t.Context(), nil, runs, podFrame)
	if err != nil {
		t.Fatal(err)
	}
	for i, f := range frames {
		if (f.Len == 0) != (i == 1) {
			t.Errorf("the frames of run %d have %d bytes", i, f.Len)
		}
	}
}

// TestFrames_OfEvents_AreShared: an event is compressed once for all watches that send it as the
// same type.
func TestFrames_OfEvents_AreShared(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	rep := newRepresentation(s, podItem, nil)
	defer rep.Close()
	f.create(t, newPod("a"))
	f.catchUp(t)
	snap, err := s.resource.Latest()
	if err != nil {
		t.Fatal(err)
	}
	cursor := snap.Cursor("", "")
	f.create(t, newPod("b"))
	if err := f.Delete(t.Context(), "/pods/ns/b", &example.Pod{}, nil, storage.ValidateAllObjectFunc, nil, storage.DeleteOptions{}); err != nil {
		t.Fatal(err)
	}
	f.catchUp(t)
	events, err := cursor.Next(nil, 10)
	if err != nil || len(events) != 2 {
		t.Fatalf("%d events, %v", len(events), err)
	}
	seen := map[*encoded.Frame]bool{}
	for _, use := range []struct {
		event int
		t     watch.EventType
	}{{0, watch.Added}, {0, watch.Modified}, {1, watch.Deleted}} {
		first, err := rep.DeflatedEvent(events[use.event], use.t, podFrame)
		if err != nil {
			t.Fatal(err)
		}
		again, err := rep.DeflatedEvent(events[use.event], use.t, podFrame)
		if err != nil || again != first || seen[first] {
			t.Errorf("%s: %v, shared %v, of another type %v", use.t, err, again == first, seen[first])
		}
		seen[first] = true
		item := rep.ItemAfter
		if use.t == watch.Deleted {
			item = rep.ItemBefore
		}
		data, err := item(events[use.event])
		if err != nil {
			t.Fatal(err)
		}
		if want, size := podFrame(nil, use.t, data); !bytes.Equal(inflate(t, first.Segment), want) || first.Size != size {
			t.Errorf("%s: the frame is not that of the item", use.t)
		}
	}
}
