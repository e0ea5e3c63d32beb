package kubestorage

import (
	"errors"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

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

// Readers of one list walk it in step; it is compressed once, not once for each.
func TestReadersShareWhatOneOfThemCompresses(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	rep := s.NewRepresentation(podItem, nil)
	defer rep.Close()
	leaf := firstLeaf(t, s)

	const readers = 32
	first := make([]*byte, readers) // where what each reader got lies
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

// What is compressed counts against the budget as long as its leaf is part of the
// newest version.
func TestCompressedLeavesAreCounted(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	rep := s.NewRepresentation(podItem, nil)
	defer rep.Close()
	leaf := firstLeaf(t, s)
	var spans Spans
	if err := rep.AppendRun(t.Context(), &spans, leaf); err != nil || len(spans.All) == 0 {
		t.Fatalf("%d spans, %v", len(spans.All), err)
	}

	before := rep.budget.used.Load()
	run, err := rep.Deflated(t.Context(), leaf)
	if err != nil {
		t.Fatal(err)
	}
	kept := rep.budget.used.Load() - before
	if want := int64(len(run.Deflated) + blockOverhead); kept != want {
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
		_, ok := rep.keptDeflated(leaf.Leaf)
		return !ok
	})
	again, err := rep.Deflated(t.Context(), firstLeaf(t, s))
	if err != nil || again.CRC == run.CRC {
		t.Errorf("after a change the leaf has the same checksum %08x (%v)", again.CRC, err)
	}
}

// A reader whose request ends while it compresses a leaf takes nobody with it.
func TestReadersDoNotShareErrors(t *testing.T) {
	f := setup(t)
	s := f.engine(t)
	fillPods(t, f, 200)
	failed := errors.New("this request has ended")
	var calls atomic.Int64
	entered, release := make(chan struct{}), make(chan struct{})
	rep := s.NewRepresentation(func(dst []byte, obj runtime.Object) ([]byte, error) {
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
