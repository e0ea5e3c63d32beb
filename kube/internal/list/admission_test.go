package list

import (
	"errors"
	"strings"
	"testing"

	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apiserver/pkg/apis/example"
	"k8s.io/apiserver/pkg/storage"

	"github.com/stratakube/strata/kube/internal/test/podtest"
	"github.com/stratakube/strata/kube/listadmission"
)

// largePods stores 40 pods of 100 KB, 4 MB in total, of which one is labelled chosen=yes.
func largePods(t *testing.T, f *fixture) {
	t.Helper()
	for i := range 40 {
		pod := podtest.Pod(podName(i))
		pod.Annotations = map[string]string{"value": strings.Repeat("0123456789", 10_000)}
		if i == 17 {
			pod.Labels = map[string]string{"chosen": "yes"}
		}
		f.Put(t, pod)
	}
	f.CatchUp(t)
}

// TestGetList_TakesBytesUntilRequestEnds: a list of 4 MB, from memory, from etcd and of an old
// revision, where 8 MB in flight allow 3 MB to one. A list with a selector takes the bytes of the
// objects that it selects, and one that is too large reads nothing from etcd.
func TestGetList_TakesBytesUntilRequestEnds(t *testing.T) {
	for name, where := range map[string]func(f *fixture) storage.ListOptions{
		"memory": func(*fixture) storage.ListOptions { return everything() },
		"etcd": func(f *fixture) storage.ListOptions {
			f.env.Gates.Latest = false
			return everything()
		},
		"past": func(f *fixture) storage.ListOptions {
			rev := f.Etcd.Revision()
			f.Put(t, podtest.Pod("zz"))
			f.olderThanMemory(t)
			return exactly(everything(), rev)
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := newFixture(t)
			largePods(t, f)
			opts := where(f)
			list := func(limitBytes int64, opts storage.ListOptions) (held int64, err error) {
				t.Helper()
				l := listadmission.New(limitBytes)
				ctx, d := l.Begin(podtest.Context(t), listadmission.Level{}, listadmission.Form{Factor: 1})
				err = f.env.GetList(ctx, "/pods/", opts, &example.PodList{})
				held = d.Held()
				d.End()
				if used := l.InFlight(); used != 0 {
					t.Errorf("%d bytes are held after a list", used)
				}
				return held, err
			}
			if held, err := list(64<<20, opts); err != nil || held < 4e6 || held > 5e6 {
				t.Errorf("a list of 4 MB where 64 are allowed: holds %d bytes, %v", held, err)
			}
			before, _ := f.kv.Requests()
			if _, err := list(8<<20, opts); !apierrors.IsRequestEntityTooLargeError(err) {
				t.Errorf("a list of 4 MB where 3 are allowed to one: %v, want 413", err)
			}
			// one key shows whether a revision is compacted
			if after, _ := f.kv.Requests(); after > before+1 {
				t.Errorf("a refused list sent %d requests to etcd", after-before)
			}
			if _, err := list(8<<20, limited(opts, 10)); err != nil {
				t.Errorf("a page of 1 MB: %v", err)
			}
			for selector, tooLarge := range map[string]bool{"chosen=yes": false, "chosen=no": false, "chosen!=maybe": true} {
				selected := opts
				selected.Predicate = podtest.Selecting(t, selector, "")
				_, err := list(8<<20, selected)
				if name == "etcd" { // not bounded: upstream's store does not report objects
					tooLarge = false
				}
				if apierrors.IsRequestEntityTooLargeError(err) != tooLarge || !tooLarge && err != nil {
					t.Errorf("a list of %s: %v, want 413: %t", selector, err, tooLarge)
				}
			}
		})
	}
}

// TestWithAdmission_ListFromEtcd_IsAdmittedBefore etcd is read, with the bytes of the cached
// objects in its range. An error ends the list. Lists from memory are not admitted.
func TestWithAdmission_ListFromEtcd_IsAdmittedBefore(t *testing.T) {
	f := newFixture(t)
	largePods(t, f)
	rev := f.Etcd.Revision()
	f.Put(t, podtest.Pod("zz"))
	f.olderThanMemory(t)
	all := exactly(everything(), rev)
	selected := all
	selected.Predicate = podtest.Selecting(t, "chosen=yes", "")
	full := errors.New("no room")
	for name, c := range map[string]struct {
		key         string
		opts        storage.ListOptions
		least, most int64 // 0: not called
	}{
		"memory":    {"/pods/", everything(), 0, 0},
		"past":      {"/pods/", all, 4e6, 4.1e6},
		"page":      {"/pods/", limited(all, 10), 9e5, 1.1e6},
		"selected":  {"/pods/", selected, 4e6, 4.1e6},
		"elsewhere": {"/pods/other/", all, -1, 0},
	} {
		for _, want := range []error{nil, full} {
			calls, admitted, before := 0, int64(-1), 0
			ctx := WithAdmission(podtest.Context(t), func(bytes int64) error {
				calls++
				before, _ = f.kv.Requests()
				admitted = bytes
				return want
			})
			start, _ := f.kv.Requests()
			r, err := f.env.Read(ctx, c.key, c.opts)
			if err == nil {
				defer r.Close()
			}
			called := c.least != 0
			switch {
			case (calls == 1) != called || calls > 1:
				t.Errorf("%s: admitted %d times", name, calls)
			case called && (admitted < c.least || admitted > c.most):
				t.Errorf("%s: admitted with %d bytes, want %d to %d", name, admitted, c.least, c.most)
			case called && !errors.Is(err, want), !called && err != nil:
				t.Errorf("%s: %v, want %v", name, err, want)
			case called && before > start+1:
				t.Errorf("%s: %d requests to etcd before", name, before-start)
			}
		}
	}
}

// TestPageShare_Limit_TakesItsPart of the objects and bytes.
func TestPageShare_Limit_TakesItsPart(t *testing.T) {
	for _, c := range []struct {
		objects      int
		bytes, limit int64
		wantObjects  int
		wantBytes    int64
	}{
		{10, 1000, 0, 10, 1000}, {10, 1000, 3, 3, 300}, {10, 1000, 10, 10, 1000}, {10, 1000, 11, 10, 1000},
		{0, 0, 5, 0, 0}, {10, 1000, -1, 10, 1000}, {3, 1 << 40, 1, 1, (1 << 40) / 3},
	} {
		if n, bytes := pageShare(c.objects, c.bytes, c.limit); n != c.wantObjects || bytes != c.wantBytes {
			t.Errorf("%d objects of %d bytes, limit %d: %d, %d", c.objects, c.bytes, c.limit, n, bytes)
		}
	}
}

// TestEstimate_IsOfRevisionAndRange: without a wait, of the objects at the revision or near it.
// There is none where memory may not be able to answer.
func TestEstimate_IsOfRevisionAndRange(t *testing.T) {
	h := newHistory(t)
	atZero := limited(everything(), 2)
	atZero.ResourceVersion = "0"
	notOlder := everything()
	notOlder.ResourceVersion = version(future)
	for name, c := range map[string]struct {
		key     string
		opts    storage.ListOptions
		objects int // below 0: no estimate
		limit   int64
	}{
		"latest":                 {"/pods/", everything(), 5, 0},
		"page":                   {"/pods/", limited(everything(), 2), 5, 2},
		"any version":            {"/pods/", atZero, 5, 0},
		"not older, future":      {"/pods/", notOlder, 5, 0},
		"after a token":          {"/pods/", continued(limited(everything(), 2), token(t, "b", now)), 3, 2},
		"other namespace":        {"/pods/other/", everything(), 0, 0},
		"now":                    {"/pods/", exactly(everything(), now), 5, 0},
		"in memory":              {"/pods/", exactly(everything(), old), 5, 0}, // by the newest
		"older than memory":      {"/pods/", exactly(everything(), older), -1, 0},
		"compacted":              {"/pods/", exactly(everything(), compacted), -1, 0},
		"not reached":            {"/pods/", exactly(everything(), unseen), -1, 0},
		"beyond":                 {"/pods/", exactly(everything(), beyond), -1, 0},
		"invalid token":          {"/pods/", continued(everything(), "garbage"), -1, 0},
		"another resource's key": {"/secrets/", everything(), -1, 0},
	} {
		x, ok := h.env.Estimate(c.key, c.opts)
		if ok != (c.objects >= 0) {
			t.Errorf("%s: an estimate: %t", name, ok)
			continue
		}
		if !ok {
			continue
		}
		if n, _ := x.Objects.Count(x.Start, x.End); n != c.objects || x.Limit != c.limit {
			t.Errorf("%s: %d objects, limit %d, want %d, %d", name, n, x.Limit, c.objects, c.limit)
		}
	}
	h.env.Gates = Gates{}
	if _, ok := h.env.Estimate("/pods/", everything()); ok {
		t.Error("an estimate of a list from etcd")
	}
	single := everything()
	single.Recursive = false
	h.env.Gates = Gates{Latest: true}
	if x, ok := h.env.Estimate("/pods/ns/a", single); !ok || x.Start != podtest.Root+"ns/a" || x.End != x.Start+"\x00" {
		t.Errorf("one key: %q to %q, %t", x.Start, x.End, ok)
	}
}

// TestEstimate_CachedShard_IsOfItsObjects; before it is cached, of all.
func TestEstimate_CachedShard_IsOfItsObjects(t *testing.T) {
	shardGate(t)
	f := newFixture(t)
	f.Fill(t, 300)
	opts := selecting(withShard(storage.Everything, namespaceField, 0, 64))
	for _, cached := range []bool{false, true} {
		x, ok := f.env.Estimate("/pods/", opts)
		if n, _ := x.Objects.Count(x.Start, x.End); !ok || (n < 300) != cached {
			t.Errorf("the shard is cached: %t: an estimate: %t, %d objects", cached, ok, n)
		}
		f.list(t, "/pods/", opts)
	}
}

// TestEstimate_BeforeLoad_IsNone.
func TestEstimate_BeforeLoad_IsNone(t *testing.T) {
	f, release := unloaded(t)
	if _, ok := f.env.Estimate("/pods/", everything()); ok {
		t.Error("an estimate before the load")
	}
	release()
	if err := f.Resource.WaitReady(podtest.Context(t)); err != nil {
		t.Fatal(err)
	}
	if x, ok := f.env.Estimate("/pods/", everything()); !ok || x.Start != podtest.Root || x.End != After(podtest.Root) {
		t.Errorf("after the load: %+v, %t", x, ok)
	}
}

// TestRead_EstimatedBytes_AreOfCandidates: of the range, of a page its share, and with an index of
// the candidates. They are found once.
func TestRead_EstimatedBytes_AreOfCandidates(t *testing.T) {
	f := newFixture(t, finding)
	f.Fill(t, 1000)
	_, bytes := f.Latest(t).Count("", "")
	near := func(got, want int64) bool { return got >= want*9/10 && got <= want*11/10 }
	if got := f.read(t, everything()).EstimatedBytes(); got != bytes {
		t.Errorf("all: %d bytes, want %d", got, bytes)
	}
	if got := f.read(t, limited(everything(), 100)).EstimatedBytes(); !near(got, bytes/10) {
		t.Errorf("a page: %d bytes, want about %d", got, bytes/10)
	}
	f.list(t, "/pods/", selecting(podtest.Selecting(t, "i=3", ""))) // the second list has an index
	f.list(t, "/pods/", selecting(podtest.Selecting(t, "i=3", "")))
	r := f.read(t, selecting(podtest.Selecting(t, "i=3", "")))
	if got := r.EstimatedBytes(); !near(got, bytes/10) {
		t.Errorf("a tenth, by an index: %d bytes, want about %d", got, bytes/10)
	}
	found := 0
	for range r.Candidates() {
		found++
	}
	if found != 100 {
		t.Errorf("%d candidates after the estimate, want 100", found)
	}
	if got := f.read(t, limited(selecting(podtest.Selecting(t, "i=3", "")), 50)).EstimatedBytes(); !near(got, bytes/20) {
		t.Errorf("a page of a tenth, by an index: %d bytes, want about %d", got, bytes/20)
	}
	if got := f.read(t, selecting(podtest.Selecting(t, "i=none", ""))).EstimatedBytes(); got <= 0 {
		t.Errorf("no candidates: %d bytes, want those of one object", got)
	}
}
