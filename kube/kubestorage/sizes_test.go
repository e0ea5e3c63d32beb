package kubestorage

import (
	"bytes"
	"slices"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/encoded"
	"github.com/stratakube/strata/mirror"
)

// TestRepresentation_ItemSizeChanges_NextListMeasuresAgain: a webhook may convert an object differently each time.
// From the next list on, the announced size equals the sent size.
func TestRepresentation_ItemSizeChanges_NextListMeasuresAgain(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 300)
	var more atomic.Int32
	rep := newRepresentation(s, func(dst []byte, obj runtime.Object) ([]byte, error) {
		dst, err := podItem(dst, obj)
		return append(dst, bytes.Repeat([]byte(" "), int(more.Load()))...), err
	}, nil)
	defer rep.Close()

	everything := storage.ListOptions{Recursive: true, Predicate: storage.Everything}
	// announced and sent are the sizes of one list.
	list := func() (announced, sent int64) {
		t.Helper()
		r, err := s.Read(contextFor(t), "/pods", everything)
		if err != nil {
			t.Fatal(err)
		}
		announced, known := rep.Measure(r.Snapshot, r.Start, r.End)
		if !known {
			if announced, err = rep.Prepare(contextFor(t), r.Runs(), false); err != nil {
				t.Fatal(err)
			}
		}
		var spans encoded.Spans
		for run := range r.Runs() {
			spans.Reset()
			if err := rep.AppendRun(contextFor(t), &spans, run); err != nil {
				t.Fatal(err)
			}
			for _, data := range spans.All {
				sent += int64(len(data))
			}
		}
		return announced, sent
	}
	for range 2 {
		if announced, sent := list(); announced != sent {
			t.Fatalf("%d bytes are announced, and %d sent", announced, sent)
		}
	}
	more.Store(7)
	s.cluster.blocks.Flush()
	list() // detects the change, too late
	for range 2 {
		if announced, sent := list(); announced != sent {
			t.Fatalf("after a change %d bytes are announced, and %d sent", announced, sent)
		}
	}
	more.Store(9)
	s.cluster.blocks.Flush()
	if announced, sent := list(); announced != sent {
		t.Fatalf("after a second change %d bytes are announced, and %d sent", announced, sent)
	}
}

// TestRepresentation_LargeLeaf_BuildsItemsOneByOne: the items of a leaf of large objects are not held together, but
// their total size is known.
func TestRepresentation_LargeLeaf_BuildsItemsOneByOne(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 100)
	padding := bytes.Repeat([]byte(" "), (1<<20)/20)
	rep := newRepresentation(s, func(dst []byte, obj runtime.Object) ([]byte, error) {
		dst, err := podItem(dst, obj)
		return append(dst, padding...), err
	}, nil)
	defer rep.Close()
	r, err := s.Read(contextFor(t), "/pods", storage.ListOptions{Recursive: true, Predicate: storage.Everything})
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range slices.Collect(r.Runs()) {
		if rep.Large(run) {
			t.Error("the stored object is too small for the test")
		}
	}
	all, err := rep.Prepare(contextFor(t), r.Runs(), false)
	if err != nil {
		t.Fatal(err)
	}
	for _, run := range slices.Collect(r.Runs()) {
		if !rep.Large(run) {
			t.Errorf("%d objects are not large", len(run.Items()))
		}
	}
	s.cluster.blocks.SetLimit(0)
	s.cluster.blocks.Flush()
	again, err := rep.Prepare(contextFor(t), func(yield func(mirror.Run) bool) {
		for run := range r.Runs() {
			var n int64
			var buf []byte
			for _, e := range run.Items() {
				item, err := rep.ItemIn(contextFor(t), e, &buf)
				if err != nil {
					t.Fatal(err)
				}
				n += int64(len(item))
			}
			if size, known := rep.Size(run); !known || n != size {
				t.Errorf("%d bytes; the size is %d, %v", n, size, known)
			}
			if !yield(run) {
				return
			}
		}
	}, false)
	if err != nil || again != all {
		t.Errorf("%d bytes and then %d, %v", all, again, err)
	}
	if n, known := rep.Measure(r.Snapshot, r.Start, r.End); !known || n != all {
		t.Errorf("measured %d bytes, %v; want %d", n, known, all)
	}
}
