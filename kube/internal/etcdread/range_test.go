package etcdread

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"github.com/stratakube/strata/etcdsource/memory"
	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/mirror"
)

// past is an etcd with pods of which memory has a later state.
type past struct {
	*podtest.Cluster
	reader Reader
	kv     *podtest.KV
	rev    mirror.Revision   // to be read
	want   map[string]string // values at rev by key
}

// newPast creates n pods with padding, and then changes a fifth of them and deletes another.
func newPast(t *testing.T, n, pad int) *past {
	t.Helper()
	p := &past{Cluster: podtest.New(t), want: map[string]string{}}
	for i := range n {
		pod := podtest.Labelled(fmt.Sprintf("pod-%04d", i), "pad", strings.Repeat("x", pad))
		p.want[podtest.Key(pod)] = podtest.Stored(t, pod)
		p.rev = p.Put(t, pod)
	}
	for i, key := range slices.Sorted(maps.Keys(p.want)) {
		switch i % 5 {
		case 0:
			p.Etcd.Put(key, p.want[key]+" ")
		case 1:
			p.Etcd.Delete(key)
		}
	}
	p.CatchUp(t)
	p.kv = podtest.NewKV(p.Etcd, nil)
	p.reader = Reader{Places: make(Places, 2), Ranges: p.kv, Mirror: p.Mirror, Keep: 1 << 20}
	return p
}

func (p *past) open(ctx context.Context, t *testing.T, maxKeys int64) *Range {
	t.Helper()
	r, err := p.reader.Open(ctx, p.Latest(t), podtest.Root, podtest.Root[:len(podtest.Root)-1]+"0", p.rev, maxKeys)
	if err != nil {
		t.Fatal(err)
	}
	return r
}

// requireRuns fails unless the runs have the first n pods, and share the unchanged ones with
// memory.
func (p *past) requireRuns(t *testing.T, r *Range, n int) {
	t.Helper()
	i, keys, snap := 0, slices.Sorted(maps.Keys(p.want)), p.Latest(t)
	for run := range r.Runs() {
		if len(run.Items()) > runEntries {
			t.Errorf("a run of %d entries", len(run.Items()))
		}
		for _, e := range run.Items() {
			if i == n || e.Key() != keys[i] || string(e.Value()) != p.want[e.Key()] {
				t.Fatalf("entry %d is %s: %s", i, e.Key(), e.Value())
			}
			held, _ := snap.Get(e.Key())
			if shared := held == e; shared != (i%5 > 1) || e.Detached() == shared {
				t.Errorf("entry %d is shared with memory: %t", i, shared)
			}
			i++
		}
	}
	if i != n || r.Err() != nil {
		t.Errorf("%d entries, want %d: %v", i, n, r.Err())
	}
	if len(p.reader.Places) != 0 {
		t.Errorf("%d places are taken", len(p.reader.Places))
	}
}

// TestRange_OlderThanMemory_HasStateOfRevision: whole, and to a number of keys, once and again.
// Entries that fit Keep are read once.
func TestRange_OlderThanMemory_HasStateOfRevision(t *testing.T) {
	const n = 600 // more than the first page
	p := newPast(t, n, 100)
	for _, keep := range []int64{1 << 20, 1 << 10} {
		for _, maxKeys := range []int64{0, 1, 17, n - 1, n} {
			p.reader.Keep = keep
			before, _ := p.kv.Requests()
			r := p.open(podtest.Context(t), t, maxKeys)
			want := n
			if maxKeys > 0 {
				want = int(maxKeys)
			}
			if r.Count() != n {
				t.Errorf("the range counts %d keys, want %d", r.Count(), n)
			}
			p.requireRuns(t, r, want)
			first, _ := p.kv.Requests()
			p.requireRuns(t, r, want)
			second, _ := p.kv.Requests()
			fits := r.own <= keep
			if (second == first) != fits || fits != (len(r.kept) > 0) {
				t.Errorf("keep %d, %d keys: %d requests and then %d; %d bytes of its own, %d kept runs", keep, want, first-before, second-first, r.own, len(r.kept))
			}
		}
	}
}

// TestRange_CompactedOrRestored_Fails: in the middle with the same error each time, and at the
// first page.
func TestRange_CompactedOrRestored_Fails(t *testing.T) {
	p := newPast(t, 600, 0)
	r := p.open(podtest.Context(t), t, 0)
	p.Etcd.Compact(p.Etcd.Revision())
	for range 2 {
		for range r.Runs() {
		}
		if err := r.Err(); !errors.Is(err, mirror.ErrCompacted) {
			t.Errorf("in the middle: %v, want that it is compacted", err)
		}
	}
	if _, err := p.reader.Open(podtest.Context(t), p.Latest(t), podtest.Root, "", p.rev, 0); !errors.Is(err, mirror.ErrCompacted) {
		t.Errorf("at the first page: %v, want that it is compacted", err)
	}
	other := memory.New()
	other.Restore(p.rev, nil) // another cluster
	p.reader.Ranges = podtest.NewKV(other, nil)
	if _, err := p.reader.Open(podtest.Context(t), p.Latest(t), podtest.Root, "", p.rev, 0); !errors.Is(err, mirror.ErrRestored) {
		t.Errorf("from another cluster: %v, want that it is restored", err)
	}
	if len(p.reader.Places) != 0 {
		t.Errorf("%d places are taken", len(p.reader.Places))
	}
}

// TestRange_WithoutPlace_TimesOut with its request, and holds none when its request ends.
func TestRange_WithoutPlace_TimesOut(t *testing.T) {
	p := newPast(t, 600, 0)
	ctx, cancel := context.WithCancel(podtest.Context(t))
	r := p.open(ctx, t, 0)
	p.reader.Places <- struct{}{}
	p.reader.Places <- struct{}{}
	quick, end := context.WithTimeout(ctx, time.Millisecond)
	defer end()
	if _, err := p.reader.Open(quick, p.Latest(t), podtest.Root, "", p.rev, 0); !apierrors.IsTimeout(err) {
		t.Errorf("without a place: %v, want a timeout", err)
	}
	<-p.reader.Places
	cancel()
	before, _ := p.kv.Requests()
	for range r.Runs() {
	}
	if err := r.Err(); err == nil || r.Context().Err() == nil {
		t.Error("the list went on without its request")
	}
	if after, _ := p.kv.Requests(); after > before+1 {
		t.Errorf("%d requests of an ended list", after-before)
	}
}
